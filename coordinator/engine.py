"""What an engine's log amounts to: the state, and what each event means. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from typing import Any, Literal, assert_never

from pydantic import TypeAdapter

from coordinator.events import (
    Applied,
    Cause,
    Claimed,
    Cleared,
    Decided,
    Departed,
    Ended,
    EngineName,
    Event,
    Floor,
    Kept,
    Objected,
    Opened,
    Reported,
    Reserved,
    Retired,
    Serving,
    StillReserved,
    Suspected,
    Touch,
    Touched,
)
from coordinator.policy import Policy
from kvaccord.layout import Groups, Layout
from kvaccord.messages import Built, Join, Launch, Report
from kvaccord.plan import Finding

# Attempts given out and not claimed yet. Twice the largest world: a whole start may join before
# its first claim, and so may the start after it.
KEPT_RESERVATIONS = 2048
KEPT_RUNS = 64

Phase = Literal["gather", "report", "apply"]


@dataclass(frozen=True)
class Reservation:
    join: Join
    touched: tuple[Touch, ...] = ()


@dataclass(frozen=True)
class Member:
    """A process that claimed. seated: it holds the slots of its ranks."""

    attempt: int
    join: Join
    seated: bool
    suspect: str | None = None  # the connection whose end made it so
    gone: bool = False
    applied: Built | None = None
    kept: bool = False  # after the seal: keeps its session while it serves
    departed: str | None = None  # after the seal: why it is known to be gone

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.join.ranks


@dataclass(frozen=True)
class Round:
    number: int
    launch: Launch
    layout: Layout
    mode: str
    policy: Policy
    members: Mapping[int, Member] = field(default_factory=dict)  # by attempt
    slots: Mapping[int, int] = field(default_factory=dict)  # rank -> attempt
    sent: Mapping[int, Report] = field(default_factory=dict)  # by rank, as sent
    planned: Mapping[int, Report] = field(default_factory=dict)  # by rank, as planned
    spent_s: Mapping[int, int] = field(default_factory=dict)  # by rank: of report_s, when it came
    took_over: str | None = None  # the launch whose name this round took over, nobody alive
    short: tuple[Finding, ...] = ()  # what one report alone makes certain
    causes: tuple[Cause, ...] = ()
    traces: tuple[tuple[tuple[int, ...], str], ...] = ()  # (ranks, end of the traceback)
    touches: tuple[Touch, ...] = ()
    verdict: Literal["PASSED", "FAILED"] | None = None
    decision: bytes = b""
    ended: Literal["FAILED", "SEALED", "ABORTED"] | None = None
    outcome: bytes = b""
    retired: str | None = None

    @cached_property
    def attempts(self) -> dict[tuple[str, tuple[int, ...]], int]:
        """By nonce and ranks. Kept, since each join asks every round, and most change no more."""
        return {(m.join.nonce, m.ranks): a for a, m in self.members.items()}

    @property
    def open(self) -> bool:
        return self.ended is None

    @property
    def phase(self) -> Phase | None:
        """The budget that runs; None once the round has ended."""
        if self.ended:
            return None
        if self.verdict:
            return "apply"
        return "report" if len(self.slots) == self.layout.world_size else "gather"

    @property
    def state(self) -> str:
        if self.ended or self.verdict:
            return self.ended or "PASSED"
        return "GATHERING" if self.phase == "gather" else "REPORTING"

    def holder(self, rank: int) -> Member | None:
        return self.members[self.slots[rank]] if rank in self.slots else None

    def host(self, rank: int) -> str | None:
        holder = self.holder(rank)
        return holder.join.host if holder else None

    @property
    def seated(self) -> list[Member]:
        return [m for m in self.members.values() if m.seated]

    @property
    def hosts(self) -> dict[int, str]:
        return {rank: m.join.host for m in self.seated for rank in m.ranks}

    @property
    def groups(self) -> dict[int, Groups] | None:
        """The groups that the claimed ranks name themselves; None where the layout gives them."""
        named = {r: g for m in self.seated for r, g in (m.join.groups or {}).items()}
        return named or None

    @property
    def suspects(self) -> list[Member]:
        return [m for m in self.seated if m.suspect and not m.gone]

    @property
    def departed(self) -> list[int]:
        """The ranks that are known to have gone since the seal; none of them: it stands whole."""
        return sorted(r for m in self.seated if m.departed is not None for r in m.ranks)

    @property
    def enforced(self) -> bool:
        """Whether its numbers bind; an observed round changes nothing anywhere."""
        return self.mode == "enforce"

    @property
    def waiting_for(self) -> list[int]:
        """The ranks that the running budget waits for."""
        match self.phase:
            case "gather":
                return [r for r in range(self.layout.world_size) if r not in self.slots]
            case "report":
                return [r for r in range(self.layout.world_size) if r not in self.sent]
            case "apply":
                return sorted(r for m in self.seated if m.applied is None for r in m.ranks)
        return []


@dataclass(frozen=True)
class Engine:
    """The log of one engine, folded. entries: how many the log holds."""

    name: EngineName
    store_id: str
    entries: int = 0
    last_attempt: int = 0
    reservations: Mapping[int, Reservation] = field(default_factory=dict)  # not claimed yet
    rounds: Mapping[int, Round] = field(default_factory=dict)
    # Runs that another run took over from, oldest first, and the last attempt given out by then.
    left_runs: Mapping[str, int] = field(default_factory=dict)
    # Snapshots that await their floor, piece by piece.
    kept: Mapping[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def last(self) -> Round | None:
        return next(self.newest_first(), None)

    def newest_first(self) -> Iterator[Round]:
        return (self.rounds[number] for number in sorted(self.rounds, reverse=True))

    @property
    def in_force(self) -> Round | None:
        """The plan that stands until a later round is sealed or an operator retires it."""
        last = next((r for r in self.newest_first() if r.ended == "SEALED" and r.enforced), None)
        return last if last and last.retired is None else None

    def taken_over(self, round_: Round) -> Round | None:
        """The round of a greater restart of the same run: the older start gives way to it."""
        last = self.last
        if last is None or last.launch.run != round_.launch.run:
            return None
        return last if last.launch.restart > round_.launch.restart else None

    def round_of(self, attempt: int) -> Round | None:
        """The round a claimed attempt belongs to: one process, one round."""
        return next((r for r in self.newest_first() if attempt in r.members), None)


def evolve_entry(engine: Engine, events: Iterable[Event]) -> Engine:
    """Apply one entry of the log."""
    return replace(reduce(evolve, events, engine), entries=engine.entries + 1)


def evolve(engine: Engine, event: Event) -> Engine:
    """What an event means. Total: an event that was kept can always be applied again."""
    match event:
        case Reserved(attempt=attempt, join=join, touched=touched):
            kept = {**engine.reservations, attempt: Reservation(join, touched)}
            for oldest in list(kept)[: max(0, len(kept) - KEPT_RESERVATIONS)]:
                del kept[oldest]
            last = max(attempt, engine.last_attempt)
            return replace(engine, last_attempt=last, reservations=kept)
        case Opened():
            return _opened(engine, event)
        case Kept(round=number, snapshot=snapshot, more=more):
            if more:
                snapshot = laid_over(engine.kept[number], snapshot)
            return replace(engine, kept={**engine.kept, number: snapshot})
        case StillReserved(reservations=reservations):
            again = RESERVATIONS.validate_python(reservations)
            return replace(engine, reservations={**engine.reservations, **again})
        case Floor(reservations=reservations):
            still = dict(engine.reservations)
            if reservations is not None:
                still = RESERVATIONS.validate_python(reservations)
            return replace(
                engine,
                rounds={number: _round_of(engine.kept[number]) for number in event.rounds},
                kept={},
                last_attempt=event.last_attempt,
                left_runs=event.left_runs,
                reservations=still,
            )
        case Claimed(round=number, attempt=attempt):
            return _claimed(engine, engine.rounds[number], attempt)
        case _:
            round_ = _in_round(engine.rounds[event.round], event)
            return replace(engine, rounds={**engine.rounds, event.round: round_})


def _opened(engine: Engine, event: Opened) -> Engine:
    left = engine.left_runs
    if engine.last and engine.last.launch.run != event.launch.run:
        left = {**left}
        left.pop(engine.last.launch.run, None)  # its place is that of the latest run now
        left[engine.last.launch.run] = engine.last_attempt
        left = dict(list(left.items())[-KEPT_RUNS:])
    opened = Round(
        event.round,
        event.launch,
        event.layout,
        event.mode,
        event.policy,
        took_over=event.took_over,
    )
    return replace(engine, rounds={**engine.rounds, event.round: opened}, left_runs=left)


def _claimed(engine: Engine, round_: Round, attempt: int) -> Engine:
    join = engine.reservations[attempt].join
    seated = round_.open and fits_in(round_, join)
    slots = {**round_.slots, **dict.fromkeys(join.ranks, attempt)} if seated else round_.slots
    member = Member(attempt, join, seated)
    round_ = replace(round_, members={**round_.members, attempt: member}, slots=slots)
    # A reservation lapses when a higher attempt of its run claims one of its ranks. That of another
    # run may be waiting for this one to end.
    ranks, run = set(join.ranks), join.launch.run
    left = {
        a: r
        for a, r in engine.reservations.items()
        if a > attempt
        or (a < attempt and (ranks.isdisjoint(r.join.ranks) or r.join.launch.run != run))
    }
    return replace(engine, rounds={**engine.rounds, round_.number: round_}, reservations=left)


def same_terms(round_: Round, join: Join) -> bool:
    """Whether a process was started with the terms that the round's first claim bound."""
    return join.layout == round_.layout and join.mode == round_.mode


