"""Who reported long after its peers stands in the decision, by name, and changes nothing else."""

from __future__ import annotations

import asyncio
import json

import pytest

from coordinator.cell import Clock
from coordinator.commands import Submit
from coordinator.events import EngineName
from coordinator.logs.memory import MemoryLog
from coordinator.service import Service
from kvaccord import Layout
from kvaccord.peers import slow_ranks
from tests.builders import Log, a_join, a_report

HOSTS = {rank: f"gpu-{rank // 2}" for rank in range(8)}


def test_the_sentence_names_the_last_rank_its_host_and_how_late_it_was():
    (notice,) = slow_ranks({0: 400, 1: 401, 2: 398, 3: 612, 4: 400, 5: 500}, HOSTS)
    assert (notice.code, notice.ranks) == ("slow_rank", (3, 5))
    assert notice.text.startswith(
        "rank 3 on gpu-1 reported 212 s after the median of its peers, which took 400 s;"
    )
    assert notice.text.endswith("; rank 5 did so late too")


@pytest.mark.parametrize(
    ("spent_s", "slow"),
    [
        ({}, ()),
        ({0: 900}, ()),
        ({0: 0, 1: 0, 2: 60}, ()),  # a minute is no news
        ({0: 0, 1: 0, 2: 61}, (2,)),
        ({0: 1000, 1: 1000, 2: 1100}, ()),  # nor is a tenth of what all others took
        ({0: 1000, 1: 1000, 2: 1101}, (2,)),
        ({0: 10, 1: 300}, (1,)),  # of two the first one is usual
        ({0: 300, 1: 10, 2: 300}, ()),  # the early one is not slow, and makes no one slow
        ({0: 10, 1: 10, 2: 300, 3: 300}, (2, 3)),
    ],
)
def test_slow_is_over_a_minute_and_over_a_tenth_after_the_median(spent_s, slow):
    assert tuple(r for notice in slow_ranks(spent_s, HOSTS) for r in notice.ranks) == slow


def test_a_slow_rank_stands_in_the_decision_of_a_start_that_passed():
    log = Log()
    for process, spent_s in zip(log.start(3), (30, 40, 252), strict=True):
        log.do(Submit(1, process.attempt, {process.join.ranks[0]: a_report()}, {}, (), spent_s))
    assert log.decision.code == "agreed"
    (warning,) = log.decision.document["verdict"]["warnings"]
    assert (warning["code"], warning["ranks"]) == ("slow_rank", [2])
    assert "rank 2 on host-2 reported 212 s after" in warning["text"]
    assert log.replayed() == log.engine


def test_before_the_report_budget_runs_nothing_of_it_is_spent():
    log, clock = Log(), Clock()
    first = log.claimed(0, layout=Layout(tp=2))
    clock.advance(log.round, 1.0)
    assert clock.report_spent_s(log.round) == 0, "that was the gather budget"
    log.claimed(1, layout=Layout(tp=2))
    for _ in range(3):
        clock.advance(log.round, 0.9)
    assert clock.report_spent_s(log.round) == 2
    first.leaves()
    log.spends("grace")
    assert clock.report_spent_s(log.round) == 0, "it has ended"


def test_the_shell_says_how_much_was_spent_when_a_report_came():
    async def story() -> list[dict[str, object]]:
        name, service = EngineName("default", "llama"), Service(MemoryLog())
        await service.start()
        attempts = []
        for rank in range(2):
            joined = await service.join(name, a_join(rank, layout=Layout(tp=2)))
            attempts.append(joined["attempt"])
            await service.claim(name, joined["attempt"])
        for rank, attempt in enumerate(attempts):
            round_ = await service.report(
                name, 1, attempt, {rank: a_report()}, planned={}, wait_s=0
            )
            service.cell(name).clock.resume(round_, "report", 300.0)  # five minutes go by
        await service.close()
        return json.loads(round_.decision)["verdict"]["warnings"]

    (warning,) = asyncio.run(story())
    assert (warning["code"], warning["ranks"]) == ("slow_rank", [1])
