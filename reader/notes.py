"""What else is worth knowing about a start: checks of what was expected, and odd terms. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from reader.causes import Blame
from reader.numbers import GIB, ROUNDING_GIB
from reader.seats import Seats
from reader.start import Start

NON_TORCH_HIGH = 0.08  # of the device
UNLIKE = 1.05  # devices of one kind differ by far less


def notes_of(
    start: Start,
    seats: Seats,
    blame: Blame,
    ranks: int | None,
    layout: Mapping[str, int] | None,
) -> tuple[str, ...]:
    return (
        *_expected(start, seats, ranks, layout),
        *_devices(start),
        *_terms(start),
        *_compared_with_one_stage(seats, blame),
    )


def _expected(
    start: Start, seats: Seats, ranks: int | None, layout: Mapping[str, int] | None
) -> Iterator[str]:
    wanted = ranks or (seats.world if layout else None)
    if wanted and len(start.ranks) > wanted:
        yield f"{len(start.ranks)} ranks wrote, and {wanted} were expected"
    if wanted and start.world and start.world != wanted:
        yield f"the log speaks of {start.world} ranks, and {wanted} were expected"
    for axis, size in start.axes.items():
        if layout and layout.get(axis, 1) != size:
            yield f"the log says {axis}={size}, and {axis}={layout.get(axis, 1)} was expected"
    if sum(key[0] == "line" for key in start.ranks) > 1:
        yield "the lines name no rank: numbers are the order of the lines"
    if start.dropped:
        yield f"{start.dropped} more kinds of errors are not shown"


def _devices(start: Start) -> Iterator[str]:
    """A slice of a device that is reported as the whole, or mixed cards."""
    totals = [r.facts["total_gib"] for r in start.ranks.values() if "total_gib" in r.facts]
    if totals and max(totals) > UNLIKE * min(totals):
        yield f"devices are unlike: {min(totals):.2f} to {max(totals):.2f} GiB in all"


def _terms(start: Start) -> Iterator[str]:
    """Terms of ATOM's printed budget that explain a small count."""
    printed = [r for r in start.ranks.values() if "block_bytes" in r.facts and r.counts]
    gaps = [
        rank.facts["available_gib"]
        - next(iter(rank.counts.values())) * rank.facts["block_bytes"] / GIB
        for rank in printed
        if "available_gib" in rank.facts
    ]
    if gaps and min(gaps) > 2 * ROUNDING_GIB:
        yield (
            f"{min(gaps):.2f} GiB of what is available went to other pools (state, windows): a"
            " count cannot be computed from the line"
        )
    shares = [
        (rank.facts["non_torch_gib"] / total, rank.facts["non_torch_gib"], total)
        for rank in printed
        if "non_torch_gib" in rank.facts and (total := rank.facts.get("total_gib", 0.0)) > 0
    ]
    share, used, total = max(shares, default=(0.0, 0.0, 0.0))
    if share > NON_TORCH_HIGH:
        yield (
            f"non_torch is {used:.2f} of {total:.2f} GiB ({share:.1%}): every communication group"
            " takes buffers of its own"
        )


def _compared_with_one_stage(seats: Seats, blame: Blame) -> Iterator[str]:
    """A version of vLLM compared what all stages need with what one stage has."""
    facts = dict(blame.first.trouble.facts) if blame.first else {}
    stages = seats.sizes.get("pp", 1)
    if "needed_gib" in facts and stages > 1:
        needed = float(facts["needed_gib"])
        yield (
            f"of {needed:.2f} GiB one of {stages} stages holds about {needed / stages:.2f}: if this"
            " version compares the need of all stages with one, the model fits; try a newer one"
        )
