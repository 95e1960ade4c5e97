"""A coordinator is replaced again and again (SIGTERM, start) under the sessions of many engines.

    python benchmarks/replace.py --engines 200 --times 20

Prints how many sessions were moved, cut and refused, how long a coordinator took to be gone and to
be ready again, and how the rounds ended: whatever is not SEALED was lost.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time

from calls import Calls
from fleet import Engine, enter_all, finish_all
from server import Coordinator, raise_descriptor_limit, rows, serving

AT_ONCE = 50


async def play(args: argparse.Namespace, coordinator: Coordinator) -> None:
    calls = Calls(coordinator.port, AT_ONCE)
    engines = [Engine(n, args.ranks, calls) for n in range(args.engines)]
    ranks = await enter_all(engines, AT_ONCE)
    stopped_s, started_s, attached = [], [], []
    for _ in range(args.times):
        attached.append(sum(rank.attached.is_set() for rank in ranks))
        stopped_s.append(await coordinator.terminate())
        began_s = time.monotonic()
        await coordinator.start()
        started_s.append(time.monotonic() - began_s)
        await asyncio.sleep(args.every_s)
    began_s = time.monotonic()
    await asyncio.gather(*(rank.attached.wait() for rank in ranks))
    back_s = time.monotonic() - began_s
    values = {
        "rounds": await finish_all(engines),
        **{name: str(n) for name, n in sorted(calls.sessions.items())},
        "calls without an answer, repeated": str(calls.unanswered),
        "refusals": str(calls.refusals.total()),
        "attached when it was stopped": f"{min(attached)} to {max(attached)} of {len(ranks)}",
        "gone after SIGTERM": f"at most {max(stopped_s):.1f} s",
        "ready again": f"at most {max(started_s):.1f} s after its start",
        "all attached after the last": f"{back_s:.1f} s",
    }
    title = f"{args.engines} engines x {args.ranks} ranks, coordinator replaced {args.times} times"
    for row in rows(title, values):
        print(row)


async def measure(args: argparse.Namespace) -> None:
    raise_descriptor_limit()
    with tempfile.TemporaryDirectory() as folder:
        async with serving(folder) as coordinator:
            await play(args, coordinator)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--every-s", type=float, default=2.0, help="from a start to the next stop")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