def fits_in(round_: Round, join: Join) -> bool:
    return same_terms(round_, join) and round_.slots.keys().isdisjoint(join.ranks)


def _in_round(
    round_: Round,
    event: Reported
    | Objected
    | Suspected
    | Cleared
    | Applied
    | Touched
    | Decided
    | Ended
    | Serving
    | Departed
    | Retired,
) -> Round:
    match event:
        case Reported(reports=reports, planned=planned, spent_s=spent_s):
            return replace(
                round_,
                spent_s={**round_.spent_s, **dict.fromkeys(reports, spent_s)},
                sent={**round_.sent, **reports},
                planned={**round_.planned, **reports, **planned},
                short=(*round_.short, *event.certain),
            )
        case Objected(attempt=attempt, gone=gone, cause=cause, trace=trace):
            traces = ((cause.ranks, trace),) if trace else ()
            round_ = replace(
                round_, causes=(*round_.causes, cause), traces=(*round_.traces, *traces)
            )
            return _with_member(round_, attempt, gone=True) if gone else round_
        case Suspected(attempt=attempt, connection=connection):
            return _with_member(round_, attempt, suspect=connection)
        case Cleared(attempt=attempt):
            return _with_member(round_, attempt, suspect=None)
        case Applied(attempt=attempt, built=built):
            return _with_member(round_, attempt, applied=built)
        case Touched(touches=touches):
            return replace(round_, touches=(*round_.touches, *touches))
        case Decided(result=result, document=document):
            return replace(
                round_,
                verdict=result,
                decision=document.encode(),
                ended="FAILED" if result == "FAILED" else None,
            )
        case Ended(result=result, document=document):
            return replace(round_, ended=result, outcome=document.encode())
        case Serving(attempt=attempt):
            return _with_member(round_, attempt, kept=True)
        case Departed(attempt=attempt, why=why):
            return _with_member(round_, attempt, departed=why, suspect=None)
        case Retired(reason=reason):
            return replace(round_, retired=reason)
        case _:
            assert_never(event)


