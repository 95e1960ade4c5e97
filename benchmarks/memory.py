"""What a round keeps in the coordinator's memory: while it waits, and once it has ended.

    .venv/bin/python benchmarks/memory.py --rounds 1000 --ranks 8

A waiting round has all of its ranks claimed, their sessions open, and all but one reported; so its
memory is also that of the sessions and their sockets' buffers in Python. A finished one is SEALED,
its sessions closed. Each engine has one round. Measured as resident memory of a coordinator of its
own, more with the rounds than before them.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile

from calls import Calls
from fleet import Engine
from server import Coordinator, raise_descriptor_limit, rows, serving

AT_ONCE = 10  # engines that enter together: what a crowd needs meanwhile is no part of a round


async def waiting_bytes(coordinator: Coordinator, rounds: int, ranks: int) -> float:
    before = await settled(coordinator, ranks)
    calls = Calls(coordinator.port, at_once=AT_ONCE * ranks)
    engines = [Engine(n, ranks, calls) for n in range(rounds)]
    gate = asyncio.Semaphore(AT_ONCE)
    tasks: list[asyncio.Task[None]] = []

    async def enter(engine: Engine) -> None:
        async with gate:
            *others, last = engine.ranks
            tasks.extend(asyncio.create_task(rank.play()) for rank in others)
            await last.enter()
            await asyncio.gather(*(r.reported.wait() for r in others), last.attached.wait())

    await asyncio.gather(*map(enter, engines))
    kept = coordinator.resident_bytes - before
    for task in tasks:
        task.cancel()
    for engine in engines:
        engine.ranks[-1].close()
    await asyncio.gather(*tasks, return_exceptions=True)
    calls.close()
    return kept / rounds


async def finished_bytes(coordinator: Coordinator, rounds: int, ranks: int) -> float:
    before = await settled(coordinator, ranks)
    await play(coordinator, rounds, ranks, "load")
    return (coordinator.resident_bytes - before) / rounds


async def settled(coordinator: Coordinator, ranks: int) -> int:
    """Its memory once everything has been used once: what is loaded late belongs to no round."""
    await play(coordinator, 2 * AT_ONCE, ranks, "first")
    return coordinator.resident_bytes


async def play(coordinator: Coordinator, rounds: int, ranks: int, name: str) -> None:
    calls = Calls(coordinator.port, at_once=AT_ONCE * ranks)
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> None:
        engine = Engine(number, ranks, calls, name)
        async with gate:
            await engine.play()
        assert engine.sealed, engine.ends

    await asyncio.gather(*map(one, range(rounds)))
    calls.close()
    await asyncio.sleep(2.0)  # until the ends of the sessions have been noticed


async def main() -> None:
    parser = argparse.ArgumentParser(description="Memory of a round.")
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=8)
    args = parser.parse_args()
    raise_descriptor_limit()
    values = {}
    for what, measure in (("waiting", waiting_bytes), ("finished", finished_bytes)):
        with tempfile.TemporaryDirectory() as folder:
            async with serving(folder) as coordinator:
                before = coordinator.resident_bytes
                kept = await measure(coordinator, args.rounds, args.ranks)
                values["a coordinator without rounds"] = f"{before / 2**20:.0f} MiB"
                values[f"a {what} round"] = f"{kept / 1024:.1f} KiB"
    for row in rows(f"{args.rounds} rounds of {args.ranks} ranks", values):
        print(row)


if __name__ == "__main__":
    asyncio.run(main())
