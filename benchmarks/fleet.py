"""Ranks as connections of one process, and a coordinator beside it that can be killed.

Each rank does what the client does, with its pauses (worker_client/session.py and flow.py): a
session that attaches again after what it last heard, calls that are repeated until they are
answered. Ten thousand clients with their threads do not fit one process.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import random
import re
import resource
import subprocess
import sys
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from worker_client.flow import BACKOFF_MAX_S, BACKOFF_MIN_S, CALL_S, LONG_POLL_S
from worker_client.session import CALM_S, QUICK_S, READ_S, REATTACH_S
from worker_client.steps import ATTACH_S

NO_ANSWER = (OSError, EOFError, TimeoutError, asyncio.IncompleteReadError)
REPORT = {
    "free_bytes": 100_000,
    "kv_budget_bytes": 90_000,
    "classes": [{"kind": "page", "name": "kv", "entry_bytes": 1000}],
}


class Coordinator:
    """A real one in a process of its own, on a store in `folder`. cpu: the core it is held to."""

    def __init__(self, folder: str, cpu: int | None = None) -> None:
        self._command = [sys.executable, "-m", "cli", "serve"]
        self._command += ["--store", f"sqlite:///{folder}/kvaccord.db"]
        self._cpu = cpu
        self._spent_s = 0.0  # CPU of those that were killed
        self.port = 0

    async def start(self) -> None:
        """Returns when it answers that it is ready."""
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            "--port",
            str(self.port),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            preexec_fn=self._settle_in,
        )
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        found = re.search(rb":(\d+)/ on ", line)
        assert found, f"the coordinator did not start: {line!r}"
        self.port = int(found[1])
        # It listens before it has read its store; who calls meanwhile is answered then.
        calls = Calls(self.port, at_once=1)
        await calls.ask("GET", "/readyz", timeout_s=120.0)
        calls.close()

    def _settle_in(self) -> None:
        raise_descriptor_limit()
        if self._cpu is not None:
            os.sched_setaffinity(0, {self._cpu})

    async def kill(self) -> None:
        self._spent_s = self.cpu_s
        self._process.kill()
        await self._process.wait()

    @property
    def cpu_s(self) -> float:
        """CPU seconds of this coordinator and of those before it."""
        if self._process.returncode is not None:
            return self._spent_s
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return self._spent_s + (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def resident_bytes(self) -> int:
        pages = Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    @property
    def peak_bytes(self) -> int:
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]


def raise_descriptor_limit() -> int:
    """To the hard limit, which is returned."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


@contextlib.asynccontextmanager
async def serving(folder: str, cpu: int | None = None) -> Any:
    coordinator = Coordinator(folder, cpu)
    await coordinator.start()
    try:
        yield coordinator
    finally:
        await coordinator.kill()


class Calls:
    """Keep-alive connections for calls: as many as are in flight at once, at most `at_once`."""

    def __init__(self, port: int, at_once: int) -> None:
        self._port = port
        self._free = asyncio.Semaphore(at_once)
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self.latencies_s: dict[str, list[float]] = defaultdict(list)
        self.refusals: Counter[str] = Counter()
        self.unanswered = 0
        self._answered = asyncio.Event()

    async def ask(
        self,
        method: str,
        path: str,
        token: str = "",
        body: Any = None,
        *,
        timeout_s: float = CALL_S,
    ) -> tuple[int, bytes]:
        """Status and body. Raises one of NO_ANSWER."""
        content = b"" if body is None else json.dumps(body).encode()
        head = request(method, path, token, f"Content-Length: {len(content)}\r\n")
        async with self._free:
            began_s = time.monotonic()
            async with asyncio.timeout(timeout_s):
                reader, writer = await self._connection()
                try:
                    writer.write(head + content)
                    answer = await reader.readuntil(b"\r\n\r\n")
                    length = re.search(rb"content-length: (\d+)", answer)
                    answered = await reader.readexactly(int(length[1])) if length else b""
                except BaseException:
                    writer.transport.abort()
                    raise
            self._idle.append((reader, writer))
        status = int(answer[9:12])
        noun = path.partition("?")[0].rpartition("/")[2]
        self.latencies_s[noun].append(time.monotonic() - began_s)
        self._answered.set()
        if status >= 400 and status != 503:
            self.refusals[f"{status} {noun} {answered[:300].decode()}"] += 1
        return status, answered

    async def until_answered(self, path: str, token: str = "", body: Any = None) -> Any:
        """POST and repeat, as the client does to enter; the JSON that was answered."""
        pause_s = BACKOFF_MIN_S
        while True:
            with contextlib.suppress(*NO_ANSWER):
                status, answer = await self.ask("POST", path, token, body)
                if status != 503:
                    return json.loads(answer)
            self.unanswered += 1
            await asyncio.sleep(random.uniform(0, pause_s))
            pause_s = min(pause_s * 2, BACKOFF_MAX_S)

    async def until(self, noun: str, count: int) -> None:
        """Wait until so many calls of this kind have been answered."""
        while len(self.latencies_s[noun]) < count:
            self._answered.clear()
            await self._answered.wait()

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while self._idle:
            reader, writer = self._idle.pop()
            if not reader.at_eof() and not writer.is_closing():
                return reader, writer
            writer.close()
        return await asyncio.open_connection("127.0.0.1", self._port, limit=2**20)

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()


