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
from collections import Counter

from ranks import Server, engines_of, enter_all, finish_all, raise_descriptor_limit, show


async def play(args: argparse.Namespace, server: Server) -> None:
    told: Counter[str] = Counter()
    engines = engines_of(server.port, args.engines, args.ranks, told)
    await enter_all(engines)
    ranks = [rank for ranks in engines for rank in ranks]
    stopped_s, started_s, attached = [], [], []
    for _ in range(args.times):
        attached.append(sum(rank.attached.is_set() for rank in ranks))
        stopped_s.append(await asyncio.to_thread(server.terminate))
        began_s = time.perf_counter()
        await asyncio.to_thread(server.start)
        started_s.append(time.perf_counter() - began_s)
        await asyncio.sleep(args.every_s)
    began_s = time.perf_counter()
    await asyncio.gather(*(rank.attached.wait() for rank in ranks))
    back_s = time.perf_counter() - began_s
    ends = await finish_all(engines)
    show(
        f"{args.engines} engines x {args.ranks} ranks, coordinator replaced {args.times} times",
        {
            "rounds": ", ".join(f"{n} {end}" for end, n in ends.items()),
            **{name: str(n) for name, n in sorted(told.items())},
            "attached when it was stopped": f"{min(attached)} to {max(attached)} of {len(ranks)}",
            "gone after SIGTERM": f"at most {max(stopped_s):.1f} s",
            "listening again": f"at most {max(started_s):.1f} s after its start",
            "all attached after the last": f"{back_s:.1f} s",
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--every-s", type=float, default=2.0, help="from a start to the next stop")
    args = parser.parse_args()
    raise_descriptor_limit()
    with tempfile.TemporaryDirectory() as folder:
        server = Server(folder)
        try:
            asyncio.run(play(args, server))
        finally:
            server.kill()


if __name__ == "__main__":
    main()
