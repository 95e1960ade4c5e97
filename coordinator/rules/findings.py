"""What the shell found out about presence and time, checked against the log. Pure.

The log has the last word: a finding that it has overtaken means nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import assert_never

from coordinator.commands import Clear, Lose, Sign, Spend, Suspect
from coordinator.engine import Engine, Round
from coordinator.events import Cause, Cleared, Event, Suspected
from coordinator.rules.members import departures, is_followed
from coordinator.rules.settling import end_round, objected, settle
from kvaccord import plan as plan_rules

NO_SIGN = {
    "ended": "ended and did not come back",
    "not opened": "was not opened",
    "silent": "is held open by a proxy, but it sent no beat",
}


def on_presence(engine: Engine, command: Suspect | Clear | Lose) -> tuple[Event, ...]:
    round_ = engine.rounds.get(command.round)
    member = round_.members.get(command.attempt) if round_ else None
    if round_ is None or member is None or not is_followed(round_, member):
        return ()
    match command:
        case Suspect(connection=connection):
            if member.suspect == connection:
                return ()
            return (Suspected(round=round_.number, attempt=member.attempt, connection=connection),)
        case Clear():
            if member.suspect is None:
                return ()
            cleared = Cleared(round=round_.number, attempt=member.attempt)
            return settle(engine, round_.number, cleared)
        case Lose(connection=connection, after_s=after_s, session=session):
            if member.suspect != connection:  # back since, or another session's end
                return ()
            why = f"its session {NO_SIGN[session]} within {after_s:g} s"
            if round_.ended:
                return departures(round_, [member], why)
            text = (
                f"lost: {why} (pid {member.join.pid}); look at this process's own log, and for the"
                " kernel's out-of-memory killer"
            )
            return (
                objected(
                    round_,
                    member.attempt,
                    "rank_lost",
                    member.ranks,
                    member.join.host,
                    text,
                    gone=True,
                ),
            )
        case _:
            assert_never(command)


def on_spend(engine: Engine, command: Spend) -> tuple[Event, ...]:
    round_ = engine.rounds.get(command.round)
    if round_ is None or not round_.open:
        return ()
    short = () if round_.verdict else tuple(_as_cause(round_, f) for f in round_.short)
    match command.what:
        case "grace":
            return end_round(engine, round_, *short) if round_.causes else ()
        case "shortfall":
            return end_round(engine, round_, *short) if short and not round_.causes else ()
    if command.what != round_.phase or round_.causes:
        return ()
    if command.soft:
        stuck = {r: s for r, s in command.signs.items() if s.stuck and r in round_.waiting_for}
        causes = [_is_stuck(round_, rank, sign) for rank, sign in sorted(stuck.items())]
    else:
        causes = list(_time_ran_out(engine, round_, command.signs))
    return end_round(engine, round_, *causes, *short) if causes else ()


def _as_cause(round_: Round, finding: plan_rules.Finding) -> Cause:
    return Cause(
        code=finding.code,
        ranks=finding.ranks,
        host=round_.host(finding.ranks[0]),
        text=finding.text,
        retryable=finding.retryable,
    )


def _time_ran_out(engine: Engine, round_: Round, signs: Mapping[int, Sign]) -> Iterable[Cause]:
    """One cause for every rank that the spent budget waited for: the missing, then the stuck."""
    waited_for, policy = round_.waiting_for, round_.policy
    stuck = [rank for rank in waited_for if rank in signs and signs[rank].stuck]
    for rank in waited_for:
        if rank in stuck:
            continue
        holder, sign = round_.holder(rank), signs.get(rank)
        if holder is None:
            text = (
                f"never joined within gather_s {policy.gather_s:g} s; {_left(engine, round_, rank)}"
            )
        else:
            seen = f", last seen at {sign.phase!r} {sign.age_s:.0f} s ago" if sign else ""
            what = (
                f"joined but sent no report within report_s {policy.report_s.hard:g} s"
                if round_.verdict is None
                else f"did not say that it built its pools within apply_s {policy.apply_s.hard:g} s"
            )
            text = f"{what} (pid {holder.join.pid}{seen}); look at this process's own log"
        yield Cause(code="ranks_missing", ranks=(rank,), host=round_.host(rank), text=text)
    for rank in stuck:
        yield _is_stuck(round_, rank, signs[rank])
    if not waited_for:
        # Everyone was heard; the round waited only for sessions to come back.
        for member in round_.suspects:
            yield Cause(
                code="rank_lost",
                ranks=member.ranks,
                host=member.join.host,
                text=f"lost: its session ended and was not back when time ran out"
                f" (pid {member.join.pid}); look at this process's own log",
            )


def _left(engine: Engine, round_: Round, rank: int) -> str:
    """What to do about a rank that nobody claimed: a process of an earlier round may be in the way.

    A wedged process outlives its round, so that its container is never started anew.
    """
    earlier = (r for r in engine.newest_first() if r.launch.run == round_.launch.run)
    for before in earlier:
        if before is not round_ and (old := before.holder(rank)):
            return (
                f"its last process, on {old.join.host} (pid {old.join.pid}), is one of round"
                f" {before.number} and takes no part in this one: see that it exits, and start it"
                " anew"
            )
    return "start it, or see why its process did not come up"


def _is_stuck(round_: Round, rank: int, sign: Sign) -> Cause:
    holder = round_.holder(rank)
    assert holder is not None, "only a claimed rank shows signs"
    pid = holder.join.pid
    return Cause(
        code="rank_stuck",
        ranks=(rank,),
        host=holder.join.host,
        text=f"stuck: alive, but without progress for {sign.age_s:.0f} s at {sign.phase!r}"
        f" (pid {pid}); see where it stands: py-spy dump --pid {pid}",
    )
