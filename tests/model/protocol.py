"""The protocol as a model: every order of messages, crashes and findings, within small scopes.

The log's transitions are those of the SHIPPED rules: `decide` and `evolve` are loaded from
coordinator/round.py, coordinator/rules/ and coordinator/engine.py (with a planted mistake, if one
is asked for) and every step of the search runs them. What the model adds is the world around the
log: messages that are lost, repeated, delayed for ever or reordered, processes that die and are
started again, coordinators that decide on old snapshots, crash and forget, sessions and timers.

README.md says what each scope holds and what it leaves out.
"""

from __future__ import annotations

import ast
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import coordinator.compaction
import coordinator.engine
import coordinator.round
from coordinator import commands
from coordinator.events import EngineName
from coordinator.policy import Policy
from kvaccord import Layout, Report, messages, page
from kvaccord.canonical import digest
from kvaccord.decision import Decision
from kvaccord.errors import Problem
from kvaccord.messages import Join, Launch

ROOT = Path(__file__).parents[2]
# The rules, each after those that it imports.
FILES = (
    "engine.py",
    "compaction.py",
    "verdict.py",
    *(f"rules/{name}.py" for name in ("settling", "members", "joining")),
    *(f"rules/{name}.py" for name in ("claiming", "calls", "orders", "findings")),
    "round.py",
)
OTHER_DIGEST = "sha256:" + "0" * 64
ENTRY_BYTES = 10


class Breach(Exception):
    """A property does not hold. `what` begins with its name."""


_only: frozenset[str] | None = None  # the properties that are checked; all of them if None


def must(holds: object, what: str) -> None:
    if not holds and is_checked(what):
        raise Breach(what)


def is_checked(what: str) -> bool:
    return _only is None or not _only.isdisjoint(what.partition(" ")[0].split("/"))


# --- the shipped rules, perhaps with a mistake --------------------------------------------------


class Edit(NamedTuple):
    """In this function of this file, `old` becomes `new`; both as `ast.unparse` spells them."""

    file: str
    function: str
    old: str
    new: str


class Moved(Exception):
    """The guard that an edit removes is not where it was: point the edit to its new place."""


class Rules:
    """decide and evolve of the shipped files, perhaps edited."""

    def __init__(self, edits: Sequence[Edit] = ()) -> None:
        engine: ModuleType = coordinator.engine
        rules: ModuleType = coordinator.round
        kept: ModuleType = coordinator.compaction
        if edits:
            assert {edit.file for edit in edits} <= {*FILES}, "an edit of a file that is not loaded"
            edited: dict[str, ModuleType] = {}
            for file in FILES:
                module = _edited(file, edits, edited)
                edited[module.__name__] = module
            engine, rules = edited["coordinator.engine"], edited["coordinator.round"]
            kept = edited["coordinator.compaction"]
        self.engine, self.round, self.compaction = engine, rules, kept.compaction

    def empty(self) -> Any:
        return self.engine.Engine(EngineName("default", "llama"), "store-1")

    def decide(self, engine: Any, command: Any) -> tuple[Any, ...]:
        return self.round.decide(engine, command)

    def evolve(self, engine: Any, events: tuple[Any, ...]) -> Any:
        return self.engine.evolve_entry(engine, events)


def _edited(file: str, edits: Sequence[Edit], instead: dict[str, ModuleType]) -> ModuleType:
    path = ROOT / "coordinator" / file
    tree = ast.parse(path.read_text())
    for edit in (e for e in edits if e.file == file):
        found = [
            (body, index)
            for node in ast.walk(tree)
            if isinstance(body := getattr(node, "body", None), list)
            for index, item in enumerate(body)
            if isinstance(item, ast.FunctionDef) and item.name == edit.function
        ]
        if len(found) != 1:
            raise Moved(f"{file} has {len(found)} functions {edit.function}")
        body, index = found[0]
        text = ast.unparse(body[index])
        if text.count(edit.old) != 1:
            raise Moved(f"{file} {edit.function}: {text.count(edit.old)} times {edit.old!r}")
        body[index] = ast.parse(text.replace(edit.old, edit.new)).body[0]
    module = ModuleType(f"coordinator.{file.removesuffix('.py').replace('/', '.')}")
    module.__file__ = str(path)
    # Its own types are looked up by its name: a snapshot must be one of the edited rounds.
    instead = {**instead, module.__name__: module}
    saved = {name: sys.modules[name] for name in instead}
    sys.modules.update(instead)
    try:
        exec(compile(ast.fix_missing_locations(tree), str(path), "exec"), module.__dict__)
    finally:
        sys.modules.update(saved)
    return module


