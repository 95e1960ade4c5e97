"""What stays of a log when old rounds are dropped, in entries that every store takes. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from coordinator.engine import RESERVATIONS, Engine, snapshot_of
from coordinator.events import Event, Floor, Kept, StillReserved

# An entry holds one piece, or one item that alone is longer: a decision is the longest of all.
PIECE_BYTES = 256 * 1024


def compaction(engine: Engine, keep_rounds: int) -> Iterator[Event]:
    """What to append, an entry each, so that everything before it can be dropped.

    The latest rounds, the open one and the one in force stay; of the rest only what must never be
    forgotten: the last attempt, the runs that were left, the reservations. Nothing comes when
    nothing is old. Until the floor, the last one, each entry changes nothing.
    """
    numbers = sorted(engine.rounds)
    latest = set(numbers[-keep_rounds:])
    stay = [n for n in numbers if n in latest or engine.rounds[n] is engine.in_force]
    if len(stay) == len(numbers):
        return
    for number in stay:
        for index, piece in enumerate(_pieces(snapshot_of(engine.rounds[number]))):
            yield Kept(round=number, snapshot=piece, more=index > 0)
    reserved = RESERVATIONS.dump_python(dict(engine.reservations), mode="json")
    for piece in _pieces({"reservations": reserved}):
        yield StillReserved(reservations=piece["reservations"])
    yield Floor(
        rounds=tuple(stay), last_attempt=engine.last_attempt, left_runs=dict(engine.left_runs)
    )


def _pieces(snapshot: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Parts of a snapshot, of PIECE_BYTES or one item; laid over each other they are the whole."""
    piece: dict[str, Any] = {}
    size = 0
    for name, value in snapshot.items():
        for key, item in _items(value):
            item_size = len(json.dumps([name, key, item]))
            if piece and size + item_size > PIECE_BYTES:
                yield piece
                piece, size = {}, 0
            size += item_size
            if isinstance(value, dict):
                piece.setdefault(name, {})
                if key is not None:
                    piece[name][key] = item
            elif isinstance(value, list):
                piece.setdefault(name, [])
                if key is not None:
                    piece[name].append(item)
            else:
                piece[name] = item
    yield piece


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    """The items of a map or a list, by key; (None, value) of what has none."""
    match value:
        case dict() if value:
            yield from value.items()
        case list() if value:
            yield from enumerate(value)
        case _:
            yield None, value
