"""What a durable append costs, and how many a second one store keeps while many engines write.

Each appender has an engine of its own and appends its next entry once the last one is durable, as
ranks that wait do.

    .venv/bin/python benchmarks/append.py [--folder DIR] [--seconds 3] [--json] [APPENDERS ...]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from itertools import chain
from pathlib import Path

from coordinator.events import EngineName, Entry, Reported
from coordinator.logs import EngineLog, open_log
from kvaccord.messages import CacheClass, Report

REPORT = Report(
    free_bytes=100 * 2**30,
    kv_budget_bytes=90 * 2**30,
    max_num_seqs=256,
    classes=(CacheClass(kind="page", name="kv", entry_bytes=1_399_040),),
)


async def appender(log: EngineLog, name: EngineName, until_s: float) -> list[float]:
    """Seconds that each append took."""
    took: list[float] = []
    while (began_s := time.perf_counter()) < until_s:
        event = Reported(round=1, attempt=len(took), reports={0: REPORT}, planned={})
        await log.append(name, Entry(events=(event,)), n=len(took))
        took.append(time.perf_counter() - began_s)
    return took


async def measure(url: str, appenders: int, seconds: float) -> dict[str, float]:
    log = open_log(url)
    names = [EngineName("bench", f"engine-{i}") for i in range(appenders)]
    began_s, cpu_s = time.perf_counter(), time.process_time()
    until_s = began_s + seconds
    each = await asyncio.gather(*(appender(log, name, until_s) for name in names))
    took = sorted(chain.from_iterable(each))
    cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - began_s
    await log.close()
    return {
        "appenders": appenders,
        "appends_per_s": round(len(took) / wall_s),
        "p50_ms": round(took[len(took) // 2] * 1e3, 2),
        "p99_ms": round(took[len(took) * 99 // 100] * 1e3, 2),
        "cpu_us_per_append": round(cpu_s / len(took) * 1e6),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Durable appends a second.")
    parser.add_argument("appenders", nargs="*", type=int, default=[1, 8, 64])
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: temporary")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    for appenders in args.appenders:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            row = asyncio.run(measure(f"sqlite:///{folder}/store.db", appenders, args.seconds))
        print(json.dumps(row) if args.json else "  ".join(f"{k} {v}" for k, v in row.items()))


if __name__ == "__main__":
    main()
