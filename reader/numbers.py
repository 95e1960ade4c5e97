"""The counts of a start: what goes on, the spread, who binds and why, what is stranded. Pure.

Sizes in GiB come with two decimals. A difference of two is known to 0.01 at best, which is several
blocks: no count is ever computed from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from reader.seats import Seats, groups_of
from reader.sights import Place
from reader.start import Key, RankSeen, Start

GIB = 2**30
ROUNDING_GIB = 0.01
Pool = tuple[str, str]  # (unit, name)
# Pools in the order in which their counts are the scheduler's own.
_PREFERRED: tuple[Pool, ...] = (
    ("tokens", "scheduler"),
    ("blocks", ""),
    ("tokens", ""),
    ("tokens", "profiled"),
)
_TAKES = ("non_torch_gib", "peak_torch_gib", "graph_gib", "weights_gib")
_GIVES = ("free_gib", "total_gib")


@dataclass(frozen=True, slots=True)
class Row:
    """One rank. `stranded_*`: what it has beyond what is used; None where it cannot be known."""

    rank: int
    label: str
    count: int | None
    unit: str | None
    facts: Mapping[str, float]
    step: str | None
    binds: bool
    stranded_count: int | None
    stranded_bytes: int | None
    stranded_gib: float | None
    place: Place | None


@dataclass(frozen=True, slots=True)
class Numbers:
    """`value`: what the engine goes on with, the smallest; None where the log has no count."""

    values: Mapping[Key, int]  # of the ranks that count for themselves
    value: int | None
    unit: str | None
    spread: int | None
    least_gib: float | None
    binding: tuple[int, ...]
    why_binding: str
    rows: tuple[Row, ...]


def numbers_of(start: Start, seats: Seats) -> Numbers:
    pool = _pool(start)
    values = {key: rank.counts[pool] for key, rank in start.ranks.items() if pool in rank.counts}
    value, unit = _goes_on(start, pool, values)
    sizes = list(values.values()) or [size for _, size, _, _ in start.offers]
    have = [r.facts["available_gib"] for r in start.ranks.values() if "available_gib" in r.facts]
    bound = _bound(start, seats, values)
    all_alike = len(bound) == (len(values) or len(have))
    return Numbers(
        values=values,
        value=value,
        unit=unit,
        spread=max(sizes) - min(sizes) if sizes else None,
        least_gib=min(have, default=None),
        binding=tuple(sorted(seats.numbers[key] for key in bound)),
        why_binding=_why(start, bound[0]) if bound and not all_alike else "",
        rows=tuple(_rows(start, seats, pool, values, () if all_alike else bound)),
    )


def _pool(start: Start) -> Pool | None:
    """The pool that is compared in the table: the one that most ranks have."""
    found: dict[Pool, int] = {}
    for rank in start.ranks.values():
        for pool in rank.counts:
            found[pool] = found.get(pool, 0) + 1
    order = {pool: n for n, pool in enumerate(_PREFERRED)}
    return min(found, key=lambda p: (-found[p], order.get(p, len(order)), p), default=None)


def _goes_on(
    start: Start, pool: Pool | None, values: Mapping[Key, int]
) -> tuple[int | None, str | None]:
    if values and pool:
        return min(values.values()), pool[0]
    if start.offers:
        _, value, unit, _ = min(start.offers, key=lambda offer: offer[1])
        return value, unit
    if start.plans:
        return start.plans[-1][1], start.plans[-1][2]
    return None, None


def _bound(start: Start, seats: Seats, values: Mapping[Key, int]) -> list[Key]:
    """Who has the least; among equals who has least available, where that is printed."""
    have = {k: f for k, r in start.ranks.items() if (f := r.facts.get("available_gib")) is not None}
    least = min(values.values(), default=0)
    bound = [key for key, value in values.items() if value == least]
    if not values and seats.sizes.get("pp", 1) == 1:  # stages differ in what a block takes
        bound = list(have)
    if not bound or any(key not in have for key in bound):
        return bound
    floor = min(have[key] for key in bound)
    return [key for key in bound if have[key] - floor < 1.5 * ROUNDING_GIB]  # else: within rounding


def _why(start: Start, bound: Key) -> str:
    """The term of the binding rank that is furthest from the roomiest rank's."""
    mine = start.ranks[bound].facts
    others = [rank for key, rank in start.ranks.items() if key != bound]
    worst: tuple[float, str] = (2 * ROUNDING_GIB, "")
    for name in (*_TAKES, *_GIVES):
        theirs = [rank.facts[name] for rank in others if name in rank.facts]
        if name not in mine or not theirs:
            continue
        lost = mine[name] - min(theirs) if name in _TAKES else max(theirs) - mine[name]
        word = "more" if name in _TAKES else "less"
        said = f"{lost:.2f} GiB {word} {name.removesuffix('_gib')} than the roomiest"
        worst = max(worst, (round(lost, 2), said), key=lambda found: found[0])
    return worst[1]


def _rows(
    start: Start, seats: Seats, pool: Pool | None, values: Mapping[Key, int], bound: object
) -> list[Row]:
    floors = _floors(start)
    least = min(values.values(), default=0)
    layers_differ = seats.sizes.get("pp", 1) > 1
    rows = []
    for key, rank in start.ranks.items():
        count = values.get(key)
        beyond = count - least if count is not None else None
        gib = rank.facts["available_gib"] - floors[key] if key in floors else None
        rows.append(
            Row(
                rank=seats.numbers[key],
                label=seats.label(key),
                count=count,
                unit=pool[0] if pool and count is not None else None,
                facts=rank.facts,
                step=rank.step.name if rank.step else None,
                binds=isinstance(bound, list) and key in bound,
                stranded_count=beyond,
                stranded_bytes=_bytes_of(beyond, count, rank),
                stranded_gib=round(gib, 2) if gib is not None and not layers_differ else None,
                place=rank.place,
            )
        )
    return sorted(rows, key=lambda row: (row.rank, row.label))


def _floors(start: Start) -> dict[Key, float]:
    """What the tightest rank of each rank's scheduler has available."""
    floors: dict[Key, float] = {}
    for keys in groups_of(start).values():
        have = {k: f for k in keys if (f := start.ranks[k].facts.get("available_gib")) is not None}
        floors |= dict.fromkeys(have, min(have.values(), default=0.0))
    return floors


def _bytes_of(beyond: int | None, count: int | None, rank: RankSeen) -> int | None:
    """Bytes that are stranded: exact where a block's bytes are printed, else by the pool's size."""
    if beyond is None or count is None or count <= 0:
        return None
    if each := rank.facts.get("block_bytes"):
        return beyond * int(each)
    if size := rank.facts.get("kv_gib"):
        return int(beyond / count * size * GIB)
    return 0 if beyond == 0 else None
