"""One engine in this coordinator's memory: its folded log, its facts, its clock."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict, deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

from coordinator.commands import Command
from coordinator.engine import Engine, Round, evolve_entry
from coordinator.engine import Phase as BudgetPhase
from coordinator.events import (
    Applied,
    Claimed,
    Cleared,
    Decided,
    Departed,
    Ended,
    EngineName,
    Entry,
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
    Touched,
)
from coordinator.round import Step
from kvaccord.messages import Phase

TICK_S = 1.0
# Facts of one moment are told together: in a start of n ranks n streams are each told some 3 n.
FACTS_S = 0.05

# entry: whatever was appended, at once. fact: the same, within FACTS_S. document: a decision, an
# outcome, or that there will be none here; these come at once to all.
News = Literal["entry", "fact", "document"]


@dataclass(frozen=True)
class Fact:
    """What the log holds, as it is pushed: `id` is ENTRY.INDEX, `data` one line of JSON."""

    entry: int
    index: int
    kind: Literal["fact", "decision", "outcome"]
    data: str

    @property
    def place(self) -> tuple[int, int]:
        """Facts of an engine are ordered by it."""
        return self.entry, self.index

    @property
    def id(self) -> str:
        return f"{self.entry}.{self.index}"


@dataclass(frozen=True)
class Waiting:
    """A command that is to be carried out, and what its caller will hear."""

    command: Command
    heard: asyncio.Future[Step]


class Clock:
    """Seconds spent in the running budget, in its grace, and served in all.

    It advances in ticks, so that a pause of this process counts as one tick at most: a budget may
    end late, never early, and nobody looks stuck because this process was.
    """

    def __init__(self) -> None:
        self.served_s = 0.0
        self._running: tuple[int, BudgetPhase | None] = (0, None)
        self._spent_s = 0.0
        self._grace_s = 0.0  # since the first cause
        self._short_s = 0.0  # since a report made failure certain

    def advance(self, round_: Round, elapsed_s: float) -> None:
        """Count time that passed while this was the open round."""
        tick_s = min(elapsed_s, TICK_S)
        if self._running != (round_.number, round_.phase):
            if not self._same_grace(round_):
                self._grace_s = self._short_s = 0.0
            self._running, self._spent_s = (round_.number, round_.phase), 0.0
        self.served_s += tick_s
        self._spent_s += tick_s
        if round_.causes:
            self._grace_s += tick_s
        if round_.short:
            self._short_s += tick_s

    def resume(self, round_: Round, phase: str, spent_s: float) -> None:
        """Go on from what an earlier coordinator had counted."""
        if round_.phase == phase and self._spent(round_) < spent_s:
            self._running, self._spent_s = (round_.number, round_.phase), spent_s

    def spent(self, round_: Round) -> tuple[BudgetPhase | None, float]:
        """The running budget and how much of it is spent."""
        return round_.phase, self._spent(round_)

    def report_spent_s(self, round_: Round | None) -> int:
        """Whole seconds of the report budget that are spent; 0 where it does not run yet."""
        return int(self._spent(round_)) if round_ and round_.phase == "report" else 0

    def left_s(self, round_: Round) -> float:
        """What is left to the budget's hard end, 0 when the round has ended. Changes nothing."""
        return max(0.0, hard_end_s(round_) - self._spent(round_))

    def soft_left_s(self, round_: Round) -> float:
        """What is left to the soft end; gathering has none, an unclaimed rank shows no progress."""
        return max(0.0, soft_end_s(round_) - self._spent(round_))

    def grace_left_s(self, round_: Round) -> float:
        spent_s = self._grace_s if self._same_grace(round_) else 0.0
        return max(0.0, round_.policy.grace_s - spent_s)

    def short_left_s(self, round_: Round) -> float:
        spent_s = self._short_s if self._same_grace(round_) else 0.0
        return max(0.0, round_.policy.shortfall_grace_s - spent_s)

    def _spent(self, round_: Round) -> float:
        return self._spent_s if self._running == (round_.number, round_.phase) else 0.0

    def _same_grace(self, round_: Round) -> bool:
        # The grace of a failing start runs on when the last rank joins; an abort has its own.
        number, phase = self._running
        return number == round_.number and (phase == "apply") == (round_.phase == "apply")


def hard_end_s(round_: Round) -> float:
    match round_.phase:
        case "gather":
            return round_.policy.gather_s
        case "report":
            return round_.policy.report_s.hard
        case "apply":
            return round_.policy.apply_s.hard
        case None:
            return 0.0


def soft_end_s(round_: Round) -> float:
    match round_.phase:
        case "report":
            return round_.policy.report_s.soft
        case "apply":
            return round_.policy.apply_s.soft
        case _:
            return hard_end_s(round_)


