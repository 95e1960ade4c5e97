"""A history read once: the log as it grew, what became of each round, and who was told what.

Kept apart from the coordinator's own state on purpose: it is what the checkers compare that with.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from kvaccord.canonical import digest
from tests.simulation.history import History

Event = dict[str, Any]
UNTOLD = {"reserved", "kept", "still_reserved", "floor"}  # events that belong to no round


@dataclass
class Logged:
    """One event of the log: where it stands, and when it became durable."""

    at: int  # its place in the history
    t: float
    by: str  # the coordinator
    n: int
    index: int
    event: Event

    @property
    def id(self) -> str:
        return f"{self.n}.{self.index}"

    @property
    def kind(self) -> str:
        return str(self.event["event"])


@dataclass
class Round:
    number: int
    opened: Logged
    events: list[Logged] = field(default_factory=list)
    slots: dict[int, int] = field(default_factory=dict)
    seated: dict[int, tuple[int, ...]] = field(default_factory=dict)
    gone: dict[int, Logged] = field(default_factory=dict)
    decided: Logged | None = None
    ended: Logged | None = None
    full: Logged | None = None  # the claim that made it so

    @property
    def terms(self) -> Event:
        return self.opened.event

    @property
    def world(self) -> int:
        layout = self.terms["layout"]
        return int(layout["dp"] * layout["pp"] * layout["pcp"] * layout["tp"])

    @property
    def over(self) -> Logged | None:
        """What ended it."""
        if self.decided is not None and self.decided.event["result"] == "FAILED":
            return self.decided
        return self.ended

    def of(self, *kinds: str) -> list[Logged]:
        return [e for e in self.events if e.kind in kinds]


class Generation:
    """The log of one store, from its beginning or from the copy that it was restored from."""

    def __init__(self, store: str) -> None:
        self.store = store
        self.entries: dict[str, list[tuple[Event, int]]] = defaultdict(list)
        self.events: dict[str, list[Logged]] = defaultdict(list)
        self.joins: dict[tuple[str, int], Logged] = {}
        self.rounds: dict[tuple[str, int], Round] = {}
        self.kept: dict[str, set[int]] = defaultdict(set)  # rounds that were not dropped
        self.floors: dict[str, int] = {}

    def add(self, entry: Event, at: int) -> None:
        engine = entry["engine"]
        self.entries[engine].append((entry, at))
        for index, event in enumerate(entry["events"]):
            logged = Logged(at, entry["t"], entry["at"], entry["n"], index, event)
            self.events[engine].append(logged)
            self._follow(engine, logged)

    def copied(self, store: str, kept: dict[str, int]) -> Generation:
        copy = Generation(store)
        for engine, entries in self.entries.items():
            for entry, at in entries:
                if entry["n"] < kept.get(engine, 0):
                    copy.add(entry, at)
        return copy

    def _follow(self, engine: str, logged: Logged) -> None:
        event = logged.event
        match logged.kind:
            case "reserved":
                self.joins.setdefault((engine, event["attempt"]), logged)
                return
            case "floor":
                self.kept[engine] = set(event["rounds"])
                self.floors[engine] = logged.n
                return
            case "kept" | "still_reserved":
                return
            case "opened":
                self.rounds[engine, event["round"]] = Round(event["round"], logged)
                self.kept[engine].add(event["round"])
        round_ = self.rounds[engine, event["round"]]
        round_.events.append(logged)
        match logged.kind:
            case "claimed":
                join = self.joins[engine, event["attempt"]].event["join"]
                same = join["layout"] == round_.terms["layout"]
                same = same and join.get("mode", "enforce") == round_.terms["mode"]
                if same and round_.over is None and not round_.slots.keys() & set(join["ranks"]):
                    round_.seated[event["attempt"]] = tuple(join["ranks"])
                    round_.slots.update(dict.fromkeys(join["ranks"], event["attempt"]))
                    if len(round_.slots) == round_.world:
                        round_.full = round_.full or logged
            case "objected" if event["gone"]:
                round_.gone.setdefault(event["attempt"], logged)
            case "decided":
                round_.decided = round_.decided or logged
            case "ended":
                round_.ended = round_.ended or logged


class Account:
    def __init__(self, history: History) -> None:
        self.history = history
        self.events = history.events
        self.generations: list[Generation] = []
        self._starts: list[tuple[int, Generation]] = []
        self.requests: dict[int, tuple[int, Event]] = {}
        self.arrivals: list[tuple[int, Event]] = []
        self.answers: list[tuple[int, Event]] = []
        self.pushed: list[tuple[int, Event]] = []
        self.heard: dict[int, list[tuple[int, Event]]] = defaultdict(list)
        self.acknowledged: dict[tuple[str, str, int, float], int] = {}
        self.processes: dict[str, list[tuple[int, Event]]] = defaultdict(list)
        self.closed: dict[int, int] = {}  # streams that have ended at the coordinator
        self.acks: dict[tuple[str, str, int], int] = {}  # (coordinator, engine, n) -> place
        for at, event in enumerate(history.events):
            self._read(at, event)

    def _read(self, at: int, event: Event) -> None:
        match event["kind"]:
            case "append":
                if not self.generations:
                    self._begin(at, Generation(event["store"]))
                self.generations[-1].add(event, at)
            case "restored":
                older = [g for g in self.generations if g.store == event["of"]]
                before = older[-1] if older else Generation("")
                self._begin(at, before.copied(event["store"], event["kept"]))
            case "appended":
                self.acks[event["at"], event["engine"], event["n"]] = at
            case "request":
                self.requests[event["x"]] = (at, event)
            case "arrived":
                self.arrivals.append((at, event))
            case "answer":
                self.answers.append((at, event))
            case "pushed":
                self.pushed.append((at, event))
            case "closed":
                self.closed[event["x"]] = at
            case "fact":
                self.heard[event["x"]].append((at, event))
            case "process":
                self.processes[event["who"]].append((at, event))

    def _begin(self, at: int, generation: Generation) -> None:
        self.generations.append(generation)
        self._starts.append((at, generation))

    def generation(self, at: int) -> Generation | None:
        """The store's life at a place of the history."""
        found = None
        for start, generation in self._starts:
            if start > at:
                break
            found = generation
        return found

    def rounds(self) -> list[tuple[Generation, str, Round]]:
        return [(g, engine, r) for g in self.generations for (engine, _), r in g.rounds.items()]

    def own(self, generation: Generation, logged: Logged) -> bool:
        """Whether it was appended in this life of the store, and not copied from the one before."""
        start = next(at for at, g in self._starts if g is generation)
        return logged.at >= start

    def caller(self, x: int, generation: Generation | None) -> int | None:
        """The attempt that calls, if this store gave it out."""
        request = self.requests[x][1]
        ours = generation is not None and request.get("store") == generation.store
        return request.get("attempt") if ours else None

    def call(self, x: int) -> tuple[str, str | None, int | None, str]:
        """(method, engine, round, noun) of an exchange."""
        _, request = self.requests[x]
        path = request["target"].partition("?")[0]
        parts = path.split("/")
        if len(parts) < 6 or parts[2] != "engines":
            return request["method"], None, None, path
        engine = f"{parts[3]}/{parts[4]}"
        if parts[5] == "rounds" and len(parts) > 6:
            number = int(parts[6]) if parts[6].isdigit() else None
            return request["method"], engine, number, parts[7] if len(parts) > 7 else "status"
        return request["method"], engine, None, parts[5]

    def document(self, name: str) -> Any:
        return json.loads(self.history.documents[name])


def digest_of(logged: Logged) -> str:
    return digest(logged.event["document"].encode())


def before(events: list[Logged], end: Logged) -> list[Logged]:
    return [e for e in events if (e.n, e.index) < (end.n, end.index)]


def suspects(round_: Round, until: Logged) -> list[int]:
    found: dict[int, Logged] = {}
    for e in before(round_.of("suspected", "cleared"), until):
        if e.kind == "suspected":
            found[e.event["attempt"]] = e
        else:
            found.pop(e.event["attempt"], None)
    return [a for a in found if a in round_.seated and a not in round_.gone]


def healed(account: Account) -> int | None:
    """The place from which all is well; None in a world that stays ill."""
    if account.history.mode == "calm":
        return 0
    return next((at for at, e in enumerate(account.events) if e["kind"] == "healed"), None)


def finish(account: Account) -> int:
    places = (at for at, e in enumerate(account.events) if e["kind"] == "reading back")
    return next(places, len(account.events))


def overlap(account: Account) -> bool:
    """Two coordinators served at once: they share no presence and no clock (issue H)."""
    return any(e["kind"] == "coordinator" and e["what"] == "second beside" for e in account.events)
