"""How a round ends when time runs out: soft and hard ends, progress, what is certain early."""

from __future__ import annotations

import pytest

from coordinator.commands import Cancel, Retire, Serve, Sign, Spend
from kvaccord import Layout
from kvaccord.errors import Conflict, EngineNameInUse
from tests.builders import Log, a_join, a_launch


@pytest.fixture
def log() -> Log:
    return Log()


def signs(**stuck: bool) -> dict[int, Sign]:
    """signs(r1=True): rank 1 is stuck."""
    return {int(k[1:]): Sign("loading", 400.0 if s else 3.0, s) for k, s in stuck.items()}


def test_at_the_soft_end_nobody_who_makes_progress_is_blamed(log):
    log.start(2)
    assert log.do(Spend(1, "report", soft=True, signs=signs(r0=False, r1=False))) == ()
    assert log.round.state == "REPORTING"


def test_at_the_soft_end_the_stuck_are_blamed_and_the_others_are_not_heard(log):
    log.start(3)
    log.do(Spend(1, "report", soft=True, signs=signs(r0=False, r1=True, r2=False)))
    verdict = log.decision.document["verdict"]
    assert (verdict["code"], verdict["ranks"], verdict["not_heard"]) == ("rank_stuck", [1], [0, 2])
    assert "without progress for 400 s at 'loading'" in verdict["message"]
    assert "py-spy dump --pid" in verdict["message"]


def test_at_the_hard_end_all_that_are_missing_are_blamed_the_stuck_as_stuck(log):
    log.start(3)
    log.do(Spend(1, "report", signs=signs(r0=True, r1=False, r2=False)))
    verdict = log.decision.document["verdict"]
    assert (verdict["code"], verdict["also"]) == ("ranks_missing", ["rank_stuck"])
    assert {c["rank"]: c["code"] for c in verdict["causes"]} == {
        0: "rank_stuck",
        1: "ranks_missing",
        2: "ranks_missing",
    }
    assert "last seen at 'loading' 3 s ago" in verdict["causes"][0]["text"]


def test_who_has_reported_is_never_stuck(log):
    a, _ = log.start(2)
    a.reports(90)
    log.do(Spend(1, "report", soft=True, signs=signs(r0=True, r1=False)))
    assert log.round.state == "REPORTING"


def test_a_rank_that_is_stuck_while_it_builds_aborts_the_round(log):
    a, _ = log.passed(90, 70)
    a.applies()
    log.do(Spend(1, "apply", soft=True, signs=signs(r1=True)))
    assert (log.outcome.code, log.outcome.ranks) == ("rank_stuck", [1])


def test_a_report_that_makes_failure_certain_does_not_wait_for_the_others(log):
    a, b, _ = log.start(3)
    a.reports(0)
    assert log.round.state == "REPORTING"
    b.reports(0)
    log.spends("shortfall")
    verdict = log.decision.document["verdict"]
    assert (verdict["code"], verdict["ranks"], verdict["not_heard"]) == (
        "does_not_fit",
        [0, 1],
        [2],
    )


def test_a_shortfall_is_judged_by_the_planner_when_all_have_reported(log):
    a, b = log.start(2)
    a.reports(0)
    b.reports(70)
    assert (log.decision.code, log.decision.ranks) == ("does_not_fit", [0])


def test_a_veto_comes_before_a_shortfall_that_stands_in_also(log):
    a, b, _ = log.start(3)
    a.reports(0)
    b.vetoes("broken")
    assert log.spends("shortfall") == ()
    log.spends("grace")
    assert (log.decision.code, log.decision.document["verdict"]["also"]) == (
        "rank_vetoed",
        ["does_not_fit"],
    )


def test_an_operator_cancels_an_open_round_and_its_ranks_hear_why(log):
    log.start(2)
    log.do(Cancel(1, "wrong model"))
    assert (log.decision.code, log.decision.retryable) == ("cancelled", False)
    assert "wrong model" in log.decision.message
    assert log.do(Cancel(1, "again")) == ()


def test_an_operator_aborts_a_round_that_passed(log):
    log.passed(90, 70)
    log.do(Cancel(1, "wrong model"))
    assert (log.outcome.result, log.outcome.code) == ("ABORTED", "cancelled")


def test_a_retired_round_is_in_force_no_more(log):
    log.sealed(90, 70)
    assert log.engine.in_force is log.round
    log.do(Retire(1, "moved away"))
    assert log.engine.in_force is None
    assert log.do(Retire(1, "again")) == ()


@pytest.mark.parametrize("serves", [True, False])
def test_the_living_members_of_a_retired_round_hold_the_name_until_they_go(log, serves):
    first, second = log.sealed(90, 70)
    if serves:
        log.do(Serve(1, first.attempt))
    log.do(Retire(1, "moved away"))
    other = log.joined(a_join(0, layout=Layout(tp=2), launch=a_launch("run-2")))
    with pytest.raises(EngineNameInUse, match="host-0"):
        other.claims(watched=[first])
    if serves:
        first.leaves("scaled down")
    other.claims()
    assert other.round.number == 2
    assert second.round.retired == "moved away"


def test_only_a_sealed_round_is_retired(log):
    log.start(2)
    with pytest.raises(Conflict, match="cancelled"):
        log.do(Retire(1, "moved away"))


def test_retiring_the_latest_does_not_bring_back_an_earlier_one(log):
    log.sealed(90, 70)
    log.sealed(80, 70)
    log.do(Retire(2, "moved away"))
    assert log.engine.in_force is None


def test_layouts_bind_the_first_claims_shorter_budgets(log):
    a = log.claimed(0, layout=Layout(tp=2), budgets={"gather_s": 60, "report_s": {"hard": 90}})
    assert log.round.policy.gather_s == 60
    assert (log.round.policy.report_s.soft, log.round.policy.report_s.hard) == (90, 90)
    log.claimed(1, layout=Layout(tp=2), budgets={"gather_s": 1})
    assert log.round.policy.gather_s == 60
    assert a.attempt == 1
