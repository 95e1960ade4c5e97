"""Whose a slot is: two processes of one rank, other starts, and who comes late."""

import pytest

from kvaccord import Layout
from kvaccord.errors import DuplicateRank, EngineNameInUse, NotFound, Superseded
from tests.builders import a_join, a_launch

# --- taken slots --------------------------------------------------------------------------------


def test_two_living_processes_of_one_slot_fail_the_round(log):
    log.start(2)
    log.claimed(1, layout=Layout(tp=2), host="host-9", pid=99)
    log.spends("grace")
    assert (log.decision.code, log.decision.ranks) == ("duplicate_rank", [1])
    (cause,) = log.decision.causes
    for said in ("host-1", "1001", "host-9", "99"):
        assert said in cause["text"]


def test_two_living_processes_of_one_slot_abort_what_was_agreed(log):
    a, b = log.passed(90, 70)
    log.claimed(1, layout=Layout(tp=2), host="host-9")
    a.applies()
    b.applies()
    log.spends("grace")
    assert (log.round.state, log.outcome.code) == ("ABORTED", "duplicate_rank")


def test_a_newcomer_to_a_sealed_round_is_refused_alone(log):
    _, b = log.sealed(90, 70)
    newcomer = log.joined(a_join(1, layout=Layout(tp=2), host="host-9"))
    with pytest.raises(DuplicateRank, match="host-9"):
        newcomer.claims(watched=[b])
    assert log.round.state == "SEALED"


def test_the_unwatched_slot_of_a_sealed_round_opens_the_next(log):
    a, _ = log.sealed(90, 70)
    newcomer = log.joined(a_join(1, layout=Layout(tp=2)))
    newcomer.claims(watched=[a])
    assert (log.round.number, log.round.state) == (2, "GATHERING")
    assert log.engine.in_force.number == 1


@pytest.mark.parametrize("phase", ["start", "passed"])
def test_a_new_process_in_a_suspects_slot_ends_the_round_and_opens_the_next(log, phase):
    _, b = log.start(2) if phase == "start" else log.passed(90, 70)
    b.is_suspected("s1")
    new = log.claimed(1, layout=Layout(tp=2), host="host-9")
    old, current = log.engine.rounds[1], log.engine.rounds[2]
    assert old.ended == ("FAILED" if phase == "start" else "ABORTED")
    assert current.state == "GATHERING"
    assert new.round == current
    body = old.outcome or old.decision
    assert b'"code":"rank_replaced"' in body
    assert b'"ranks":[1]' in body
    assert b.reports(70) == ()


@pytest.mark.parametrize("no", ["vetoes", "leaves"])
def test_a_new_process_in_the_slot_of_one_that_said_no_opens_the_next(log, no):
    _, b = log.start(2)
    getattr(b, no)()
    log.claimed(1, layout=Layout(tp=2))
    assert log.engine.rounds[1].ended == "FAILED"
    assert log.round.number == 2


def test_a_duplicate_names_the_living_holder_not_the_one_that_is_gone(log):
    a, _ = log.start(2)
    a.is_suspected("s1")
    log.claimed(0, 1, layout=Layout(tp=2), host="host-9")
    log.spends("grace")
    assert log.decision.code == "duplicate_rank"
    assert log.decision.ranks == [1]
    assert "host-1" in log.decision.causes[0]["text"]


# --- other starts -------------------------------------------------------------------------------


def test_another_launch_is_refused_while_one_is_alive(log):
    log.start(2)
    other = log.joined(a_join(0, layout=Layout(tp=2), launch=a_launch("run-2"), host="host-9"))
    with pytest.raises(EngineNameInUse) as refused:
        other.claims()
    assert refused.value.retry_after_s
    for said in ("run-1", "run-2", "host-0", "host-9"):
        assert said in str(refused.value)
    assert log.round.launch.run == "run-1"
    assert log.round.causes == ()


def test_another_launch_is_refused_while_a_sealed_round_is_watched(log):
    a, _ = log.sealed(90, 70)
    other = log.joined(a_join(0, layout=Layout(tp=2), launch=a_launch("run-2")))
    with pytest.raises(EngineNameInUse):
        other.claims(watched=[a])
    other.claims()
    assert (log.round.number, log.round.launch.run) == (2, "run-2")