# --- the log ------------------------------------------------------------------------------------


class Process(NamedTuple):
    """after: the process that must have died before this one is started.

    short: its report alone makes failure certain.
    """

    name: str
    ranks: tuple[int, ...]
    run: str = "A"
    restart: int = 0
    after: int | None = None
    tp: int = 0  # another layout than the scope's, if not 0
    length: int = 8  # max_model_len, which must be equal over the engine
    short: bool = False


Key = tuple[Any, ...]


def sorted_tuple(items: Iterable[Any]) -> Key:
    return tuple(sorted(items))


class Step(NamedTuple):
    """What a command did: the state afterwards, and what was appended or why it was refused."""

    after: int
    events: tuple[Any, ...] = ()
    refused: str = ""


class Log:
    """The states of one engine's log, each known by a small integer, and the steps between them.

    Two logs are one state when the rules and the properties cannot tell them apart: how long the
    log is, and what the documents and causes of the past say, is left out of the key. That
    documents do not change is checked on every step itself.
    """

    def __init__(
        self, rules: Rules, processes: Sequence[Process], world: int, *, alike: bool = False
    ) -> None:
        """alike: no two processes share a rank and all may do the same; so may their names."""
        self.rules, self.processes, self.world, self.alike = rules, processes, world, alike
        self.engines: list[Any] = []
        self._ids: dict[Key, int] = {}
        self._steps: dict[tuple[int, Key], Step] = {}
        self._found: dict[tuple[int, int], tuple[int, int]] = {}
        self._rivals = [
            (f"process-{a}", f"process-{b}")
            for b, q in enumerate(processes)
            for a, p in enumerate(processes[:b])
            if set(p.ranks) & set(q.ranks)
        ]
        self._by_nonce = {f"process-{i}": i for i in range(len(processes))}
        self.joins = [
            Join(
                ranks=p.ranks,
                layout=Layout(tp=p.tp or world),
                nonce=f"process-{i}",
                launch=Launch(run=p.run, restart=p.restart),
                host=f"host-{p.name}",
                pid=100 + i,
            )
            for i, p in enumerate(processes)
        ]
        self.start = self._id(rules.empty())

    def report(self, process: int, pages: int) -> dict[int, Report]:
        """Every process has other numbers, so that a plan shows whose reports made it."""
        budget = (pages + 10 + process) * 10
        if self.processes[process].short:
            budget = ENTRY_BYTES - 1 - pages  # not one page
        report = Report(
            free_bytes=budget + 3,
            kv_budget_bytes=budget,
            max_model_len=self.processes[process].length,
            classes=(page("kv", ENTRY_BYTES),),
        )
        return dict.fromkeys(self.processes[process].ranks, report)

    def process_of(self, join: Join) -> int:
        return self._by_nonce[join.nonce]

    def find(self, state: int, process: int) -> tuple[int, int]:
        """(attempt, round) of a process; round 0: reserved only; (0, 0): neither."""
        known = self._found.get((state, process))
        if known is None:
            known = self._found[state, process] = self._find(state, process)
        return known

    def _find(self, state: int, process: int) -> tuple[int, int]:
        engine, nonce = self.engines[state], f"process-{process}"
        for round_ in engine.newest_first():
            for member in round_.members.values():
                if member.join.nonce == nonce:
                    return member.attempt, round_.number
        for attempt, reservation in engine.reservations.items():
            if reservation.join.nonce == nonce:
                return attempt, 0
        return 0, 0

    def last(self, state: int) -> Any:
        return self.engines[state].last

    def command(self, engine: Any, key: Key) -> Any:
        match key:
            case ("join", process):
                return commands.Reserve(self.joins[process])
            case ("claim", _, attempt, watched):
                return commands.Claim(attempt, Policy(), frozenset(watched))
            case ("report", process, attempt, number, pages):
                return commands.Submit(number, attempt, self.report(process, pages), {})
            case ("veto", process, attempt, number):
                said = messages.Veto(rank=self.processes[process].ranks[0], text="no")
                return commands.Veto(number, attempt, said)
            case ("leave", _, attempt, number):
                return commands.Leave(number, attempt, messages.Leave())
            case ("applied", process, attempt, number, how):
                return commands.Apply(number, attempt, self._applied(engine, process, number, how))
            case ("suspect", attempt, number, connection):
                return commands.Suspect(number, attempt, connection)
            case ("clear", attempt, number):
                return commands.Clear(number, attempt)
            case ("lose", attempt, number, connection):
                return commands.Lose(number, attempt, connection, 1.0)
            case ("spend", number, what):
                return commands.Spend(number, what)
            case ("spend", number, what, soft, stuck):
                # As the shell finds them: of the claimed ranks, perhaps some time ago.
                signs = {
                    r: commands.Sign("at", 1.0, r in stuck) for r in engine.rounds[number].slots
                }
                return commands.Spend(number, what, soft, signs)
            case ("serve", _, attempt, number):
                return commands.Serve(number, attempt)
            case ("cancel", number):
                return commands.Cancel(number, "so")
            case ("retire", number):
                return commands.Retire(number, "so")
        raise AssertionError(key)

    def _applied(self, engine: Any, process: int, number: int, how: str) -> messages.Applied:
        decision = engine.rounds[number].decision if number in engine.rounds else b""
        name = digest(decision) if decision and how != "other" else OTHER_DIGEST
        if how == "failed":
            return messages.Applied(digest=name, failed=messages.BuildFailed(text="no"))
        built = {"kv": 1}
        if decision and how in ("built", "other"):
            built = Decision(decision).entries(self.processes[process].ranks[0]) or built
        return messages.Applied(digest=name, built=built)

    def step(self, state: int, key: Key) -> Step:
        """One command, decided on a state and appended to it. Raises Breach."""
        known = self._steps.get((state, key))
        if known is None:
            known = self._steps[state, key] = self._step(state, key)
        return known

    def _step(self, state: int, key: Key) -> Step:
        before = self.engines[state]
        command = self.command(before, key)
        try:
            events = self.rules.decide(before, command)
        except Problem as refusal:
            check_claim(self, before, before, command, ())
            return Step(state, refused=refusal.code)
        except Breach:
            raise
        except Exception as fault:
            must(False, f"TOTAL the rules fail on {key}: {type(fault).__name__} {fault}")
            return Step(state, refused="broken")
        if not events:
            check_claim(self, before, before, command, events)
            return Step(state)
        return self.append(state, events, command)

    def append(self, state: int, events: tuple[Any, ...], command: Any) -> Step:
        """Append what was decided, here or (by mistake) on another state. Raises Breach."""
        before = self.engines[state]
        try:
            after = self.rules.evolve(before, events)
        except Exception as fault:
            must(False, f"TOTAL evolve fails: {type(fault).__name__} {fault}")
            return Step(state, refused="broken")
        check_entry(self, before, after, command, events)
        return Step(self._id(after), events)

    def _id(self, engine: Any) -> int:
        key = self._key(engine)
        known = self._ids.get(key)
        if known is None:
            known = self._ids[key] = len(self.engines)
            self.engines.append(engine)
            check_floor(self.rules, engine)
        return known

    def _key(self, engine: Any) -> Key:
        if self.alike:
            return self._alike_key(engine)
        rounds = list(engine.newest_first())[::-1]
        given = {r.join.nonce: a for a, r in engine.reservations.items()}
        for round_ in rounds:
            given |= {m.join.nonce: a for a, m in round_.members.items()}
        return (
            sorted_tuple(r.join.nonce for r in engine.reservations.values()),
            # Attempts are compared where two processes want one rank, and nowhere else.
            tuple(
                None if a not in given or b not in given else given[a] < given[b]
                for a, b in self._rivals
            ),
            tuple((r.number, r.launch, *self._standing(r)) for r in rounds[:-1]),
            self._round_key(rounds[-1]) if rounds else None,
        )

    def _standing(self, r: Any) -> Key:
        """What may still matter of a round that has ended."""
        members = r.members.values()
        if r.ended != "SEALED":
            return (False, sorted_tuple((m.join.nonce, m.seated) for m in members))
        each = sorted_tuple((m.join.nonce, m.seated, *_after_the_seal(m)) for m in members)
        return (True, r.retired is not None, each)

    def _alike_key(self, engine: Any) -> Key:
        """One round of processes that only their names tell apart: what each has come to, sorted.

        Names of attempts, ranks and (per process) of two connections may be exchanged.
        """
        last = engine.last
        if last is None:
            return (len(engine.reservations),)
        if last.ended == "SEALED":
            each = sorted_tuple((m.kept, bool(m.suspect), bool(m.departed)) for m in last.seated)
            return len(engine.reservations), last.number, last.retired is not None, each
        if last.ended:
            return (
                len(engine.reservations),
                last.ended,
                sorted_tuple((m.seated, bool(m.suspect)) for m in last.members.values()),
                bool(last.causes),
            )
        each = sorted_tuple(
            (m.seated, bool(m.suspect), m.gone, m.applied is not None, m.ranks[0] in last.sent)
            for m in last.members.values()
        )
        return len(engine.reservations), last.number, last.verdict, each, bool(last.causes)

    def _round_key(self, r: Any) -> Key:
        if r.ended:
            return r.number, r.launch, r.layout.tp, r.ended, self._standing(r), bool(r.causes)
        members = sorted_tuple(
            (m.join.nonce, m.seated, m.suspect or "", m.gone, m.applied is not None)
            for m in r.members.values()
        )
        sent = tuple((rank, report.kv_budget_bytes) for rank, report in sorted(r.sent.items()))
        return r.number, r.launch, r.layout.tp, r.verdict, members, sent, bool(r.causes)


