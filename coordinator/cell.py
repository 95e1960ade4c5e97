"""One engine in this coordinator's memory: its folded log, its facts, its clock."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from coordinator.engine import Engine, Phase, Round, evolve_entry
from coordinator.events import (
    Applied,
    Claimed,
    Cleared,
    Decided,
    Ended,
    EngineName,
    Entry,
    Event,
    Objected,
    Opened,
    Reported,
    Reserved,
    Suspected,
    Touched,
)

TICK_S = 1.0


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


class Clock:
    """Seconds spent in the running budget, and in the grace since the round's first cause.

    It advances in ticks, so that a pause of this process counts as one tick at most: a budget may
    end late, never early.
    """

    def __init__(self) -> None:
        self._running: tuple[int, Phase | None] = (0, None)
        self._spent_s = 0.0
        self._grace_s = 0.0

    def advance(self, round_: Round, elapsed_s: float) -> None:
        """Count time that passed while this was the open round."""
        if self._running != (round_.number, round_.phase):
            if not self._same_grace(round_):
                self._grace_s = 0.0
            self._running, self._spent_s = (round_.number, round_.phase), 0.0
        self._spent_s += min(elapsed_s, TICK_S)
        if round_.causes:
            self._grace_s += min(elapsed_s, TICK_S)

    def left_s(self, round_: Round) -> float:
        """What is left of the running budget, 0 when the round has ended. Changes nothing."""
        match round_.phase:
            case "gather":
                budget_s = round_.budgets.gather_s
            case "report":
                budget_s = round_.budgets.report_s
            case "apply":
                budget_s = round_.budgets.apply_s
            case None:
                return 0.0
        spent_s = self._spent_s if self._running == (round_.number, round_.phase) else 0.0
        return max(0.0, budget_s - spent_s)

    def grace_left_s(self, round_: Round, grace_s: float) -> float:
        return max(0.0, grace_s - (self._grace_s if self._same_grace(round_) else 0.0))

    def _same_grace(self, round_: Round) -> bool:
        # The grace of a failing start runs on when the last rank joins; an abort has its own.
        number, phase = self._running
        return number == round_.number and (phase == "apply") == (round_.phase == "apply")


class Cell:
    """What the coordinator knows of one engine. `lock` is held from decide to append."""

    def __init__(self, name: EngineName, store_id: str) -> None:
        self.name = name
        self.lock = asyncio.Lock()
        self.clock = Clock()
        self.stale = True  # the log may hold more than this
        self._store_id = store_id
        self._changed = asyncio.Event()
        self.load(())

    def load(self, entries: Iterable[Entry]) -> None:
        self.engine = Engine(self.name, self._store_id)
        self.facts: dict[int, list[Fact]] = defaultdict(list)
        for entry in entries:
            self.add(entry.events)

    def add(self, events: tuple[Event, ...]) -> None:
        """An entry is durable: fold it in and make its facts."""
        number = self.engine.entries
        self.engine = evolve_entry(self.engine, events)
        for index, event in enumerate(events):
            if not isinstance(event, Reserved):
                self.facts[event.round].append(_fact(self.engine, number, index, event))

    def wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def change(self, timeout_s: float) -> None:
        """Wait for news, at most `timeout_s` seconds."""
        changed = self._changed
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await changed.wait()


def _fact(engine: Engine, entry: int, index: int, event: Event) -> Fact:
    match event:
        case Decided(document=document):
            return Fact(entry, index, "decision", document)
        case Ended(document=document):
            return Fact(entry, index, "outcome", document)
    data = json.dumps(_fields(engine, event), separators=(",", ":"))
    return Fact(entry, index, "fact", data)


def _fields(engine: Engine, event: Event) -> dict[str, Any]:
    assert not isinstance(event, Reserved), "a reservation belongs to no round"
    fields: dict[str, Any] = {"round": event.round, "event": event.event}
    match event:
        case Opened(launch=launch, layout=layout):
            return fields | {"launch": str(launch), "layout": layout.model_dump(mode="json")}
        case Objected(cause=cause):
            return fields | cause.model_dump(mode="json", exclude_none=True)
        case Touched(touches=touches):
            return fields | {"rules": sorted({t.rule for t in touches})}
        case Claimed() | Reported() | Suspected() | Cleared() | Applied():
            member = engine.rounds[event.round].members[event.attempt]
            return fields | {
                "ranks": list(member.ranks),
                "host": member.join.host,
                "pid": member.join.pid,
            }
    return fields