def test_another_launch_takes_over_when_nobody_is_alive(log):
    a, b = log.start(2)
    a.is_suspected("s1")
    b.is_suspected("s2")
    log.claimed(0, layout=Layout(tp=2), launch=a_launch("run-2"))
    first = log.engine.rounds[1]
    assert first.ended == "FAILED"
    assert b'"code":"superseded"' in first.decision
    assert log.round.launch.run == "run-2"


def test_another_launch_follows_a_failed_round_at_once(log):
    log.start(2)
    log.spends("report")
    log.claimed(0, layout=Layout(tp=2), launch=a_launch("run-2"))
    assert (log.round.number, log.round.launch.run) == (2, "run-2")


@pytest.mark.parametrize("phase", ["start", "passed"])
def test_a_greater_restart_takes_over_whoever_is_alive(log, phase):
    log.start(2) if phase == "start" else log.passed(90, 70)
    log.claimed(1, layout=Layout(pp=2), launch=a_launch("run-1", 1))
    first = log.engine.rounds[1]
    assert first.ended == ("FAILED" if phase == "start" else "ABORTED")
    assert b'"code":"superseded"' in (first.outcome or first.decision)
    assert (log.round.number, log.round.launch.restart) == (2, 1)


def test_a_greater_restart_follows_a_sealed_round_though_it_is_watched(log):
    a, b = log.sealed(90, 70)
    new = log.joined(a_join(0, layout=Layout(tp=2), launch=a_launch("run-1", 1)))
    new.claims(watched=[a, b])
    assert log.round.number == 2
    assert log.engine.in_force.number == 1


def test_a_lower_restart_is_over(log):
    old = log.joined(a_join(0, layout=Layout(tp=2), launch=a_launch("run-1", 1)))
    log.start(2, launch=a_launch("run-1", 2))
    with pytest.raises(Superseded, match=r"run-1 \(restart 1\) is older"):
        log.claimed(1, layout=Layout(tp=2), launch=a_launch("run-1", 1))
    with pytest.raises(Superseded):
        old.claims()


def test_an_earlier_run_is_over_whatever_its_restart(log):
    log.start(2)
    log.spends("report")
    log.start(2, launch=a_launch("run-2"))
    log.spends("report")
    with pytest.raises(Superseded, match="older than launch run-2"):
        log.claimed(0, layout=Layout(tp=2), launch=a_launch("run-1", 9))


def test_the_last_64_earlier_runs_are_over(log):
    for n in range(65):
        log.claimed(0, layout=Layout(tp=2), launch=a_launch(f"run-{n}"))
        log.spends("gather")
    for n in (63, 1, 0):
        with pytest.raises(Superseded):
            log.claimed(0, layout=Layout(tp=2), launch=a_launch(f"run-{n}"))


@pytest.mark.parametrize("source", ["master", "lws", "ray", "mpi"])
def test_a_run_named_by_an_address_or_a_counter_may_come_back(log, source):
    def master(run):
        return a_launch(run, source=source)

    early = log.joined(a_join(0, layout=Layout(tp=2), launch=master("10.0.0.1:29500")))
    log.claimed(1, layout=Layout(tp=2), launch=master("10.0.0.1:29500"))
    log.spends("gather")
    log.claimed(1, layout=Layout(tp=2), launch=master("10.0.0.2:29500"))
    log.spends("gather")
    with pytest.raises(Superseded):
        early.claims()
    log.claimed(1, layout=Layout(tp=2), launch=master("10.0.0.1:29500"))
    assert log.round.number == 3


def test_an_attempt_of_a_run_that_was_left_is_over_when_its_name_comes_back(log):
    # S5: no decision ever holds ranks of two starts.
    def master(run):
        return a_launch(run, source="master")

    early = log.joined(a_join(0, layout=Layout(tp=2), launch=master("10.0.0.1:29500")))
    log.claimed(1, layout=Layout(tp=2), launch=master("10.0.0.1:29500"))
    log.spends("gather")
    log.claimed(1, layout=Layout(tp=2), launch=master("10.0.0.2:29500"))
    log.spends("gather")
    log.claimed(1, layout=Layout(tp=2), launch=master("10.0.0.1:29500"))
    with pytest.raises(Superseded):
        early.claims()


