"""Sessions that end and return, alone and together. Time is real, but short."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from coordinator.commands import Finding, Lose, Suspect
from coordinator.events import EngineName
from coordinator.presence import Presence, Seat
from coordinator.served import served_sleep

LLAMA = EngineName("default", "llama")


class Found:
    """Collects what presence finds."""

    def __init__(self, patience_s: float = 0.05, doubt_s: float = 0.3) -> None:
        self.findings: list[Finding] = []
        self.presence = Presence(self.keep, lambda _: patience_s, doubt_s)

    async def keep(self, name: EngineName, finding: Finding) -> None:
        self.findings.append(finding)

    def lost(self) -> list[int]:
        return [f.attempt for f in self.findings if isinstance(f, Lose)]


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(story)


def seat(attempt: int) -> Seat:
    return Seat(LLAMA, 1, attempt)


def test_a_session_that_ends_makes_suspect_at_once_and_lost_after_its_patience():
    async def story() -> None:
        found = Found()
        connection = found.presence.attach(seat(1), "a")
        found.presence.detach(connection, by_peer=True)
        await asyncio.sleep(0.01)
        assert [type(f) for f in found.findings] == [Suspect]
        await asyncio.sleep(0.1)
        assert found.lost() == [1]

    run(story())


def test_who_comes_back_is_not_lost_and_the_older_sessions_end_is_nothing():
    async def story() -> None:
        found = Found()
        older = found.presence.attach(seat(1), "a")
        newer = found.presence.attach(seat(1), "a")
        found.presence.detach(older, by_peer=True)
        await asyncio.sleep(0.1)
        assert found.findings == []
        found.presence.detach(newer, by_peer=True)
        await asyncio.sleep(0.01)
        found.presence.attach(seat(1), "a")
        await asyncio.sleep(0.1)
        assert found.lost() == []

    run(story())


def test_a_session_that_the_coordinator_closed_starts_no_clock():
    async def story() -> None:
        found = Found()
        found.presence.detach(found.presence.attach(seat(1), "a"), by_peer=False)
        await asyncio.sleep(0.1)
        assert found.findings == []

    run(story())


def test_who_never_opens_a_session_is_lost_when_its_time_is_over():
    async def story() -> None:
        found = Found()
        found.presence.expect(seat(1), within_s=0.05)
        await asyncio.sleep(0.12)
        (lose,) = [f for f in found.findings if isinstance(f, Lose)]
        assert not lose.was_open

    run(story())


def test_many_sessions_of_many_hosts_that_end_together_put_the_network_in_doubt():
    async def story() -> None:
        found = Found()
        open_ = [found.presence.attach(seat(n), f"host-{n % 4}") for n in range(20)]
        for connection in open_[:8]:
            found.presence.detach(connection, by_peer=True)
        await asyncio.sleep(0.15)
        assert found.lost() == []
        assert found.presence.doubt_left_s > 0
        for connection in open_[1:8]:
            found.presence.attach(connection.seat, connection.host)
        await asyncio.sleep(0.3)
        assert found.lost() == [0], "and the one that is really gone is lost in the end"

    run(story())


@pytest.mark.parametrize(("ending", "hosts"), [(8, 2), (3, 8)])
def test_few_sessions_or_few_hosts_are_no_reason_for_doubt(ending: int, hosts: int):
    async def story() -> None:
        found = Found()
        open_ = [found.presence.attach(seat(n), f"host-{n % hosts}") for n in range(40)]
        for connection in open_[:ending]:
            found.presence.detach(connection, by_peer=True)
        await asyncio.sleep(0.15)
        assert found.lost() == list(range(ending))

    run(story())


def test_a_pause_of_the_coordinator_counts_against_nobody():
    async def story() -> None:
        began_s = time.monotonic()
        waiting = asyncio.create_task(served_sleep(1.0))
        await asyncio.sleep(0.1)
        time.sleep(2.0)  # noqa: ASYNC251  the pause itself
        await asyncio.sleep(0.1)
        assert not waiting.done(), "only one tick of the pause has counted"
        await waiting
        assert time.monotonic() - began_s >= 2.5

    run(story())
