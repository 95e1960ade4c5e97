"""Logs of the simulation as paths of the model: which commands made each entry. Pure.

The model of tests/model steps by the shipped `decide` and `evolve`, on the commands of its own
shell. An entry of a history belongs to the model when a sequence of such commands, each decided on
what those before it leave, yields exactly its events. The commands are not in the log, so they are
searched for: an event says nearly all of the command that it came from.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from coordinator import commands
from coordinator.engine import Engine, Round
from coordinator.events import Cause, EngineName, Event, entry_from
from coordinator.policy import Policy
from coordinator.rules.findings import NO_SIGN
from kvaccord import messages
from kvaccord.canonical import digest
from kvaccord.decision import Decision
from kvaccord.errors import Refused
from tests.model import monitors
from tests.model.rules import Rules
from tests.simulation.history import History

COMPACTION = {"kept", "still_reserved", "floor"}
# What the model checks of every step, by docs/protocol.md section 8. S3 and S7 it states for its
# own reports and one class of cache; of histories documents.py judges them.
MONITORS = frozenset({"S1", "S2", "S4", "S5", "S6", "S12"})


class Foreign(Exception):
    """An entry that no command of the model makes of the log before it."""


@dataclass
class Path:
    """The commands that made a log, by kind, and what became of the engine."""

    engine: Engine
    used: Counter[str] = field(default_factory=Counter)
    entries: int = 0


@dataclass
class Life:
    """The logs of one store, from its beginning or from the copy that it was restored from."""

    store: str
    logs: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    copied: dict[str, int] = field(default_factory=dict)  # how many entries came with the copy

    def restored(self, event: dict[str, Any]) -> Life:
        kept = event["kept"]
        logs = {
            name: [e for e in log if e["n"] < kept.get(name, 0)] for name, log in self.logs.items()
        }
        counts = {name: len(log) for name, log in logs.items()}
        return Life(event["store"], defaultdict(list, logs), counts)


def lives(history: History) -> list[Life]:
    found: list[Life] = []
    for event in history.of("append", "restored"):
        if event["kind"] == "restored":
            older = [life for life in found if life.store == event["of"]]
            found.append(older[-1].restored(event) if older else Life(event["store"]))
            continue
        if not found:
            found.append(Life(event["store"]))
        found[-1].logs[event["engine"]].append(event)
    return found


def paths(history: History) -> list[Path]:
    """One for each engine in each life of the store. Raises Foreign, or the model's Breach."""
    return [_path(life, name, history.settings) for life in lives(history) for name in [*life.logs]]


def _path(life: Life, name: str, settings: dict[str, Any]) -> Path:
    rules, keep_rounds = Rules(), settings["policy"]["keep_rounds"]
    path = Path(Engine(EngineName(*name.split("/")), life.store))
    for at, entry in enumerate(life.logs[name]):
        events = _read(entry)
        if at >= life.copied.get(name, 0):  # those were judged in the life that made them
            path.entries += 1
            try:
                _accept(rules, path, events, keep_rounds)
            except Foreign as fault:
                kinds = ", ".join(e.event for e in events)
                raise Foreign(
                    f"{name} entry {entry['n']} ({kinds}) at {entry['t']:.3f} s: {fault}"
                ) from None
        path.engine = rules.evolve(path.engine, events)
    return path


def _read(entry: dict[str, Any]) -> tuple[Event, ...]:
    return entry_from(json.dumps({"version": 1, "events": entry["events"]}).encode()).events


def _accept(rules: Rules, path: Path, events: tuple[Event, ...], keep_rounds: int) -> None:
    if events[0].event in COMPACTION:
        if len(events) > 1 or events[0] not in list(rules.compaction(path.engine, keep_rounds)):
            raise Foreign("no compaction of the log before it has this piece")
        path.used["compaction"] += 1
        return
    made = _commands(rules, path.engine, events)
    if made is None:
        raise Foreign("no command of the model makes this of the log before it")
    engine = path.engine
    for command, its in made:
        path.used[type(command).__name__] += 1
        after = reduce(rules.engine.evolve, its, engine)
        if _in_scope(after, its):
            with monitors.checking(MONITORS):
                monitors.check_entry(_Log(rules), engine, after, command, its)  # type: ignore[arg-type]
        engine = after


