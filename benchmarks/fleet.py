"""Ranks as connections of one process.

Each rank does what the client does, with its pauses (worker_client/session.py and flow.py): a
session that attaches again after what it last heard, calls that are repeated until they are
answered. Ten thousand clients with their threads do not fit one process.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
import time
import uuid
from collections import Counter
from typing import Any

from calls import NO_ANSWER, Calls, connect, request

from worker_client.flow import BACKOFF_MAX_S, BACKOFF_MIN_S, CALL_S, LONG_POLL_S
from worker_client.session import CALM_S, QUICK_S, READ_S, REATTACH_S
from worker_client.steps import ATTACH_S

REPORT = {
    "free_bytes": 100_000,
    "kv_budget_bytes": 90_000,
    "classes": [{"kind": "page", "name": "kv", "entry_bytes": 1000}],
}


class Engine:
    """Its ranks, what they heard, and when (monotonic seconds)."""

    def __init__(self, number: int, ranks: int, calls: Calls, name: str = "load") -> None:
        self.path = f"/v1/engines/default/{name}-{number}"
        # Two small engines share a host, and a large one has several.
        hosts = [f"host-{number // 2}-{rank // 8}" for rank in range(ranks)]
        self.ranks = [Rank(self, rank, calls, host) for rank, host in enumerate(hosts)]
        self.entered_s = 0.0
        self.reported_s: list[float] = []  # when each rank's report was first answered
        self.heard_s: dict[str, list[float]] = {"decision": [], "outcome": []}
        self.documents: dict[str, set[bytes]] = {"decision": set(), "outcome": set()}

    async def play(self, after_s: float = 0.0) -> None:
        """A whole start. Returns when every rank has heard the outcome."""
        await asyncio.sleep(after_s)
        self.entered_s = time.monotonic()
        await asyncio.gather(*(rank.play() for rank in self.ranks))

    async def finish(self, within_s: float) -> None:
        """Its ranks have entered: each reports at some moment, and hears the outcome."""
        delays_s = [random.uniform(0, within_s) for _ in self.ranks]
        starts = zip(self.ranks, delays_s, strict=True)
        await asyncio.gather(*(rank.finish(delay_s) for rank, delay_s in starts))

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
        """From the answer to its last report until its last rank had the decision.

        0 where that came first: the session may be told before the call is answered.
        """
        return max(0.0, max(self.heard_s["decision"]) - max(self.reported_s))

    @property
    def sealed_s(self) -> float:
        return max(self.heard_s["outcome"])


class Rank:
    def __init__(self, engine: Engine, rank: int, calls: Calls, host: str) -> None:
        self._engine = engine
        self._rank = rank
        self._calls = calls
        self._host = host
        self._documents: dict[str, bytes] = {}
        self.attached, self.reported = asyncio.Event(), asyncio.Event()
        self._was_cut = False
        self._changed = asyncio.Event()
        self._last_id = ""

    async def play(self) -> None:
        """A whole start: enter, report, build, hear the outcome."""
        await self.enter()
        await self.finish()

    async def enter(self) -> None:
        """Join, claim, and hold a session from then on, until close()."""
        engine, world = self._engine, len(self._engine.ranks)
        join = {
            "ranks": [self._rank],
            "layout": {"tp": world},
            "nonce": uuid.uuid4().hex,
            "launch": {"run": "load"},
            "host": self._host,
            "pid": 1 + self._rank,
        }
        self._token = (await self._calls.until_answered(f"{engine.path}/join", body=join))["token"]
        claim = await self._calls.until_answered(f"{engine.path}/claim", self._token)
        self._path = f"{engine.path}/rounds/{claim['round']}"
        self._session = asyncio.create_task(self._hold_session())
        await self._news("", ATTACH_S)

    async def finish(self, after_s: float = 0.0) -> None:
        """Report, build, and hear the document that ends the round."""
        try:
            await asyncio.sleep(after_s)
            await self._size()
        finally:
            self.close()

    async def hears(self, what: str) -> bytes:
        """A document, whoever has reported."""
        while what not in self._documents:
            await self._news(what, LONG_POLL_S)
        return self._documents[what]

    def close(self) -> None:
        self._session.cancel()

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
        pause_s, call_s = BACKOFF_MIN_S, CALL_S
        while what not in self._documents:
            # At first the session is on its way: it brings the document.
            wait_s = LONG_POLL_S if self._was_cut and not self.attached.is_set() else 0.0
            path = f"{self._path}/{noun}?wait_s={wait_s:g}"
            try:
                status, answer = await self._calls.ask(
                    "PUT", path, self._token, body, timeout_s=wait_s + call_s
                )
                if status not in (200, 202):
                    raise EOFError(f"answered {status}")
            except NO_ANSWER as fault:
                if isinstance(fault, TimeoutError):
                    call_s *= 2
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

    async def _hold_session(self) -> None:
        cut_s = time.monotonic()
        while True:
            began_s, pause_s = time.monotonic(), QUICK_S
            try:
                pause_s = await self._attach()
            except NO_ANSWER as fault:
                what = "sessions cut" if self.attached.is_set() else "sessions not let in"
                self._calls.sessions[what] += 1
                if isinstance(fault, ConnectionRefusedError):
                    pause_s = CALM_S
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

    async def _attach(self) -> float:
        """Attach once and read to the end. Returns the longest pause before the next try."""
        reader, writer = await connect(self._calls.port)
        try:
            again = f"Last-Event-ID: {self._last_id}\r\n" if self._last_id else ""
            writer.write(request("GET", f"{self._path}/session?facts=0", self._token, again))
            async with asyncio.timeout(READ_S) as limit:
                status = int((await reader.readuntil(b"\r\n\r\n"))[9:12])
                if status != 200:
                    if status == 503:
                        self._calls.sessions["sessions answered 503"] += 1
                        return CALM_S
                    self._calls.refusals[f"{status} session"] += 1
                    return REATTACH_S
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
                        self._calls.sessions["sessions moved"] += 1
                        return CALM_S
                    elif field == b"data" and name in (b"decision", b"outcome"):
                        self._hear(name.decode(), value)
                    elif not line.strip() and ident:
                        self._last_id, ident = ident.decode(), b""
            raise EOFError("the stream ended without a goodbye")
        finally:
            writer.transport.abort()


async def enter_all(engines: list[Engine], at_once: int = 50) -> list[Rank]:
    """All of their ranks, once each holds its session."""
    gate = asyncio.Semaphore(at_once)
    ranks = [rank for engine in engines for rank in engine.ranks]

    async def enter(rank: Rank) -> None:
        async with gate:
            await rank.enter()
            await rank.attached.wait()

    await asyncio.gather(*map(enter, ranks))
    return ranks


async def finish_all(engines: list[Engine], within_s: float = 3.0) -> str:
    """How their rounds ended, by outcome and code; two ends of one round are wrong."""
    await asyncio.gather(*(engine.finish(within_s) for engine in engines))
    ends = Counter(
        end if len(engine.ends) == 1 else "WRONG: its ranks heard different ends"
        for engine in engines
        for end in [next(iter(engine.ends))]
    )
    return ", ".join(f"{count} {end}" for end, count in ends.items())