def _after_the_seal(member: Any) -> Key:
    return member.kept, member.suspect or "", member.departed is not None


# --- the properties of one entry ----------------------------------------------------------------


def check_entry(log: Log, before: Any, after: Any, command: Any, events: tuple[Any, ...]) -> None:
    """What every appended entry must keep. Written from docs/protocol.md, not from the rules."""
    _frozen(before, after)
    _numbers(before, after)
    check_claim(log, before, after, command, events)
    rules, now = log.rules, before
    for event in events:
        then, now = now, rules.engine.evolve(now, event)
        kind = event.event
        if kind == "reserved":
            continue
        round_ = now.rounds[event.round]
        if kind in ("opened", "claimed"):
            _launch_is_not_older(now, round_)
        if kind == "claimed":
            member = round_.members[event.attempt]
            if member.seated:
                must(then.rounds[event.round].open, "S5 a process took a seat in an ended round")
                must(
                    member.join.launch == round_.launch and member.join.layout == round_.layout,
                    f"S5 round {round_.number} seats another start: {member.join.launch}",
                )
            continue
        if kind == "opened":
            continue
        was = then.rounds[event.round]
        if kind in ("serving", "departed", "retired"):
            _stands(then, was, command, event)
            continue
        if kind in ("suspected", "cleared") and was.ended == "SEALED":
            member = was.members[event.attempt]
            must(
                member.seated and member.kept, f"S5 {kind} was appended of one that does not serve"
            )
            must(member.departed is None, f"S5 {kind} was appended of one that had departed")
            continue
        must(was.open, f"S5 {kind} was appended to a round that had ended")
        must(was.number == before.last.number, f"S5 {kind} was appended to an older round")
        if hasattr(event, "attempt"):
            must(event.attempt in was.members, f"S5 {kind} by a process of another round")
            _is_current(now, was, event)
        if kind == "reported":
            must(was.members[event.attempt].seated, "S5 a report of a process without a seat")
            must(command.round == event.round, "S5 a report for another round was kept")
        if kind == "applied":
            _applied_is_true(was, command, event)
        if kind == "suspected":
            must(was.members[event.attempt].seated, "S5 a process without a seat is suspect")
        if kind == "objected" and event.cause.code == "rank_lost":
            suspect = was.members[event.attempt].suspect
            must(
                suspect and suspect == getattr(command, "connection", None),
                "S12 lost although the suspicion was cleared, or is of another session",
            )
        if kind == "decided":
            _decided(log, was, command, event)
        if kind == "ended":
            _ended(was, command, event)