def _with_member(round_: Round, attempt: int, **changes: object) -> Round:
    member = replace(round_.members[attempt], **changes)  # type: ignore[arg-type]
    return replace(round_, members={**round_.members, attempt: member})


# --- snapshots ----------------------------------------------------------------------------------

ROUNDS: TypeAdapter[Round] = TypeAdapter(Round)
RESERVATIONS: TypeAdapter[dict[int, Reservation]] = TypeAdapter(dict[int, Reservation])


def laid_over(below: dict[str, Any], piece: dict[str, Any]) -> dict[str, Any]:
    """Two pieces of a snapshot as one: maps and lists go on, anything else is in one of them."""
    whole = {**below}
    for name, value in piece.items():
        match whole.get(name):
            case dict(held):
                whole[name] = {**held, **value}
            case list(held):
                whole[name] = [*held, *value]
            case _:
                whole[name] = value
    return whole


def snapshot_of(round_: Round) -> dict[str, Any]:
    """A round as JSON. A report stands once, unless a fault rule changed what is planned."""
    changed = {r: p for r, p in round_.planned.items() if p != round_.sent[r]}
    return ROUNDS.dump_python(replace(round_, planned=changed), mode="json")  # type: ignore[no-any-return]


def _round_of(snapshot: dict[str, Any]) -> Round:
    round_ = ROUNDS.validate_python(snapshot)
    return replace(round_, planned={**round_.sent, **round_.planned})
