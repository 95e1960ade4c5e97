"""Claiming: who gets the slots of its ranks, opens a round, ends one, or is refused. Pure.

docs/protocol.md, rule 7, has the table that `on_claim` follows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

from coordinator.commands import Claim
from coordinator.engine import Engine, Member, Reservation, Round, evolve, same_terms
from coordinator.events import Cause, Claimed, Event, Objected, Opened, RoundEvent
from coordinator.rules.members import departures
from coordinator.rules.settling import end_round, newly_touched, objected, settle
from kvaccord.canonical import canonical
from kvaccord.errors import DuplicateRank, EngineNameInUse, Superseded
from kvaccord.layout import named
from kvaccord.messages import Join
from kvaccord.plan import Finding, differing_maps, disagreeing_groups, first_keys


def on_claim(engine: Engine, command: Claim) -> tuple[Event, ...]:
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
        ended = end_round(
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
    # Once each: a process may hold several of these ranks.
    holders = dict.fromkeys(last.slots[r] for r in join.ranks if r in last.slots)
    taken = [last.members[attempt] for attempt in holders]
    if last.ended == "FAILED" and not taken and not _was_here(last, join):
        # Nobody had claimed its slot: a late member of the start that failed. It hears why.
        return _claimed(last, command, reserved)
    if last.ended == "SEALED" and (alive := _alive(last, command.watched)):
        _not_in_place_of(taken, alive, join, last)
    if not last.open:
        left = departures(last, taken, f"a new process on {join.host} took its place")
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
        ended = end_round(engine, last, cause)
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
    return (*newly_touched(round_, reserved.touched + command.touched), claimed)


def _fence(engine: Engine, attempt: int, join: Join, last: Round) -> None:
    """Refuse what belongs to an older start, however late its packet arrives."""
    launch, left_at = join.launch, engine.left_runs.get(join.launch.run)
    if launch.run == last.launch.run and launch.restart < last.launch.restart:
        old = True
    elif left_at is None:
        old = False
    else:
        # MASTER_ADDR:MASTER_PORT and the like come back by nature: there, only who joined before
        # it was left is old. For any other source the same holds while the run is current.
        came_back = launch.comes_back or launch.run == last.launch.run
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
    return objected(round_, attempt, code, join.ranks, join.host, text)


def _groups_differ(round_: Round, attempt: int, join: Join) -> list[Objected]:
    before = {r: m.join for m in round_.seated for r in m.ranks}
    joins = before | dict.fromkeys(join.ranks, join)

    def differences(of: dict[int, Join]) -> list[Finding]:
        return disagreeing_groups({r: (j.groups or {}).get(r) for r, j in of.items()})

    found = _brought(join, differences(joins), lambda: differences(before))
    return _inputs_disagree(round_, attempt, joins, found)


def _inputs_differ(round_: Round, attempt: int, join: Join) -> list[Objected]:
    before = {m.ranks[0]: m.join for m in round_.seated if m.join.inputs is not None}
    if join.inputs is None or not before:
        return []
    one = next(iter(before.values()))  # without a cause those before agree: it speaks for all
    # As bytes, for True == 1 in Python and not on the wire.
    if not round_.causes and canonical(join.inputs) == canonical(one.inputs or {}):
        return []
    joins = before | {join.ranks[0]: join}

    def differences(of: dict[int, Join]) -> list[Finding]:
        return differing_maps("inputs", {r: j.inputs for r, j in of.items()})

    found = _brought(join, differences(joins), lambda: differences(before))
    return _inputs_disagree(round_, attempt, joins, found)


def _brought(
    join: Join, found: list[Finding], before: Callable[[], list[Finding]]
) -> list[Finding]:
    """What this join adds to the differences there were: that may well blame others than itself.

    Of halves the one without the lowest rank is blamed, whoever came last. Where others differed
    before, who agrees with most adds nothing.
    """
    shown = first_keys(found)
    if shown and before():
        return [f for f in shown if not {*join.ranks}.isdisjoint(f.ranks)]
    return shown


def _inputs_disagree(
    round_: Round, attempt: int, joins: dict[int, Join], found: list[Finding]
) -> list[Objected]:
    return [
        objected(round_, attempt, f.code, f.ranks, joins[f.ranks[0]].host, f.text) for f in found
    ]


def _duplicate(round_: Round, attempt: int, join: Join, old: Member) -> Objected:
    both = sorted(set(join.ranks) & set(old.ranks))
    text = (
        f"claimed by two living processes of one launch: {old.join.host} (pid {old.join.pid}) and"
        f" {join.host} (pid {join.pid}); correct the rank or the launch of one of them"
    )
    return objected(round_, attempt, "duplicate_rank", both, join.host, text)
