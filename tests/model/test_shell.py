"""What the model found, shown on the real Service."""

import asyncio
import json
from contextlib import suppress
from typing import Any

import pytest

from coordinator.events import EngineName, Entry
from coordinator.logs import LogUnavailable
from coordinator.logs.memory import MemoryLog
from coordinator.presence import Connection
from coordinator.service import Service, Settings
from kvaccord import Layout, messages
from kvaccord.canonical import digest
from kvaccord.errors import EngineNameInUse, Refused, Unavailable
from kvaccord.messages import Launch
from tests.builders import a_join, a_report

NAME = EngineName("default", "e")


class SlowLog(MemoryLog):
    """Keeps an entry at once; says so, where `slow` is the kind of its first event, on release."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = ""
        self.unheard = ""  # the kind of an event whose entry is kept, and the answer lost
        self.release = asyncio.Event()

    async def append(self, engine: EngineName, entry: Entry, *, n: int) -> None:
        await super().append(engine, entry, n=n)
        if entry.events[0].event == self.slow:
            await self.release.wait()
        if entry.events[0].event == self.unheard:
            raise LogUnavailable("the answer was lost")


class Start:
    """A coordinator, and a start of `world` processes that have claimed and attached."""

    def __init__(self, **settings: Any) -> None:
        self.log = SlowLog()
        self.service = Service(self.log, Settings(**settings))
        self.attempts: list[int] = []
        self.sessions: list[Connection] = []

    async def up(self, world: int) -> None:
        await self.service.start()
        for rank in range(world):
            join = a_join(rank, layout=Layout(tp=world))
            attempt = (await self.service.join(NAME, join))["attempt"]
            await self.service.claim(NAME, attempt)
            self.attempts.append(attempt)
            self.sessions.append(await self.service.attach(NAME, 1, attempt))

    async def seals(self, world: int) -> None:
        await self.up(world)
        for rank in range(world):
            await self.reports(rank)
        for rank in range(world):
            await self.applies(rank)
        assert self.service.round(NAME, 1).state == "SEALED"

    async def reports(self, rank: int, wait_s: float = 0.0) -> Any:
        return await self.service.report(
            NAME, 1, self.attempts[rank], {rank: a_report(5)}, planned={}, wait_s=wait_s
        )

    async def applies(self, rank: int) -> Any:
        decision = self.service.round(NAME, 1).decision
        said = messages.Applied(digest=digest(decision), built={"kv": 5})
        return await self.service.applied(NAME, 1, self.attempts[rank], said, wait_s=0)

    async def session_ends(self, rank: int) -> None:
        self.service.presence.detach(self.sessions[rank], by_peer=True)
        await asyncio.sleep(0.05)

    def codes(self) -> list[str]:
        return [c.code for c in self.service.round(NAME, 1).causes]


def test_a_suspect_that_leaves_is_not_sealed():
    async def story() -> str:
        start = Start()
        await start.up(2)
        for rank in (0, 1):
            await start.reports(rank)
        await start.applies(0)
        await start.session_ends(0)
        await start.applies(1)
        round_ = await start.service.leave(NAME, 1, start.attempts[0], messages.Leave())
        await start.service.close()
        return round_.state

    assert asyncio.run(story()) == "PASSED"  # and ABORTED once the grace is over


def test_a_suspect_that_vetoes_is_not_passed():
    async def story() -> list[str]:
        start = Start()
        await start.up(2)
        await start.reports(0)
        await start.session_ends(0)
        await start.reports(1)
        veto = messages.Veto(rank=0, text="CUDA out of memory")
        await start.service.veto(NAME, 1, start.attempts[0], veto)
        await start.service.close()
        return start.codes()

    assert asyncio.run(story()) == ["rank_vetoed"]


def test_who_is_answered_while_its_suspicion_is_being_appended_is_not_lost():
    async def story() -> list[str]:
        start = Start(reattach_s=0.2)
        await start.up(2)
        await start.reports(0)
        start.log.slow = "suspected"
        await start.session_ends(0)
        call = asyncio.create_task(start.reports(0))
        await asyncio.sleep(0.05)
        start.log.release.set()
        await call
        # Answered after the suspicion was logged: nothing of before may make it lost.
        round_ = start.service.round(NAME, 1)
        suspects = [m.attempt for m in round_.suspects]
        await start.service.close()
        return suspects

    assert asyncio.run(story()) == []


def test_whose_long_poll_is_answered_is_not_a_suspect():
    async def story() -> list[int]:
        start = Start(reattach_s=5.0)
        await start.up(2)
        poll = asyncio.create_task(start.reports(0, wait_s=0.3))
        await asyncio.sleep(0.1)
        await start.session_ends(0)
        await poll
        suspects = [m.attempt for m in start.service.round(NAME, 1).suspects]
        await start.service.close()
        return suspects

    assert asyncio.run(story()) == []


def test_a_sealed_start_is_not_taken_over_while_its_sessions_come_back():
    """A coordinator that has just started knows of no session; its members are not dead."""

    async def story() -> None:
        start = Start()
        await start.up(1)
        await start.reports(0)
        await start.applies(0)
        await start.service.serve(NAME, 1, start.attempts[0])
        join = a_join(0, layout=Layout(tp=1), launch=Launch(run="another"))
        attempt = (await start.service.join(NAME, join))["attempt"]
        with pytest.raises(EngineNameInUse):
            await start.service.claim(NAME, attempt)
        restarted = Service(start.log, start.service.settings)
        await restarted.start()
        try:
            with pytest.raises(EngineNameInUse):
                await restarted.claim(NAME, attempt)
        finally:
            await restarted.close()
            await start.service.close()

    asyncio.run(story())


def test_a_serving_start_is_not_taken_over_because_a_later_round_failed():
    """Round 1 is in force and alive; round 2 of the same launch came to nothing."""

    async def story() -> str:
        start = Start()
        await start.up(2)
        for rank in (0, 1):
            await start.reports(rank)
        for rank in (0, 1):
            await start.applies(rank)
        await start.session_ends(1)  # rank 1 is gone; rank 0 serves on, and keeps its session
        join = a_join(1, layout=Layout(tp=2))
        attempt = (await start.service.join(NAME, join))["attempt"]
        number = (await start.service.claim(NAME, attempt))["round"]
        veto = messages.Veto(rank=1, text="no")
        await start.service.veto(NAME, number, attempt, veto)
        await asyncio.sleep(0.8)  # the grace
        assert start.service.round(NAME, number).state == "FAILED"
        join = a_join(0, layout=Layout(tp=2), launch=Launch(run="another"))
        attempt = (await start.service.join(NAME, join))["attempt"]
        try:
            return json.dumps(await start.service.claim(NAME, attempt))
        except EngineNameInUse:
            return "in use"
        finally:
            await start.service.close()

    assert asyncio.run(story()) == "in use"


def test_who_serves_and_dies_without_a_session_is_not_whole_for_ever():
    async def story() -> list[int]:
        start = Start(reattach_s=0.2, lost_after_s=0.2)
        await start.seals(1)
        await start.session_ends(0)
        await start.service.serve(NAME, 1, start.attempts[0])
        await asyncio.sleep(0.8)
        departed = start.service.round(NAME, 1).departed
        await start.service.close()
        return departed

    assert asyncio.run(story()) == [0]


def test_who_serves_and_is_not_answered_and_dies_is_not_whole_for_ever():
    """The store kept the entry and its answer was lost; the process died before it repeated."""

    async def story() -> list[int]:
        start = Start(reattach_s=0.2, lost_after_s=0.2)
        await start.seals(1)
        await start.session_ends(0)
        start.log.unheard = "serving"
        with pytest.raises(Unavailable):
            await start.service.serve(NAME, 1, start.attempts[0])
        await start.service.seen(NAME, 1, start.attempts[0])  # any call: the log is read again
        await asyncio.sleep(1.2)
        departed = start.service.round(NAME, 1).departed
        await start.service.close()
        return departed

    assert asyncio.run(story()) == [0]


def test_a_replaced_process_does_not_serve():
    """Its packet comes after another process took its place and departed it."""

    async def story() -> bool:
        start = Start()
        await start.seals(2)
        await start.session_ends(0)
        attempt = (await start.service.join(NAME, a_join(0, layout=Layout(tp=2))))["attempt"]
        assert (await start.service.claim(NAME, attempt))["round"] == 2
        assert start.service.round(NAME, 1).departed == [0]
        with suppress(Refused):
            await start.service.serve(NAME, 1, start.attempts[0])
        kept = start.service.round(NAME, 1).members[start.attempts[0]].kept
        await start.service.close()
        return kept

    assert not asyncio.run(story())
