"""Commands that wait at one engine: decided one after the other, kept as one entry."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from coordinator import round as rules
from coordinator.commands import Reserve, Submit, Veto
from coordinator.engine import evolve_entry
from coordinator.events import MAX_ENTRY_BYTES, EngineName, Entry, entry_of
from coordinator.logs import LogUnavailable
from coordinator.logs.memory import MemoryLog
from coordinator.round import Step, decide_together
from coordinator.service import Service
from kvaccord import Layout, messages
from kvaccord.errors import Conflict, TooLarge, Unavailable
from tests.builders import Log, a_join, a_report

LLAMA = EngineName("default", "llama")


@pytest.fixture
def log() -> Log:
    return Log()


def submits(process, pages=90, **changes):
    rank = process.join.ranks[0]
    return Submit(process.round.number, process.attempt, {rank: a_report(pages, **changes)}, {})


def kinds(steps):
    return [[e.event for e in s.events] if isinstance(s, Step) else type(s) for s in steps]


# --- deciding -----------------------------------------------------------------------------------


def test_each_command_is_decided_on_what_those_before_it_left(log):
    processes = log.start(3)
    steps = decide_together(log.engine, map(submits, processes))
    assert kinds(steps) == [["reported"], ["reported"], ["reported", "decided"]]


def test_together_they_come_to_the_same_state_as_one_by_one(log):
    processes = log.start(3)
    steps = decide_together(log.engine, map(submits, processes))
    together = evolve_entry(log.engine, [e for s in steps for e in s.events])
    for process in processes:
        process.reports()
    assert together.rounds == log.engine.rounds
    assert steps[-1].after.rounds == log.engine.rounds


def test_a_call_that_is_said_twice_at_once_is_kept_once(log):
    first, _ = log.start(2)
    assert kinds(decide_together(log.engine, [submits(first)] * 2)) == [["reported"], []]


def test_one_that_is_refused_changes_nothing_for_the_others(log):
    first, second = log.start(2)
    commands = [submits(first, 90), submits(first, 80), submits(second)]
    steps = decide_together(log.engine, commands)
    assert kinds(steps) == [["reported"], Conflict, ["reported", "decided"]]


def test_a_no_before_the_last_report_is_heard_before_it(log):
    first, second = log.start(2)
    first.reports()
    veto = Veto(1, second.attempt, messages.Veto(rank=1, text="CUDA out of memory"))
    steps = decide_together(log.engine, [veto, submits(second)])
    assert kinds(steps) == [["objected"], []]
    assert steps[-1].after.last.verdict is None, "its grace is still to come"


def test_a_mistake_of_ours_strikes_only_the_command_that_shows_it(log, monkeypatch):
    first, second = log.start(2)
    right = rules.decide

    def decide(engine, command):
        if command.attempt == first.attempt:
            raise KeyError("a mistake")
        return right(engine, command)

    monkeypatch.setattr(rules, "decide", decide)
    assert kinds(decide_together(log.engine, map(submits, (first, second)))) == [
        KeyError,
        ["reported"],
    ]


def test_what_is_too_much_for_one_entry_waits_for_the_next(log):
    long = {f"key-{n}": "x" * 200 for n in range(60)}
    commands = [Reserve(a_join(r, layout=Layout(tp=200), inputs=long)) for r in range(200)]
    engine, sizes, left = log.engine, [], commands
    while left:
        steps = decide_together(engine, left)
        entry = entry_of(e for s in steps for e in s.events)  # or it would raise TooLarge
        sizes.append(len(entry.body))
        engine, left = evolve_entry(engine, entry.events), left[len(steps) :]
    assert len(sizes) > 1
    assert min(sizes[:-1]) > 0.9 * MAX_ENTRY_BYTES
    assert engine.last_attempt == 200


def test_one_that_alone_is_too_much_for_an_entry_is_refused_alone(log):
    layout, ranks = Layout(tp=128), range(127)
    many, one = log.claimed(*ranks, layout=layout), log.claimed(127, layout=layout)
    inputs = {f"key-{n}": "x" * 200 for n in range(60)}
    reports = {r: a_report(inputs=inputs) for r in ranks}
    steps = decide_together(log.engine, [Submit(1, many.attempt, reports, {}), submits(one)])
    assert kinds(steps) == [TooLarge, ["reported"]]


# --- keeping ------------------------------------------------------------------------------------


class SlowLog(MemoryLog):
    """Appends only while it is `free`. lost: how many of the next are kept without an answer."""

    lost = 0

    def __init__(self) -> None:
        super().__init__()
        self.free = asyncio.Event()
        self.free.set()

    async def append(self, engine: EngineName, entry: Entry, *, n: int) -> None:
        await self.free.wait()
        await super().append(engine, entry, n=n)
        if self.lost:
            self.lost -= 1
            raise LogUnavailable("the answer was lost")


class Start:
    """A start whose processes have claimed and attached."""

    def __init__(self, log: MemoryLog | None = None) -> None:
        self.log = log or SlowLog()
        self.service = Service(self.log)

    async def up(self, world: int) -> None:
        await self.service.start()
        joins = [a_join(rank, layout=Layout(tp=world)) for rank in range(world)]
        answers = await asyncio.gather(*(self.service.join(LLAMA, join) for join in joins))
        self.attempts = [answer["attempt"] for answer in answers]
        await asyncio.gather(*(self.service.claim(LLAMA, attempt) for attempt in self.attempts))
        self.sessions = [await self.service.attach(LLAMA, 1, a) for a in self.attempts]

    async def reports(self, rank: int) -> Any:
        attempt, reports = self.attempts[rank], {rank: a_report(5)}
        return await self.service.report(LLAMA, 1, attempt, reports, planned={}, wait_s=0)

    async def kept(self) -> list[list[str]]:
        return [[e.event for e in entry.events] for entry in await self.log.read(LLAMA)]


async def all_wait() -> None:
    """Until everything has come as far as it can without the store."""
    for _ in range(20):
        await asyncio.sleep(0)


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(story)


def test_calls_that_wait_share_an_entry_and_each_is_answered():
    async def story() -> None:
        start = Start()
        await start.up(8)
        rounds = await asyncio.gather(*map(start.reports, range(8)))
        assert {r.state for r in rounds} == {"PASSED"}
        assert await start.kept() == [
            ["reserved"] * 8,
            ["opened", *["claimed"] * 8],
            [*["reported"] * 8, "decided"],
        ]
        await start.service.close()

    run(story())


def test_what_comes_during_an_append_shares_the_next():
    async def story() -> None:
        start = Start()
        await start.up(4)
        start.log.free.clear()
        calls = [asyncio.create_task(start.reports(0))]
        await all_wait()
        calls += [asyncio.create_task(start.reports(rank)) for rank in range(1, 4)]
        await all_wait()
        start.log.free.set()
        await asyncio.gather(*calls)
        assert (await start.kept())[2:] == [["reported"], [*["reported"] * 3, "decided"]]
        await start.service.close()

    run(story())


def test_the_end_of_an_old_session_does_not_share_the_entry_of_the_attach_before_it():
    async def story() -> None:
        start = Start()
        await start.up(2)
        start.log.free.clear()
        appending = asyncio.create_task(start.reports(0))
        await all_wait()
        attaching = asyncio.create_task(start.service.attach(LLAMA, 1, start.attempts[1]))
        await asyncio.sleep(0)
        start.service.presence.detach(start.sessions[1], by_peer=True)
        await all_wait()
        start.log.free.set()
        await asyncio.gather(appending, attaching)
        await all_wait()
        assert not start.service.round(LLAMA, 1).suspects, "it was answered, and has its session"
        assert (await start.kept())[2:] == [["reported"]]
        await start.service.close()

    run(story())


def test_ends_of_many_sessions_share_an_entry():
    async def story() -> None:
        start = Start()
        await start.up(8)
        for session in start.sessions:
            start.service.presence.detach(session, by_peer=True)
        await all_wait()
        assert (await start.kept())[2:] == [["suspected"] * 8]
        await start.service.close()

    run(story())


def test_an_append_without_an_answer_is_decided_again_for_all_who_repeat():
    async def story() -> None:
        start = Start()
        await start.up(4)
        start.log.lost = 1
        refused = await asyncio.gather(*map(start.reports, range(4)), return_exceptions=True)
        assert {type(r) for r in refused} == {Unavailable}
        rounds = await asyncio.gather(*map(start.reports, range(4)))
        assert {r.state for r in rounds} == {"PASSED"}
        assert (await start.kept())[2:] == [[*["reported"] * 4, "decided"]]
        await start.service.close()

    run(story())


def test_what_another_coordinator_has_appended_is_read_and_all_are_decided_again():
    async def story() -> None:
        log = SlowLog()
        ours, theirs = Service(log), Service(log)
        await theirs.join(LLAMA, a_join(0, layout=Layout(tp=4)))
        joins = [a_join(rank, layout=Layout(tp=4)) for rank in range(1, 4)]
        answers = await asyncio.gather(*(ours.join(LLAMA, join) for join in joins))
        assert [answer["attempt"] for answer in answers] == [2, 3, 4]
        await ours.close()

    run(story())


def test_a_caller_that_has_gone_before_its_turn_leaves_nothing():
    async def story() -> None:
        start = Start()
        await start.up(2)
        start.log.free.clear()
        first = asyncio.create_task(start.reports(0))
        await all_wait()
        second = asyncio.create_task(start.reports(1))
        await all_wait()
        second.cancel()
        start.log.free.set()
        await first
        await all_wait()
        assert (await start.kept())[2:] == [["reported"]]
        await start.service.close()

    run(story())


def test_who_waits_when_the_coordinator_closes_is_told_to_repeat():
    class ClosedLog(SlowLog):
        """As SQLite: what is being appended is kept, what comes later is refused."""

        closed = False

        async def append(self, engine: EngineName, entry: Entry, *, n: int) -> None:
            if self.closed:
                raise LogUnavailable("it has been closed")
            await super().append(engine, entry, n=n)

        async def close(self) -> None:
            self.closed = True
            self.free.set()

    async def story() -> None:
        start = Start(ClosedLog())
        await start.up(2)
        start.log.free.clear()
        appended = asyncio.create_task(start.reports(0))
        await all_wait()
        waits = asyncio.create_task(start.reports(1))
        await all_wait()
        await start.service.close()
        async with asyncio.timeout(5):
            assert (await appended).number == 1
            with pytest.raises(Unavailable):
                await waits

    run(story())
