"""The planner: reports in, one plan or what stands in its way out. Pure.

The numbers are integer bytes and entries throughout; `design` means docs/protocol.md, "The plan".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvaccord.layout import BudgetGroup, Groups, Layout, SchedulerGroup, named, scheduler_groups
from kvaccord.messages import Report
from kvaccord.peers import Notice, Peers, Spread, spreads, warnings
from kvaccord.room import Needs, Reports, available_bytes, needs, page_count, pages_in, size

__all__ = [
    "Finding",
    "Needs",
    "Notice",
    "Planned",
    "Reports",
    "agreed_sentence",
    "available_bytes",
    "differing_maps",
    "disagreeing_groups",
    "disagreements",
    "first_keys",
    "needs",
    "page_count",
    "plan",
    "plan_document",
]

SHOWN_KEYS, SHOWN_VALUES, SHOWN_HOSTS = 32, 8, 8
# What the same start would meet again.
NOT_RETRYABLE = frozenset(
    {
        "state_floor_exceeds_budget",
        "does_not_fit",
        "inputs_disagree",
        "implausible_report",
        "spread_too_wide",
    }
)


@dataclass(frozen=True)
class Finding:
    """One reason why there is no plan: `text` stands alone, with numbers and a remedy.

    ranks: those it is about, lowest first; the first one carries the text.
    """

    code: str
    ranks: tuple[int, ...]
    text: str

    @property
    def retryable(self) -> bool:
        """Whether the same start may find another memory next time."""
        return self.code not in NOT_RETRYABLE


@dataclass(frozen=True)
class BudgetMinima:
    """The published minima of one budget group, bytes."""

    group: BudgetGroup
    free_bytes: int
    budget_bytes: int
    available_bytes: int
    binding_rank: int
    bound_by: str  # "budget" or "free"


@dataclass(frozen=True)
class RankShare:
    """What the plan costs one rank, bytes."""

    rank: int
    entry_bytes: dict[str, int]
    reserved_bytes: dict[str, int]
    stranded_bytes: int


@dataclass(frozen=True)
class SchedulerPlan:
    """Entry counts of one scheduler group, and who bound them.

    binding: the ranks of the group that bind a class, or the lowest one elsewhere that does.
    """

    group: SchedulerGroup
    entries: dict[str, int]
    binding: dict[str, tuple[int, ...]]
    budget_groups: tuple[BudgetMinima, ...]
    by_rank: tuple[RankShare, ...]


@dataclass(frozen=True)
class Capacity:
    """What every rank has of another resource, and the ranks that have no more."""

    bytes: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Planned:
    """Either findings, earliest planner step first, or a plan; never both. Warnings with either."""

    findings: tuple[Finding, ...] = ()
    schedulers: tuple[SchedulerPlan, ...] = ()
    capacities: dict[str, Capacity] = field(default_factory=dict)
    warnings: tuple[Notice, ...] = ()


def plan(
    layout: Layout,
    reports: Reports,
    groups: Mapping[int, Groups] | None = None,
    *,
    spread_limit: float | None = None,
) -> Planned:
    """Plan an engine from one report of every rank.

    groups: those that ranks name themselves. spread_limit: a spread over this share of the roomiest
    rank's is no plan (`spread_too_wide`).

    Every broken rule is found, not only the first: whoever mends one should not meet the next one
    at the next start. The order of the findings is the order of precedence.
    """
    assert reports.keys() == set(range(layout.world_size)), "one report of every rank"
    # A rank whose reading is wrong, or that has nothing, fails the later steps by that alone.
    implausible = list(_implausible(reports))
    read = _without(reports, implausible)
    nothing_free = list(_nothing_free(read))
    findings = [
        *disagreements(layout, reports, groups),
        *implausible,
        *_in_order([*nothing_free, *_request_exceeds_free(read)]),
        *_floors(_without(read, nothing_free)),
    ]
    if groups and disagreeing_groups(_by_rank(layout, groups)):
        return Planned(findings=tuple(findings), warnings=warnings(reports, ()))
    schedulers = scheduler_groups(layout, groups)
    peers = _peers(layout, schedulers)
    counts = [_counts(each.ranks, reports) for each in peers]
    apart = spreads(peers, reports)
    if not findings:
        findings = [*_too_few(counts, reports), *_too_wide(apart, spread_limit)]
    elif {finding.code for finding in findings} == {"state_floor_exceeds_budget"}:
        findings += _too_few_without_state(peers, reports)
    noticed = warnings(reports, apart)
    if findings:
        return Planned(findings=tuple(findings), warnings=noticed)
    return Planned(
        schedulers=tuple(_rows(schedulers, reports, counts)),
        capacities=_capacities(reports),
        warnings=noticed,
    )


def _peers(layout: Layout, schedulers: Sequence[SchedulerGroup]) -> list[Peers]:
    """The ranks whose counts must be equal: those of a scheduler, or all under equal_over."""
    if layout.equal_over:
        every = tuple(group for row in schedulers for group in row.budget_groups)
        return [Peers(range(layout.world_size), every)]
    return [Peers(row.ranks, row.budget_groups) for row in schedulers]


def _by_rank(layout: Layout, groups: Mapping[int, Groups]) -> dict[int, Groups | None]:
    return {rank: groups.get(rank) for rank in range(layout.world_size)}


# --- what must be equal -------------------------------------------------------------------------


def disagreements(
    layout: Layout, reports: Reports, groups: Mapping[int, Groups] | None = None
) -> list[Finding]:
    """Values that must be equal and are not: over the engine, and `inputs_stage` over a stage."""
    found: list[Finding] = []
    stages: Sequence[Sequence[int]] = layout.groups_along("dp", "pcp", "tp")
    if groups:
        found += disagreeing_groups(_by_rank(layout, groups))
        # Named groups have no stages; a budget group lies within one.
        rows = () if found else scheduler_groups(layout, groups)
        stages = [group.ranks for row in rows for group in row.budget_groups]
    for key in ("max_num_seqs", "max_model_len", "block_tokens"):
        found += _differing(key, {r: getattr(reports[r], key) for r in reports})
    found += differing_maps("inputs", {r: reports[r].inputs for r in reports})
    for stage in stages:
        found += differing_maps("inputs_stage", {r: reports[r].inputs_stage for r in stage})
    return first_keys([*found, *_differing_classes(reports), *_differing_capacities(reports)])


def disagreeing_groups(groups: Mapping[int, Groups | None]) -> list[Finding]:
    """What is wrong with the groups that these ranks name (None: names none).

    All do or none, and a budget group lies within one scheduler group.
    """
    found = _differing("groups", {r: "named" if g else None for r, g in groups.items()})
    schedulers: dict[str, dict[int, str]] = defaultdict(dict)
    for rank, each in groups.items():
        if each:
            schedulers[each.budget][rank] = each.scheduler
    for budget in sorted(schedulers):
        found += _differing(f"the scheduler group of budget group {budget}", schedulers[budget])
    return found


def first_keys(found: Sequence[Finding]) -> list[Finding]:
    """One finding for each of the first keys, and one for how many more there are."""
    shown = list(found[:SHOWN_KEYS])
    if more := found[SHOWN_KEYS:]:
        ranks = tuple(sorted({rank for finding in more for rank in finding.ranks}))
        text = f"{len(more)} more keys differ; start every rank with the same settings and version"
        shown.append(Finding("inputs_disagree", ranks, text))
    return shown


def differing_maps(label: str, maps: Mapping[int, Mapping[str, Any] | None]) -> list[Finding]:
    """A key that one rank has and another has not differs too: versions disagree that way."""
    keys = sorted({key for values in maps.values() for key in values or ()})
    return [
        finding
        for key in keys
        for finding in _differing(f"{label}.{key}", {r: (maps[r] or {}).get(key) for r in maps})
    ]


def _differing_classes(reports: Reports) -> Iterable[Finding]:
    # A class may be absent on a rank, but what two ranks both declare must be one thing.
    shapes: dict[str, dict[int, str]] = defaultdict(dict)
    pages: dict[int, str] = {}
    for rank, report in reports.items():
        for c in report.classes:
            shapes[c.name][rank] = (
                f"{c.kind}, entries_per_req {c.entries_per_req},"
                f" extra_entries {c.extra_entries}, multiple_of {c.multiple_of}"
            )
            if c.kind == "page":
                pages[rank] = c.name
    for name in sorted(shapes):
        yield from _differing(f"classes.{name}", shapes[name])
    yield from _differing("classes, the page class", pages)


def _differing_capacities(reports: Reports) -> Iterable[Finding]:
    # A rank that lacks a tier cannot keep what its peers keep there: it must say 0.
    for name in sorted({name for r in reports.values() for name in r.capacities or ()}):
        said = {r: "present" if name in (reports[r].capacities or ()) else None for r in reports}
        yield from _differing(f"capacities.{name}", said)


def _differing(key: str, said: Mapping[int, object]) -> list[Finding]:
    by_value: dict[tuple[type, object], list[int]] = defaultdict(list)
    for rank in sorted(said):
        # True == 1 in Python, not on the wire.
        by_value[(type(said[rank]), said[rank])].append(rank)
    if len(by_value) < 2:
        return []
    # The odd ones are blamed; of two halves those that do not hold the lowest rank.
    groups = sorted(by_value.items(), key=lambda item: (-len(item[1]), item[1]))
    odd = sorted(rank for _, ranks in groups[1:] for rank in ranks)
    values = [f"{_shown(value)} on {named(ranks)}" for (_, value), ranks in groups[:SHOWN_VALUES]]
    if len(groups) > SHOWN_VALUES:
        values.append(f"{len(groups) - SHOWN_VALUES} more values")
    return [
        Finding(
            "inputs_disagree",
            tuple(odd),
            f"{key} differs: {', '.join(values)}; start every rank with the same settings and"
            " version",
        )
    ]


def _shown(value: object) -> str:
    return "absent" if value is None else str(value)[:120]


# --- planner steps ------------------------------------------------------------------------------


def _implausible(reports: Reports) -> Iterable[Finding]:
    # One sign of a wrong reading alone may be true; two at once never are.
    totals = [r.total_bytes for r in reports.values() if r.total_bytes is not None]
    usual = max(sorted(set(totals)), key=totals.count, default=None)
    for rank in sorted(reports):
        r = reports[rank]
        if r.free_bytes == 0 and r.total_bytes:
            yield Finding(
                "implausible_report",
                (rank,),
                f"free_bytes is exactly 0 of total_bytes {r.total_bytes}; a running process never"
                " sees that: the device driver does not answer, check it on this host",
            )
        elif (
            len(set(totals)) > 1
            and r.total_bytes == max(totals)
            and r.kv_budget_bytes > r.free_bytes
        ):
            others = usual if usual != r.total_bytes else min(totals)
            yield Finding(
                "implausible_report",
                (rank,),
                f"total_bytes {r.total_bytes} is unlike its peers' {others} and kv_budget_bytes"
                f" {r.kv_budget_bytes} is above its own free_bytes {r.free_bytes}: most likely the"
                " parent of a MIG slice was read; measure with the CUDA runtime on every rank",
            )


def _without(reports: Reports, findings: Iterable[Finding]) -> Reports:
    found = {rank for finding in findings for rank in finding.ranks}
    return {rank: report for rank, report in reports.items() if rank not in found}


def _in_order(findings: list[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: finding.ranks[0])


def _nothing_free(reports: Reports) -> Iterable[Finding]:
    for rank in sorted(reports):
        r = reports[rank]
        if r.free_bytes - r.reserve_bytes <= 0:
            yield Finding(
                "reserve_exceeds_free" if r.reserve_bytes else "no_free_memory",
                (rank,),
                f"free_bytes {size(r.free_bytes)} minus reserve_bytes {size(r.reserve_bytes)}"
                " leaves nothing; free memory on this device or lower the reserve",
            )


def _request_exceeds_free(reports: Reports) -> Iterable[Finding]:
    for rank in sorted(reports):
        r = reports[rank]
        wanted, free = r.requested_bytes, r.initial_free_bytes
        if wanted is not None and free is not None and free < wanted:
            yield Finding(
                "request_exceeds_free",
                (rank,),
                f"{size(wanted)} are requested and {size(free)} were free when the process"
                " began; stop what else holds memory on this device or request a smaller share",
            )


def _floors(reports: Reports) -> Iterable[Finding]:
    for rank in sorted(reports):
        need, available = needs(reports[rank]), available_bytes(reports[rank])
        # Where pages are wanted too, a floor that takes everything is one that does not fit.
        left = available - need.floor_bytes - (1 if need.page else 0)
        if need.state_entries and left < 0:
            wants = ", ".join(
                f"{need.state_entries[n]} x {need.state_bytes[n]} bytes of {n!r}"
                for n in sorted(need.state_entries)
            )
            yield Finding(
                "state_floor_exceeds_budget",
                (rank,),
                f"the state classes need {size(need.floor_bytes)} ({wants}) of"
                f" {size(available)} available and leave nothing; lower max_num_seqs"
                f" {reports[rank].max_num_seqs} or free memory",
            )


def _counts(ranks: Iterable[int], reports: Reports) -> dict[int, int]:
    """Each rank's own page count: divide per rank first, for stages differ in bytes per entry."""
    return {rank: page_count(reports[rank]) for rank in ranks if reports[rank].has_page}