def test_a_rank_no_layout_had_does_not_end_a_sealed_start_that_is_alive(log):
    members = log.sealed(90, 70)
    odd = log.joined(a_join(3, layout=Layout(tp=4)))
    with pytest.raises((DuplicateRank, EngineNameInUse, Superseded)):
        odd.claims(watched=members)
    assert log.round.state == "SEALED"


# --- one process, one round ---------------------------------------------------------------------


def test_a_late_member_of_a_failed_start_hears_its_decision(log):
    a = log.claimed(0, layout=Layout(tp=3))
    a.vetoes()
    log.spends("grace")
    body = log.round.decision
    late = log.claimed(2, layout=Layout(tp=3))
    assert late.round.number == 1
    assert late.round.decision == body
    assert late.reports(90) == ()
    assert log.engine.last.number == 1


def test_the_next_process_of_a_late_members_slot_opens_the_next_round(log):
    log.claimed(0, layout=Layout(tp=3)).vetoes()
    log.spends("grace")
    log.claimed(2, layout=Layout(tp=3))
    next_one = log.claimed(2, layout=Layout(tp=3))
    assert next_one.round.number == 2
    assert log.claimed(0, layout=Layout(tp=3)).round.number == 2
    assert log.claimed(1, layout=Layout(tp=3)).round.number == 2


def test_the_next_process_of_a_slot_that_was_claimed_opens_the_next_round(log):
    log.claimed(0, layout=Layout(tp=3)).vetoes()
    log.spends("grace")
    assert log.claimed(0, layout=Layout(tp=3)).round.number == 2


def test_a_process_that_differed_was_here_too(log):
    log.claimed(0, layout=Layout(tp=2))
    log.claimed(1, layout=Layout(pp=2))
    log.spends("grace")
    assert log.claimed(1, layout=Layout(tp=2)).round.number == 2


def test_a_late_member_of_another_start_opens_its_own_round(log):
    log.claimed(0, layout=Layout(tp=3)).vetoes()
    log.spends("grace")
    late = log.claimed(2, layout=Layout(tp=3), launch=a_launch("run-1", 1))
    assert late.round.number == 2


def test_a_process_of_an_aborted_round_has_no_late_members(log):
    a, _ = log.passed(90, 70)
    a.leaves()
    log.spends("grace")
    assert log.claimed(0, layout=Layout(tp=2)).round.number == 2


def test_one_process_takes_part_in_one_round(log):
    a, _ = log.start(2)
    log.spends("report")
    log.start(2)
    with pytest.raises(Superseded, match="does not belong to round 2 but to round 1"):
        a.reports(90, round_=2)
    with pytest.raises(NotFound):
        a.reports(90, round_=3)
    assert a.reports(90) == ()
    assert log.round.sent == {}


def test_what_a_superseded_process_says_has_no_effect(log):
    a, b = log.start(2)
    a.reports(90)
    log.claimed(0, layout=Layout(tp=2), launch=a_launch("run-1", 1))
    before = log.engine
    assert b.reports(70) == b.vetoes() == b.leaves() == b.is_suspected() == ()
    assert b.is_back() == b.is_lost() == ()
    assert log.engine == before


def test_a_reservation_lapses_when_a_newer_one_of_its_ranks_is_claimed(log):
    layout = Layout(tp=2)
    old = log.joined(a_join(0, layout=layout))
    other = log.joined(a_join(1, layout=layout))
    log.claimed(0, layout=layout)
    with pytest.raises(Superseded, match="has lapsed"):
        old.claims()
    other.claims()


def test_a_claim_of_an_attempt_that_was_never_given_is_refused(log):
    a, _ = log.start(2)
    a.attempt = 77
    with pytest.raises(Superseded):
        a.claims()
