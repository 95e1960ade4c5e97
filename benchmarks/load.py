"""Many engines start at once: one load process, one session per rank, a real coordinator beside it.

    python benchmarks/load.py --engines 200 --ranks 8 --within-s 10

Prints how long the ranks waited for the decision after the last report of their engine was
answered, the latency of calls, and the CPU seconds that coordinator and load spent.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

CALL_CONNECTIONS = 100
REPORT = {
    "free_bytes": 100_000,
    "kv_budget_bytes": 90_000,
    "classes": [{"kind": "page", "name": "kv", "entry_bytes": 1000}],
}


class Calls:
    """A few keep-alive connections for all calls; each session has one of its own."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: asyncio.LifoQueue[Any] = asyncio.LifoQueue()
        for _ in range(CALL_CONNECTIONS):
            self._idle.put_nowait(None)
        self.latencies_s: list[float] = []

    async def call(self, method: str, path: str, token: str = "", body: Any = None) -> bytes:
        connection = await self._idle.get()
        if connection is None:
            connection = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = connection
        content = b"" if body is None else json.dumps(body).encode()
        began_s = time.perf_counter()
        writer.write(request(method, path, token, content) + content)
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head)
        answer = await reader.readexactly(int(length[1])) if length else b""
        self.latencies_s.append(time.perf_counter() - began_s)
        self._idle.put_nowait(connection)
        if not head.startswith((b"HTTP/1.1 200", b"HTTP/1.1 202")):
            raise RuntimeError(f"{method} {path}: {head[:60]!r} {answer[:200]!r}")
        return answer


def request(method: str, path: str, token: str, content: bytes = b"") -> bytes:
    return (
        f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Kvaccord-Attempt: {token}\r\nContent-Length: {len(content)}\r\n\r\n"
    ).encode()


class Engine:
    """What its ranks heard, and when."""

    def __init__(self, number: int, ranks: int) -> None:
        self.path = f"/v1/engines/default/load-{number}"
        self.ranks = ranks
        self.last_report_s = 0.0
        self.heard_s: list[float] = []
        self.decisions: set[bytes] = set()
        self.outcomes: set[str] = set()

    async def play(self, port: int, calls: Calls, after_s: float) -> None:
        await asyncio.sleep(after_s)
        await asyncio.gather(*(self._rank(port, calls, rank) for rank in range(self.ranks)))

    async def _rank(self, port: int, calls: Calls, rank: int) -> None:
        join = {
            "ranks": [rank],
            "layout": {"tp": self.ranks},
            "nonce": uuid.uuid4().hex,
            "launch": {"run": "load"},
            "host": f"host-{rank}",
            "pid": 1 + rank,
        }
        token = json.loads(await calls.call("POST", f"{self.path}/join", body=join))["token"]
        number = json.loads(await calls.call("POST", f"{self.path}/claim", token))["round"]
        at = f"{self.path}/rounds/{number}"
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**22)
        writer.write(request("GET", f"{at}/session", token))
        report = {str(rank): REPORT | {"kv_budget_bytes": 90_000 - rank}}
        await calls.call("PUT", f"{at}/reports", token, report)
        self.last_report_s = time.perf_counter()
        decision = await self._event(reader, b"event: decision")
        self.heard_s.append(time.perf_counter())
        self.decisions.add(decision)
        digest = f"sha256:{hashlib.sha256(decision).hexdigest()}"
        applied = {"digest": digest, "built": {"kv": (90_000 - self.ranks + 1) // 1000}}
        await calls.call("PUT", f"{at}/applied", token, applied)
        outcome = json.loads(await self._event(reader, b"event: outcome"))
        self.outcomes.add(outcome["outcome"])
        writer.close()

    async def _event(self, reader: asyncio.StreamReader, name: bytes) -> bytes:
        while (await reader.readline()).strip() != name:
            if reader.at_eof():
                raise RuntimeError("the session ended")
        return (await reader.readline()).removeprefix(b"data: ").strip()


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def play(args: argparse.Namespace, port: int, pid: int) -> None:
    calls = Calls(port)
    engines = [Engine(n, args.ranks) for n in range(args.engines)]
    before_s, began_s = cpu_s(pid), time.perf_counter()
    await asyncio.gather(*(e.play(port, calls, random.uniform(0, args.within_s)) for e in engines))
    took_s = time.perf_counter() - began_s
    waits_s = sorted(max(e.heard_s) - e.last_report_s for e in engines)
    ranks = args.engines * args.ranks
    wrong = [e.path for e in engines if len(e.decisions) != 1 or e.outcomes != {"SEALED"}]
    latencies = sorted(calls.latencies_s)

    def at(values: list[float], share: float) -> str:
        return f"{values[min(len(values) - 1, int(len(values) * share))] * 1000:.1f} ms"

    server_s = cpu_s(pid) - before_s
    rows = {
        "wrong or not sealed": str(len(wrong)),
        "whole run": f"{took_s:.1f} s",
        "decision after last report": f"p50 {at(waits_s, 0.5)}, p99 {at(waits_s, 0.99)}",
        "a call": f"p50 {at(latencies, 0.5)}, p99 {at(latencies, 0.99)}",
        "coordinator's CPU": f"{server_s:.1f} s, {server_s / ranks * 1000:.2f} ms a rank",
    }
    print(f"{args.engines} engines x {args.ranks} ranks, arriving within {args.within_s:g} s")
    for name, value in rows.items():
        print(f"  {name:28}{value}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--within-s", type=float, default=10.0)
    args = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "cli", "serve", "--port", "0"]
        server = subprocess.Popen(
            [*command, "--store", f"sqlite:///{folder}/kvaccord.db"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            assert server.stdout is not None
            port = int(re.search(r":(\d+)/ on ", server.stdout.readline())[1])  # type: ignore[index]
            time.sleep(1)
            asyncio.run(play(args, port, server.pid))
        finally:
            server.kill()


if __name__ == "__main__":
    main()
