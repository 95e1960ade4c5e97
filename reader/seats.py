"""Which rank is which: ranks are inferred from what a start wrote; options only check. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from reader.start import Key, Start

RANKS_MAX = 1024
AXES = ("dp", "pp", "pcp", "tp")  # the last varies fastest


@dataclass(frozen=True, slots=True)
class Seats:
    """Numbers of the ranks that were seen, and how many there should be.

    `world` is None where the log does not say. `sure`: it was said, not only seen.
    """

    numbers: Mapping[Key, int]
    sizes: Mapping[str, int]
    world: int | None
    sure: bool
    by_axes: bool  # the log names coordinates

    def label(self, key: Key | None) -> str:
        match key:
            case None:
                return "no rank named"
            case ("axes", tuple(axes)):
                return " ".join(f"{name.upper()}{value}" for name, value in axes)
            case ("process", str(process)):
                return f"worker {process}"
            case _:
                return f"rank {self.numbers.get(key, key[1])}"

    def missing(self) -> tuple[int, ...]:
        """Numbers of the world that nobody seen has."""
        if self.world is None or len(self.numbers) >= self.world:
            return ()
        return tuple(sorted(set(range(min(self.world, RANKS_MAX))) - set(self.numbers.values())))

    def name_of(self, number: int) -> str:
        """A rank by its number, in the log's own manner where that has a single axis."""
        large = [axis for axis, size in self.sizes.items() if size > 1]
        if self.by_axes and len(large) == 1:
            return f"{large[0].upper()}{number}"
        return f"rank {number}"


def seats_of(start: Start, ranks: int | None, layout: Mapping[str, int] | None) -> Seats:
    """Number the ranks of a start. `ranks` and `layout` are what the user says they should be."""
    seen: dict[Key, dict[str, int]] = {}
    troubled = (s.key for s in start.troubles if s.key is not None and s.key[0] != "process")
    keys = [*start.ranks, *troubled]
    for key in keys:
        seen[key] = dict(key[1]) if key[0] == "axes" and isinstance(key[1], tuple) else {}
    named = [axes for axes in seen.values() if axes]
    sizes = dict(start.axes)
    for axes in named:
        for axis, value in axes.items():
            sizes[axis] = max(sizes.get(axis, 1), value + 1)
    inside = _dp_inside_tp(start.engine, named)
    if inside:
        sizes.pop("dp", None)
    sizes |= layout or {}
    numbers = {key: _number(key, axes, sizes, inside) for key, axes in seen.items()}
    numbers = _apart(numbers)
    said = start.world or (prod(start.axes.values()) if start.axes else None)
    if layout:
        said = prod(layout.values())
    highest = max(numbers.values(), default=-1) + 1
    pointed = max((r for s in start.troubles for r in s.trouble.ranks), default=-1) + 1
    world = ranks or (max(said, highest) if said else max(highest, pointed) or None)
    return Seats(
        {key: number for key, number in numbers.items() if key in start.ranks or key[0] != "line"},
        sizes,
        world,
        bool(ranks or said),
        bool(named),
    )


def _dp_inside_tp(engine: str, named: list[dict[str, int]]) -> bool:
    """SGLang's attention DP lies inside TP: then no (PP, TP) comes twice."""
    if engine != "sglang" or not any("dp" in axes for axes in named):
        return False
    places = [(axes.get("pp", 0), axes.get("tp", 0)) for axes in named]
    return len(set(places)) == len(places)


def _number(key: Key, axes: Mapping[str, int], sizes: Mapping[str, int], inside: bool) -> int:
    if not axes:
        return key[1] if isinstance(key[1], int) else -1
    number = 0
    for axis in AXES:
        if axis == "dp" and inside:
            continue
        number = number * sizes.get(axis, 1) + axes.get(axis, 0)
    return number


def _apart(numbers: dict[Key, int]) -> dict[Key, int]:
    """Workers without a number take what is free, in the order in which they were seen."""
    taken = {number for number in numbers.values() if number >= 0}
    free = (n for n in range(len(numbers) + len(taken) + 1) if n not in taken)
    return {key: number if number >= 0 else next(free) for key, number in numbers.items()}


def groups_of(start: Start) -> dict[int, list[Key]]:
    """Ranks whose counts must be equal: one scheduler's, which is all of one DP rank."""
    groups: dict[int, list[Key]] = {}
    for key in start.ranks:
        dp = dict(key[1]).get("dp", 0) if key[0] == "axes" and isinstance(key[1], tuple) else 0
        groups.setdefault(dp, []).append(key)
    return groups
