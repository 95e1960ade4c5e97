"""The shell round the rules, without HTTP: what happens between its awaits."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from coordinator.events import EngineName, Entry
from coordinator.logs.memory import MemoryLog
from coordinator.service import Service
from kvaccord import Layout
from kvaccord.errors import Refused
from tests.builders import a_join

LLAMA = EngineName("default", "llama")


class SlowLog(MemoryLog):
    """Every append takes a moment, so that others come in between."""

    async def append(self, engine: EngineName, entry: Entry, *, n: int) -> None:
        await asyncio.sleep(0.01)
        await super().append(engine, entry, n=n)
        await asyncio.sleep(0.01)


def test_a_refused_join_takes_no_engine_from_those_that_join_beside_it():
    async def story() -> list[int]:
        service = Service(SlowLog())
        await service.start()
        good = [a_join(rank, layout=Layout(tp=3)) for rank in range(3)]
        bad = a_join(0, layout=Layout(tp=3)).model_copy(update={"protocol": 2})

        async def join(document):
            with suppress(Refused):
                return (await service.join(LLAMA, document))["attempt"]

        attempts = await asyncio.gather(*map(join, [bad, good[0], bad, good[1], good[2], bad]))
        for attempt in filter(None, attempts):
            await service.claim(LLAMA, attempt)
        await service.close()
        return sorted(filter(None, attempts))

    assert asyncio.run(story()) == [1, 2, 3]


def test_an_append_that_was_cancelled_is_found_out_about_though_nobody_calls():
    async def story() -> int:
        service = Service(SlowLog())
        await service.start()
        await service.join(LLAMA, a_join(0, layout=Layout(tp=2)))
        joining = asyncio.create_task(service.join(LLAMA, a_join(1, layout=Layout(tp=2))))
        await asyncio.sleep(0.015)  # it is kept, and not answered yet
        joining.cancel()
        await asyncio.sleep(0.8)
        known = len(service.engine(LLAMA).reservations)
        await service.close()
        return known

    assert asyncio.run(story()) == 2


def test_what_is_kept_is_answered_and_told_though_telling_it_meets_a_fault():
    async def story() -> tuple[int, bool]:
        service = Service(SlowLog())
        await service.start()
        await service.join(LLAMA, a_join(0))
        told = asyncio.create_task(service.cell(LLAMA).change(20, "fact"))
        await asyncio.sleep(0)

        def faulty(*_: object) -> None:
            raise ValueError("a fault of our own")

        service._writer._on_kept = faulty
        attempt = (await service.join(LLAMA, a_join(0)))["attempt"]
        await asyncio.sleep(0)
        heard = told.done()
        told.cancel()
        await service.close()
        return attempt, heard

    assert asyncio.run(story()) == (2, True)
