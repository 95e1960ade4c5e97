"""No start makes a log entry or a decision that is too long to be kept, whatever it sends."""

from __future__ import annotations

import time

import pytest

from coordinator.commands import Mark, Submit
from coordinator.compaction import compaction
from coordinator.engine import Engine, evolve_entry
from coordinator.events import MAX_ENTRY_BYTES, Entry, Reserved, Touch, entry_from, entry_of
from coordinator.verdict import MAX_DECISION_BYTES
from kvaccord import Layout, Report, page, state
from kvaccord.errors import TooLarge
from kvaccord.layout import Groups
from tests.builders import Log, Process, a_join, a_report
from tests.wire import KV, Worker, an_engine

GIB = 2**30
RANKS = range(1024)
LONG = "x" * 63  # a class's name has one letter more
WORST_HOST = "h" * 250
CONTROL = "\x01"  # six bytes in JSON, seven in the entry that holds the JSON


def bytes_kept(log: Log) -> int:
    return max(map(len, log.entries))


def a_large_report(rank: int, *, states: int, name: str, differs: bool) -> Report:
    """Other bytes on every rank, and where it differs other bytes of every entry too."""
    budget = 133_756_019_016 + rank * 7_919_000
    more = rank if differs else 0
    return Report(
        free_bytes=budget + 30 * GIB,
        kv_budget_bytes=budget,
        max_num_seqs=512,
        classes=[
            page("kv", 1_399_040 + more),
            *(state(f"{name}{n:X}", 25_296 + n + more, entries_per_req=1) for n in range(states)),
        ],
        capacities={"host": budget},
    )


def reported(layout: Layout, host: str, **report: object) -> Log:
    log = Log()
    processes = [log.claimed(r, layout=layout, host=f"{host}{r // 8:04}") for r in RANKS]
    for rank, process in zip(RANKS, processes, strict=True):
        process.reports(a_large_report(rank, **report))  # type: ignore[arg-type]
    return log


@pytest.mark.parametrize("layout", [Layout(dp=1024), Layout(dp=128, pp=8)], ids=str)
def test_the_largest_world_with_8_classes_has_a_plan(layout):
    log = reported(layout, "prefill-worker-cluster-local-", states=7, name="s", differs=False)
    assert log.decision.code == "agreed"
    assert len(log.round.decision) <= MAX_DECISION_BYTES
    assert bytes_kept(log) <= MAX_ENTRY_BYTES


@pytest.mark.parametrize("layout", [Layout(dp=1024), Layout(pp=1024)], ids=str)
def test_a_plan_that_no_decision_holds_fails_its_start(layout):
    log = reported(layout, WORST_HOST, states=31, name=LONG[1:], differs=True)
    decision = log.decision
    assert (decision.result, decision.code) == ("FAILED", "plan_too_large")
    assert not decision.retryable
    assert "shorter names" in decision.message
    assert "plan" not in decision.document
    assert len(log.round.decision) <= MAX_DECISION_BYTES
    assert bytes_kept(log) <= MAX_ENTRY_BYTES
    assert log.replayed() == log.engine


def test_the_longest_failure_of_reports_is_kept():
    # All that a planner can say at once: keys, values and ranks differ, and every warning is due.
    log = Log()
    layout = Layout(dp=8, tp=128)
    processes = [log.claimed(r, layout=layout, host=f"{WORST_HOST}{r}") for r in RANKS]
    for rank, process in zip(RANKS, processes, strict=True):
        said = {f"{'k' * 120}{n}": CONTROL * 120 + str(rank % 9) for n in range(50)}
        budget = 10 * GIB * (1 + rank % 7)
        report = Report(
            free_bytes=40 * GIB + budget,
            kv_budget_bytes=budget,
            initial_free_bytes=30 * GIB,
            max_num_seqs=1 + rank % 9,
            local_count=1 + rank % 3,
            inputs=said,
            inputs_stage=said,
            classes=[page("kv", 1000, multiple_of=1 + rank % 2), state(LONG, 7)],
        )
        spent_s = 0 if rank < 600 else 100 + rank
        log.do(Submit(1, process.attempt, {rank: report}, {}, spent_s=spent_s))
    codes = {w["code"] for w in log.decision.document["verdict"]["warnings"]}
    assert codes >= {"imbalanced", "device_shared", "memory_moved", "slow_rank"}
    assert log.decision.code == "inputs_disagree"
    assert len(log.round.decision) <= MAX_DECISION_BYTES
    assert bytes_kept(log) <= MAX_ENTRY_BYTES


def test_the_longest_failure_of_processes_is_kept():
    log = Log()
    processes = [log.claimed(r, layout=Layout(tp=1024), host=f"{WORST_HOST}{r}") for r in RANKS]
    for process in processes:
        process.vetoes(CONTROL * 2048, trace=CONTROL * 6144)
    log.spends("grace")
    assert log.decision.code == "rank_vetoed"
    assert len(log.round.decision) <= MAX_DECISION_BYTES
    assert bytes_kept(log) <= MAX_ENTRY_BYTES


