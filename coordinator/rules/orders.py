"""What an operator orders: to end an open round, or to take a sealed one out of force. Pure."""

from __future__ import annotations

from coordinator.commands import Cancel, Retire
from coordinator.engine import Engine
from coordinator.events import Cause, Event, Retired
from coordinator.rules.members import find_round
from coordinator.rules.settling import end_round
from kvaccord.errors import Conflict


def on_cancel(engine: Engine, command: Cancel) -> tuple[Event, ...]:
    round_ = find_round(engine, command.round)
    if not round_.open:
        return ()
    text = f"cancelled by an operator: {command.reason}"
    return end_round(engine, round_, Cause(code="cancelled", ranks=(), text=text, retryable=False))


def on_retire(engine: Engine, command: Retire) -> tuple[Event, ...]:
    round_ = find_round(engine, command.round)
    if round_.ended != "SEALED":
        raise Conflict(
            f"{engine.name} round {round_.number} is {round_.state}; only a sealed round can be"
            " retired, an open one is cancelled",
            field="round",
            value=round_.state,
        )
    if round_.retired is not None:
        return ()
    return (Retired(round=round_.number, reason=command.reason),)
