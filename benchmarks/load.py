"""Many engines start at once: one load process, one session per rank, a real coordinator beside it.

    .venv/bin/python benchmarks/load.py --engines 200 --ranks 8 --within-s 5
    .venv/bin/python benchmarks/load.py --engines 1250 --pin --kill-at-half --down-s 60

Prints what went wrong (nothing should), how long engines waited, and the coordinator's CPU seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import tempfile
import time
from collections import Counter

from calls import Calls
from fleet import Engine
from server import Coordinator, milliseconds, raise_descriptor_limit, rows, serving

SPARE_DESCRIPTORS = 200


async def play(args: argparse.Namespace, coordinator: Coordinator, descriptors: int) -> None:
    ranks = args.engines * args.ranks
    calls = Calls(coordinator.port, at_once=descriptors - ranks - SPARE_DESCRIPTORS)
    engines = [Engine(n, args.ranks, calls) for n in range(args.engines)]
    before_s, began_s = coordinator.cpu_s, time.monotonic()
    starts = [asyncio.create_task(e.play(random.uniform(0, args.within_s))) for e in engines]
    killed_s = back_s = 0.0
    if args.kill_at_half:
        await calls.until("reports", ranks // 2)
        await coordinator.kill()
        killed_s = time.monotonic()
        await asyncio.sleep(args.down_s)
        called_s = time.monotonic()
        await coordinator.start()
        back_s = time.monotonic()
    # A rank that is refused never ends: what it heard stands below.
    done, stuck = await asyncio.wait(starts, timeout=args.patience_s)
    for start in done:
        start.result()
    for start in stuck:
        start.cancel()

    server_s, took_s = coordinator.cpu_s - before_s, time.monotonic() - began_s
    ended = [e for e in engines if len(e.heard_s["outcome"]) == args.ranks]
    sealed = [e for e in ended if e.sealed]
    requests = sum(map(len, calls.latencies_s.values())) + ranks
    values = {
        "wrong (not one decision, or not SEALED)": str(len(ended) - len(sealed)),
        "not ended": str(len(engines) - len(ended)),
        "false losses": str(sum(e.lost for e in engines)),
        "refusals": str(calls.refusals.total()),
        "calls without an answer, repeated": str(calls.unanswered),
        "whole run": f"{took_s:.1f} s",
        "decision after last report was answered": milliseconds(
            [e.decided_after_s for e in sealed if max(e.reported_s, default=0.0) > back_s]
        ),
        "a whole start, join to outcome": milliseconds([e.sealed_s - e.entered_s for e in sealed]),
    }
    if args.kill_at_half:
        last_s = max((e.sealed_s for e in sealed), default=back_s)
        before = [e for e in sealed if max(e.reported_s, default=0.0) <= back_s]
        values |= {
            "killed -9 after": f"{killed_s - began_s:.1f} s, for {called_s - killed_s:.1f} s",
            "start until ready": f"{back_s - called_s:.1f} s",
            "whose last report was answered before": f"{len(before)} engines",
            "last rank SEALED after it was ready": f"{last_s - back_s:.1f} s",
        }
    for noun, latencies in calls.latencies_s.items():
        values[f"a call: {noun}"] = milliseconds(latencies)
    values["coordinator's CPU"] = (
        f"{server_s:.1f} s, {server_s / ranks * 1000:.2f} ms a rank,"
        f" {server_s / requests * 1000:.2f} ms a request"
    )
    values["load's CPU"] = f"{time.process_time():.1f} s"
    values["coordinator's resident memory at most"] = f"{coordinator.peak_bytes / 2**20:.0f} MiB"
    title = f"{args.engines} engines x {args.ranks} ranks, arriving within {args.within_s:g} s"
    for row in rows(title, values):
        print(row)
    for end, count in Counter(end for e in ended for end in e.ends).most_common():
        print(f"  {end}: {count} engines")
    for message in [m for e in ended for m in e.messages if not e.sealed][:3]:
        print(f"  {message}")
    for refusal, count in calls.refusals.most_common(5):
        print(f"  refused {count} times: {refusal}")


async def measure(args: argparse.Namespace) -> None:
    if args.pin:
        os.sched_setaffinity(0, {1})
    with tempfile.TemporaryDirectory() as folder:
        async with serving(folder, cpu=0 if args.pin else None) as coordinator:
            await play(args, coordinator, raise_descriptor_limit())


def main() -> None:
    parser = argparse.ArgumentParser(description="Many engines start at once.")
    parser.add_argument("--engines", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--within-s", type=float, default=10.0)
    parser.add_argument("--pin", action="store_true", help="coordinator on core 0, load on core 1")
    parser.add_argument("--kill-at-half", action="store_true", help="-9 when half have reported")
    parser.add_argument("--down-s", type=float, default=5.0)
    parser.add_argument("--patience-s", type=float, default=240.0)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