def _frozen(before: Any, after: Any) -> None:
    for number, was in before.rounds.items():
        now = after.rounds.get(number)
        must(now is not None, "S6 a round is gone")
        if was.decision:
            must(now.decision == was.decision, "S1 a second decision of one round")
            must(now.verdict == was.verdict, "S1 an abort rewrote the verdict")
        if was.outcome or was.ended:
            must((now.outcome, now.ended) == (was.outcome, was.ended), "S2 an outcome changed")
            must(_proof(now) == _proof(was), "S2 what an outcome rests on changed")


def _proof(round_: Any) -> Key:
    built = {m.attempt: m.applied for m in round_.seated}
    return dict(round_.slots), dict(round_.sent), round_.causes, built


def _stands(engine: Any, was: Any, command: Any, event: Any) -> None:
    """What may come after the seal: words of its own members, and what was found of servers."""
    kind, said = event.event, type(command).__name__
    must(was.ended == "SEALED", f"S5 {kind} was appended to a round that is not sealed")
    if kind == "retired":
        must(said == "Retire" and command.round == was.number, "S5 retired without an order")
        return
    must(event.attempt in was.members, f"S5 {kind} of a process of another round")
    member = was.members[event.attempt]
    must(member.seated, f"S5 {kind} of a process without a seat")
    if said in ("Serve", "Leave"):
        own = (command.round, command.attempt) == (was.number, event.attempt)
        must(own, f"S5 {kind}, which it did not say of itself")
    if kind == "serving":
        must(said == "Serve", "S5 serving, which it did not say")
        _is_current(engine, was, event)
        return
    must(member.departed is None, "S5 one departed twice")
    match said:
        case "Leave":
            now = (_in_force(engine), engine.last.number)
            must(was.number in now, "S5 the leave of a round of the past was kept")
        case "Claim":
            ranks = engine.reservations[command.attempt].join.ranks
            must(set(ranks) & set(member.ranks), "S5 departed, and nobody wants its place")
        case "Lose":
            must(
                member.suspect and member.suspect == command.connection,
                "S12 departed although the suspicion was cleared, or is of another session",
            )
        case _:
            must(False, f"S5 departed by {said}")


