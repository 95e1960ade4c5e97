"""Starts of 8 ranks as processes with the real client, one after the other, on one coordinator.

    .venv/bin/python benchmarks/starts.py --ranks 8 --starts 100

Prints how long a whole start takes (from the first join to the last `applied` that returned),
how long each call took, and the coordinator's CPU seconds. All processes share the machine's cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import defaultdict

from server import Coordinator, milliseconds, rows, serving

from kvaccord import Layout, Report, page
from worker_client import Rendezvous

WARM_UP = 3  # starts that are not counted: imports, first connections


def be_a_rank(url: str, rank: int, world: int, starts: int) -> None:
    """What one process does; prints the seconds at which each call began and ended."""
    report = Report(free_bytes=100_000, kv_budget_bytes=90_000 - rank, classes=(page("kv", 1000),))
    for number in range(starts):
        times_s = [time.monotonic()]
        with Rendezvous.join(
            url=url,
            engine=f"start-{number}",
            ranks=[rank],
            layout=Layout(tp=world),
            launch="benchmark",
        ) as rendezvous:
            times_s.append(time.monotonic())
            agreed = rendezvous.report(report)
            times_s.append(time.monotonic())
            rendezvous.applied(built=agreed.entries)
            times_s.append(time.monotonic())
        print(json.dumps(times_s), flush=True)


async def measure(coordinator: Coordinator, ranks: int, starts: int) -> None:
    before_s = coordinator.cpu_s
    said = await asyncio.gather(
        *(rank_process(coordinator, r, ranks, starts) for r in range(ranks))
    )
    spent_s = coordinator.cpu_s - before_s
    took_s: dict[str, list[float]] = defaultdict(list)
    for each in list(zip(*said, strict=True))[WARM_UP:]:
        took_s["a whole start"].append(max(t[-1] for t in each) - min(t[0] for t in each))
        last = max(t[1] for t in each)  # then the last rank begins to report
        took_s["decision after the last rank's join"].append(max(t[2] for t in each) - last)
        for times_s in each:
            for at, name in enumerate(("join", "report", "applied")):
                took_s[f"a call: {name}"].append(times_s[at + 1] - times_s[at])
    values = {name: milliseconds(seconds) for name, seconds in took_s.items()}
    values["coordinator's CPU"] = f"{spent_s / ranks / starts * 1000:.2f} ms a rank"
    for row in rows(f"{starts - WARM_UP} starts of {ranks} ranks as processes", values):
        print(row)


async def rank_process(
    coordinator: Coordinator, rank: int, ranks: int, starts: int
) -> list[list[float]]:
    url = f"http://127.0.0.1:{coordinator.port}"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, "--rank", str(rank), "--url", url),
        *("--ranks", str(ranks), "--starts", str(starts)),
        stdout=asyncio.subprocess.PIPE,
    )
    said, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"rank {rank} ended with {process.returncode}")
    return [json.loads(line) for line in said.splitlines()]


async def main(ranks: int, starts: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with serving(folder) as coordinator:
            await measure(coordinator, ranks, starts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Starts of ranks as processes.")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--starts", type=int, default=100)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is None:
        asyncio.run(main(args.ranks, args.starts + WARM_UP))
    else:
        be_a_rank(args.url, args.rank, args.ranks, args.starts)
