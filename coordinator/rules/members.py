"""Who takes part: the round and the process that a call speaks of. Pure."""

from __future__ import annotations

from coordinator.engine import Engine, Member, Round
from coordinator.events import Departed
from kvaccord.errors import NotFound, Superseded


def find_round(engine: Engine, number: int) -> Round:
    if number not in engine.rounds:
        raise NotFound(f"{engine.name} has no round {number}", field="round", value=str(number))
    return engine.rounds[number]


def member_of(engine: Engine, number: int, attempt: int) -> tuple[Round, Member]:
    """The round and the process a call speaks of. Raises NotFound or Superseded."""
    round_ = find_round(engine, number)
    member = round_.members.get(attempt)
    if member is None:
        own = engine.round_of(attempt)
        raise Superseded(
            f"attempt {attempt} of {engine.name} does not belong to round {number}"
            + (f" but to round {own.number}" if own else ", it has not claimed")
            + "; one process takes part in one round",
            field="round",
            value=str(number),
        )
    return round_, member


def is_followed(round_: Round, member: Member) -> bool:
    """Whether the end of this member's session means anything."""
    if not member.seated or member.gone or member.departed is not None:
        return False
    return round_.open or (round_.ended == "SEALED" and member.kept)


def departures(round_: Round, members: list[Member], why: str) -> tuple[Departed, ...]:
    """Members of a sealed round that are known to be gone now."""
    if round_.ended != "SEALED":
        return ()
    return tuple(
        Departed(round=round_.number, attempt=m.attempt, why=why)
        for m in members
        if m.departed is None
    )


def refuse_if_taken_over(engine: Engine, round_: Round) -> None:
    """Raises Superseded for a start that a greater restart of its run has taken over from."""
    if newer := engine.taken_over(round_):
        raise Superseded(
            f"{engine.name} round {round_.number} is of launch {round_.launch}, and launch"
            f" {newer.launch} has taken over in round {newer.number}; this process must exit",
            field="launch",
            value=str(round_.launch),
        )
