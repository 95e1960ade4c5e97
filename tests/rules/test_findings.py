"""What the shell finds: a budget that is spent, a session that ends."""

import pytest

from coordinator.commands import Clear, Lose, Suspect
from kvaccord import Layout
from tests.builders import blamed

# --- time ---------------------------------------------------------------------------------------


def test_ranks_that_never_joined_are_missing_by_name(log):
    log.claimed(1, layout=Layout(tp=4))
    log.claimed(3, layout=Layout(tp=4))
    log.spends("gather")
    assert log.round.state == "FAILED"
    assert (log.decision.code, log.decision.ranks) == ("ranks_missing", [0, 2])
    assert blamed(log.decision) == [("ranks_missing", 0, None), ("ranks_missing", 2, None)]
    assert log.decision.document["verdict"]["not_heard"] == [1, 3]
    assert log.decision.retryable is True


def test_a_rank_that_did_not_report_is_missing_with_its_host(log):
    a, _, c = log.start(3)
    a.reports(90)
    c.reports(90)
    log.spends("report")
    assert blamed(log.decision) == [("ranks_missing", 1, "host-1")]
    assert log.decision.document["verdict"]["not_heard"] == []


def test_a_rank_that_did_not_build_is_missing_with_its_host(log):
    a, _, c = log.passed(90, 90, 90)
    a.applies()
    c.applies()
    log.spends("apply")
    assert log.round.state == "ABORTED"
    assert blamed(log.outcome) == [("ranks_missing", 1, "host-1")]


@pytest.mark.parametrize(
    ("reach", "other"),
    [
        (lambda log: log.claimed(0, layout=Layout(tp=2)), ["report", "apply", "grace"]),
        (lambda log: log.start(2), ["gather", "apply", "grace"]),
        (lambda log: log.passed(90, 70), ["gather", "report", "grace"]),
        (lambda log: log.sealed(90, 70), ["gather", "report", "apply", "grace"]),
    ],
)
def test_only_the_budget_that_runs_can_be_spent(log, reach, other):
    reach(log)
    before = log.engine
    for what in other:
        assert log.spends(what) == ()
    assert log.engine == before


def test_a_budget_of_another_round_is_nothing(log):
    log.start(2)
    assert log.spends("report", round_=7) == ()
    log.spends("report")
    log.start(2)
    assert log.spends("report", round_=1) == ()
    assert log.round.state == "REPORTING"


def test_time_blames_nobody_while_a_cause_waits_for_its_grace(log):
    a, _ = log.start(2)
    a.vetoes()
    assert log.spends("report") == ()
    log.spends("grace")
    assert blamed(log.decision) == [("rank_vetoed", 0, "host-0")]


# --- presence -----------------------------------------------------------------------------------


def test_a_suspect_holds_the_verdict_back_until_it_is_back(log):
    a, b = log.start(2)
    a.reports(90)
    a.is_suspected("s1")
    b.reports(70)
    assert log.round.state == "REPORTING"
    a.is_back()
    assert log.round.state == "PASSED"


def test_a_suspect_holds_the_seal_back_until_it_is_back(log):
    a, b = log.passed(90, 70)
    a.applies()
    a.is_suspected("s1")
    b.applies()
    assert log.round.state == "PASSED"
    a.is_back()
    assert log.round.state == "SEALED"


def test_a_suspect_that_is_neither_back_nor_lost_ends_with_the_budget(log):
    a, b = log.start(2)
    a.reports(90)
    b.reports(90)
    assert log.round.state == "PASSED"
    b.applies()
    b.is_suspected("s1")
    a.applies()
    log.spends("apply")
    assert log.round.state == "ABORTED"
    assert blamed(log.outcome) == [("rank_lost", 1, "host-1")]


def test_what_one_session_ended_another_sessions_end_does_not_judge(log):
    a, _ = log.start(2)
    a.is_suspected("s1")
    a.is_back()
    assert a.is_lost("s1") == ()
    a.is_suspected("s2")
    assert a.is_lost("s1") == ()
    assert log.round.causes == ()
    assert a.is_lost("s2") != ()


def test_the_same_end_is_noted_once(log):
    a, _ = log.start(2)
    assert a.is_suspected("s1") != ()
    assert a.is_suspected("s1") == ()
    assert a.is_back() != ()
    assert a.is_back() == ()


def test_findings_about_nobody_are_nothing(log):
    log.start(2)
    for number, attempt in ((9, 1), (1, 9)):
        assert log.do(Suspect(number, attempt, "s")) == ()
        assert log.do(Clear(number, attempt)) == ()
        assert log.do(Lose(number, attempt, "s", 1.0)) == ()
