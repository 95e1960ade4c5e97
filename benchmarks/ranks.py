"""What the benchmarks share: ranks as bare connections that hold on as the client does, a server.

The pauses are those of worker_client/session.py; a process for each of hundreds of ranks would
measure the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
import re
import resource
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from worker_client.session import CALM_S, QUICK_S, READ_S, REATTACH_S

BACKOFF_S = 1.0
ENTRY_BYTES = 1000


class Server:
    """`kvaccord serve` on a SQLite store, that can be stopped and started on the same port."""

    def __init__(self, folder: str, *options: str) -> None:
        self._command = [sys.executable, "-m", "cli", "serve", "--port"]
        self._options = ["--store", f"sqlite:///{folder}/kvaccord.db", *options]
        self.port = 0
        self.start()

    def start(self) -> None:
        """Returns once it listens."""
        self.process = subprocess.Popen(
            [*self._command, str(self.port), *self._options],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdout is not None
        found = re.search(r":(\d+)/ on ", self.process.stdout.readline())
        if found is None:
            raise RuntimeError("the coordinator did not start")
        self.port = int(found[1])

    def terminate(self) -> float:
        """SIGTERM. Seconds until it was gone."""
        began_s = time.perf_counter()
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(30)
        return time.perf_counter() - began_s

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)


@dataclass
class Rank:
    """One rank of a start that all begin together. told: counts of what came of its tries."""

    port: int
    engine: str
    rank: int
    world: int
    host: str
    told: Counter[str]
    attached: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._base = f"/v1/engines/default/{self.engine}"
        self._token = ""
        self._last_id = ""
        self._documents: dict[str, asyncio.Future[bytes]] = {}

    async def enter(self) -> None:
        """Join, claim, and hold a session from then on."""
        join = {
            "ranks": [self.rank],
            "layout": {"tp": self.world},
            "nonce": uuid.uuid4().hex,
            "launch": {"run": "benchmark"},
            "host": self.host,
            "pid": 1 + self.rank,
        }
        self._token = json.loads(await self.call("POST", f"{self._base}/join", join))["token"]
        number = json.loads(await self.call("POST", f"{self._base}/claim"))["round"]
        self._at = f"{self._base}/rounds/{number}"
        loop = asyncio.get_running_loop()
        self._documents = {what: loop.create_future() for what in ("decision", "outcome")}
        self._session = asyncio.create_task(self._hold_on())
        await self.attached.wait()

    async def finish(self, report_after_s: float = 0.0) -> dict[str, Any]:
        """Report, build, and return the document that ended the round."""
        await asyncio.sleep(report_after_s)
        report = {
            "free_bytes": 100_000,
            "kv_budget_bytes": 90_000,
            "classes": [{"kind": "page", "name": "kv", "entry_bytes": ENTRY_BYTES}],
        }
        await self.call("PUT", f"{self._at}/reports", {str(self.rank): report})
        decision = await self._documents["decision"]
        document: dict[str, Any] = json.loads(decision)
        if document["verdict"]["outcome"] == "PASSED":
            built = document["plan"]["schedulers"][0]["entries"]
            digest = f"sha256:{hashlib.sha256(decision).hexdigest()}"
            await self.call("PUT", f"{self._at}/applied", {"digest": digest, "built": built})
            document = json.loads(await self._documents["outcome"])
        await self.close()
        return document

    async def decision(self) -> dict[str, Any]:
        """What is decided, whoever has reported."""
        document: dict[str, Any] = json.loads(await self._documents["decision"])
        return document

    async def close(self) -> None:
        self._session.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._session

    async def call(self, method: str, path: str, body: Any = None) -> bytes:
        """A call on a connection of its own, repeated while nobody answers."""
        content = b"" if body is None else json.dumps(body).encode()
        while True:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                with contextlib.closing(writer):
                    writer.write(self._request(method, path, content, "Connection: close\r\n"))
                    head = await reader.readuntil(b"\r\n\r\n")
                    answer = await reader.read()
            except (OSError, asyncio.IncompleteReadError):
                self.told["calls without an answer, repeated"] += 1
            else:
                status = int(head.split()[1])
                if status < 300:
                    return answer
                if status != 503:
                    self.told["calls refused"] += 1
                    raise RuntimeError(f"{method} {path}: {status} {answer[:300]!r}")
                self.told["calls answered 503, repeated"] += 1
            await asyncio.sleep(random.uniform(0, BACKOFF_S))

    def _request(self, method: str, path: str, content: bytes = b"", more: str = "") -> bytes:
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Kvaccord-Attempt: {self._token}\r\nContent-Length: {len(content)}\r\n{more}\r\n"
        )
        return head.encode() + content

    async def _hold_on(self) -> None:
        loop = asyncio.get_running_loop()
        cut_s = loop.time()
        while True:
            began_s, pause_s = loop.time(), QUICK_S
            try:
                pause_s = await self._hold()
            except (OSError, asyncio.IncompleteReadError, TimeoutError) as fault:
                self.told["sessions not let in"] += not self.attached.is_set()
                self.told["sessions cut"] += self.attached.is_set()
                if isinstance(fault, ConnectionRefusedError):
                    pause_s = CALM_S
            self.attached.clear()
            now_s = loop.time()
            if now_s - began_s >= REATTACH_S:
                cut_s = now_s
            if now_s - cut_s >= REATTACH_S:
                pause_s = CALM_S
            await asyncio.sleep(random.uniform(0, pause_s))

    async def _hold(self) -> float:
        """Attach once and read to the end. Returns the longest pause before the next try."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=2**22)
        with contextlib.closing(writer):
            more = f"Last-Event-ID: {self._last_id}\r\n" if self._last_id else ""
            writer.write(self._request("GET", f"{self._at}/session?facts=0", more=more))
            status = int((await reader.readuntil(b"\r\n\r\n")).split()[1])
            if status != 200:
                self.told["sessions answered 503" if status == 503 else "sessions refused"] += 1
                return CALM_S
            name = ""
            while line := await self._line(reader):
                key, _, value = line.decode().strip().partition(": ")
                if line.startswith(b":"):
                    self.attached.set()
                elif key == "event":
                    name = value
                elif key == "id":
                    self._last_id = value
                elif key == "data" and name == "move":
                    self.told["sessions moved"] += 1
                    return CALM_S
                elif key == "data" and name in self._documents and not self._documents[name].done():
                    self._documents[name].set_result(value.encode())
            raise asyncio.IncompleteReadError(b"", None)

    async def _line(self, reader: asyncio.StreamReader) -> bytes:
        async with asyncio.timeout(READ_S):
            return await reader.readline()


