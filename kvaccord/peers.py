"""How far ranks that should be alike are apart, and what else a reader should look at. Pure.

Nothing in here changes a number of the plan. A warning is given where the reports make it
computable, and only there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from kvaccord.layout import BudgetGroup, named
from kvaccord.messages import Report, cut
from kvaccord.room import Reports, available_bytes, needs, page_count, size

IMBALANCED_OVER = Fraction(5, 100)  # spread, as a share of the roomiest rank's value
LOW_USE_BELOW = Fraction(1, 2)  # budget as a share of free, or an entry's real bytes of its stated
MOVED_OVER = Fraction(1, 100)  # of the memory that was free when the process began
# After the median, as seconds of the report budget and as a share of what the median took.
SLOW_OVER_S, SLOW_OVER = 60, Fraction(1, 10)
# One decision stays readable however many groups there are.
SHOWN_GROUPS, TEXT_BYTES = 8, 512


@dataclass(frozen=True)
class Notice:
    """What should be looked at, though it stops nothing. ranks: those to look at."""

    code: str
    ranks: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class Peers:
    """Ranks whose page counts must be equal, and the budget groups they lie in."""

    ranks: Sequence[int]
    budget_groups: tuple[BudgetGroup, ...]


@dataclass(frozen=True)
class Spread:
    """The widest difference among peers. width: (most - least) / most; ranks: those at the least.

    The short ranks are named, never the roomy ones: they decide what all others get.
    """

    width: Fraction
    ranks: tuple[int, ...]
    text: str

    def exceeds(self, limit: float | Fraction) -> bool:
        return self.width > (limit if isinstance(limit, Fraction) else Fraction(str(limit)))


def spreads(peers: Iterable[Peers], reports: Reports) -> list[Spread]:
    """The widest spread of each set of peers: of page counts, or of bytes in a budget group.

    Counts are compared over all stages, bytes within one: stages differ in what they hold.
    Source: SGLang `_check_tp_memory_balance`, least < (1 - limit) * most.
    """
    return [spread for each in peers if (spread := _widest(each, reports)) is not None]


def _widest(peers: Peers, reports: Reports) -> Spread | None:
    counts = {r: page_count(reports[r]) for r in peers.ranks if reports[r].has_page}
    found = [_spread("page entries", str, counts)]
    for group in peers.budget_groups:
        free = {r: reports[r].free_bytes for r in group.ranks}
        available = {r: available_bytes(reports[r]) for r in group.ranks}
        found += [_spread("available", size, available), _spread("free", size, free)]
    widest = max((s for s in found if s), key=lambda s: s.width, default=None)
    if widest is None:
        return None
    least = min(counts.values(), default=0)
    stranded = sum((n - least) * needs(reports[r]).page_bytes for r, n in counts.items())
    unused = f"{size(stranded)} stay unused on the others; " if stranded else ""
    remedy = f"see what else holds memory there: {named(widest.ranks)}"
    return Spread(widest.width, widest.ranks, f"{widest.text}; {unused}{remedy}")


def _spread(what: str, shown: Callable[[int], str], said: Mapping[int, int]) -> Spread | None:
    least, most = min(said.values(), default=0), max(said.values(), default=0)
    if most <= 0 or least == most:
        return None
    short = tuple(r for r in sorted(said) if said[r] == least)
    roomy = tuple(r for r in sorted(said) if said[r] == most)
    width = Fraction(most - least, most)
    return Spread(
        width,
        short,
        f"{what}: {shown(least)} on {named(short)}, {shown(most)} on {named(roomy)},"
        f" {float(width):.1%} apart; the median is {shown(_median(said.values()))}",
    )


def _median(values: Iterable[int]) -> int:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]  # of two, the greater: a value that someone reported


# --- warnings -----------------------------------------------------------------------------------


def warnings(reports: Reports, apart: Iterable[Spread]) -> tuple[Notice, ...]:
    """All warnings, one for each code and one for each set of peers that is imbalanced."""
    found = [
        *_imbalanced([spread for spread in apart if spread.exceeds(IMBALANCED_OVER)]),
        *_of_ranks("device_shared", reports, _shared),
        *_of_ranks("memory_moved", reports, _moved),
        *_of_ranks("low_use_of_budget", reports, _low_use),
        *_local_counts(reports),
    ]
    return tuple(Notice(w.code, w.ranks, cut(w.text, TEXT_BYTES)) for w in found)


def slow_ranks(spent_s: Mapping[int, int], hosts: Mapping[int, str]) -> tuple[Notice, ...]:
    """Ranks that reported long after most; spent_s: of the report budget, seconds, when each did.

    Whoever reported while others had yet to join spent nothing of it.
    """
    # Of two the lesser: the usual time is that of whoever was not late.
    usual_s = sorted(spent_s.values())[(len(spent_s) - 1) // 2] if spent_s else 0
    behind_s = {r: s - usual_s for r, s in spent_s.items()}
    slow = [
        r
        for r in sorted(behind_s)
        if behind_s[r] > SLOW_OVER_S and behind_s[r] > usual_s * SLOW_OVER
    ]
    if not slow:
        return ()
    last = max(slow, key=lambda r: (behind_s[r], -r))
    others = [r for r in slow if r != last]
    where = f" on {hosts[last]}" if last in hosts else ""
    more = f"; {named(others)} did so late too" if others else ""
    text = (
        f"rank {last}{where} reported {behind_s[last]} s after the median of its peers, which took"
        f" {usual_s} s; all others waited for it: see how it reads its weights, and its clocks and"
        f" temperature{more}"
    )
    return (Notice("slow_rank", tuple(slow), cut(text, TEXT_BYTES)),)


def _imbalanced(apart: Sequence[Spread]) -> Iterable[Notice]:
    widest_first = sorted(apart, key=lambda s: (-s.width, s.ranks))
    for spread in widest_first[:SHOWN_GROUPS]:
        yield Notice("imbalanced", spread.ranks, spread.text)
    if more := widest_first[SHOWN_GROUPS:]:
        ranks = tuple(sorted(r for spread in more for r in spread.ranks))
        yield Notice(
            "imbalanced", ranks, f"{len(more)} more groups are less than that, and over 5 % apart"
        )


def _of_ranks(
    code: str, reports: Reports, look: Callable[[Report], str | None]
) -> Iterable[Notice]:
    """One warning for all ranks that a sentence is found for; the lowest rank's is told."""
    found = {r: text for r in sorted(reports) if (text := look(reports[r]))}
    if found:
        first, *others = found
        more = f"; likewise {named(others)}" if others else ""
        yield Notice(code, tuple(found), f"{named([first])}: {found[first]}{more}")


