"""Joining: an attempt number is given out, once for each process. It binds nothing. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from coordinator.commands import Mark, Reserve
from coordinator.engine import Engine
from coordinator.events import Event, Reserved
from coordinator.rules.settling import newly_touched
from kvaccord import messages
from kvaccord.errors import Conflict, ProtocolTooOld
from kvaccord.layout import named
from kvaccord.messages import Join


def find_attempt(engine: Engine, join: Join) -> int | None:
    """The attempt already given to this process: a repeated join gets the same answer."""
    process = (join.nonce, join.ranks)
    found = next(_joined_as(engine, process), None)
    if found is None:
        return None
    attempt, earlier = found
    if earlier != join:
        raise Conflict(
            f"nonce {join.nonce} already joined with another document for"
            f" {named(join.ranks)}; the first stands: use a new nonce for a new process",
            rank=join.ranks[0],
            field="nonce",
            value=join.nonce,
        )
    return attempt


def _joined_as(engine: Engine, process: tuple[str, tuple[int, ...]]) -> Iterator[tuple[int, Join]]:
    for attempt, reservation in engine.reservations.items():
        if (reservation.join.nonce, reservation.join.ranks) == process:
            yield attempt, reservation.join
    for round_ in engine.newest_first():
        if (claimed := round_.attempts.get(process)) is not None:
            yield claimed, round_.members[claimed].join


def on_reserve(engine: Engine, command: Reserve) -> tuple[Event, ...]:
    if command.join.protocol != messages.PROTOCOL:
        raise ProtocolTooOld(
            f"this coordinator speaks protocol {messages.PROTOCOL}, {named(command.join.ranks)}"
            f" asked for {command.join.protocol}; install the same kvaccord on both sides",
            rank=command.join.ranks[0],
            field="protocol",
            value=str(command.join.protocol),
        )
    if find_attempt(engine, command.join) is not None:
        return ()
    return (Reserved(attempt=engine.last_attempt + 1, join=command.join, touched=command.touched),)


def on_mark(engine: Engine, command: Mark) -> tuple[Event, ...]:
    if round_ := engine.round_of(command.attempt):
        return newly_touched(round_, command.touched)
    reserved = engine.reservations.get(command.attempt)
    if reserved is None or set(command.touched) <= set(reserved.touched):
        return ()
    touched = (*reserved.touched, *command.touched)
    return (Reserved(attempt=command.attempt, join=reserved.join, touched=touched),)