def _in_force(engine: Any) -> int:
    """The number of the latest sealed round, if it was not retired."""
    sealed = [n for n, r in engine.rounds.items() if r.ended == "SEALED"]
    return max(sealed) if sealed and engine.rounds[max(sealed)].retired is None else 0


def check_floor(rules: Rules, engine: Any) -> None:
    """Dropping all but the latest round forgets nothing that the rules go by."""
    if len(engine.rounds) < 2 or not is_checked("S6"):
        return
    now = engine
    for event in rules.compaction(engine, 1):
        now = rules.engine.evolve(now, event)
    must(now.last == engine.last, "S6 a floor forgets the last round")
    must(now.in_force == engine.in_force, "S6 a floor forgets the round in force")
    must(now.rounds.items() <= engine.rounds.items(), "S6 a floor changes a round")
    for name in ("last_attempt", "left_runs", "reservations"):
        must(getattr(now, name) == getattr(engine, name), f"S6 a floor changes {name}")


def _numbers(before: Any, after: Any) -> None:
    must(after.last_attempt >= before.last_attempt, "S6 attempts went back")
    new = sorted(after.rounds.keys() - before.rounds.keys())
    first = max(before.rounds, default=0) + 1
    must(new == list(range(first, first + len(new))), f"S6 rounds {new} after {first - 1}")
    known = {a for r in before.rounds.values() for a in r.members} | set(before.reservations)
    given = after.reservations.keys() - before.reservations.keys()
    must(not given & known, "S6 an attempt was given out twice")
    must(all(a > before.last_attempt for a in given), "S6 an older attempt was given out")
    for number, round_ in after.rounds.items():
        earlier = {a for n, r in after.rounds.items() if n < number for a in r.members}
        must(not earlier & round_.members.keys(), "S5 one process takes part in two rounds")


def _launch_is_not_older(engine: Any, round_: Any) -> None:
    earlier = [r for r in engine.rounds.values() if r.number < round_.number]
    launch = round_.launch
    for r in earlier:
        if r.launch.run == launch.run:
            must(r.launch.restart <= launch.restart, "S5 an older restart opened a round")
            between = [x for x in earlier if x.number > r.number and x.launch.run != launch.run]
            must(not between, "S5 an earlier run opened a round")


def _is_current(engine: Any, round_: Any, event: Any) -> None:
    """Nothing of a process has effect once a newer one holds one of its slots.

    Newer is a later round's, or a higher attempt of its own run. A lower attempt of another run may
    have waited for that one to end.
    """
    me = round_.members[event.attempt]
    ranks, run = set(me.ranks), me.join.launch.run
    newer = [
        m
        for r in engine.rounds.values()
        for m in r.members.values()
        if m.seated and m.attempt != event.attempt and ranks & set(m.ranks)
        if r.number > round_.number or (m.join.launch.run == run and m.attempt > event.attempt)
    ]
    must(not newer, f"S5 {event.event} of a replaced process was kept")


