"""The planner: reports in, one plan or what stands in its way out. Pure.

The numbers are integer bytes and entries throughout; `design` means docs/protocol.md, "The plan".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvaccord.layout import Layout, named
from kvaccord.messages import CacheClass, Report

Reports = Mapping[int, Report]

SHOWN_KEYS, SHOWN_VALUES = 32, 8
# What the same start would meet again.
NOT_RETRYABLE = frozenset(
    {"state_floor_exceeds_budget", "does_not_fit", "inputs_disagree", "implausible_report"}
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
class BudgetGroup:
    """The published minima of the ranks that share dp and pp, bytes."""

    pp: int
    ranks: range
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
    """Entry counts of one scheduler group, and who bound them."""

    dp: int
    ranks: range
    entries: dict[str, int]
    binding: dict[str, tuple[int, ...]]
    budget_groups: tuple[BudgetGroup, ...]
    by_rank: tuple[RankShare, ...]


@dataclass(frozen=True)
class Planned:
    """Either findings, earliest planner step first, or a plan; never both."""

    findings: tuple[Finding, ...] = ()
    schedulers: tuple[SchedulerPlan, ...] = ()


@dataclass
class _Needs:
    """The classes of one rank, with declarations of one name added up."""

    page: CacheClass | None = None
    page_bytes: int = 0
    page_min: int = 0
    page_max: int | None = None
    state_bytes: dict[str, int] = field(default_factory=dict)
    state_entries: dict[str, int] = field(default_factory=dict)

    @property
    def floor_bytes(self) -> int:
        return sum(self.state_bytes[name] * n for name, n in self.state_entries.items())


def available_bytes(report: Report) -> int:
    """What the classes may share on one rank; negative when nothing is left."""
    return min(report.kv_budget_bytes, report.free_bytes) - report.reserve_bytes


def needs(report: Report) -> _Needs:
    """Add up one rank's declarations: a draft model's KV rides the target's blocks."""
    total = _Needs()
    for c in report.classes:
        if c.kind == "page":
            total.page = total.page or c
            total.page_bytes += c.entry_bytes
            total.page_min = max(total.page_min, c.min_entries or 0)
            limits = [n for n in (total.page_max, c.max_entries) if n is not None]
            total.page_max = min(limits, default=None)
        else:
            total.state_bytes[c.name] = total.state_bytes.get(c.name, 0) + c.entry_bytes
            total.state_entries[c.name] = report.max_num_seqs * c.entries_per_req + c.extra_entries
    return total


def page_count(report: Report) -> int:
    """Entries that fit on one rank once its state classes are reserved; 0 where nothing is left.

    Source: ATOM `plan_pools`; vLLM `get_num_blocks`; SGLang `calculate_pool_sizes`.
    """
    need = needs(report)
    if need.page is None:
        return 0
    count = max(0, available_bytes(report) - need.floor_bytes) // need.page_bytes
    if need.page_max is not None:
        count = min(count, need.page_max)
    return count // need.page.multiple_of * need.page.multiple_of


def plan(layout: Layout, reports: Reports) -> Planned:
    """Plan an engine from one report of every rank.

    Every broken rule is found, not only the first: whoever mends one should not meet the next one
    at the next start. The order of the findings is the order of precedence.
    """
    assert reports.keys() == set(range(layout.world_size)), "one report of every rank"
    findings = [
        *disagreements(layout, reports),
        *_implausible(reports),
        *_nothing_free(reports),
        *_floors(reports),
    ]
    if findings:
        return Planned(findings=tuple(findings))
    counts = _agree(layout, reports)
    if findings := _too_few(layout, reports, counts):
        return Planned(findings=tuple(findings))
    return Planned(schedulers=tuple(_rows(layout, reports, counts)))


# --- what must be equal -------------------------------------------------------------------------


def disagreements(layout: Layout, reports: Reports) -> list[Finding]:
    """Values that must be equal and are not: over the engine, and `inputs_stage` over a stage."""
    found: list[Finding] = []
    for key in ("max_num_seqs", "max_model_len", "block_tokens"):
        found += _differing(key, {r: getattr(reports[r], key) for r in reports})
    found += differing_maps("inputs", {r: reports[r].inputs for r in reports})
    for pp in range(layout.pp):
        stage = [r for r in reports if layout.coordinates(r).pp == pp]
        found += differing_maps("inputs_stage", {r: reports[r].inputs_stage for r in stage})
    return first_keys([*found, *_differing_classes(reports)])


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


