"""Policy are counted in ticks: late at worst, never early, whoever asks meanwhile."""

import pytest

from coordinator.cell import TICK_S, Clock
from coordinator.policy import Policy
from kvaccord import Layout
from tests.builders import Log

BUDGETS = Policy()


@pytest.fixture
def log():
    return Log()


def test_a_budget_runs_down_with_time(log):
    log.claimed(0, layout=Layout(tp=2))
    clock = Clock()
    assert clock.left_s(log.round) == BUDGETS.gather_s
    clock.advance(log.round, 0.75)
    assert clock.left_s(log.round) == BUDGETS.gather_s - 0.75


def test_a_pause_counts_as_one_tick(log):
    log.claimed(0, layout=Layout(tp=2))
    clock = Clock()
    clock.advance(log.round, 3600.0)
    assert clock.left_s(log.round) == BUDGETS.gather_s - TICK_S


def test_each_budget_begins_anew(log):
    a = log.claimed(0, layout=Layout(tp=2))
    clock = Clock()
    clock.advance(log.round, 1.0)
    b = log.claimed(1, layout=Layout(tp=2))
    assert clock.left_s(log.round) == BUDGETS.report_s.hard
    clock.advance(log.round, 1.0)
    a.reports(90)
    assert clock.left_s(log.round) == BUDGETS.report_s.hard - 1
    b.reports(90)
    assert clock.left_s(log.round) == BUDGETS.apply_s.hard


def test_nothing_is_left_of_a_round_that_has_ended(log):
    log.start(2)
    log.spends("report")
    assert Clock().left_s(log.round) == 0.0


def test_a_budget_never_goes_below_nothing(log):
    log.claimed(0, layout=Layout(tp=2))
    clock = Clock()
    for _ in range(int(BUDGETS.gather_s) + 5):
        clock.advance(log.round, 1.0)
    assert clock.left_s(log.round) == 0.0


def test_grace_runs_from_the_first_cause_only(log):
    a, _ = log.start(2)
    clock = Clock()
    clock.advance(log.round, 1.0)
    assert clock.grace_left_s(log.round) == 0.5
    a.vetoes()
    clock.advance(log.round, 0.25)
    assert clock.grace_left_s(log.round) == 0.25
    clock.advance(log.round, 0.25)
    assert clock.grace_left_s(log.round) == 0.0


def test_grace_begins_anew_with_the_next_round(log):
    a, _ = log.start(2)
    a.vetoes()
    clock = Clock()
    clock.advance(log.round, 1.0)
    log.spends("grace")
    a, _ = log.start(2)
    a.vetoes()
    assert clock.left_s(log.round) == BUDGETS.report_s.hard
    assert clock.grace_left_s(log.round) == 0.5


def test_a_question_about_an_older_round_does_not_wind_the_clock_back(log):
    # A page that shows an earlier round asks what is left of it; the open one must still end.
    log.start(2)
    log.spends("report")
    older = log.round
    log.start(2)
    clock = Clock()
    for _ in range(10):
        clock.advance(log.round, 1.0)
        assert clock.left_s(older) == 0.0
    assert clock.left_s(log.round) == BUDGETS.report_s.hard - 10
