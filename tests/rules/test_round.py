"""A round, told as a story over the log of one engine: how it goes well, what it leaves behind."""

import pytest

from coordinator.commands import Submit
from coordinator.events import Claimed, Decided, Ended, Objected, Opened, Reported
from kvaccord import Layout, page, state
from kvaccord.errors import EngineNameInUse
from tests.builders import Log, a_join, a_launch, a_report, blamed, is_canonical

# --- a start that goes well ---------------------------------------------------------------------


def test_a_healthy_start_is_sealed(log):
    a, b = log.start(2)
    assert log.round.state == "REPORTING"
    a.reports(90)
    assert log.round.waiting_for == [1]
    b.reports(70)
    assert log.round.state == "PASSED"
    assert (log.decision.code, log.decision.passed) == ("agreed", True)
    assert log.decision.entries(0) == log.decision.entries(1) == {"kv": 70}
    a.applies()
    assert log.round.state == "PASSED"
    b.applies()
    assert log.round.state == "SEALED"
    assert (log.outcome.result, log.outcome.code) == ("SEALED", "sealed")
    assert log.outcome.document["decision_digest"] == log.decision.digest
    assert log.engine.in_force == log.round


def test_joining_opens_nothing(log):
    log.joined(a_join(0, layout=Layout(tp=2)))
    assert log.engine.last is None


def test_the_first_claim_opens_the_round_and_binds_its_terms(log):
    layout = Layout(dp=1, pcp=2)
    a = log.joined(a_join(1, layout=layout, launch=a_launch("run-7", 3)))
    opened, claimed = a.claims()
    assert isinstance(opened, Opened)
    assert isinstance(claimed, Claimed)
    assert (opened.round, opened.launch.run, opened.layout) == (1, "run-7", layout)
    assert log.round.state == "GATHERING"


def test_a_rank_may_report_before_the_others_claimed(log):
    a = log.claimed(0, layout=Layout(tp=2))
    a.reports(90)
    b = log.claimed(1, layout=Layout(tp=2))
    b.reports(70)
    assert log.round.state == "PASSED"


def test_one_process_may_hold_several_ranks(log):
    layout = Layout(tp=4)
    a, b = log.claimed(0, 1, layout=layout), log.claimed(3, 2, layout=layout)
    a.reports(90)
    b.reports(70)
    a.applies()
    b.applies()
    assert log.round.state == "SEALED"


def test_a_process_whose_ranks_hold_different_classes_can_seal(log):
    # A rank builds its row; a process with two ranks says once what it built for both.
    a = log.claimed(0, 1, layout=Layout(pp=2))
    kv, slot = page("kv", 1000), state("slot", 10, entries_per_req=1)
    log.do(
        Submit(
            1,
            a.attempt,
            {
                0: a_report(90, classes=[kv], max_num_seqs=4),
                1: a_report(70, classes=[kv, slot], max_num_seqs=4),
            },
            {},
        )
    )
    assert log.round.state == "PASSED"
    a.applies({**log.decision.entries(0), **log.decision.entries(1)})
    assert log.round.causes == ()
    assert log.round.state == "SEALED"


def test_a_world_of_one_passes_alone(log):
    (a,) = log.passed(90)
    a.applies()
    assert log.round.state == "SEALED"


def test_a_start_that_does_not_fit_fails_at_its_last_report(log):
    a, b = log.start(2)
    a.reports(90)
    b.reports(0)
    assert log.round.state == "FAILED"
    assert (log.decision.code, log.decision.ranks) == ("does_not_fit", [1])
    assert blamed(log.decision) == [("does_not_fit", 1, "host-1")]
    assert log.decision.retryable is False
    assert "plan" not in log.decision.document
    assert log.decision.entries(0) == {}


def test_the_entry_that_settles_a_round_holds_the_decision(log):
    a, b = log.start(2)
    a.reports(90)
    events = b.reports(70)
    assert [type(e) for e in events] == [Reported, Decided]


# --- frozen documents ---------------------------------------------------------------------------


def test_a_decision_holds_what_every_rank_must_know(log):
    log.passed(90, 70)
    document = log.decision.document
    assert is_canonical(log.round.decision)
    assert document["engine"] == "default/llama"
    assert (document["round"], document["store_id"], document["mode"]) == (1, "store-1", "enforce")
    assert document["launch"] == {"run": "run-1", "restart": 0, "source": "env"}
    assert document["layout"] == {"dp": 1, "pp": 1, "pcp": 1, "tp": 2, "equal_over": []}
    assert document["faults"] == []
    assert document["inputs_digest"].startswith("sha256:")
    (row,) = document["plan"]["schedulers"]
    assert row["binding"] == {"kv": {"ranks": [1], "hosts": ["host-1"]}}
    assert set(document["verdict"]) == {
        *("outcome", "code", "message", "ranks", "causes", "also", "not_heard"),
        *("more_causes", "retryable", "warnings"),
    }


