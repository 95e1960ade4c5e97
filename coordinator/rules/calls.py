"""What a member of a round says: its reports, its no, that it leaves, built or serves. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coordinator.commands import Apply, Leave, Serve, Submit, Veto
from coordinator.engine import Engine, Member, Round
from coordinator.events import Applied, Cause, Event, Objected, Reported, Serving, Touch
from coordinator.rules.members import departures, member_of, refuse_if_taken_over
from coordinator.rules.settling import newly_touched, objected, settle
from kvaccord import messages
from kvaccord.canonical import digest
from kvaccord.decision import Decision
from kvaccord.errors import Conflict, DuplicateRank, Invalid, Superseded
from kvaccord.layout import named
from kvaccord.messages import Report, cut


def check_reports(
    engine: Engine, number: int, attempt: int, reports: Mapping[int, Report]
) -> tuple[Round, Member]:
    """The round and process of these reports. Raises Invalid unless they are its ranks' own."""
    round_, member = member_of(engine, number, attempt)
    if foreign := sorted(set(reports) - set(member.ranks)):
        raise Invalid(
            f"{named(foreign)}: not among the ranks this process claimed ({list(member.ranks)});"
            " report the ranks that joined",
            rank=foreign[0],
            field="reports",
            value=str(foreign[0]),
        )
    if absent := sorted(set(member.ranks) - set(reports)):
        raise Invalid(
            f"{named(absent)}: no report; a process reports all of its ranks at once",
            rank=absent[0],
            field="reports",
            value="absent",
        )
    return round_, member


def on_submit(engine: Engine, command: Submit) -> tuple[Event, ...]:
    round_, member = check_reports(engine, command.round, command.attempt, command.reports)
    if member.seated and member.ranks[0] in round_.sent:
        for rank, report in command.reports.items():
            if report != round_.sent[rank]:
                raise Conflict(
                    f"rank {rank} already reported {_difference(round_.sent[rank], report)} in"
                    f" round {round_.number}; the first report stands: measure once, report once",
                    rank=rank,
                    field="reports",
                    value=str(rank),
                )
        return ()
    if round_.verdict == "PASSED" and not member.seated:
        # Told PASSED, it would build by a plan that it has no part in.
        raise DuplicateRank(
            f"{named(member.ranks)} on {member.join.host} (pid {member.join.pid}): holds no slot of"
            f" round {round_.number}, which was agreed without it; this process must exit",
            rank=member.ranks[0],
            field="ranks",
            value=str(member.ranks[0]),
        )
    if round_.verdict or member.gone or not member.seated:
        return ()
    return settle(
        engine,
        round_.number,
        *newly_touched(round_, command.touched),
        Reported(
            round=round_.number,
            attempt=member.attempt,
            reports=dict(command.reports),
            planned=dict(command.planned),
            spent_s=command.spent_s,
        ),
    )


def _difference(first: Report, second: Report) -> str:
    for name in type(first).model_fields:
        ours, theirs = getattr(first, name), getattr(second, name)
        if ours != theirs:
            return f"{name} {ours} and now says {theirs}"[:300]
    return "the same"


def on_veto(engine: Engine, command: Veto) -> tuple[Event, ...]:
    round_, member = member_of(engine, command.round, command.attempt)
    veto = command.veto
    if veto.rank not in member.ranks:
        raise Invalid(
            f"rank {veto.rank}: not among the ranks this process claimed ({list(member.ranks)});"
            " a process vetoes for its own ranks",
            rank=veto.rank,
            field="rank",
            value=str(veto.rank),
        )
    code = "apply_failed" if round_.verdict else "rank_vetoed"
    return _said_no(round_, member, command.touched, code, (veto.rank,), veto)


def _said_no(
    round_: Round,
    member: Member,
    touched: tuple[Touch, ...],
    code: str,
    ranks: tuple[int, ...],
    said: messages.Veto | messages.BuildFailed,
) -> tuple[Event, ...]:
    if not round_.open or member.gone:
        return ()
    return (
        *newly_touched(round_, touched),
        Objected(
            round=round_.number,
            attempt=member.attempt,
            gone=True,
            cause=Cause(
                code=code,
                ranks=ranks,
                host=member.join.host,
                text=f"[{said.code}] {said.text}" if said.code else said.text,
                retryable=said.retryable,
            ),
            trace=said.trace,
        ),
    )