def test_a_claim_that_differs_in_every_input_and_group_is_kept():
    log = Log()
    layout, said = Layout(tp=1024), {f"{'k' * 120}{n:03}": CONTROL * 100 for n in range(70)}
    first, rest = range(512), range(512, 1024)
    groups = {r: Groups(budget=f"{LONG[4:]}{r:03}", scheduler=LONG) for r in first}
    log.claimed(*first, layout=layout, inputs=said, groups=groups, host=WORST_HOST)
    groups = {r: Groups(budget=f"{LONG[4:]}{r - 512:03}", scheduler=LONG + "y") for r in rest}
    said = {key: f"{value}!" for key, value in said.items()}
    log.claimed(*rest, layout=layout, inputs=said, groups=groups, host=WORST_HOST)
    assert len(log.round.causes) == 2 * 33, "32 keys and one line for the others, of both"
    assert bytes_kept(log) <= MAX_ENTRY_BYTES


def test_the_faults_of_a_decision_are_bounded():
    log = Log()
    process = log.claimed(*RANKS, layout=Layout(tp=1024))
    for n in range(100):
        touch = Touch(rule=f"fault-{n:08}", kind="delay", call="phase", ranks=tuple(RANKS))
        log.do(Mark(process.attempt, (touch,)))
    process.vetoes("no")
    log.spends("grace")
    assert len(log.decision.document["faults"]) == 16
    assert log.decision.document["more_faults"] == 84
    assert len(log.round.decision) <= MAX_DECISION_BYTES


# --- at the bound -------------------------------------------------------------------------------


def many_reports() -> tuple[Log, Process, Report]:
    """One process of 1,024 ranks; together their reports are longer than an entry."""
    log = Log()
    process = log.claimed(*RANKS, layout=Layout(tp=1024))
    classes = [page("kv", 1000), *(state(f"s{n}", 1, entries_per_req=1) for n in range(12))]
    return log, process, a_report(classes=classes, max_num_seqs=1)


def test_reports_that_no_entry_holds_are_refused_and_nothing_is_kept():
    log, process, report = many_reports()
    before, n = log.engine, len(log.entries)
    with pytest.raises(TooLarge, match="let several processes report"):
        process.reports(report)
    assert (log.engine, len(log.entries)) == (before, n)


def test_who_was_refused_for_its_size_says_no_and_the_start_ends():
    log, process, report = many_reports()
    with pytest.raises(TooLarge) as refused:
        process.reports(report)
    process.vetoes(str(refused.value))
    log.spends("grace")
    assert log.decision.code == "rank_vetoed"


def test_over_the_wire_it_is_a_refusal_that_says_what_to_do(url: str):
    worker = Worker(url, an_engine(), *RANKS, tp=1024).enter()
    states = [{"kind": "state", "name": f"s{n}", "entry_bytes": 1} for n in range(12)]
    refused = worker.report(classes=[*KV, *states], max_num_seqs=1)
    assert (refused.status_code, refused.json()["code"]) == (413, "too_large")
    assert "let several processes report a part of the ranks each" in refused.json()["detail"]
    worker.veto(refused.json()["detail"])
    time.sleep(1)  # its grace
    assert worker.decision().json()["verdict"]["code"] == "rank_vetoed"


@pytest.mark.parametrize("over", [0, 1])
def test_an_entry_may_be_as_long_as_the_limit_and_no_longer(over):
    def reserved(length: int) -> Reserved:
        join = a_join(0).model_copy(update={"engine_version": "v" * length})
        return Reserved(attempt=1, join=join)

    around = len(Entry(events=(reserved(0),)).body)
    event = reserved(MAX_ENTRY_BYTES - around + over)
    if over:
        with pytest.raises(TooLarge):
            entry_of([event])
    else:
        assert len(entry_of([event]).body) == MAX_ENTRY_BYTES


# --- retention ----------------------------------------------------------------------------------


def test_a_large_round_and_all_reservations_are_kept_in_entries_within_the_limit():
    log = Log()
    log.claimed(0, layout=Layout(tp=2))
    log.spends("gather")  # a round that will be old
    for process in [log.claimed(r, layout=Layout(tp=1024), host=f"{WORST_HOST}{r}") for r in RANKS]:
        process.reports(a_large_report(process.attempt, states=7, name=LONG, differs=False))
        process.vetoes(CONTROL * 2048, trace=CONTROL * 6144)
    log.spends("grace")
    for rank in RANKS:
        log.joined(a_join(rank, layout=Layout(tp=1024), host=WORST_HOST))
    entries = [entry_of([event]).body for event in compaction(log.engine, 1)]
    assert sum(map(len, entries)) > 4 * MAX_ENTRY_BYTES, "it would not fit into one"
    started = Engine(log.engine.name, log.engine.store_id)
    for body in entries:
        started = evolve_entry(started, entry_from(body).events)
    assert started.rounds == {2: log.round}
    assert started.reservations == log.engine.reservations
    assert started.last_attempt == log.engine.last_attempt
