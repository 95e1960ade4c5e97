"""The first cause of a failed start, against those who only suffered from it. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from reader.seats import RANKS_MAX, Seats
from reader.start import Seen, Start

# An import that failed is often handled: it is a cause only where there is no other.
_OFTEN_HANDLED = ("ImportError", "ModuleNotFoundError", "HTTPError", "FileExistsError")
_WEIGHT = {"limit": 0, "raised": 1, "late": 2, "died": 3}


@dataclass(frozen=True, slots=True)
class Blame:
    """`first` is None where the log holds consequences alone, or no trouble at all.

    `suspects`: ranks of the world that neither complain nor are seen to be well.
    """

    first: Seen | None
    text: str
    ranks: tuple[int, ...]  # that the first cause is of
    others: tuple[Seen, ...]  # further causes: every limit that is broken
    victims: tuple[int, ...]
    consequences: tuple[Seen, ...]
    suspects: tuple[int, ...]
    missing: tuple[int, ...]


def blame_of(start: Start, seats: Seats) -> Blame:
    """Tell the first cause from its consequences.

    A refusal of numbers comes before an exception, since the exception may be its wrapping; among
    equals a text that a victim quotes, then the earliest.
    """
    quotes = [str(q) for s in start.troubles if (q := dict(s.trouble.facts).get("quotes"))]
    causes = [s for s in start.troubles if s.trouble.kind != "victim"]
    suffered: tuple[Seen, ...] = tuple(s for s in start.troubles if s.trouble.kind == "victim")
    ordered = sorted(causes, key=lambda seen: _order(seen, quotes))
    first = ordered[0] if ordered else None
    alike = [s for s in causes if first and s.trouble.code == first.trouble.code
             and s.trouble.kind == first.trouble.kind == "limit"]  # fmt: skip
    late = [s for s in causes if first and first.trouble.kind == s.trouble.kind == "late"]
    missing = _missing(late, seats)
    nodes = first is not None and dict(first.trouble.facts).get("of") == "nodes"
    ranks = _ranks(alike or ([first] if first else []), seats)
    if (
        first and first.trouble.code == "spread_too_wide"
    ):  # a roomy rank complains, a short one is it
        rest = tuple(r for r in range(seats.world or 0) if r not in ranks)
        ranks = rest if ranks and len(rest) == 1 else ()
    if late:  # whoever says so came
        ranks, suffered = () if nodes else missing, (*suffered, *late)
    further = tuple(s for s in ordered[1:] if s.trouble.kind == "limit" and s not in alike)
    victims = _ranks(suffered, seats, pointed=False)
    return Blame(
        first=first,
        text=_text(first, start),
        ranks=ranks,
        others=further,
        victims=tuple(v for v in victims if v not in ranks),
        consequences=tuple(s for s in suffered if s is not first),
        suspects=_suspects(start, seats, victims) if first is None and suffered else (),
        missing=missing,
    )


def _order(seen: Seen, quotes: list[str]) -> tuple[int, bool, bool, float, int]:
    text = seen.trouble.text
    quoted = any(q[:60] in text or text[:60] in q for q in quotes)
    handled = text.startswith(_OFTEN_HANDLED)
    at = seen.stamp.s if seen.stamp and seen.stamp.dated else 0.0
    return (_WEIGHT[seen.trouble.kind], not quoted, handled, at, seen.order)


def _ranks(seen: Iterable[Seen], seats: Seats, pointed: bool = True) -> tuple[int, ...]:
    found: set[int] = set()
    for one in seen:
        if one.key in seats.numbers and one.key is not None and one.key[0] != "process":
            found.add(seats.numbers[one.key])
        elif one.key is not None and one.key[0] == "rank" and isinstance(one.key[1], int):
            found.add(one.key[1])
        elif pointed:
            found |= set(one.trouble.ranks)
    return tuple(sorted(found))


def _missing(late: Iterable[Seen], seats: Seats) -> tuple[int, ...]:
    """Who did not come. Who complains came: when those are all who came, the rest is known."""
    named = {rank for seen in late for rank in seen.trouble.missing}
    writers = set(_ranks(late, seats, pointed=False))
    for seen in late:
        facts = dict(seen.trouble.facts)
        world, came = int(float(facts.get("world", 0))), int(float(facts.get("came", 0)))
        if 0 < came < world <= RANKS_MAX and came == len(writers):
            return tuple(sorted(set(range(world)) - writers))
    return tuple(sorted(named - writers))


def _text(first: Seen | None, start: Start) -> str:
    if first is None:
        return ""
    text = first.trouble.text.partition(" [repeated ")[0].strip()
    if first.during:
        text += f" (in {first.during})"
    return text


def _suspects(start: Start, seats: Seats, victims: Iterable[int]) -> tuple[int, ...]:
    """Who is pointed at, or silent: of a world up to its highest rank that is named."""
    if not seats.world:
        return ()
    pointed = {r for s in start.troubles for r in s.trouble.ranks}
    hurt = set(victims)
    return tuple(r for r in range(seats.world) if r not in hurt) or tuple(sorted(pointed - hurt))
