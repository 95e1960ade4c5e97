"""A picture of memory per rank, for a terminal: who has how much of a device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from rich.text import Text

from kvaccord.changes import part
from kvaccord.layout import named
from kvaccord.messages import Report
from kvaccord.room import available_bytes, needs

GIB = 2**30
COLUMNS = 60
SHOWN_BARS = 32


class Kind(NamedTuple):
    """What memory is for. mark: a letter, so that a pipe shows it as well as a screen."""

    mark: str
    colour: str
    word: str


WEIGHTS = Kind("W", "blue", "weights")
ACTIVATIONS = Kind("A", "cyan", "activations")
PEAK = Kind("W", "blue", "weights and activations")
OTHERS = Kind("o", "yellow", "others: communicators, contexts, neighbours")
GRAPHS = Kind("G", "magenta", "graphs")
MARGIN = Kind("m", "white", "margin")
RESERVE = Kind("r", "bright_magenta", "reserve")
STATE = Kind("S", "bright_green", "state floor")
PAGES = Kind("#", "green", "pages")
STRANDED = Kind("!", "red", "stranded: a peer has no room for it")
LEFT = Kind("?", "bright_yellow", "available, not planned")
REST = Kind(".", "bright_black", "outside the engine's share, or unexplained")


class Segment(NamedTuple):
    kind: Kind
    bytes: int


def segments(report: Report, entries: Mapping[str, int] | None) -> list[Segment]:
    """What a rank's device is used for, bytes, as far as its report explains it.

    entries: its row of the plan; None where there is no plan. Without total_bytes the bar is what
    is available alone.
    """
    peak, weights = part(report, "peak_torch_bytes"), part(report, "weights_bytes")
    parts = [Segment(PEAK, peak or 0)]
    if weights is not None and peak is not None and weights <= peak:
        parts = [Segment(WEIGHTS, weights), Segment(ACTIVATIONS, peak - weights)]
    elif weights is not None and peak is None:
        parts = [Segment(WEIGHTS, weights)]
    for kind, name in (
        (OTHERS, "non_torch_bytes"),
        (GRAPHS, "graph_bytes"),
        (MARGIN, "safety_bytes"),
    ):
        parts.append(Segment(kind, part(report, name) or 0))
    parts.append(Segment(RESERVE, report.reserve_bytes))
    need, available = needs(report), max(0, available_bytes(report))
    floor = min(need.floor_bytes, available)
    parts.append(Segment(STATE, floor))
    if entries is None:
        parts.append(Segment(LEFT, available - floor))
    else:
        pages = entries[need.page.name] * need.page_bytes if need.page else 0
        parts += [Segment(PAGES, pages), Segment(STRANDED, available - floor - pages)]
    used = sum(each.bytes for each in parts)
    if report.total_bytes is not None:
        parts.append(Segment(REST, max(0, report.total_bytes - used)))
    else:
        # What is beside the cache is no part of a bar whose whole nobody knows.
        parts = [each for each in parts if each.kind in (STATE, PAGES, STRANDED, LEFT)]
    return [each for each in parts if each.bytes > 0]


def bar(parts: Iterable[Segment], scale_bytes: int) -> Text:
    """The segments side by side; rounding never makes the bar longer than its whole."""
    drawn, at_bytes, column = Text(), 0, 0
    for each in parts:
        at_bytes += each.bytes
        end = round(at_bytes * COLUMNS / scale_bytes) if scale_bytes else 0
        drawn.append(each.kind.mark * (end - column), style=each.kind.colour)
        column = end
    return drawn


def picture(reports: Mapping[int, Report], plan: Mapping[str, Any] | None) -> Iterator[Text]:
    """One bar for all ranks that are alike, then what the marks mean."""
    rows = {rank: row for row in (plan or {}).get("schedulers", ()) for rank in row["ranks"]}
    parts = {
        rank: segments(report, rows[rank]["entries"] if plan else None)
        for rank, report in reports.items()
    }
    wholes = {rank: sum(each.bytes for each in parts[rank]) for rank in parts}
    alike: dict[str, list[int]] = {}
    for rank in parts:
        alike.setdefault(bar(parts[rank], max(wholes.values())).plain, []).append(rank)
    width = max(len(named(ranks)) for ranks in alike.values())
    for ranks in list(alike.values())[:SHOWN_BARS]:
        line = Text(f"{named(ranks):{width}}  ")
        line.append_text(bar(parts[ranks[0]], max(wholes.values())))
        yield line.append(f"  {_gib([wholes[rank] for rank in ranks])} GiB")
    if more := list(alike)[SHOWN_BARS:]:
        yield Text(f"{' ' * width}  and {len(more)} more that differ")
    for kind in dict.fromkeys(each.kind for found in parts.values() for each in found):
        shown = [each.bytes for found in parts.values() for each in found if each.kind == kind]
        line = Text(f"{' ' * width}  ")
        line.append(kind.mark, style=kind.colour)
        yield line.append(f" {kind.word}, {_gib(shown)} GiB")


def _gib(sizes: list[int]) -> str:
    least, most = f"{min(sizes) / GIB:.2f}", f"{max(sizes) / GIB:.2f}"
    return least if least == most else f"{least} to {most}"
