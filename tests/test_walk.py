"""Random walks through the rules: whatever is said, in whatever order, what must hold holds.

A walk is a function of its seed. Each step is one command, true or false, in time or too late;
after each the log is read back and design section 9 is checked against a ledger that this file
keeps itself.
"""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from coordinator.cell import Cell
from coordinator.commands import (
    Apply,
    Claim,
    Clear,
    Command,
    Leave,
    Lose,
    Reserve,
    Spend,
    Submit,
    Suspect,
    Veto,
)
from coordinator.engine import Engine
from coordinator.events import (
    Applied,
    Claimed,
    Cleared,
    Decided,
    Departed,
    Ended,
    Entry,
    Event,
    Objected,
    Opened,
    Reserved,
    Suspected,
    Touch,
    Touched,
    entry_from,
)
from coordinator.policy import Policy
from coordinator.round import decide
from coordinator.views import budget_row
from kvaccord import Layout, Report, messages, page, state
from kvaccord.canonical import digest
from kvaccord.errors import Refused, Superseded
from kvaccord.messages import BuildFailed, Join
from tests.builders import Log, a_join, a_launch, is_canonical

LAYOUTS = [
    Layout(tp=2),
    Layout(tp=3),
    Layout(pp=2),
    Layout(dp=2),
    Layout(dp=2, equal_over=("dp",)),
    Layout(dp=2, pcp=2),
]
CHAOS = [
    *("join", "claim", "claim", "submit", "submit", "veto", "leave", "apply", "apply"),
    *("suspect", "suspect", "suspect", "clear", "lose", "lose", "lose", "spend", "spend", "lie"),
    *("replace", "replace", "take over"),
]
STEPS = 70

FAILED = {
    *("reserve_exceeds_free", "no_free_memory", "request_exceeds_free", "does_not_fit"),
    *("state_floor_exceeds_budget", "inputs_disagree", "implausible_report", "rank_vetoed"),
    *("rank_left", "rank_lost", "rank_replaced", "duplicate_rank", "ranks_missing", "superseded"),
}
ABORTED = {
    *("apply_failed", "applied_differently", "duplicate_rank", "rank_left", "rank_lost"),
    *("rank_replaced", "ranks_missing", "superseded"),
}


@dataclass(frozen=True)
class Start:
    """What a launcher starts: a run, how often it was started before, and a layout."""

    run: str
    restart: int
    layout: Layout


@dataclass
class Process:
    start: Start
    join: Join
    attempt: int = 0  # 0: it has not joined
    round: int = 0  # 0: it has not claimed
    said: dict[int, Report] | None = None  # the report that was acknowledged
    built: bool = False  # the right pools, acknowledged
    sessions: int = 0

    @property
    def session(self) -> str:
        return f"{self.attempt}/{self.sessions}"


@dataclass
class Ledger:
    """What was told to anyone, kept apart from the engine's own state."""

    attempts: dict[int, Process] = field(default_factory=dict)
    opened: dict[int, Start] = field(default_factory=dict)
    frozen: dict[tuple[int, str], str] = field(default_factory=dict)
    heard: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))  # by round
    objected: Counter[int] = field(default_factory=Counter)
    objected_after: Counter[int] = field(default_factory=Counter)
    newest: Counter[int] = field(default_factory=Counter)  # the last attempt claimed, by rank
    holders: dict[tuple[int, int], int] = field(default_factory=dict)  # by round and rank
    suspects: dict[int, str] = field(default_factory=dict)  # attempt -> session, as logged
    touches: dict[int, list[Touch]] = field(default_factory=lambda: defaultdict(list))


