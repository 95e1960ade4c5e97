"""After the seal: who serves, who has gone, and what an observed round never does."""

from __future__ import annotations

import pytest

from coordinator.check import check_rooms
from coordinator.commands import Serve
from coordinator.views import standing
from kvaccord import Layout, page, state
from kvaccord.errors import Conflict, Invalid
from tests.builders import Log, a_report


@pytest.fixture
def log() -> Log:
    return Log()


def serve(log, *processes):
    for process in processes:
        log.do(Serve(process.round.number, process.attempt))


def test_a_sealed_round_stands_whole_until_somebody_is_known_to_be_gone(log):
    a, _ = log.sealed(90, 70)
    assert standing(log.round) == {"standing": "whole", "ranks": []}
    a.leaves("drained")
    assert log.round.state == "SEALED"
    assert standing(log.round) == {"standing": "broken", "ranks": [0]}


def test_the_end_of_a_session_says_nothing_unless_the_process_keeps_it(log):
    a, b = log.sealed(90, 70)
    assert a.is_suspected("s1") == ()
    serve(log, b)
    b.is_suspected("s2")
    b.is_lost("s2")
    assert standing(log.round) == {"standing": "broken", "ranks": [1]}


def test_a_kept_session_that_comes_back_breaks_nothing(log):
    a, _ = log.sealed(90, 70)
    serve(log, a)
    a.is_suspected("s1")
    a.is_back()
    a.is_lost("s1")
    assert standing(log.round)["standing"] == "whole"


def test_the_claim_of_a_slot_says_that_its_holder_is_gone(log):
    log.sealed(90, 70)
    log.claimed(1, layout=Layout(tp=2))
    assert standing(log.engine.rounds[1]) == {"standing": "broken", "ranks": [1]}
    assert log.engine.in_force is log.engine.rounds[1]


def test_nobody_serves_before_the_seal(log):
    a, _ = log.passed(90, 70)
    with pytest.raises(Conflict, match="after applied"):
        serve(log, a)


def test_an_observed_round_is_never_in_force_and_compares_nothing(log):
    log.sealed(90, 70)
    layout = Layout(tp=2)
    observers = [log.claimed(r, layout=layout, mode="observe") for r in range(2)]
    for process in observers:
        process.reports(50)
    for process in observers:
        process.applies({"kv": 12})
    assert log.round.state == "SEALED"
    assert log.decision.document["mode"] == "observe"
    assert log.engine.in_force is log.engine.rounds[1]


def test_modes_that_differ_within_a_launch_are_one_verdict(log):
    log.claimed(0, layout=Layout(tp=2))
    log.claimed(1, layout=Layout(tp=2), mode="observe")
    log.spends("grace")
    assert log.decision.code == "inputs_disagree"
    assert "mode observe" in log.decision.message


def test_check_tells_class_by_class_whether_the_plan_still_has_room(log):
    classes = [page("kv", 1000), state("slot", 10, entries_per_req=1)]
    a, b = log.start(2)
    for process in (a, b):
        process.reports(a_report(90, classes=classes, max_num_seqs=4))
    a.applies(log.decision.entries(0))
    b.applies(log.decision.entries(1))
    agreed = log.decision.entries(0)["kv"]
    roomy = a_report(agreed + 1, classes=classes, max_num_seqs=4)
    short = a_report(agreed - 10, classes=classes, max_num_seqs=4)
    assert check_rooms(log.round, {0: roomy})["fits"]
    answer = check_rooms(log.round, {1: short})
    assert (answer["fits"], answer["code"]) == (False, "plan_no_longer_fits")
    assert [row["class"] for row in answer["ranks"] if row["room"] < row["planned"]] == ["kv"]
    with pytest.raises(Invalid, match="outside the layout"):
        check_rooms(log.round, {7: short})
