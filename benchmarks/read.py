"""How fast `kvaccord read` reads, and in how much memory.

    .venv/bin/python -m benchmarks.read [--mib 1024] [--kind serving|starting|errors] [--keep FILE]

It makes a log and reads it in a process of its own. serving: a start, then requests until the log
is full. starting: the start never gets ready, so that every needle is searched for to the end.
errors: every other line is an exception.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

BUDGET = (
    "(Worker_TP{r} pid={p}) INFO 09-25 00:15:14 [gpu_worker.py:298] Available KV cache memory:"
    " 18.2{r} GiB\n"
)
START = (
    "(EngineCore_DP0 pid=9) INFO 09-25 00:10:14 [core.py:77] Initializing a V1 LLM engine"
    " (v0.11.0) with config: model='m', max_seq_len=8192, tensor_parallel_size=8\n"
    + "".join(BUDGET.format(r=r, p=100 + r) for r in range(8))
    + "(EngineCore_DP0 pid=9) INFO 09-25 00:15:15 [kv_cache_utils.py:1286] GPU KV cache size:"
    " 428,512 tokens\n"
)
READY = (
    "(EngineCore_DP0 pid=9) INFO 09-25 00:16:15 [core.py:210] init engine (profile, create kv"
    " cache, warmup model) took 38.57 seconds\n"
    "(APIServer pid=1) INFO:     Application startup complete.\n"
)
REQUESTS = (
    '(APIServer pid=1) INFO:     10.0.{a}.{b}:4123 - "POST /v1/completions HTTP/1.1" 200 OK\n',
    "(APIServer pid=1) INFO 09-25 01:15:14 [loggers.py:118] Engine 00{c}: Avg prompt throughput:"
    " {a}{b}.0 tokens/s, Avg generation throughput: {b}.0 tokens/s, Running: {c} reqs, Waiting: 0"
    " reqs, GPU KV cache usage: {c}2.3%, Prefix cache hit rate: 0.0%\n",
    "[2025-09-08 10:00:01 TP{c}] Decode batch. #running-req: {a}, #token: {b}0132, token usage:"
    " 0.05, cuda graph: True, gen throughput (token/s): {b}.2, #queue-req: 0, \n",
)
ERROR = "(Worker_TP{c} pid=9) ERROR 09-25 01:00:00 [x.py:1] RuntimeError: {a} of {b} failed\n"


def pieces(kind: str, rng: random.Random) -> Iterator[str]:
    yield START + (READY if kind == "serving" else "")
    shapes = [*REQUESTS, *([ERROR] * len(REQUESTS) if kind == "errors" else [])]
    while True:
        yield "".join(
            rng.choice(shapes).format(a=rng.randrange(99), b=rng.randrange(99), c=rng.randrange(8))
            for _ in range(5000)
        )


def make(path: Path, mib: int, kind: str) -> None:
    """Different lines up to 64 MiB, then the same again."""
    source, block = pieces(kind, random.Random(0)), bytearray()
    with path.open("wb") as log:
        log.write(next(source).encode())
        while len(block) < min(mib, 64) * 2**20:
            block += next(source).encode()
        while log.tell() < mib * 2**20:
            log.write(block)


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--mib", type=int, default=1024)
    asked.add_argument("--kind", choices=("serving", "starting", "errors"), default="serving")
    asked.add_argument("--keep", type=Path)
    options = asked.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = options.keep or Path(folder) / "engine.log"
        make(path, options.mib, options.kind)
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "cli", "read", "--json", str(path)],
            capture_output=True,
            text=True,
            check=False,
        )
        wall_s = time.perf_counter() - began
        peak_kib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        cpu = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        json.dumps(
            {
                "kind": options.kind,
                "mib": options.mib,
                "wall_s": round(wall_s, 2),
                "cpu_s": round(cpu.ru_utime + cpu.ru_stime, 2),
                "peak_mib": round(peak_kib / 1024, 1),
                "exit_code": done.returncode,
                "headline": json.loads(done.stdout)["headline"],
            }
        )
    )


if __name__ == "__main__":
    main()