def on_leave(engine: Engine, command: Leave) -> tuple[Event, ...]:
    round_, member = member_of(engine, command.round, command.attempt)
    reason = command.leave.reason or "no reason given"
    if round_ in (engine.in_force, engine.last) and round_.ended == "SEALED" and member.seated:
        return departures(round_, [member], f"left: {reason}")
    if not round_.open or member.gone:
        return ()
    left = objected(
        round_,
        member.attempt,
        "rank_left",
        member.ranks,
        member.join.host,
        f"left before the round was sealed: {reason}",
        gone=True,
    )
    return (*newly_touched(round_, command.touched), left)


def on_apply(engine: Engine, command: Apply) -> tuple[Event, ...]:
    round_, member = member_of(engine, command.round, command.attempt)
    said = command.applied
    if not round_.decision:
        raise Conflict(
            f"{named(member.ranks)}: applied before round {round_.number} was decided; wait for"
            " the decision",
            rank=member.ranks[0],
            field="digest",
            value=said.digest,
        )
    if said.digest != digest(round_.decision):
        raise Conflict(
            f"{named(member.ranks)} built the decision {said.digest}, round {round_.number} has"
            f" {digest(round_.decision)}; build only what this round decided",
            rank=member.ranks[0],
            field="digest",
            value=said.digest,
        )
    if said.failed is not None:
        return _said_no(round_, member, command.touched, "apply_failed", member.ranks, said.failed)
    assert said.built is not None, "either built or failed"
    if foreign := sorted(r for r in said.built if isinstance(r, int) and r not in member.ranks):
        raise Invalid(
            f"{named(foreign)}: not among the ranks this process claimed ({list(member.ranks)});"
            " say what was built on the ranks that joined",
            rank=foreign[0],
            field="built",
            value=str(foreign[0]),
        )
    if member.applied is not None and member.applied != said.built:
        raise Conflict(
            f"{named(member.ranks)} already said that it built {_shown(member.applied)} and now"
            f" says {_shown(said.built)}; the first stands",
            rank=member.ranks[0],
            field="built",
            value=_shown(said.built),
        )
    if not round_.open or member.gone or member.applied is not None or not member.seated:
        return ()
    touched = newly_touched(round_, command.touched)
    # An observed round only looks on: what was built is kept, never compared.
    if round_.enforced and (wrong := _built_otherwise(round_, member, said.built)):
        return (*touched, wrong)
    applied = Applied(round=round_.number, attempt=member.attempt, built=said.built)
    return settle(engine, round_.number, *touched, applied)


def _built_otherwise(round_: Round, member: Member, built: messages.Built) -> Objected | None:
    """Every rank builds exactly its row of the plan."""
    rows = {rank: Decision(round_.decision).entries(rank) for rank in member.ranks}
    for rank, row in rows.items():
        said = messages.built_on(built, rank, row)
        if said != row:
            text = (
                f"built {_shown(said)}, the decision says {_shown(row)}; a rank builds exactly its"
                " row of the plan"
            )
            ranks, host = (rank,), member.join.host
            return objected(
                round_, member.attempt, "applied_differently", ranks, host, text, gone=True
            )
    known = {name for row in rows.values() for name in row}
    if odd := sorted(messages.classes_in(built) - known):
        text = f"built classes {odd}, which the plan has for none of its ranks; build the plan only"
        return objected(
            round_,
            member.attempt,
            "applied_differently",
            member.ranks,
            member.join.host,
            text,
            gone=True,
        )
    return None


def _shown(built: Mapping[Any, Any]) -> str:
    return cut(", ".join(f"{key} {built[key]}" for key in sorted(built)), 300)


def on_serve(engine: Engine, command: Serve) -> tuple[Event, ...]:
    round_, member = member_of(engine, command.round, command.attempt)
    refuse_if_taken_over(engine, round_)
    if _replaced(engine, round_, member):
        raise Superseded(
            f"{named(member.ranks)} (pid {member.join.pid}): a newer process has taken its place"
            f" since round {round_.number}; this one must exit",
            rank=member.ranks[0],
            field="round",
            value=str(round_.number),
        )
    if round_.ended != "SEALED" or not member.seated:
        raise Conflict(
            f"{named(member.ranks)} serves, but round {round_.number} is {round_.state}; serve"
            " after applied() has returned",
            rank=member.ranks[0],
            field="round",
            value=round_.state,
        )
    if member.kept:
        return ()
    return (Serving(round=round_.number, attempt=member.attempt),)


def _replaced(engine: Engine, round_: Round, member: Member) -> bool:
    """Whether another process has held a slot of this one in a later round."""
    later = (r for r in engine.rounds.values() if r.number > round_.number)
    return any(not r.slots.keys().isdisjoint(member.ranks) for r in later)
