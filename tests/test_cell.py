"""What is told to whom when an entry is durable."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from coordinator.cell import FACTS_S, Cell, News
from coordinator.events import EngineName


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(story)


class Waiters:
    """One for each kind of news; notes when it was told, in seconds from the first entry on."""

    def __init__(self) -> None:
        self.cell = Cell(EngineName("default", "llama"), "store")
        self.told_s: dict[News, float] = {}

    async def hear(self, *, for_s: float, entries: int = 1, at_once: bool = False) -> None:
        began_s = asyncio.get_running_loop().time()

        async def wait(of: News) -> None:
            async with asyncio.timeout(for_s):
                await self.cell.change(10.0, of)
                self.told_s[of] = asyncio.get_running_loop().time() - began_s

        kinds: tuple[News, ...] = ("entry", "fact", "document")
        waits = [asyncio.create_task(wait(of)) for of in kinds]
        await asyncio.sleep(0)
        for _ in range(entries):
            self.cell.wake(at_once=at_once)
        await asyncio.gather(*waits, return_exceptions=True)


def test_a_document_is_told_to_all_at_once():
    async def story() -> None:
        waiters = Waiters()
        await waiters.hear(for_s=5.0, at_once=True)
        assert waiters.told_s.keys() == {"entry", "fact", "document"}
        assert max(waiters.told_s.values()) < FACTS_S

    run(story())


def test_facts_of_one_moment_are_told_together_and_who_wants_documents_sleeps_on():
    async def story() -> None:
        waiters = Waiters()
        await waiters.hear(for_s=20 * FACTS_S, entries=10)
        assert waiters.told_s.keys() == {"entry", "fact"}
        assert waiters.told_s["entry"] < FACTS_S <= waiters.told_s["fact"]

    run(story())


def test_a_document_takes_the_facts_before_it_along():
    async def story() -> None:
        waiters = Waiters()
        waiters.cell.wake(at_once=False)
        await waiters.hear(for_s=5.0, at_once=True)
        assert waiters.told_s["fact"] < FACTS_S
        waiters.told_s.clear()
        await waiters.hear(for_s=3 * FACTS_S, entries=0)
        assert waiters.told_s == {}, "nothing is left to tell"

    run(story())


def test_who_waits_without_news_gives_up_in_time():
    async def story() -> None:
        cell = Cell(EngineName("default", "llama"), "store")
        async with asyncio.timeout(5.0):
            await cell.change(0.01, "document")

    run(story())