Made = list[tuple[commands.Command, tuple[Event, ...]]]


def _commands(rules: Rules, engine: Engine, events: tuple[Event, ...]) -> Made | None:
    """Commands that make these events one after the other; None if there are none.

    Calls that wait together are decided together: an entry may hold what several came to.
    """
    if not events:
        return []
    for command in _candidates(engine, events):
        try:
            its = rules.decide(engine, command)
        except Refused:
            continue
        if its and its == events[: len(its)]:
            after = reduce(rules.engine.evolve, its, engine)
            rest = _commands(rules, after, events[len(its) :])
            if rest is not None:
                return [(command, its), *rest]
    return None


def _in_scope(engine: Engine, events: tuple[Event, ...]) -> bool:
    """Whether the model has such steps; README.md of tests/model says what it leaves out."""
    comes_back = any(r.launch.comes_back for r in engine.rounds.values())
    return not comes_back and not any(e.event == "touched" for e in events)


@dataclass(frozen=True)
class _Log:
    """What the model's monitors ask of a log, where they do not state S3."""

    rules: Rules

    def process_of(self, join: messages.Join) -> messages.Join:
        return join

    def report(self, process: messages.Join, _pages: int) -> dict[int, messages.Report]:
        return dict.fromkeys(process.ranks, NO_REPORT)


NO_REPORT = messages.Report(free_bytes=1, kv_budget_bytes=1, classes=(messages.page("kv", 1),))


# --- which command an event may have come from ----------------------------------------------------


def _candidates(engine: Engine, events: tuple[Event, ...]) -> Iterator[commands.Command]:
    first, *rest = events
    if first.event == "reserved":
        yield from _join(engine, first)
        return
    yield from _claim(events)
    if first.event == "cleared":
        # Its own finding; or whoever is answered is not suspect, in the entry of its call.
        yield commands.Clear(first.round, first.attempt)
        events = tuple(rest)
    touched: tuple[Any, ...] = ()
    if events and events[0].event == "touched":
        touched, *rest = events[0].touches, *events[1:]
        events = tuple(rest)
    if getattr(first, "round", None) not in engine.rounds:
        return
    if events and events[0].event not in ("reserved", "opened"):
        yield from _word(engine, events[0], touched)
    if first.event == "touched":
        members = engine.rounds[first.round].members
        yield from (commands.Mark(attempt, touched) for attempt in list(members)[:1])


def _join(engine: Engine, event: Any) -> Iterator[commands.Command]:
    yield commands.Reserve(event.join, event.touched)
    if before := engine.reservations.get(event.attempt):
        yield commands.Mark(event.attempt, event.touched[len(before.touched) :])


def _claim(events: tuple[Event, ...]) -> Iterator[commands.Command]:
    """It may end a round, say who has departed, and open the next before it takes its slots."""
    policy, touched = Policy(), ()
    for event in events:
        match event.event:
            case "opened":
                policy = event.policy
            case "touched":
                touched = event.touches
            case "claimed":
                yield commands.Claim(event.attempt, policy, frozenset(), touched)
                return
            case "decided" | "ended" | "departed":
                continue
            case _:
                return