def request(method: str, path: str, token: str, more: str = "") -> bytes:
    return (
        f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Kvaccord-Attempt: {token}\r\n{more}\r\n"
    ).encode()


class Engine:
    """Its ranks, what they heard, and when (monotonic seconds)."""

    def __init__(self, number: int, ranks: int, calls: Calls, name: str = "load") -> None:
        self.path = f"/v1/engines/default/{name}-{number}"
        self.ranks = [Rank(self, rank, calls) for rank in range(ranks)]
        self.entered_s = 0.0
        self.reported_s: list[float] = []  # when each rank's report was first answered
        self.heard_s: dict[str, list[float]] = {"decision": [], "outcome": []}
        self.documents: dict[str, set[bytes]] = {"decision": set(), "outcome": set()}

    async def play(self, port: int, after_s: float = 0.0) -> None:
        """A whole start. Returns when every rank has heard the outcome."""
        await asyncio.sleep(after_s)
        self.entered_s = time.monotonic()
        await asyncio.gather(*(rank.play(port) for rank in self.ranks))

    @property
    def sealed(self) -> bool:
        """One decision, one outcome, and that it is SEALED."""
        return len(self.documents["decision"]) == 1 and self.ends == {"SEALED sealed"}

    @property
    def ends(self) -> set[str]:
        """Outcome and code of every document that ended the round, as its ranks heard it."""
        return {f"{verdict['outcome']} {verdict['code']}" for verdict in self._verdicts}

    @property
    def messages(self) -> set[str]:
        return {verdict["message"] for verdict in self._verdicts}

    @property
    def _verdicts(self) -> list[dict[str, Any]]:
        documents = map(json.loads, self.documents["outcome"])  # after FAILED, the decision
        return [document.get("verdict", document) for document in documents]

    @property
    def lost(self) -> bool:
        """Whether a document blames a rank as lost, though each of them lives."""
        return any(b'"rank_lost"' in d for said in self.documents.values() for d in said)

    @property
    def decided_after_s(self) -> float:
        """From the answer to its last report until its last rank had the decision."""
        return max(self.heard_s["decision"]) - max(self.reported_s)

    @property
    def sealed_s(self) -> float:
        return max(self.heard_s["outcome"])


