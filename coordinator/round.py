"""All the rules of a round. Commands in, events out; no clock, no I/O, no chance.

What a command cannot know from the log (time that was spent, sessions that ended) the shell found
out and says in the command; the log has the last word on whether it still matters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import reduce
from itertools import chain
from typing import Any, assert_never

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
    Sign,
    Spend,
    Submit,
    Suspect,
    Veto,
)
from coordinator.engine import (
    Engine,
    Member,
    Reservation,
    Round,
    evolve,
    same_terms,
)
from coordinator.events import (
    Applied,
    Cause,
    Claimed,
    Cleared,
    Decided,
    Departed,
    Ended,
    Event,
    Objected,
    Opened,
    Reported,
    Reserved,
    Retired,
    RoundEvent,
    Serving,
    Suspected,
    Touch,
    Touched,
)
from coordinator.verdict import (
    NOT_RETRYABLE,
    Verdict,
    decision_document,
    failed,
    judge_reports,
    outcome_document,
)
from kvaccord import messages
from kvaccord import plan as plan_rules
from kvaccord.canonical import digest
from kvaccord.decision import Decision
from kvaccord.errors import (
    Conflict,
    DuplicateRank,
    EngineNameInUse,
    Invalid,
    NotFound,
    ProtocolTooOld,
    Superseded,
)
from kvaccord.layout import named
from kvaccord.messages import Join, Report, cut
from kvaccord.peers import Notice
from kvaccord.plan import differing_maps, disagreeing_groups, first_keys


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
    return _touched(round_, touched) if round_ else ()


def _decide(engine: Engine, command: Command) -> tuple[Event, ...]:
    match command:
        case Reserve():
            return _on_reserve(engine, command)
        case Claim():
            return _on_claim(engine, command)
        case Submit():
            return _on_submit(engine, command)
        case Veto():
            return _on_veto(engine, command)
        case Leave():
            return _on_leave(engine, command)
        case Apply():
            return _on_apply(engine, command)
        case Mark():
            return _on_mark(engine, command)
        case Serve():
            return _on_serve(engine, command)
        case Cancel():
            return _on_cancel(engine, command)
        case Retire():
            return _on_retire(engine, command)
        case Suspect() | Clear() | Lose():
            return _on_presence(engine, command)
        case Spend():
            return _on_spend(engine, command)
        case _:
            assert_never(command)


# --- joining ------------------------------------------------------------------------------------


def find_attempt(engine: Engine, join: Join) -> int | None:
    """The attempt already given to this process: a repeated join gets the same answer."""
    claimed = (m for r in engine.newest_first() for m in r.members.values())
    known = chain(
        ((a, r.join) for a, r in engine.reservations.items()),
        ((m.attempt, m.join) for m in claimed),
    )
    for attempt, earlier in known:
        if (earlier.nonce, earlier.ranks) == (join.nonce, join.ranks):
            if earlier != join:
                raise Conflict(
                    f"nonce {join.nonce} already joined with another document for"
                    f" {named(join.ranks)}; the first stands: use a new nonce for a new process",
                    rank=join.ranks[0],
                    field="nonce",
                    value=join.nonce,
                )
            return attempt
    return None


def _on_reserve(engine: Engine, command: Reserve) -> tuple[Event, ...]:
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


def _on_mark(engine: Engine, command: Mark) -> tuple[Event, ...]:
    if round_ := engine.round_of(command.attempt):
        return _touched(round_, command.touched)
    reserved = engine.reservations.get(command.attempt)
    if reserved is None or set(command.touched) <= set(reserved.touched):
        return ()
    touched = (*reserved.touched, *command.touched)
    return (Reserved(attempt=command.attempt, join=reserved.join, touched=touched),)


def _on_claim(engine: Engine, command: Claim) -> tuple[Event, ...]:
    if engine.round_of(command.attempt):
        return ()
    reserved = engine.reservations.get(command.attempt)
    if reserved is None:
        raise Superseded(
            f"attempt {command.attempt} of {engine.name} has lapsed: a newer process holds its"
            " ranks; this one must exit",
            field="attempt",
            value=str(command.attempt),
        )
    last, join = engine.last, reserved.join
    if last is None:
        return _open(engine, command, reserved)
    _fence(engine, command.attempt, join, last)
    if join.launch.run == last.launch.run and join.launch.restart == last.launch.restart:
        return _claim_of_this_launch(engine, command, reserved, last)
    same_run = join.launch.run == last.launch.run
    alive = _alive(last, command.watched) if last.ended in (None, "SEALED") else []
    if engine.in_force and engine.in_force is not last:
        alive += _alive(engine.in_force, command.watched)
    if alive and not same_run:
        other = alive[0]
        raise EngineNameInUse(
            f"{engine.name} is in use by launch {last.launch}, {named(other.ranks)} on"
            f" {other.join.host}; this is launch {join.launch} on {join.host}: give one of them"
            " another engine name, or wait for the other to end",
            rank=join.ranks[0],
            field="launch",
            value=str(join.launch),
            retry_after_s=1.0,
        )
    ended: tuple[Event, ...] = ()
    if last.open:
        ended = _end(
            engine,
            last,
            Cause(
                code="superseded",
                ranks=(),
                text=f"launch {join.launch} on {join.host} took over from launch {last.launch};"
                " processes of the older launch must exit",
            ),
        )
    return ended + _open(reduce(evolve, ended, engine), command, reserved)


def _claim_of_this_launch(
    engine: Engine, command: Claim, reserved: Reservation, last: Round
) -> tuple[Event, ...]:
    join = reserved.join
    taken = [last.members[last.slots[r]] for r in join.ranks if r in last.slots]
    if last.ended == "FAILED" and not taken and not _was_here(last, join):
        # Nobody had claimed its slot: a late member of the start that failed. It hears why.
        return _claimed(last, command, reserved)
    if last.ended == "SEALED" and (alive := _alive(last, command.watched)):
        _not_in_place_of(taken, alive, join, last)
    if not last.open:
        left = _departures(last, taken, f"a new process on {join.host} took its place")
        return (*left, *_open(reduce(evolve, left, engine), command, reserved))
    claimed = _claimed(last, command, reserved)
    if not same_terms(last, join):
        return (*claimed, _differs(last, command.attempt, join))
    if taken and all(m.gone or m.suspect for m in taken):
        old = taken[0]
        cause = Cause(
            code="rank_replaced",
            ranks=join.ranks,
            host=join.host,
            text=f"a new process on {join.host} (pid {join.pid}) took the place of the one on"
            f" {old.join.host} (pid {old.join.pid}); a round is not joined twice",
        )
        ended = _end(engine, last, cause)
        return ended + _open(reduce(evolve, ended, engine), command, reserved)
    if taken:
        alive = [m for m in taken if not m.gone and not m.suspect]
        return (*claimed, _duplicate(last, command.attempt, join, alive[0]))
    differences = (
        *_groups_differ(last, command.attempt, join),
        *_inputs_differ(last, command.attempt, join),
    )
    return settle(engine, last.number, *claimed, *differences)


def _not_in_place_of(taken: list[Member], alive: list[Member], join: Join, last: Round) -> None:
    """A sealed round stands while its members are alive: refuse who would take their place."""
    holders = [m for m in taken if m in alive] if taken else alive
    if not holders:
        return
    what = "held by" if taken else "outside the layout of"
    raise DuplicateRank(
        f"{named(join.ranks)} on {join.host} (pid {join.pid}): {what} a living start, round"
        f" {last.number}, which is sealed and stands; {named(holders[0].ranks)} is on"
        f" {holders[0].join.host} (pid {holders[0].join.pid}): stop one of the two",
        rank=join.ranks[0],
        field="ranks",
        value=str(join.ranks[0]),
    )


def _open(engine: Engine, command: Claim, reserved: Reservation) -> tuple[Event, ...]:
    join = reserved.join
    opened = Opened(
        round=engine.last.number + 1 if engine.last else 1,
        launch=join.launch,
        layout=join.layout,
        mode=join.mode,
        policy=command.policy.shortened(join.budgets),
        took_over=_taken_over(engine, join),
    )
    round_ = evolve(engine, opened).rounds[opened.round]
    return (opened, *_claimed(round_, command, reserved))


def _taken_over(engine: Engine, join: Join) -> str | None:
    before = engine.in_force
    if before is None or before.launch.run == join.launch.run:
        return None
    return str(before.launch)


def _claimed(round_: Round, command: Claim, reserved: Reservation) -> tuple[RoundEvent, ...]:
    claimed = Claimed(round=round_.number, attempt=command.attempt)
    return (*_touched(round_, reserved.touched + command.touched), claimed)


def _fence(engine: Engine, attempt: int, join: Join, last: Round) -> None:
    """Refuse what belongs to an older start, however late its packet arrives."""
    launch, left_at = join.launch, engine.left_runs.get(join.launch.run)
    if launch.run == last.launch.run and launch.restart < last.launch.restart:
        old = True
    elif left_at is None:
        old = False
    else:
        # MASTER_ADDR:MASTER_PORT comes back by nature: there, only who joined before it was left
        # is old. For any other source the same holds while the run is current.
        came_back = launch.source == "master" or launch.run == last.launch.run
        old = attempt <= left_at or not came_back
    if old:
        raise Superseded(
            f"{named(join.ranks)} on {join.host}: launch {launch} is older than launch"
            f" {last.launch}, which has taken over {engine.name}; this process must exit",
            rank=join.ranks[0],
            field="launch",
            value=str(launch),
        )


def _alive(round_: Round, watched: frozenset[int]) -> list[Member]:
    if round_.open:
        return [m for m in round_.seated if not m.gone and not m.suspect]
    # One that said it serves counts until its session is known to have ended.
    return [
        m
        for m in round_.seated
        if m.attempt in watched or (m.kept and not m.suspect and m.departed is None)
    ]


def _was_here(round_: Round, join: Join) -> bool:
    return any(not set(m.ranks).isdisjoint(join.ranks) for m in round_.members.values())


def _differs(round_: Round, attempt: int, join: Join) -> Objected:
    ours = join.layout.model_dump() | {"mode": join.mode}
    theirs = round_.layout.model_dump() | {"mode": round_.mode}
    keys = [k for k in ours if ours[k] != theirs[k]]
    said = {r: m.join.host for m in round_.seated for r in m.ranks}
    key = "mode" if keys == ["mode"] else "layout"
    text = (
        f"{key} differs: {named(join.ranks)} on {join.host} has"
        f" {', '.join(f'{k} {ours[k]}' for k in keys)}, {named(sorted(said))} have"
        f" {', '.join(f'{k} {theirs[k]}' for k in keys)};"
        " start every rank with the same settings"
    )
    # Once the numbers are agreed every slot is held: whoever comes then is one too many.
    code = "duplicate_rank" if round_.verdict else "inputs_disagree"
    return _objected(round_, attempt, code, join.ranks, join.host, text)


def _groups_differ(round_: Round, attempt: int, join: Join) -> list[Objected]:
    joins = {r: m.join for m in round_.seated for r in m.ranks} | dict.fromkeys(join.ranks, join)
    named_by = {r: (j.groups or {}).get(r) for r, j in joins.items()}
    return [
        _objected(round_, attempt, f.code, f.ranks, joins[f.ranks[0]].host, f.text)
        for f in disagreeing_groups(named_by)
        if not {*join.ranks}.isdisjoint(f.ranks)
    ]


def _inputs_differ(round_: Round, attempt: int, join: Join) -> list[Objected]:
    members = {m.ranks[0]: m.join for m in round_.seated if m.join.inputs is not None}
    if join.inputs is None or not members:
        return []
    members[join.ranks[0]] = join
    return [
        _objected(
            round_, attempt, found.code, found.ranks, members[found.ranks[0]].host, found.text
        )
        for found in first_keys(differing_maps("inputs", {r: j.inputs for r, j in members.items()}))
        if join.ranks[0] in found.ranks  # who agrees with most adds nothing to what was found
    ]


def _duplicate(round_: Round, attempt: int, join: Join, old: Member) -> Objected:
    both = sorted(set(join.ranks) & set(old.ranks))
    text = (
        f"claimed by two living processes of one launch: {old.join.host} (pid {old.join.pid}) and"
        f" {join.host} (pid {join.pid}); correct the rank or the launch of one of them"
    )
    return _objected(round_, attempt, "duplicate_rank", both, join.host, text)


def _departures(round_: Round, members: list[Member], why: str) -> tuple[Departed, ...]:
    """Members of a sealed round that are known to be gone now."""
    if round_.ended != "SEALED":
        return ()
    return tuple(
        Departed(round=round_.number, attempt=m.attempt, why=why)
        for m in members
        if m.departed is None
    )


# --- inside a round -----------------------------------------------------------------------------


def member_of(engine: Engine, number: int, attempt: int) -> tuple[Round, Member]:
    """The round and the process a call speaks of. Raises NotFound or Superseded."""
    round_ = _round(engine, number)
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


def _on_submit(engine: Engine, command: Submit) -> tuple[Event, ...]:
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
    if round_.verdict or member.gone or not member.seated:
        return ()
    return settle(
        engine,
        round_.number,
        *_touched(round_, command.touched),
        Reported(
            round=round_.number,
            attempt=member.attempt,
            reports=dict(command.reports),
            planned=dict(command.planned),
        ),
    )


def _difference(first: Report, second: Report) -> str:
    for name in type(first).model_fields:
        ours, theirs = getattr(first, name), getattr(second, name)
        if ours != theirs:
            return f"{name} {ours} and now says {theirs}"[:300]
    return "the same"


def _on_veto(engine: Engine, command: Veto) -> tuple[Event, ...]:
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
        *_touched(round_, touched),
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


def _on_leave(engine: Engine, command: Leave) -> tuple[Event, ...]:
    round_, member = member_of(engine, command.round, command.attempt)
    reason = command.leave.reason or "no reason given"
    if round_ in (engine.in_force, engine.last) and round_.ended == "SEALED" and member.seated:
        return _departures(round_, [member], f"left: {reason}")
    if not round_.open or member.gone:
        return ()
    left = _objected(
        round_,
        member.attempt,
        "rank_left",
        member.ranks,
        member.join.host,
        f"left before the round was sealed: {reason}",
        gone=True,
    )
    return (*_touched(round_, command.touched), left)


def _on_apply(engine: Engine, command: Apply) -> tuple[Event, ...]:
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
    touched = _touched(round_, command.touched)
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
            return _objected(
                round_, member.attempt, "applied_differently", ranks, host, text, gone=True
            )
    known = {name for row in rows.values() for name in row}
    if odd := sorted(messages.classes_in(built) - known):
        text = f"built classes {odd}, which the plan has for none of its ranks; build the plan only"
        return _objected(
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


# --- after the seal, and operators --------------------------------------------------------------


def refuse_if_taken_over(engine: Engine, round_: Round) -> None:
    """Raises Superseded for a start that a greater restart of its run has taken over from."""
    if newer := engine.taken_over(round_):
        raise Superseded(
            f"{engine.name} round {round_.number} is of launch {round_.launch}, and launch"
            f" {newer.launch} has taken over in round {newer.number}; this process must exit",
            field="launch",
            value=str(round_.launch),
        )


def _replaced(engine: Engine, round_: Round, member: Member) -> bool:
    """Whether another process has held a slot of this one in a later round."""
    later = (r for r in engine.rounds.values() if r.number > round_.number)
    return any(not r.slots.keys().isdisjoint(member.ranks) for r in later)


def _on_serve(engine: Engine, command: Serve) -> tuple[Event, ...]:
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


def _on_cancel(engine: Engine, command: Cancel) -> tuple[Event, ...]:
    round_ = _round(engine, command.round)
    if not round_.open:
        return ()
    text = f"cancelled by an operator: {command.reason}"
    return _end(engine, round_, Cause(code="cancelled", ranks=(), text=text, retryable=False))


def _on_retire(engine: Engine, command: Retire) -> tuple[Event, ...]:
    round_ = _round(engine, command.round)
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


def _round(engine: Engine, number: int) -> Round:
    if number not in engine.rounds:
        raise NotFound(f"{engine.name} has no round {number}", field="round", value=str(number))
    return engine.rounds[number]


# --- findings -----------------------------------------------------------------------------------


def _on_presence(engine: Engine, command: Suspect | Clear | Lose) -> tuple[Event, ...]:
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
        case Lose(connection=connection, after_s=after_s, was_open=was_open):
            if member.suspect != connection:  # back since, or another session's end
                return ()
            if round_.ended:
                why = f"its session ended and did not come back within {after_s:g} s"
                return _departures(round_, [member], why)
            what = "ended and did not come back" if was_open else "was not opened"
            text = (
                f"lost: its session {what} within {after_s:g} s"
                f" (pid {member.join.pid}); look at this process's own log, and for the kernel's"
                " out-of-memory killer"
            )
            return (
                _objected(
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


def is_followed(round_: Round, member: Member) -> bool:
    """Whether the end of this member's session means anything."""
    if not member.seated or member.gone or member.departed is not None:
        return False
    return round_.open or (round_.ended == "SEALED" and member.kept)


