"""An attempt number is given out once for each process, and kept for a while."""

from dataclasses import replace

import pytest

from coordinator.commands import Reserve
from coordinator.engine import KEPT_RESERVATIONS
from coordinator.rules.joining import find_attempt
from kvaccord import Layout
from kvaccord.errors import Conflict, ProtocolTooOld
from tests.builders import a_join, a_launch


def test_a_repeated_join_reserves_nothing(log):
    join = a_join(0, layout=Layout(tp=2))
    log.joined(join)
    assert log.do(Reserve(join)) == ()


def test_a_repeated_join_reserves_nothing_after_its_claim(log):
    a, _ = log.start(2)
    assert log.do(Reserve(a.join)) == ()
    log.spends("report")
    assert log.do(Reserve(a.join)) == ()


def test_a_repeated_join_reserves_nothing_after_the_next_round_opened(log):
    a, _ = log.start(2)
    log.spends("report")
    log.start(2)
    assert log.do(Reserve(a.join)) == ()


def test_a_join_with_the_same_nonce_and_another_document_conflicts(log):
    a, _ = log.start(2)
    with pytest.raises(Conflict, match="the first stands"):
        log.do(Reserve(a.join.model_copy(update={"pid": 7})))


def test_the_same_nonce_with_other_ranks_is_another_process(log):
    log.joined(a_join(0, layout=Layout(tp=2), nonce="nonce-one"))
    assert log.joined(a_join(1, layout=Layout(tp=2), nonce="nonce-one")).attempt == 2


def test_another_protocol_is_refused(log):
    with pytest.raises(ProtocolTooOld):
        log.joined(a_join(0, protocol=2))


def test_a_whole_start_may_join_before_the_first_claim_of_the_next(log):
    # Two starts of the largest world: nobody's place lapses for want of room.
    layout = Layout(tp=1024)
    first = [log.joined(a_join(rank, layout=layout)) for rank in range(1024)]
    for rank in range(1024):
        log.joined(a_join(rank, layout=layout, launch=a_launch("run-1", 1)))
    assert len(log.engine.reservations) == KEPT_RESERVATIONS
    first[0].claims()


def test_a_join_looks_through_the_members_of_an_ended_round_once(log):
    class Counted(dict):
        looks = 0

        def items(self):
            Counted.looks += 1
            return super().items()

        def values(self):
            Counted.looks += 1
            return super().values()

    log.sealed(9, 9)
    ended = replace(log.round, members=Counted(log.round.members))
    log.engine = replace(log.engine, rounds={ended.number: ended})
    for _ in range(5):
        log.joined(a_join(0))
    assert Counted.looks == 1


def test_a_process_of_an_ended_round_that_joins_again_has_its_attempt(log):
    first, _ = log.sealed(9, 9)
    assert find_attempt(log.replayed(), first.join) == first.attempt
    other = first.join.model_copy(update={"pid": 7})
    with pytest.raises(Conflict):
        find_attempt(log.replayed(), other)


def test_reservations_do_not_accumulate(log):
    for _ in range(KEPT_RESERVATIONS + 5):
        log.joined(a_join(0))
    assert len(log.engine.reservations) == KEPT_RESERVATIONS
    assert min(log.engine.reservations) == 6