def _too_few(counts: Iterable[dict[int, int]], reports: Reports) -> Iterable[Finding]:
    for group in counts:
        wanted = max((max(needs(reports[rank]).page_min, 1) for rank in group), default=0)
        short = sorted((group[rank], available_bytes(reports[rank]), rank) for rank in group)
        for count, available, rank in [s for s in short if s[0] < wanted]:
            need = needs(reports[rank])
            assert need.page is not None, "a counted rank has a page class"
            capped = need.page_max is not None and count + need.page.multiple_of > need.page_max
            yield Finding(
                "does_not_fit",
                (rank,),
                f"room for {count} entries of {need.page.name!r} ({need.page_bytes} bytes"
                f" each) in {size(available)} available"
                + (f" less {size(need.floor_bytes)} of state" if need.state_entries else "")
                + f", and at least {wanted} are needed; "
                + (
                    f"raise max_entries {need.page_max}"
                    if capped
                    else _more_room(need, wanted, available)
                ),
            )


def _too_few_without_state(peers: Iterable[Peers], reports: Reports) -> Iterable[Finding]:
    """Ranks whose own `min_entries` do not even fit without the state: a second broken limit."""
    for rank in sorted(rank for each in peers for rank in each.ranks):
        need, available = needs(reports[rank]), available_bytes(reports[rank])
        if need.page and need.state_entries and pages_in(need, available) < need.page_min:
            yield Finding(
                "does_not_fit",
                (rank,),
                f"{need.page_min} entries of {need.page.name!r} ({need.page_bytes} bytes each) are"
                f" needed, and without any state {pages_in(need, available)} fit in"
                f" {size(available)} available; {_more_room(need, need.page_min, available)}",
            )