def _on_spend(engine: Engine, command: Spend) -> tuple[Event, ...]:
    round_ = engine.rounds.get(command.round)
    if round_ is None or not round_.open:
        return ()
    short = () if round_.verdict else tuple(_as_cause(round_, f) for f in round_.short)
    match command.what:
        case "grace":
            return _end(engine, round_, *short) if round_.causes else ()
        case "shortfall":
            return _end(engine, round_, *short) if short and not round_.causes else ()
    if command.what != round_.phase or round_.causes:
        return ()
    if command.soft:
        stuck = {r: s for r, s in command.signs.items() if s.stuck and r in round_.waiting_for}
        causes = [_is_stuck(round_, rank, sign) for rank, sign in sorted(stuck.items())]
    else:
        causes = list(_time_ran_out(round_, command.signs))
    return _end(engine, round_, *causes, *short) if causes else ()


def _as_cause(round_: Round, finding: plan_rules.Finding) -> Cause:
    return Cause(
        code=finding.code,
        ranks=finding.ranks,
        host=round_.host(finding.ranks[0]),
        text=finding.text,
        retryable=finding.retryable,
    )


def _time_ran_out(round_: Round, signs: Mapping[int, Sign]) -> Iterable[Cause]:
    """One cause for every rank that the spent budget waited for: the missing, then the stuck."""
    waited_for, policy = round_.waiting_for, round_.policy
    stuck = [rank for rank in waited_for if rank in signs and signs[rank].stuck]
    for rank in waited_for:
        if rank in stuck:
            continue
        holder, sign = round_.holder(rank), signs.get(rank)
        if holder is None:
            text = (
                f"never joined within gather_s {policy.gather_s:g} s; start it, or see why its"
                " process did not come up"
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


# --- settling -----------------------------------------------------------------------------------


def settle(
    engine: Engine, number: int, *found: Event, seen: tuple[Event, ...] = ()
) -> tuple[Event, ...]:
    """The events found, and the decision or seal if they settle the round: one entry.

    seen: events of the same entry that the engine holds already; they come first.

    With a cause the round is settled by its grace (or budget), never here. While a member is
    suspect it waits: whether it is back or lost is logged within seconds, and a verdict that a
    dead rank would have to abort helps nobody.
    """
    after = reduce(evolve, found, engine)
    round_ = after.rounds[number]
    found = (*seen, *found)
    if not round_.open or round_.causes or round_.suspects or round_.waiting_for:
        return found
    if round_.phase == "report":
        verdict = judge_reports(
            round_.layout,
            round_.planned,
            round_.hosts,
            round_.groups,
            spread_limit=round_.policy.spread_limit,
        )
        return (*found, _decided(after, round_, verdict))
    message = f"every rank built what decision {digest(round_.decision)[:19]} says"
    return (*found, _ended(after, round_, Verdict("SEALED", "sealed", message)))


def _end(engine: Engine, round_: Round, *more: Cause) -> tuple[RoundEvent, ...]:
    """End a round for its causes: FAILED before the verdict, ABORTED after it."""
    causes = (*round_.causes, *more)
    # A rank may be missing because a fault rule held back its join or claim: that must show too.
    held = [r.touched for r in engine.reservations.values() if r.join.launch == round_.launch]
    round_ = replace(round_, touches=(*round_.touches, *chain.from_iterable(held)))
    if round_.verdict is None:
        unheard = [r for r in range(round_.layout.world_size) if r not in round_.sent]
        return (_decided(engine, round_, failed("FAILED", causes, not_heard=unheard)),)
    return (_ended(engine, round_, failed("ABORTED", causes, not_heard=round_.waiting_for)),)


def _decided(engine: Engine, round_: Round, verdict: Verdict) -> Decided:
    if round_.took_over is not None:
        text = (
            f"launch {round_.launch} took the name over from launch {round_.took_over}, of which"
            " nobody kept a session; replicas that live side by side need names of their own"
        )
        notice = Notice("name_taken_over", (), text)
        verdict = replace(verdict, warnings=(*verdict.warnings, notice))
    return Decided(
        round=round_.number,
        result="PASSED" if verdict.outcome == "PASSED" else "FAILED",
        document=decision_document(engine, round_, verdict),
    )


def _ended(engine: Engine, round_: Round, verdict: Verdict) -> Ended:
    return Ended(
        round=round_.number,
        result="SEALED" if verdict.outcome == "SEALED" else "ABORTED",
        document=outcome_document(engine, round_, verdict),
    )


def _touched(round_: Round, touches: tuple[Touch, ...]) -> tuple[Touched, ...]:
    """What fault rules did, where the round does not say it yet; an ended one is frozen."""
    new = tuple(t for t in dict.fromkeys(touches) if t not in round_.touches)
    return (Touched(round=round_.number, touches=new),) if new and round_.open else ()


def _objected(
    round_: Round,
    attempt: int,
    code: str,
    ranks: Iterable[int],
    host: str,
    text: str,
    *,
    gone: bool = False,
) -> Objected:
    return Objected(
        round=round_.number,
        attempt=attempt,
        gone=gone,
        cause=Cause(
            code=code,
            ranks=tuple(ranks),
            host=host,
            text=text,
            retryable=code not in NOT_RETRYABLE,
        ),
    )