def test_the_order_of_the_reports_leaves_the_decision_as_it_is():
    bodies = []
    for order in ([0, 1, 2], [2, 0, 1]):
        log = Log()
        ranks = log.start(3)
        for rank in order:
            ranks[rank].reports(90 + rank)
        bodies.append(log.round.decision)
    assert bodies[0] == bodies[1]


def test_outcomes_are_canonical_and_leave_the_decision_alone(log):
    a, b = log.passed(90, 70)
    before = log.round.decision
    a.applies()
    b.vetoes("hipMalloc failed")
    log.spends("grace")
    assert log.round.state == "ABORTED"
    assert log.round.decision == before
    assert is_canonical(log.round.outcome)
    assert log.decision.passed


def test_replaying_the_log_gives_the_same_bytes(log):
    log.sealed(90, 70)
    log.start(2, launch=a_launch("run-1", 1))
    assert log.replayed() == log.engine


# --- bounds -------------------------------------------------------------------------------------


def a_failure_of(world, text):
    log = Log()
    processes = log.start(world, host="h" * 255)
    for process in processes:
        process.vetoes(text(process.attempt))
    log.spends("grace")
    return log


def test_the_first_causes_are_long_the_next_short_and_the_rest_counted():
    log = a_failure_of(140, lambda n: f"{n:04}\n" + "x" * 3000)
    causes = log.decision.causes
    assert len(causes) == 16 + 112
    assert [len(c["text"].encode()) for c in causes] == [1024] * 16 + [120] * 112
    assert all("\n" not in c["text"] for c in causes[16:])
    assert log.decision.document["verdict"]["more_causes"] == 12
    assert log.decision.ranks == list(range(140))
    assert len(log.decision.message.encode()) < 1000


@pytest.mark.parametrize("letter", ["x", "😂", "\x01", '"'], ids=ascii)
def test_a_decision_is_bounded_however_many_ranks_fail(letter):
    log = a_failure_of(1024, lambda n: f"{n}" + letter * 4000)
    assert len(log.round.decision) <= 256 * 1024
    assert len(log.decision.ranks) == 1024


@pytest.mark.parametrize("phase", ["gather", "report"])
def test_a_decision_is_bounded_however_many_ranks_are_missing(phase):
    log = Log()
    layout = Layout(tp=1024)
    for rank in range(1024 if phase == "report" else 1):
        log.claimed(rank, layout=layout, host=f"gpu-node-{rank}.cluster.example.com")
    log.spends(phase)
    assert log.decision.code == "ranks_missing"
    assert len(log.decision.ranks) == (1024 if phase == "report" else 1023)
    assert len(log.round.decision) <= 256 * 1024


def test_a_plan_of_the_largest_world_is_bounded():
    log = Log()
    layout = Layout(dp=8, pp=4, pcp=4, tp=8)
    processes = log.start(1024, layout=layout)
    classes = [page("kv", 1_399_040)] + [
        state(f"state-{n}", 25_399_296, entries_per_req=1) for n in range(2)
    ]
    report = a_report(120_000_000, page_bytes=1000, classes=classes, max_num_seqs=512)
    for process in processes:
        process.reports(report)
    assert log.decision.passed
    assert len(log.round.decision) <= 256 * 1024
    assert max(map(len, log.entries)) <= 512 * 1024


def test_a_decision_is_the_same_for_a_text_of_any_letters():
    log = Log()
    a, _ = log.start(2)
    a.vetoes('NUL \x00 quote " back \\ line \n \u2028 face 😂')
    log.spends("grace")
    assert is_canonical(log.round.decision)
    assert log.replayed() == log.engine


# --- what the events are ------------------------------------------------------------------------


def test_a_refusal_keeps_nothing(log):
    log.start(2)
    other = log.joined(a_join(0, launch=a_launch("run-2")))
    before, n = log.engine, len(log.entries)
    with pytest.raises(EngineNameInUse):
        other.claims()
    assert (log.engine, len(log.entries)) == (before, n)


def test_the_end_of_a_round_and_the_opening_of_the_next_are_one_entry(log):
    log.passed(90, 70)
    new = log.joined(a_join(0, layout=Layout(tp=2), launch=a_launch("run-1", 1)))
    assert [type(e) for e in new.claims()] == [Ended, Opened, Claimed]


def test_an_objection_of_a_process_marks_it_gone(log):
    a, _ = log.start(2)
    (objected,) = a.leaves()
    assert isinstance(objected, Objected)
    assert a.member.gone