def engines_of(
    port: int, engines: int, ranks: int, told: Counter[str], name: str = "engine"
) -> list[list[Rank]]:
    """Starts of so many ranks each, two engines to a host."""
    return [
        [Rank(port, f"{name}-{e}", r, ranks, f"host-{e // 2}", told) for r in range(ranks)]
        for e in range(engines)
    ]


async def enter_all(engines: list[list[Rank]], at_once: int = 50) -> None:
    gate = asyncio.Semaphore(at_once)

    async def enter(rank: Rank) -> None:
        async with gate:
            await rank.enter()

    await asyncio.gather(*(enter(rank) for ranks in engines for rank in ranks))


async def finish_all(engines: list[list[Rank]]) -> Counter[str]:
    """How the rounds ended, by outcome and code; an engine whose ranks heard different ends."""

    async def finish(ranks: list[Rank]) -> str:
        ends = await asyncio.gather(*(rank.finish(random.uniform(0, 3.0)) for rank in ranks))
        said = {json.dumps(end, sort_keys=True) for end in ends}
        if len(said) > 1:
            return "WRONG: its ranks heard different ends"
        verdict = ends[0].get("verdict", ends[0])
        return f"{verdict['outcome']} {verdict['code']}"

    return Counter(await asyncio.gather(*(finish(ranks) for ranks in engines)))


def raise_descriptor_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def show(title: str, rows: dict[str, Any]) -> None:
    print(title)
    for name, value in rows.items():
        print(f"  {name:40}{value}")
