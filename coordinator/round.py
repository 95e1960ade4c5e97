"""`decide`: commands in, events out; no clock, no I/O, no chance.

What a command cannot know from the log (time that was spent, sessions that ended) the shell found
out and says in the command; the log has the last word on whether it still matters. Each kind of
command has its file in coordinator/rules/.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from typing import assert_never

from coordinator.commands import (
    Apply,
    Call,
    Cancel,
    Claim,
    Clear,
    Command,
    Leave,
    Lose,
    Mark,
    Reserve,
    Retire,
    Serve,
    Spend,
    Submit,
    Suspect,
    Veto,
)
from coordinator.engine import Engine, evolve
from coordinator.events import MAX_ENTRY_BYTES, Cleared, Event, Touched, entry_of
from coordinator.rules.calls import on_apply, on_leave, on_serve, on_submit, on_veto
from coordinator.rules.claiming import on_claim
from coordinator.rules.findings import on_presence, on_spend
from coordinator.rules.joining import find_attempt, on_mark, on_reserve
from coordinator.rules.members import is_followed
from coordinator.rules.orders import on_cancel, on_retire
from coordinator.rules.settling import newly_touched, settle


def decide(engine: Engine, command: Command) -> tuple[Event, ...]:
    """What happens to this engine's log, given what it holds. () is: nothing.

    Raises a Refused when the sender is wrong; then nothing is kept.
    """
    if not isinstance(command, Call):
        return _decide(engine, command)
    # Whoever is answered is not suspect, and its being back stands in the entry of its own call:
    # apart from it, the return of a rank that calls to say no would settle the round for it.
    back = _back(engine, command)
    engine = reduce(evolve, back, engine)
    events = _decide(engine, command) or _touched_only(engine, command)
    if back and not events:
        return settle(engine, back[0].round, seen=back)
    return (*back, *events)


@dataclass(frozen=True)
class Step:
    """What one of several commands comes to. after: the engine with it and those before it."""

    events: tuple[Event, ...]
    after: Engine


def decide_together(engine: Engine, commands: Iterable[Command]) -> list[Step | Exception]:
    """Decide each command on what those before it leave. All events are one entry.

    A refusal stands in the place of its command, which then changes nothing for the others. The
    answer is shorter than the commands where an entry holds no more: at least one is decided.
    """
    steps: list[Step | Exception] = []
    size = 0
    for command in commands:
        try:
            events = decide(engine, command)
            more = len(entry_of(events).body) if events else 0
        except Exception as fault:  # our own mistake, too, must strike none but this command
            steps.append(fault)
            continue
        if size and size + more > MAX_ENTRY_BYTES:
            break
        size += more
        engine = reduce(evolve, events, engine)
        steps.append(Step(events, engine))
    return steps


def _back(engine: Engine, command: Call) -> tuple[Cleared, ...]:
    if isinstance(command, Reserve):
        return ()
    round_ = engine.round_of(command.attempt)
    member = round_.members[command.attempt] if round_ else None
    if round_ is None or member is None or not member.suspect or not is_followed(round_, member):
        return ()
    return (Cleared(round=round_.number, attempt=command.attempt),)


def _touched_only(engine: Engine, command: Call) -> tuple[Touched, ...]:
    """A call that appends nothing was touched all the same: the decision must say so."""
    # A report that was kept before is not shrunk any more.
    touched = tuple(t for t in command.touched if t.field is None)
    known = find_attempt(engine, command.join) if isinstance(command, Reserve) else command.attempt
    round_ = engine.round_of(known) if known is not None else None
    return newly_touched(round_, touched) if round_ else ()


def _decide(engine: Engine, command: Command) -> tuple[Event, ...]:
    match command:
        case Reserve():
            return on_reserve(engine, command)
        case Claim():
            return on_claim(engine, command)
        case Submit():
            return on_submit(engine, command)
        case Veto():
            return on_veto(engine, command)
        case Leave():
            return on_leave(engine, command)
        case Apply():
            return on_apply(engine, command)
        case Mark():
            return on_mark(engine, command)
        case Serve():
            return on_serve(engine, command)
        case Cancel():
            return on_cancel(engine, command)
        case Retire():
            return on_retire(engine, command)
        case Suspect() | Clear() | Lose():
            return on_presence(engine, command)
        case Spend():
            return on_spend(engine, command)
        case _:
            assert_never(command)