class Walk:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.log = Log()
        self.cell = Cell(self.log.engine.name, self.log.engine.store_id)
        self.told = Ledger()
        self.starts = [Start("run-0", 0, self.rng.choice(LAYOUTS))]
        self.processes: list[Process] = []
        self.trail: list[Command] = []

    # --- what happens ---------------------------------------------------------------------------

    def run(self) -> Walk:
        for _ in range(STEPS):
            for command in self.helpful() if self.rng.random() < 0.6 else self.chaotic():
                self.carry_out(command)
        self.wind_down()
        assert self.log.replayed() == self.log.engine
        return self

    def helpful(self) -> Iterator[Command]:
        """The step that the open round, or the next one, waits for."""
        last = self.log.engine.last
        if last is None or not last.open:
            yield from self.enter(self.starts[-1])
        elif last.causes and self.rng.random() < 0.5:
            yield Spend(last.number, "grace")
        elif last.suspects and self.rng.random() < 0.5:
            yield Clear(last.number, self.rng.choice(last.suspects).attempt)
        elif last.phase == "gather":
            yield from self.enter(self.told.opened[last.number], self.rng.choice(last.waiting_for))
        elif last.waiting_for:
            holder = last.holder(self.rng.choice(last.waiting_for))
            assert holder is not None
            process = self.told.attempts[holder.attempt]
            yield self.a_submit(process) if last.phase == "report" else self.a_true_apply(process)

    def enter(self, start: Start, rank: int | None = None) -> Iterator[Command]:
        process = self.a_process(start, rank)
        yield Reserve(process.join)
        yield self.a_claim(process)

    def chaotic(self) -> Iterator[Command]:
        rng = self.rng
        known = [p for p in self.processes if p.attempt]
        if not known or rng.random() < 0.15:
            if rng.random() < 0.3:
                self.starts.append(self.another_start())
            process = self.a_process(rng.choice(self.starts[rng.choice([-1, -3, 0]) :]))
            yield Reserve(process.join)
            return
        process, last, what = rng.choice(known[-8:]), self.log.engine.last, rng.choice(CHAOS)
        if last and last.suspects and rng.random() < 0.5:
            process = self.told.attempts[rng.choice(last.suspects).attempt]
            what = rng.choice(["lose", "lose", "suspect", "replace", what])
        round_ = process.round if rng.random() < 0.9 else rng.randint(1, 4)
        match what:
            case "join":
                yield Reserve(process.join)
            case "claim":
                yield self.a_claim(process)
            case "submit":
                yield replace(self.a_submit(process), round=round_)
            case "veto":
                rank = rng.choice(process.join.ranks)
                no = messages.Veto(rank=rank, text=rng.choice(["no", "ö\n\x00", "x" * 3000]))
                yield Veto(round_, process.attempt, no, self.touches(process, "veto"))
            case "leave":
                yield Leave(round_, process.attempt, messages.Leave(reason="preempted"))
            case "apply":
                yield (
                    self.a_true_apply(process)
                    if rng.random() < 0.5
                    else self.a_false_apply(process)
                )
            case "suspect":
                process.sessions += 1
                yield Suspect(round_, process.attempt, process.session)
            case "clear":
                yield Clear(round_, process.attempt)
            case "lose":
                sessions = process.sessions - (rng.random() < 0.2)
                yield Lose(process.round, process.attempt, f"{process.attempt}/{sessions}", 1.0)
            case "replace":
                yield from self.enter(process.start, process.join.ranks[0])
            case "take over":
                latest = self.starts[-1]
                self.starts.append(replace(latest, restart=latest.restart + 1))
                yield from self.enter(self.starts[-1])
            case "spend":
                yield Spend(round_, rng.choice(["gather", "report", "apply", "grace"]))
            case "lie":  # with an attempt number that it was not given
                yield Clear(round_, process.attempt + 50)
                yield Claim(process.attempt + 50, Policy())

    def wind_down(self) -> None:
        """From wherever it stands, the round comes to its end (L4)."""
        last = self.log.engine.last
        while last and last.open:
            what = "grace" if last.causes else last.phase
            assert what is not None
            assert self.carry_out(Spend(last.number, what)) != ()
            last = self.log.engine.last

    # --- builders -------------------------------------------------------------------------------

    def another_start(self) -> Start:
        latest = self.starts[-1]
        run, restart = latest.run, latest.restart
        layout = self.rng.choice(LAYOUTS) if self.rng.random() < 0.3 else latest.layout
        match self.rng.choice(["again", "again", "other", "older"]):
            case "again":
                return Start(run, restart + 1, layout)
            case "other":
                return Start(f"run-{len(self.starts)}", 0, layout)
        older = self.rng.choice(self.starts)
        return Start(older.run, max(0, older.restart - 1), layout)

    def a_process(self, start: Start, rank: int | None = None) -> Process:
        rng, layout = self.rng, start.layout
        if rng.random() < 0.02:
            layout = rng.choice(LAYOUTS)
        if rank is None or rank >= layout.world_size:
            rank = rng.randrange(layout.world_size)
        ranks = [rank]
        if rng.random() < 0.1:
            ranks.append((rank + 1) % layout.world_size)
        process = Process(
            start,
            a_join(
                *ranks,
                layout=layout,
                launch=a_launch(start.run, start.restart),
                nonce=f"nonce-{len(self.processes):06}",
                host=f"host-{len(self.processes)}",
                inputs={"dtype": "fp8" if rng.random() < 0.01 else "bf16"},
            ),
        )
        self.processes.append(process)
        return process

    def a_claim(self, process: Process) -> Claim:
        watched = frozenset(
            p.attempt for p in self.processes if p.attempt and self.rng.random() < 0.3
        )
        touched = self.touches(process, "claim")
        return Claim(process.attempt, Policy(), watched, touched)

    def a_submit(self, process: Process) -> Submit:
        if process.said and self.rng.random() < 0.7:
            reports = process.said
        else:
            reports = {rank: self.a_report() for rank in process.join.ranks}
        planned, touched = {}, ()
        if self.rng.random() < 0.1:
            rank = process.join.ranks[0]
            less = reports[rank].free_bytes // 2
            planned[rank] = reports[rank].model_copy(update={"free_bytes": less})
            touched = (self.a_touch("report", (rank,)),)
        return Submit(process.round, process.attempt, reports, planned, touched)

    def a_report(self) -> Report:
        roll = self.rng.random()
        pages = 1 if roll < 0.03 else self.rng.randint(40, 99)
        return Report(
            free_bytes=pages * 1000 + 5000,
            kv_budget_bytes=pages * 1000 + 700,
            max_num_seqs=4 if roll > 0.02 else 5,
            classes=[
                page("kv", self.rng.choice([900, 1000]), min_entries=3),
                state("slot", 100, entries_per_req=1),
            ],
        )

    def decision_of(self, process: Process) -> bytes:
        round_ = self.log.engine.rounds.get(process.round)
        return round_.decision if round_ else b""

    def entries_of(self, process: Process) -> dict[str, int]:
        plan = json.loads(self.decision_of(process) or "{}").get("plan", {"schedulers": []})
        for row in plan["schedulers"]:
            if process.join.ranks[0] in row["ranks"]:
                return dict(row["entries"])
        return {}

    def a_true_apply(self, process: Process) -> Apply:
        said = messages.Applied(
            digest=digest(self.decision_of(process)), built=self.entries_of(process)
        )
        return Apply(process.round, process.attempt, said, self.touches(process, "applied"))

    def a_false_apply(self, process: Process) -> Apply:
        right = digest(self.decision_of(process))
        said = self.rng.choice(
            [
                messages.Applied(digest=digest(b"other"), built=self.entries_of(process)),
                messages.Applied(digest=right, built={"kv": 1}),
                messages.Applied(digest=right, failed=BuildFailed(text="hipMalloc")),
            ]
        )
        return Apply(process.round, process.attempt, said)

    def touches(self, process: Process, call: str) -> tuple[Touch, ...]:
        return (self.a_touch(call, process.join.ranks),) if self.rng.random() < 0.05 else ()

    def a_touch(self, call: str, ranks: tuple[int, ...]) -> Touch:
        rule = f"fault-{self.rng.randint(1, 3)}"
        return Touch(rule=rule, kind="delay", call=call, ranks=ranks)

    # --- carrying out, and the checks -----------------------------------------------------------

    def carry_out(self, command: Command) -> tuple[Event, ...]:
        self.trail.append(command)
        before = self.log.engine
        try:
            events = self.log.do(command)
        except Refused as error:
            refused = error
        else:
            refused = None
        if refused:
            assert self.log.engine is before
            assert refused.detail
            if isinstance(command, Claim) and isinstance(refused, Superseded):
                self.starts.append(replace(self.starts[-1], restart=self.starts[-1].restart + 1))
            return ()
        if events:
            assert decide(before, command) == events, "the same question, the same answer"
            entry = entry_from(self.log.entries[-1])
            assert entry == Entry(events=events), "what is read is what was written"
            self.cell.add(entry.events)
            assert self.cell.engine == self.log.engine
        self.note(command, events, before)
        self.check_attempts(events)
        self.check_no_effect_from_elsewhere(command, events)
        self.check_rounds()
        self.check_settled()
        budget_row(self.log.engine)
        assert decide(self.log.engine, command) == (), "said twice is said once"
        return events

    def note(self, command: Command, events: tuple[Event, ...], before: Engine) -> None:
        """What the sender was told, and what the log said."""
        told = self.told
        for event in events:
            match event:
                case Reserved():
                    process = self.by_nonce(event.join.nonce)
                    assert event.attempt not in told.attempts
                    process.attempt = event.attempt
                    told.attempts[event.attempt] = process
                case Opened():
                    assert isinstance(command, Claim)
                    self.check_opening(event, command.watched, before)
                case Claimed():
                    process = told.attempts[event.attempt]
                    assert process.round == 0, "one process, one round"
                    process.round = event.round
                    self.check_claim(process, before)
                    if event.round not in told.opened:
                        told.opened[event.round] = process.start
                case Objected():
                    told.objected[event.round] += 1
                    if self.log.engine.rounds[event.round].verdict:
                        told.objected_after[event.round] += 1
                    if event.cause.code == "rank_lost":
                        assert isinstance(command, Lose)
                        assert told.suspects[event.attempt] == command.connection  # S12
                case Suspected():
                    told.suspects[event.attempt] = event.connection
                case Cleared():
                    told.suspects.pop(event.attempt)
                case Touched():
                    told.touches[event.round] += event.touches
                case Decided():
                    self.check_decision(event)
                    self.check_time(command, event.round)
                case Ended():
                    self.check_outcome(event)
                    self.check_time(command, event.round)
                case Applied():
                    assert isinstance(command, Apply)
                    assert command.applied.built == event.built
            if isinstance(event, Decided | Ended):
                key = (event.round, event.event)
                assert key not in told.frozen, "one decision, one outcome (S1)"
                told.frozen[key] = event.document
        if isinstance(command, Submit | Apply):
            process = told.attempts[command.attempt]
            if isinstance(command, Submit):
                process.said = dict(command.reports)
                told.heard[command.round].update(command.reports)
            elif command.applied.built == self.entries_of(process) != {}:
                process.built = True

    def by_nonce(self, nonce: str) -> Process:
        return next(p for p in self.processes if p.join.nonce == nonce)

    def check_attempts(self, events: tuple[Event, ...]) -> None:
        """S6: rounds and attempts never go back."""
        engine = self.log.engine
        assert engine.last_attempt == max(self.told.attempts, default=0)
        assert sorted(engine.rounds) == list(range(1, len(engine.rounds) + 1))
        for event in events:
            if isinstance(event, Reserved):
                assert event.attempt == engine.last_attempt

    def check_time(self, command: Command, number: int) -> None:
        """A budget ends a round that has no cause, a grace one that has."""
        if isinstance(command, Spend):
            assert (command.what == "grace") == (self.told.objected[number] > 0)

    def check_claim(self, process: Process, before: Engine) -> None:
        """Of two processes of a rank the older never comes after the newer."""
        for rank in process.join.ranks:
            assert process.attempt > self.told.newest[rank]
            self.told.newest[rank] = process.attempt
        earlier = before.rounds.get(process.round)
        if earlier and earlier.ended:  # a late member of a start that failed
            assert earlier.ended == "FAILED"
            assert self.told.opened[process.round].run == process.start.run
            assert self.told.opened[process.round].restart == process.start.restart
            for other in self.processes:
                if other.round == process.round and other is not process:
                    assert set(other.join.ranks).isdisjoint(process.join.ranks)

    def check_opening(self, event: Opened, watched: frozenset[int], before: Engine) -> None:
        assert event.round == max(self.told.opened, default=0) + 1
        assert all(not r.open for n, r in self.log.engine.rounds.items() if n < event.round)
        launches = [(s.run, s.restart) for s in self.told.opened.values()]
        if launches:
            run, restart = launches[-1]
            if event.launch.run == run:
                assert event.launch.restart >= restart
            else:
                assert event.launch.run not in [run for run, _ in launches]
                assert before.last is not None
                if before.last.open:
                    assert all(m.gone or m.suspect for m in before.last.seated)
                elif before.last.ended == "SEALED":
                    assert not {m.attempt for m in before.last.seated} & watched

    def check_no_effect_from_elsewhere(self, command: Command, events: tuple[Event, ...]) -> None:
        """S5: only what belongs to the open round changes anything, apart from claims."""
        if isinstance(command, Reserve | Claim):
            return
        last = self.log.engine.last
        for event in events:
            assert not isinstance(event, Reserved | Opened | Claimed)
            assert last is not None
            if isinstance(event, Departed):  # what is in force may be older than what is open
                standing = {r.number for r in (self.log.engine.in_force, last) if r}
                assert event.round == command.round
                assert event.round in standing
                continue
            assert event.round == last.number == command.round
            if not isinstance(command, Spend):
                assert self.told.attempts[command.attempt].round == last.number

    def check_rounds(self) -> None:
        for number, round_ in self.log.engine.rounds.items():
            decided = self.told.frozen.get((number, "decided"), "")
            ended = self.told.frozen.get((number, "ended"), "")
            assert round_.decision == decided.encode()  # S2
            assert round_.outcome == ended.encode()
            assert bool(round_.verdict) == bool(decided)
            assert (round_.ended in ("SEALED", "ABORTED")) == bool(ended)
            start = self.told.opened[number]
            for rank, attempt in round_.slots.items():
                holder = self.told.attempts[attempt]
                assert (holder.start.run, holder.start.restart) == (start.run, start.restart)  # S5
                assert holder.join.layout == round_.layout
                assert rank in holder.join.ranks
                assert self.told.holders.setdefault((number, rank), attempt) == attempt
        assert sum(r.open for r in self.log.engine.rounds.values()) <= 1

    def check_settled(self) -> None:
        """Whoever could be answered is: nothing waits for nobody."""
        last = self.log.engine.last
        if last and last.open and not last.causes and not last.suspects:
            assert last.waiting_for

    def check_decision(self, event: Decided) -> None:
        document = json.loads(event.document)
        assert is_canonical(event.document.encode())
        round_ = self.log.engine.rounds[event.round]
        verdict = document["verdict"]
        assert document["round"] == event.round
        assert verdict["outcome"] == event.result
        self.check_faults(document, event.round)
        if event.result == "FAILED":
            assert verdict["causes"]
            assert verdict["code"] == verdict["causes"][0]["code"]
            assert not set(verdict["not_heard"]) & set(verdict["ranks"])
            missing = {c["rank"] for c in verdict["causes"] if c["code"] == "ranks_missing"}
            assert not missing & self.told.heard[event.round]  # S4
            assert not set(verdict["not_heard"]) & round_.sent.keys()
            assert {c["code"] for c in verdict["causes"]} <= FAILED
            for cause in verdict["causes"]:
                if cause.get("host") and cause["rank"] in round_.slots:
                    said_by = {
                        p.join.host
                        for p in self.processes
                        if p.round == event.round and cause["rank"] in p.join.ranks
                    }
                    newcomer = cause["code"] in ("rank_replaced", "duplicate_rank")
                    assert newcomer or cause["host"] in said_by
            return
        # S3
        assert self.told.objected[event.round] == 0
        assert not round_.suspects
        reports = {}
        for rank in range(round_.layout.world_size):
            holder = self.told.attempts[round_.slots[rank]]
            assert holder.round == event.round
            reports[rank] = round_.planned[rank]
            assert round_.sent[rank] == (holder.said or {}).get(rank, round_.sent[rank])
        self.check_plan(document["plan"], round_.layout, reports)

    def check_plan(self, plan: dict[str, Any], layout: Layout, reports: dict[int, Report]) -> None:
        def room(rank: int) -> int:
            report = reports[rank]
            kv, slot = report.classes
            offered = min(report.free_bytes, report.kv_budget_bytes)
            return (offered - slot.entry_bytes * report.max_num_seqs) // kv.entry_bytes

        assert [r for row in plan["schedulers"] for r in row["ranks"]] == sorted(reports)
        for row in plan["schedulers"]:
            ranks = sorted(reports) if layout.equal_over else row["ranks"]
            least = min(map(room, ranks))
            assert row["entries"] == {"kv": least, "slot": 4}
            tight = [r for r in ranks if room(r) == least]
            here = [r for r in tight if r in row["ranks"]]
            assert row["binding"]["kv"]["ranks"] == (here or tight[:1])
            for share in row["by_rank"]:
                report = reports[share["rank"]]
                kv, slot = report.classes
                reserved = least * kv.entry_bytes + 4 * slot.entry_bytes
                assert reserved <= min(report.kv_budget_bytes, report.free_bytes)
                offered = min(report.kv_budget_bytes, report.free_bytes)
                assert share["stranded_bytes"] == offered - reserved

    def check_outcome(self, event: Ended) -> None:
        document = json.loads(event.document)
        assert is_canonical(event.document.encode())
        round_ = self.log.engine.rounds[event.round]
        assert round_.verdict == "PASSED"
        assert document["decision_digest"] == digest(round_.decision)
        assert document["outcome"] == event.result
        self.check_faults(document, event.round)
        if event.result == "SEALED":
            assert self.told.objected_after[event.round] == 0  # S7
            assert not round_.suspects
            for attempt in round_.slots.values():
                process = self.told.attempts[attempt]
                assert process.built or process.attempt == self.trail[-1].attempt
            assert document["code"] == "sealed"
        else:
            assert {c["code"] for c in document["causes"]} <= ABORTED
            missing = {c["rank"] for c in document["causes"] if c["code"] == "ranks_missing"}
            assert all(not self.told.attempts[round_.slots[rank]].built for rank in missing)

    def check_faults(self, document: dict[str, Any], number: int) -> None:
        """S11: what a rule touched says so."""
        touched = {(t.rule, t.call) for t in self.told.touches[number]}
        assert {(f["id"], f["call"]) for f in document["faults"]} == touched


@pytest.mark.parametrize("seeds", [range(n, n + 20) for n in range(0, 160, 20)], ids=str)
def test_what_must_hold_holds_on_every_step(seeds):
    for seed in seeds:
        walk = Walk(seed)
        try:
            walk.run()
        except Exception as error:
            error.add_note(f"seed {seed}, step {len(walk.trail)}: {walk.trail[-1]}")
            raise


def test_the_walks_get_somewhere():
    # A walk that never seals would find nothing.
    states = Counter(
        round_.state for seed in range(40) for round_ in Walk(seed).run().log.engine.rounds.values()
    )
    assert min(states[s] for s in ("FAILED", "SEALED", "ABORTED")) >= 20


def test_a_walk_is_a_function_of_its_seed():
    assert Walk(3).run().log.entries == Walk(3).run().log.entries