def _differing(key: str, said: Mapping[int, object]) -> list[Finding]:
    by_value: dict[tuple[type, object], list[int]] = defaultdict(list)
    for rank in sorted(said):
        # True == 1 in Python, not on the wire.
        by_value[(type(said[rank]), said[rank])].append(rank)
    if len(by_value) < 2:
        return []
    groups = sorted(by_value.items(), key=lambda item: (-len(item[1]), item[1]))
    most = len(groups[0][1])
    odd = sorted(r for _, ranks in groups if len(ranks) < most for r in ranks)
    values = [f"{_shown(value)} on {named(ranks)}" for (_, value), ranks in groups[:SHOWN_VALUES]]
    if len(groups) > SHOWN_VALUES:
        values.append(f"{len(groups) - SHOWN_VALUES} more values")
    ranks = odd or sorted(said)
    return [
        Finding(
            "inputs_disagree",
            tuple(ranks),
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


def _nothing_free(reports: Reports) -> Iterable[Finding]:
    for rank in sorted(reports):
        r = reports[rank]
        if r.free_bytes - r.reserve_bytes <= 0 and not (r.free_bytes == 0 and r.total_bytes):
            yield Finding(
                "reserve_exceeds_free" if r.reserve_bytes else "no_free_memory",
                (rank,),
                f"free_bytes {_size(r.free_bytes)} minus reserve_bytes {_size(r.reserve_bytes)}"
                " leaves nothing; free memory on this device or lower the reserve",
            )
        wanted, free = r.requested_bytes, r.initial_free_bytes
        if wanted is not None and free is not None and free < wanted:
            yield Finding(
                "request_exceeds_free",
                (rank,),
                f"{_size(wanted)} are requested and {_size(free)} were free when the process"
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
                f"the state classes need {_size(need.floor_bytes)} ({wants}) of"
                f" {_size(available)} available and leave nothing; lower max_num_seqs"
                f" {reports[rank].max_num_seqs} or free memory",
            )


def _agree(layout: Layout, reports: Reports) -> dict[int, dict[int, int]]:
    """Each rank's own page count, by scheduler group: {dp: {rank: count}}.

    Divide per rank, then take the minimum: stages differ in bytes per entry.
    """
    return {
        dp: {
            rank: page_count(reports[rank])
            for rank in layout.scheduler_group(dp)
            if reports[rank].has_page
        }
        for dp in range(layout.dp)
    }


def _too_few(layout: Layout, reports: Reports, counts: dict[int, dict[int, int]]) -> list[Finding]:
    found: list[Finding] = []
    for group in _joined(layout, counts):
        wanted = max((max(needs(reports[rank]).page_min, 1) for rank in group), default=0)
        short = sorted((group[rank], available_bytes(reports[rank]), rank) for rank in group)
        for count, available, rank in [s for s in short if s[0] < wanted]:
            need = needs(reports[rank])
            assert need.page is not None, "a counted rank has a page class"
            capped = need.page_max is not None and count + need.page.multiple_of > need.page_max
            found.append(
                Finding(
                    "does_not_fit",
                    (rank,),
                    f"room for {count} entries of {need.page.name!r} ({need.page_bytes} bytes"
                    f" each) in {_size(available)} available"
                    + (f" less {_size(need.floor_bytes)} of state" if need.state_entries else "")
                    + f", and at least {wanted} are needed; "
                    + (
                        f"raise max_entries {need.page_max}"
                        if capped
                        else _more_room(need, wanted, available)
                    ),
                )
            )
    return found


def _more_room(need: _Needs, wanted: int, available: int) -> str:
    assert need.page is not None, "asked for a rank with a page class"
    whole = -(-wanted // need.page.multiple_of) * need.page.multiple_of
    missing = whole * need.page_bytes + need.floor_bytes - available
    return f"give this rank {_size(missing)} more or ask for less"


def _joined(layout: Layout, counts: dict[int, dict[int, int]]) -> Sequence[dict[int, int]]:
    """The groups whose counts must be equal: one per scheduler, or all under equal_over."""
    if "dp" not in layout.equal_over:
        return list(counts.values())
    return [{rank: n for group in counts.values() for rank, n in group.items()}]


def _rows(
    layout: Layout, reports: Reports, counts: dict[int, dict[int, int]]
) -> Iterable[SchedulerPlan]:
    joined = _joined(layout, counts)
    for dp in range(layout.dp):
        ranks = layout.scheduler_group(dp)
        fits = joined[dp if len(joined) == layout.dp else 0]
        entries: dict[str, int] = {}
        binding: dict[str, tuple[int, ...]] = {}
        agreed = min(fits.values(), default=0)
        for rank in ranks:
            need = needs(reports[rank])
            entries |= need.state_entries
            if need.page is not None:
                entries[need.page.name] = agreed
                binding[need.page.name] = tuple(r for r in sorted(fits) if fits[r] == agreed)
        yield SchedulerPlan(
            dp=dp,
            ranks=ranks,
            entries=entries,
            binding=binding,
            budget_groups=tuple(_budget_group(layout, dp, pp, reports) for pp in range(layout.pp)),
            by_rank=tuple(_share(rank, reports[rank], entries) for rank in ranks),
        )


def _budget_group(layout: Layout, dp: int, pp: int, reports: Reports) -> BudgetGroup:
    ranks = layout.budget_group(dp, pp)

    def least(of: Callable[[Report], int]) -> int:
        return min(of(reports[r]) for r in ranks)

    binding = min(ranks, key=lambda r: (available_bytes(reports[r]), r))
    bound = reports[binding]
    return BudgetGroup(
        pp=pp,
        ranks=ranks,
        free_bytes=least(lambda r: r.free_bytes),
        budget_bytes=least(lambda r: r.kv_budget_bytes),
        available_bytes=least(available_bytes),
        binding_rank=binding,
        bound_by="budget" if bound.kv_budget_bytes <= bound.free_bytes else "free",
    )


def _share(rank: int, report: Report, entries: Mapping[str, int]) -> RankShare:
    need = needs(report)
    each = dict(need.state_bytes)
    if need.page is not None:
        each[need.page.name] = need.page_bytes
    reserved = {name: entries[name] * size for name, size in each.items()}
    return RankShare(rank, each, reserved, available_bytes(report) - sum(reserved.values()))


# --- as a document ------------------------------------------------------------------------------


def plan_document(planned: Planned, hosts: Mapping[int, str]) -> dict[str, Any]:
    """The plan as it stands in a decision: integers, names and lists only."""
    return {
        "schedulers": [
            {
                "dp": row.dp,
                "ranks": list(row.ranks),
                "entries": row.entries,
                "binding": {
                    name: {
                        "ranks": list(ranks),
                        "hosts": sorted({hosts[r] for r in ranks if r in hosts}),
                    }
                    for name, ranks in row.binding.items()
                },
                "budget_groups": [
                    {
                        "pp": g.pp,
                        "ranks": list(g.ranks),
                        "free_bytes": g.free_bytes,
                        "budget_bytes": g.budget_bytes,
                        "available_bytes": g.available_bytes,
                        "binding_rank": g.binding_rank,
                        "bound_by": g.bound_by,
                    }
                    for g in row.budget_groups
                ],
                "by_rank": [
                    {
                        "rank": s.rank,
                        "entry_bytes": s.entry_bytes,
                        "reserved_bytes": s.reserved_bytes,
                        "stranded_bytes": s.stranded_bytes,
                    }
                    for s in row.by_rank
                ],
            }
            for row in planned.schedulers
        ]
    }


def agreed_sentence(planned: Planned) -> str:
    """What was agreed, in one sentence: counts, and who bound them."""
    rows = []
    for row in planned.schedulers:
        counts = " + ".join(f"{n} {name}" for name, n in sorted(row.entries.items()))
        bound = "; ".join(
            f"{name} bound by {named(ranks)}" for name, ranks in sorted(row.binding.items())
        )
        where = f"dp {row.dp}: " if len(planned.schedulers) > 1 else ""
        rows.append(f"{where}{counts} entries" + (f", {bound}" if bound else ""))
    shown = " | ".join(rows[:4]) + (f" | {len(rows) - 4} more" if len(rows) > 4 else "")
    return f"every rank builds {shown}"


def _size(n: int) -> str:
    return f"{n} bytes ({n / 2**30:.2f} GiB)"