class Rank:
    def __init__(self, engine: Engine, rank: int, calls: Calls) -> None:
        self._engine = engine
        self._rank = rank
        self._calls = calls
        self._documents: dict[str, bytes] = {}
        self.attached, self.reported = asyncio.Event(), asyncio.Event()
        self._was_cut = False
        self._changed = asyncio.Event()
        self._last_id = ""

    async def play(self, port: int, *, stop_before: str = "") -> None:
        """Enter, report, build. stop_before `reports`: enter, and hold the session for ever."""
        engine, world = self._engine, len(self._engine.ranks)
        join = {
            "ranks": [self._rank],
            "layout": {"tp": world},
            "nonce": uuid.uuid4().hex,
            "launch": {"run": "load"},
            "host": f"host-{self._rank}",
            "pid": 1 + self._rank,
        }
        self._token = (await self._calls.until_answered(f"{engine.path}/join", body=join))["token"]
        claim = await self._calls.until_answered(f"{engine.path}/claim", self._token)
        self._path = f"{engine.path}/rounds/{claim['round']}"
        session = asyncio.create_task(self._hold_session(port))
        try:
            await self._news("", ATTACH_S)
            if stop_before == "reports":
                await asyncio.Event().wait()
            await self._size()
        finally:
            session.cancel()

    async def _size(self) -> None:
        report = {str(self._rank): REPORT | {"kv_budget_bytes": 90_000 - self._rank}}
        decision = await self._settle("decision", "reports", report)
        if b'"outcome":"FAILED"' in decision:
            self._hear("outcome", decision)
            return
        digest = f"sha256:{hashlib.sha256(decision).hexdigest()}"
        built = {"kv": (90_000 - len(self._engine.ranks) + 1) // 1000}
        await self._settle("outcome", "applied", {"digest": digest, "built": built})

    async def _settle(self, what: str, noun: str, body: Any) -> bytes:
        """flow._settle: PUT, and hear the document in the session; without it the PUT waits."""
        pause_s = BACKOFF_MIN_S
        while what not in self._documents:
            # At first the session is on its way: it brings the document.
            wait_s = LONG_POLL_S if self._was_cut and not self.attached.is_set() else 0.0
            path = f"{self._path}/{noun}?wait_s={wait_s:g}"
            try:
                status, answer = await self._calls.ask(
                    "PUT", path, self._token, body, timeout_s=wait_s + CALL_S
                )
                if status not in (200, 202):
                    raise EOFError(f"answered {status}")
            except NO_ANSWER:
                self._calls.unanswered += 1
                await self._news(what, random.uniform(0, pause_s))
                pause_s = min(pause_s * 2, BACKOFF_MAX_S)
                continue
            if noun == "reports" and not self.reported.is_set():
                self._engine.reported_s.append(time.monotonic())
                self.reported.set()
            pause_s = BACKOFF_MIN_S
            if status == 200:
                self._hear(what, answer)
            await self._news(what, LONG_POLL_S)
        return self._documents[what]

    async def _news(self, what: str, timeout_s: float) -> None:
        """Wait for the document, or until the session comes up or is cut."""
        attached = self.attached.is_set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while what not in self._documents and self.attached.is_set() == attached:
                    self._changed.clear()
                    await self._changed.wait()

    def _hear(self, what: str, document: bytes) -> None:
        if what not in self._documents:
            self._engine.heard_s[what].append(time.monotonic())
        self._documents[what] = document
        self._engine.documents[what].add(document)
        self._changed.set()

    # --- the session ----------------------------------------------------------------------------

    async def _hold_session(self, port: int) -> None:
        cut_s = time.monotonic()
        while True:
            began_s, pause_s = time.monotonic(), QUICK_S
            try:
                pause_s = await self._attach(port)
            except ConnectionRefusedError:
                pause_s = CALM_S
            except NO_ANSWER:
                pass
            finally:
                self._was_cut = self._was_cut or self.attached.is_set()
                self.attached.clear()
                self._changed.set()
            now_s = time.monotonic()
            if now_s - began_s >= REATTACH_S:
                cut_s = now_s
            if now_s - cut_s >= REATTACH_S:
                pause_s = CALM_S
            await asyncio.sleep(random.uniform(0, pause_s))

    async def _attach(self, port: int) -> float:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
        try:
            again = f"Last-Event-ID: {self._last_id}\r\n" if self._last_id else ""
            writer.write(request("GET", f"{self._path}/session?facts=0", self._token, again))
            async with asyncio.timeout(READ_S) as limit:
                status = int((await reader.readuntil(b"\r\n\r\n"))[9:12])
                if status != 200:
                    if status != 503:
                        self._calls.refusals[f"{status} session"] += 1
                    return CALM_S if status == 503 else REATTACH_S
                self.attached.set()
                self._changed.set()
                name = ident = b""
                while line := await reader.readline():
                    limit.reschedule(asyncio.get_running_loop().time() + READ_S)
                    field, _, value = line.rstrip().partition(b": ")
                    if field == b"event":
                        name = value
                    elif field == b"id":
                        ident = value
                    elif field == b"data" and name == b"move":
                        return CALM_S
                    elif field == b"data" and name in (b"decision", b"outcome"):
                        self._hear(name.decode(), value)
                    elif not line.strip() and ident:
                        self._last_id, ident = ident.decode(), b""
            return QUICK_S
        finally:
            writer.transport.abort()


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0


def milliseconds(values: list[float]) -> str:
    p50, p99 = (percentile(values, share) * 1000 for share in (0.5, 0.99))
    return f"p50 {p50:.1f} ms, p99 {p99:.1f} ms, most {max(values, default=0) * 1000:.1f} ms"


def rows(title: str, values: dict[str, str]) -> Iterator[str]:
    yield title
    for name, value in values.items():
        yield f"  {name:44}{value}"