class Cell:
    """What the coordinator knows of one engine. `lock` is held from decide to append."""

    def __init__(self, name: EngineName, store_id: str) -> None:
        self.name = name
        self.lock = asyncio.Lock()
        self.clock = Clock()
        # By attempt: what it was last seen at, how far, and when by the clock of served seconds.
        self._moved: dict[int, tuple[str, int, float]] = {}
        self.stale = True  # the log may hold more than this
        self.waiting: deque[Waiting] = deque()  # in the order they came
        self.worker: asyncio.Task[None] | None = None  # carries them out
        self._store_id = store_id
        self._news: dict[News, asyncio.Event] = {}  # what is waited for
        self._telling: asyncio.TimerHandle | None = None
        self.load(())

    def load(self, entries: Iterable[Entry], first: int = 0) -> None:
        """What the log holds, from entry number `first` on."""
        self.engine = Engine(self.name, self._store_id, entries=first)
        self.facts: dict[int, list[Fact]] = defaultdict(list)
        for entry in entries:
            self.add(entry.events)

    def add(self, events: tuple[Event, ...], after: Engine | None = None) -> None:
        """An entry is durable: fold it in and make its facts. after: it is folded in already."""
        number = self.engine.entries
        self.engine = (
            replace(after, entries=number + 1) if after else evolve_entry(self.engine, events)
        )
        for index, event in enumerate(events):
            self._follow(event)
            if isinstance(event, Floor):
                self._keep_facts(number)
            if not isinstance(event, Reserved | Kept | StillReserved | Floor):
                self.facts[event.round].append(_fact(self.engine, number, index, event))

    def _keep_facts(self, entry: int) -> None:
        """Facts of dropped rounds go; of one whose own are gone its documents are told again."""
        for dropped in self.facts.keys() - self.engine.rounds.keys():
            del self.facts[dropped]
        for number, round_ in self.engine.rounds.items():
            documents: list[tuple[Literal["decision", "outcome"], bytes]] = [
                ("decision", round_.decision),
                ("outcome", round_.outcome),
            ]
            for index, (kind, body) in enumerate(documents):
                if body and not any(fact.kind == kind for fact in self.facts[number]):
                    self.facts[number].append(Fact(entry, index, kind, body.decode()))

    def note(self, attempt: int, phase: Phase) -> None:
        """A sign of progress; only what differs or grows is one."""
        name, progress, _ = self._moved.get(attempt, ("", -1, 0.0))
        if phase.phase != name or phase.progress > progress:
            self._moved[attempt] = (phase.phase, phase.progress, self.clock.served_s)

    def progress(self, attempt: int) -> tuple[str, float]:
        """What a process was last seen at, and for how many served seconds."""
        name, _, at_s = self._moved.get(attempt, ("claimed", 0, 0.0))
        return name, self.clock.served_s - at_s

    def _follow(self, event: Event) -> None:
        # Facts are signs of progress too.
        match event:
            case Claimed(attempt=attempt) | Reported(attempt=attempt) | Applied(attempt=attempt):
                self._moved[attempt] = (event.event, 0, self.clock.served_s)
            case Decided(round=number):
                for attempt in self.engine.rounds[number].members:
                    self._moved[attempt] = ("decided", 0, self.clock.served_s)
            case Opened():
                self._moved.clear()

    def wake(self, *, at_once: bool = True) -> None:
        """There is news. What waits for entries hears of it now, the others now or together."""
        self._tell("entry")
        if at_once:
            self._tell("fact")
            self._tell("document")
        elif self._telling is None:
            self._telling = asyncio.get_running_loop().call_later(FACTS_S, self._tell, "fact")

    def _tell(self, what: News) -> None:
        if what == "fact" and self._telling is not None:
            self._telling.cancel()
            self._telling = None
        if news := self._news.pop(what, None):
            news.set()

    async def change(self, timeout_s: float, of: News = "entry") -> None:
        """Wait for news, at most `timeout_s` seconds."""
        news = self._news.setdefault(of, asyncio.Event())
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await news.wait()


def _fact(engine: Engine, entry: int, index: int, event: Event) -> Fact:
    match event:
        case Decided(document=document):
            return Fact(entry, index, "decision", document)
        case Ended(document=document):
            return Fact(entry, index, "outcome", document)
    data = json.dumps(_fields(engine, event), separators=(",", ":"))
    return Fact(entry, index, "fact", data)


def _fields(engine: Engine, event: Event) -> dict[str, Any]:
    assert not isinstance(event, Reserved | Kept | StillReserved | Floor), "they belong to no round"
    fields: dict[str, Any] = {"round": event.round, "event": event.event}
    match event:
        case Opened(launch=launch, layout=layout):
            return fields | {"launch": str(launch), "layout": layout.model_dump(mode="json")}
        case Objected(cause=cause):
            return fields | cause.model_dump(mode="json", exclude_none=True)
        case Touched(touches=touches):
            return fields | {"rules": sorted({t.rule for t in touches})}
        case Retired(reason=reason):
            return fields | {"reason": reason}
        case Claimed() | Reported() | Suspected() | Cleared() | Applied() | Serving() | Departed():
            member = engine.rounds[event.round].members[event.attempt]
            return fields | {
                "ranks": list(member.ranks),
                "host": member.join.host,
                "pid": member.join.pid,
            }
    return fields