def _word(engine: Engine, event: Any, touched: tuple[Any, ...]) -> Iterator[commands.Command]:
    number, round_ = event.round, engine.rounds[event.round]
    if getattr(event, "attempt", None) not in (None, *round_.members):
        return
    match event.event:
        case "reported":
            yield commands.Submit(
                number, event.attempt, event.reports, event.planned, touched, event.spent_s
            )
        case "objected":
            yield from _no(round_, event, touched)
        case "applied":
            said = messages.Applied(digest=digest(round_.decision), built=event.built)
            yield commands.Apply(number, event.attempt, said, touched)
        case "suspected":
            yield commands.Suspect(number, event.attempt, event.connection)
        case "serving":
            yield commands.Serve(number, event.attempt)
        case "departed":
            yield _leave(number, event.attempt, event.why.removeprefix("left: "), touched)
            yield from _lose(round_, event.attempt, event.why)
        case "retired":
            yield commands.Retire(number, event.reason)
        case "decided" | "ended":
            yield from _end(round_, json.loads(event.document))


def _no(round_: Round, event: Any, touched: tuple[Any, ...]) -> Iterator[commands.Command]:
    number, attempt, cause = round_.number, event.attempt, event.cause
    member = round_.members[attempt]
    match cause.code:
        case "rank_vetoed" | "apply_failed":
            said = {"text": cause.text, "trace": event.trace, "retryable": cause.retryable}
            veto = messages.Veto(rank=cause.ranks[0], **said)
            yield commands.Veto(number, attempt, veto, touched)
            if round_.decision:
                failed = messages.Applied(
                    digest=digest(round_.decision), failed=messages.BuildFailed(**said)
                )
                yield commands.Apply(number, attempt, failed, touched)
        case "rank_left":
            yield _leave(number, attempt, cause.text.partition(": ")[2], touched)
        case "rank_lost":
            yield from _lose(round_, attempt, cause.text)
        case "applied_differently":
            built = {r: Decision(round_.decision).entries(r) for r in member.ranks}
            built[cause.ranks[0]] = _shown(cause)
            said = messages.Applied(digest=digest(round_.decision), built=built)  # type: ignore[assignment]
            yield commands.Apply(number, attempt, said, touched)  # type: ignore[arg-type]


def _shown(cause: Cause) -> dict[str, int]:
    shown = cause.text.removeprefix("built ").partition(", the decision says")[0]
    return {name: int(n) for name, n in (part.rsplit(" ", 1) for part in shown.split(", "))}


def _leave(number: int, attempt: int, reason: str, touched: tuple[Any, ...]) -> commands.Command:
    return commands.Leave(number, attempt, messages.Leave(reason=reason), touched)


def _lose(round_: Round, attempt: int, text: str) -> Iterator[commands.Command]:
    connection = round_.members[attempt].suspect
    for session, words in NO_SIGN.items():
        found = re.search(rf"its session {words} within (\S+) s", text)
        if found and connection is not None:
            after_s = float(found[1])
            yield commands.Lose(round_.number, attempt, connection, after_s, session=session)  # type: ignore[arg-type]


def _end(round_: Round, document: dict[str, Any]) -> Iterator[commands.Command]:
    """What ends a round alone: an order, or a budget or grace that is spent."""
    causes = document.get("verdict", document)["causes"]
    for cause in causes:
        if cause["code"] == "cancelled":
            yield commands.Cancel(round_.number, cause["text"].partition(": ")[2])
    yield commands.Spend(round_.number, "grace")
    yield commands.Spend(round_.number, "shortfall")
    if round_.phase is not None:
        signs = dict(filter(None, map(_sign, causes)))
        yield commands.Spend(round_.number, round_.phase, signs=signs)
        yield commands.Spend(round_.number, round_.phase, soft=True, signs=signs)


def _sign(cause: dict[str, Any]) -> tuple[int, commands.Sign] | None:
    if found := re.search(r"without progress for (\d+) s at ('.*') \(pid", cause["text"]):
        return cause["rank"], commands.Sign(ast.literal_eval(found[2]), float(found[1]), True)
    if found := re.search(r"last seen at ('.*') (\d+) s ago\)", cause["text"]):
        return cause["rank"], commands.Sign(ast.literal_eval(found[1]), float(found[2]), False)
    return None