def _applied_is_true(round_: Any, command: Any, event: Any) -> None:
    said, member = command.applied, round_.members[event.attempt]
    must(round_.verdict == "PASSED", "S7 applied before PASSED")
    must(said.digest == digest(round_.decision), "S7 applied with another digest was kept")
    decision = Decision(round_.decision)
    for rank in member.ranks:
        must(event.built == decision.entries(rank), "S7 applied with other entries was kept")


def _decided(log: Log, was: Any, command: Any, event: Any) -> None:
    must(not was.decision, "S1 a second decision of one round")
    decision = Decision(event.document.encode())
    if event.result == "FAILED":
        _causes_are_whole(was, decision, command)
        return
    must(not was.causes, "S3 PASSED over a cause")
    must(not isinstance(command, commands.Veto | commands.Leave), NO_IN_HAND)
    pages = []
    for rank in range(was.layout.world_size):
        must(rank in was.slots, f"S3 PASSED without rank {rank}")
        holder = was.members[was.slots[rank]]
        process = log.process_of(holder.join)
        must(holder.join.launch == was.launch, "S5 a decision over two starts")
        must(not holder.gone, f"S3 PASSED with rank {rank} gone")
        must(not holder.suspect, f"S3 PASSED while rank {rank} is suspect")
        mine = [log.report(process, extra)[rank] for extra in (0, 5)]
        must(was.sent.get(rank) in mine, f"S3 PASSED without a report of rank {rank}'s process")
        pages.append(was.sent[rank].kv_budget_bytes // ENTRY_BYTES)
    must(len({r.max_model_len for r in was.sent.values()}) == 1, "S3 PASSED over unequal inputs")
    for rank in range(was.layout.world_size):
        must(decision.entries(rank) == {"kv": min(pages)}, "S3 not the minimum of the reports")


NO_IN_HAND = "S3 the coordinator passed a round with a member's no in its hands"


def _causes_are_whole(was: Any, document: Any, command: Any) -> None:
    """Rule 8 and S4: the causes found, in order, then those of this command; none invented."""
    said = [(c["code"], c.get("rank")) for c in document.causes]
    kept = [(c.code, c.ranks[0] if c.ranks else None) for c in was.causes]
    must(said[: len(kept)] == kept, f"RULE8 the causes {kept} became {said}")
    found = said[len(kept) :]
    what, soft = getattr(command, "what", None), getattr(command, "soft", False)
    if what not in (None, "grace", "shortfall"):
        must(what == was.phase, f"RULE3 the budget {what} ended a round in {was.phase}")
    if what is not None and not was.verdict:
        certain = {r for r, report in was.sent.items() if report.kv_budget_bytes < ENTRY_BYTES}
        must(
            certain == {r for code, r in found if code == "does_not_fit"},
            f"RULE8 the reports of {certain} make failure certain, found was {found}",
        )
        must(what != "shortfall" or certain, "RULE3 a shortfall of nobody ended a round")
    must(what != "shortfall" or not kept, "RULE3 a shortfall ended another cause's grace")
    if type(command).__name__ == "Cancel":
        must(found == [("cancelled", None)], f"RULE8 cancelled for {found}")
    stuck = {r for code, r in found if code == "rank_stuck"}
    must(not soft or stuck, "RULE11 a soft end ended a round in which nobody is stuck")
    if stuck:
        signs = {r for r, sign in command.signs.items() if sign.stuck}
        must(stuck <= signs, f"RULE11 {stuck - signs} stuck although they move")
    blamed = stuck | {r for code, r in found if code == "ranks_missing"}
    heard = (
        was.sent.keys()
        if was.verdict is None
        else {r for m in was.seated if m.applied is not None for r in m.ranks}
    )
    late = blamed & set(heard)
    must(not late, f"S4 {late} missing or stuck although acknowledged")
    if was.phase == "gather":
        must(not blamed & was.slots.keys(), "S4 a claimed rank is missing in gather")
    lost = {r for code, r in found if code == "rank_lost"}
    for rank in lost:
        must(was.holder(rank).suspect, f"S12 rank {rank} lost by time and not suspect")
    if what in ("gather", "report", "apply") and not soft:
        must(blamed >= set(was.waiting_for), f"RULE11 of {was.waiting_for} only {blamed} blamed")


def _ended(was: Any, command: Any, event: Any) -> None:
    must(was.verdict == "PASSED", "S1 an outcome without PASSED")
    document = Decision(event.document.encode()).document
    must(document["decision_digest"] == digest(was.decision), "S2 an outcome of another decision")
    if event.result == "ABORTED":
        _causes_are_whole(was, _Outcome(document["causes"]), command)
        return
    must(not was.causes, "S7 SEALED over a cause")
    for rank in range(was.layout.world_size):
        member = was.members[was.slots[rank]]
        must(member.applied is not None, f"S7 SEALED and rank {rank} has not built")
        must(not member.gone and not member.suspect, f"S7 SEALED while rank {rank} is away")
        newer = [a for a, m in was.members.items() if a > member.attempt and rank in m.ranks]
        must(not newer, f"S7 SEALED and rank {rank} was replaced")
    must(type(command).__name__ not in ("Veto", "Leave"), NO_IN_HAND)


class _Outcome(NamedTuple):
    causes: list[dict[str, Any]]


def check_claim(log: Log, before: Any, after: Any, command: Any, events: tuple[Any, ...]) -> None:
    """Rule 7 as a table: what a first claim meets, and what must come of it."""
    if type(command).__name__ != "Claim" or before.round_of(command.attempt):
        return
    reserved, last = before.reservations.get(command.attempt), before.last
    if reserved is None:
        must(not events, "S5 a claim without a reservation had an effect")
        return
    wanted = _claim_table(before, reserved.join, command.watched)
    opened = [e.round for e in events if e.event == "opened"]
    seated = bool(events) and after.round_of(command.attempt).members[command.attempt].seated
    ended = bool(last and last.open and not after.rounds[last.number].open)
    new_cause = len(after.rounds[last.number].causes) > len(last.causes) if last else False
    got = (
        "refused"
        if not events
        else "replaces"
        if opened and ended
        else "opens"
        if opened
        else "takes"
        if seated and not new_cause
        else "fails"
        if new_cause
        else "late"
    )
    must(got == wanted, f"RULE7 a claim {got}, it should have been: {wanted}")
    if events:
        _lapse(before, after, reserved.join, command.attempt)
    if got == "opens" and last and last.ended == "SEALED" and reserved.join.launch == last.launch:
        left = [last.slots[r] for r in reserved.join.ranks if r in last.slots]
        gone = [after.rounds[last.number].members[a].departed for a in left]
        must(all(gone), "RULE7 who was replaced after the seal still stands")


def _lapse(before: Any, after: Any, join: Join, attempt: int) -> None:
    """What lapses with a claim: what was reserved earlier, by the same run, for its ranks."""
    lapsed = {
        a
        for a, r in before.reservations.items()
        if a < attempt
        and r.join.launch.run == join.launch.run
        and set(r.join.ranks) & set(join.ranks)
    }
    left = before.reservations.keys() - after.reservations.keys()
    must(left == lapsed | {attempt}, f"RULE7 with {attempt} lapsed {left}, not {lapsed}")


def _claim_table(engine: Any, join: Join, watched: Iterable[int]) -> str:
    last = engine.last
    if last is None:
        return "opens"
    same_run = join.launch.run == last.launch.run
    holders = [last.members[last.slots[r]] for r in join.ranks if r in last.slots]
    alive = _living(last, watched)
    next_ = "replaces" if last.open else "opens"
    if join.launch != last.launch:
        if same_run:
            return "refused" if join.launch.restart < last.launch.restart else next_
        if any(r.launch.run == join.launch.run for r in engine.rounds.values()):
            return "refused"
        if in_force := _in_force(engine):
            alive = alive | _living(engine.rounds[in_force], watched)
        return "refused" if alive else next_
    if last.ended == "FAILED" and not holders:
        here = any(set(m.ranks) & set(join.ranks) for m in last.members.values())
        return "opens" if here else "late"
    if last.ended == "SEALED" and (alive & {m.attempt for m in holders} if holders else alive):
        return "refused"
    if not last.open:
        return "opens"
    if join.layout != last.layout:
        return "fails"
    if not holders:
        return "takes"
    return "fails" if any(m.attempt in alive for m in holders) else "replaces"


def _living(round_: Any, watched: Iterable[int]) -> set[int]:
    """In an open round neither gone nor suspect; sealed: with a session, or serving."""
    if round_.open:
        return {m.attempt for m in round_.seated if not m.gone and not m.suspect}
    if round_.ended != "SEALED":
        return set()
    serve = {m.attempt for m in round_.seated if m.kept and not m.suspect and not m.departed}
    return serve | {m.attempt for m in round_.seated} & set(watched)


# --- the search ---------------------------------------------------------------------------------


class Scope:
    """A world: its first state, and what may happen next.

    State is a tuple; its first item is the log's. An action's label begins with its kind.
    """

    name = ""
    log: Log
    trying = ""  # the action whose effect is being worked out

    def first(self) -> tuple[Any, ...]:
        raise NotImplementedError

    def next(self, state: tuple[Any, ...]) -> Iterator[tuple[str, tuple[Any, ...]]]:
        raise NotImplementedError

    def livenesses(self) -> Iterable[Liveness]:
        return (
            Liveness(
                "L4 no outcome is reachable without an operator",
                lambda s: not self.is_over(s),
                self.is_over,
                lambda kind: kind != "cancel",
            ),
        )

    def is_over(self, state: tuple[Any, ...]) -> bool:
        last = self.log.last(state[0])
        return last is None or not last.open


class Liveness(NamedTuple):
    """From each state that `of` holds for, a state of `to` is reachable by actions of `by`."""

    what: str
    of: Callable[[tuple[Any, ...]], bool]
    to: Callable[[tuple[Any, ...]], bool]
    by: Callable[[str], bool] = lambda _: True


@dataclass
class Found:
    """What a search found: nothing, or a breach and the shortest way to it."""

    states: int
    logs: int
    edges: int
    seconds: float
    breach: str = ""
    trace: list[str] = field(default_factory=list)
    complete: bool = True

    def __str__(self) -> str:
        head = "holds" if not self.breach else f"BREACH {self.breach}"
        if not self.complete:
            head += " (not complete: stopped at the bound)"
        size = f"{self.states} states, {self.edges} steps, {self.logs} logs, {self.seconds:.1f} s"
        return "\n".join(
            [f"{head}; {size}", *(f"  {n + 1}. {a}" for n, a in enumerate(self.trace))]
        )


def explore(scope: Scope, *, only: Iterable[str] = (), bound: int = 3_000_000) -> Found:
    """Breadth first, so that what is found is found by a shortest trace.

    only: the properties to check, `S3` or `L4`; all of them if none is named.
    """
    global _only
    _only = frozenset(only) or None
    began = time.monotonic()
    start = scope.first()
    ids: dict[tuple[Any, ...], int] = {start: 0}
    parent: list[tuple[int, str]] = [(-1, "")]
    edges: list[tuple[int, int, str]] = []
    queue = deque([start])

    def path(at: int, *last: str) -> list[str]:
        back = list(last)
        while at > 0:
            at, action = parent[at]
            back.append(action)
        return back[::-1]

    def found(breach: str = "", trace: Sequence[str] = (), complete: bool = True) -> Found:
        spent = time.monotonic() - began
        logs = len(scope.log.engines)
        return Found(len(ids), logs, len(edges), spent, breach, list(trace), complete)

    while queue:
        state = queue.popleft()
        here = ids[state]
        try:
            for label, after in scope.next(state):
                if after == state:
                    continue
                there = ids.get(after)
                if there is None:
                    there = ids[after] = len(parent)
                    if there >= bound:
                        return found(complete=False)
                    parent.append((here, label))
                    queue.append(after)
                edges.append((here, there, label))
        except Breach as breach:
            return found(str(breach), path(here, scope.trying))
    states = list(ids)
    for liveness in filter(lambda li: is_checked(li.what), scope.livenesses()):
        stuck = _cannot_reach(states, edges, liveness)
        if stuck is not None:
            return found(liveness.what, path(stuck))
    return found()


def _cannot_reach(
    states: list[tuple[Any, ...]], edges: list[tuple[int, int, str]], liveness: Liveness
) -> int | None:
    back: list[list[int]] = [[] for _ in states]
    allowed: dict[str, bool] = {}
    for here, there, label in edges:
        kind = label.partition(" ")[0]
        if allowed.setdefault(kind, liveness.by(kind)):
            back[there].append(here)
    stack = [i for i, s in enumerate(states) if liveness.to(s)]
    reaches = bytearray(len(states))
    for i in stack:
        reaches[i] = 1
    while stack:
        for i in back[stack.pop()]:
            if not reaches[i]:
                reaches[i] = 1
                stack.append(i)
    return next((i for i, s in enumerate(states) if not reaches[i] and liveness.of(s)), None)