def _shared(report: Report) -> str | None:
    if (report.local_count or 1) == 1:
        return None
    return (
        f"{report.local_count} processes of this engine share one device; the budget of each must"
        " leave the others their part"
    )


def _moved(report: Report) -> str | None:
    initial, free = report.initial_free_bytes, report.free_bytes
    moved = _part(report, "free_moved_bytes") or 0
    if abs(moved) > (report.total_bytes or free) * MOVED_OVER:
        return (
            f"other processes {'released' if moved > 0 else 'took'} {size(abs(moved))} of the"
            " device while it was measured, so that the budget was measured against a moving"
            " amount"
        )
    if initial is None or (report.local_count or 1) > 1:  # its siblings load beside it
        return None
    slack = initial * MOVED_OVER
    if free > initial + slack:
        return (
            f"{size(free)} are free and {size(initial)} were when the process began: another"
            " process released memory meanwhile, so that the budget was measured against a moving"
            " amount"
        )
    torch, other = _part(report, "peak_torch_bytes"), _part(report, "non_torch_bytes")
    if torch is None or other is None or initial - free <= torch + other + slack:
        return None
    return (
        f"{size(initial - free)} went since the process began and its own parts explain"
        f" {size(torch + other)}: another process took memory meanwhile"
    )


def _low_use(report: Report) -> str | None:
    budget, free = report.kv_budget_bytes, report.free_bytes - report.reserve_bytes
    if 0 < budget < free * LOW_USE_BELOW:
        return (
            f"the budget is {size(budget)} of {size(free)} free ({budget / free:.0%}); more would"
            " fit if the share that the engine may use were larger"
        )
    real, stated = _part(report, "physical_entry_bytes"), needs(report).page_bytes
    if real is not None and 0 < real < stated * LOW_USE_BELOW:
        return (
            f"a page entry is planned with {stated} bytes and takes {real}: the pools use"
            f" {real / stated:.0%} of the budget; see whether entry_bytes counts all KV heads"
            " instead of this rank's"
        )
    return None


def _local_counts(reports: Reports) -> Iterable[Notice]:
    said = {r: reports[r].local_count for r in sorted(reports) if reports[r].local_count}
    usual = Counter(said.values()).most_common()
    if len(usual) > 1:
        odd = tuple(r for r in said if said[r] != usual[0][0])
        yield Notice(
            "local_count_differs",
            odd,
            f"{named(odd)}: not as many processes share the device as elsewhere"
            f" ({said[odd[0]]} on rank {odd[0]}, {usual[0][0]} on most)",
        )


def _part(report: Report, name: str) -> int | None:
    """A part that explains the numbers, where it is one."""
    value = (report.parts or {}).get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