def _more_room(need: Needs, wanted: int, available: int) -> str:
    assert need.page is not None, "asked for a rank with a page class"
    whole = -(-wanted // need.page.multiple_of) * need.page.multiple_of
    missing = whole * need.page_bytes + need.floor_bytes - available
    return f"give this rank {size(missing)} more or ask for less"


def _too_wide(apart: Iterable[Spread], limit: float | None) -> Iterable[Finding]:
    for spread in apart:
        if limit is not None and spread.exceeds(limit):
            yield Finding(
                "spread_too_wide",
                spread.ranks,
                f"{spread.text}; the policy's spread_limit is {limit:.1%}",
            )


def _rows(
    schedulers: Sequence[SchedulerGroup], reports: Reports, counts: Sequence[dict[int, int]]
) -> Iterable[SchedulerPlan]:
    for index, group in enumerate(schedulers):
        fits = counts[index if len(counts) == len(schedulers) else 0]
        agreed = min(fits.values(), default=0)
        entries: dict[str, int] = {}
        binding: dict[str, tuple[int, ...]] = {}
        for rank in group.ranks:
            need = needs(reports[rank])
            entries |= need.state_entries
            if need.page is not None and need.page.name not in entries:
                entries[need.page.name] = agreed
                binding[need.page.name] = _binding(group.ranks, fits, agreed)
        yield SchedulerPlan(
            group=group,
            entries=entries,
            binding=binding,
            budget_groups=tuple(_minima(each, reports) for each in group.budget_groups),
            by_rank=tuple(_share(rank, reports[rank], entries) for rank in group.ranks),
        )


def _binding(ranks: Iterable[int], fits: Mapping[int, int], agreed: int) -> tuple[int, ...]:
    # Each row lists its own, so that a thousand equal rows do not list a thousand ranks each.
    here = tuple(rank for rank in ranks if fits.get(rank) == agreed)
    return here or (min(rank for rank in fits if fits[rank] == agreed),)


def _minima(group: BudgetGroup, reports: Reports) -> BudgetMinima:
    def least(of: Callable[[Report], int]) -> int:
        return min(of(reports[r]) for r in group.ranks)

    binding = min(group.ranks, key=lambda r: (available_bytes(reports[r]), r))
    bound = reports[binding]
    return BudgetMinima(
        group=group,
        free_bytes=least(lambda r: r.free_bytes),
        budget_bytes=least(lambda r: r.kv_budget_bytes),
        available_bytes=least(available_bytes),
        binding_rank=binding,
        bound_by="budget" if bound.kv_budget_bytes <= bound.free_bytes else "free",
    )


def _share(rank: int, report: Report, entries: Mapping[str, int]) -> RankShare:
    each = needs(report).entry_bytes
    reserved = {name: entries[name] * bytes_ for name, bytes_ in each.items()}
    return RankShare(rank, each, reserved, available_bytes(report) - sum(reserved.values()))


def _capacities(reports: Reports) -> dict[str, Capacity]:
    """The minimum of every other resource over the engine: nobody counts on more than all have."""
    found = {}
    for name in sorted({name for r in reports.values() for name in r.capacities or ()}):
        have = {rank: (reports[rank].capacities or {})[name] for rank in sorted(reports)}
        least = min(have.values())
        found[name] = Capacity(least, tuple(rank for rank in have if have[rank] == least))
    return found


# --- as a document ------------------------------------------------------------------------------


def plan_document(planned: Planned, hosts: Mapping[int, str]) -> dict[str, Any]:
    """The plan as it stands in a decision: integers, names and lists only.

    Bytes of an entry are the same on many ranks, so they stand once per shape; what a rank
    reserves of a class is its row's entries times its shape's bytes.
    """
    return {
        "schedulers": [
            {
                **_place("dp", row.group.at),
                "ranks": list(row.group.ranks),
                "entries": row.entries,
                "binding": {name: _bound_by(ranks, hosts) for name, ranks in row.binding.items()},
                "budget_groups": [
                    {
                        **_place("pp", g.group.at),
                        "ranks": list(g.group.ranks),
                        "free_bytes": g.free_bytes,
                        "budget_bytes": g.budget_bytes,
                        "available_bytes": g.available_bytes,
                        "binding_rank": g.binding_rank,
                        "bound_by": g.bound_by,
                    }
                    for g in row.budget_groups
                ],
                "by_rank": [
                    {"rank": s.rank, "stranded_bytes": s.stranded_bytes} for s in row.by_rank
                ],
            }
            for row in planned.schedulers
        ],
        "shapes": _shapes(share for row in planned.schedulers for share in row.by_rank),
        "capacities": {
            name: {"bytes": c.bytes, **_bound_by(c.ranks, hosts)}
            for name, c in planned.capacities.items()
        },
    }


def _place(axis: str, at: int | str) -> dict[str, Any]:
    return {axis if isinstance(at, int) else "group": at}


def _bound_by(ranks: Sequence[int], hosts: Mapping[int, str]) -> dict[str, Any]:
    named_hosts = list(dict.fromkeys(hosts[rank] for rank in ranks if rank in hosts))
    return {"ranks": list(ranks), "hosts": named_hosts[:SHOWN_HOSTS]}


def _shapes(shares: Iterable[RankShare]) -> list[dict[str, Any]]:
    alike: dict[tuple[tuple[str, int], ...], list[int]] = defaultdict(list)
    for share in sorted(shares, key=lambda share: share.rank):
        alike[tuple(sorted(share.entry_bytes.items()))].append(share.rank)
    return [{"ranks": ranks, "entry_bytes": dict(each)} for each, ranks in alike.items()]


def agreed_sentence(planned: Planned) -> str:
    """What was agreed, in one sentence: counts, and who bound them."""
    rows = []
    for row in planned.schedulers:
        counts = " + ".join(f"{n} {name}" for name, n in sorted(row.entries.items()))
        bound = "; ".join(
            f"{name} bound by {named(ranks)}" for name, ranks in sorted(row.binding.items())
        )
        at = row.group.at
        where = f"{'dp' if isinstance(at, int) else 'group'} {at}: "
        where = where if len(planned.schedulers) > 1 else ""
        rows.append(f"{where}{counts} entries" + (f", {bound}" if bound else ""))
    shown = " | ".join(rows[:4]) + (f" | {len(rows) - 4} more" if len(rows) > 4 else "")
    return f"every rank builds {shown}"
