"""Settings as levers: how far each must be moved until the planner passes. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvaccord.changes import (
    PPM,
    part,
    share_base,
    with_field,
    with_freed,
    with_max_entries,
    with_max_model_len,
    with_min_entries,
    with_utilization,
)
from kvaccord.layout import Layout
from kvaccord.messages import Report
from kvaccord.plan import plan
from kvaccord.room import Reports

COARSE_PPM, FINE_PPM = 10_000, 1_000  # people write two decimals; three where two do not do
STEPS = 1024  # in which several settings are moved at once

Value = int | bool | str | None


@dataclass(frozen=True)
class Change:
    """One thing to change. name: of a report's field, `utilization` (ppm), or `freed_bytes`.

    ranks: () is every rank: a setting is the engine's. was: what the reports say now.
    """

    name: str
    value: Value
    was: Value = None
    ranks: tuple[int, ...] = ()


def apply(reports: Reports, changes: Sequence[Change]) -> dict[int, Report]:
    """The reports with these changes. What a report makes not computable stays as it is."""
    changed = dict(reports)
    for change in changes:
        for rank in change.ranks or reports:
            if rank in changed:
                changed[rank] = _applied(changed[rank], change.name, change.value)
    return changed


def _applied(report: Report, name: str, value: Any) -> Report:
    match name:
        case "utilization":
            return with_utilization(report, value) or report
        case "max_model_len":
            return with_max_model_len(report, value) or report
        case "min_entries":
            return with_min_entries(report, value)
        case "max_entries":
            return with_max_entries(report, value)
        case "reserve_bytes":
            return with_field(report, name, min(report.reserve_bytes, value))
        case "freed_bytes":
            return with_freed(report, value)
        case _:
            return with_field(report, name, value)


def greatest_utilization(report: Report) -> int:
    """The greatest fraction, ppm, that can be asked for: of total no more than was free at first.

    Source: vLLM worker/utils.py, request_memory.
    """
    initial, total = report.initial_free_bytes, report.total_bytes
    of_total = (report.parts or {}).get("utilization_of") == "total"
    if of_total and total and initial is not None:
        return min(PPM, initial * PPM // total)
    return PPM


class Lever(NamedTuple):
    """A setting and the values to try, the mildest first; each helps at least as the one before."""

    name: str
    values: Sequence[int]
    was: int | None = None

    def at(self, step: int) -> tuple[Change, ...]:
        """The change of this step; step 0 changes nothing."""
        return (Change(self.name, self.values[step - 1], self.was),) if step else ()


def passes(tight: Reports, changes: Sequence[Change]) -> bool:
    """Whether these ranks, each a replica of its own, all fit."""
    return not plan(Layout(dp=len(tight)), apply(tight, changes)).findings


def least_index(count: int, good: Callable[[int], bool]) -> int:
    """The least of 0 … count at which it is good. count is, and what is good stays so above."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if good(middle) else (middle + 1, high)
    return low


def mildest(
    tight: Reports, first: tuple[Change, ...], levers: Sequence[Lever]
) -> tuple[Change, ...] | None:
    """All levers moved as little as does; None if their ends do not. Several move in proportion,
    and then each goes back as far as it may.
    """
    steps = [len(lever.values) for lever in levers]

    def good(tried: Sequence[int]) -> bool:
        pairs = zip(levers, tried, strict=True)
        return passes(tight, (*first, *(c for lever, step in pairs for c in lever.at(step))))

    if not good(steps):
        return None
    if len(levers) > 1:
        ends = list(steps)
        together = least_index(STEPS, lambda t: good([-(-n * t // STEPS) for n in ends]))
        steps = [-(-n * together // STEPS) for n in ends]
    for index, most in enumerate(steps):

        def alone(step: int, at: int = index) -> bool:
            return good([*steps[:at], step, *steps[at + 1 :]])

        steps[index] = least_index(most, alone)
    changes = (c for lever, step in zip(levers, steps, strict=True) for c in lever.at(step))
    return (*first, *changes)


def rising(tight: Reports, now: int, most: int) -> Iterator[Lever]:
    """The fraction in hundredths; in thousandths where the last hundredth is not enough."""
    for step in (COARSE_PPM, FINE_PPM):
        values = range((now // step + 1) * step, most + 1, step)
        lever = Lever("utilization", values, now)
        if values and (step == FINE_PPM or passes(tight, lever.at(len(values)))):
            yield lever
            return


def deciding(reports: Reports, wanted: Mapping[int, int]) -> dict[int, Report]:
    """A world that passes whenever this one does, of the few ranks that decide. wanted: pages.

    What is equal is equal by now, so that each rank passes if it has room for what its peers
    want: each is planned as a replica of its own. One that has no less of anything than
    another that is alike decides nothing.
    """
    alike: dict[Any, list[Report]] = defaultdict(list)
    for rank, report in reports.items():
        own = report.model_copy(update={"inputs": None, "inputs_stage": None, "capacities": None})
        if own.has_page:
            own = with_min_entries(own, wanted[rank], lower_only=False)
        of = (report.parts or {}).get("utilization_of")
        moving = None if of == "total" else share_base(report)
        ppm = part(report, "utilization_ppm")
        shape = (own.classes, own.reserve_bytes, own.total_bytes, own.requested_bytes)
        alike[(*shape, of, moving, ppm)].append(own)
    left = [report for rows in alike.values() for report in _least(rows)]
    return dict(enumerate(left))


def _least(rows: Sequence[Report]) -> list[Report]:
    """Those that no other one has less than, in budget, free memory and what was free at first."""
    kept: list[tuple[int, int, int]] = []
    found = []

    def holds(report: Report) -> tuple[int, int, int]:
        initial = report.initial_free_bytes
        return report.kv_budget_bytes, report.free_bytes, -1 if initial is None else initial

    for report in sorted(rows, key=holds):
        own = holds(report)
        if not any(all(a <= b for a, b in zip(k, own, strict=True)) for k in kept):
            kept.append(own)
            found.append(report)
    return found
