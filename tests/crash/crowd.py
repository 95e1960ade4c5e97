"""Many engines whose ranks only ever repeat what was not answered, over bare connections.

Every rank lives: whatever becomes of the coordinator, each start must end SEALED.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from kvaccord.canonical import digest
from tests.simulation.history import History

CLASSES = [{"kind": "page", "name": "kv", "entry_bytes": 1000}]
CALL_S = 40.0  # longer than a long poll: an answer that takes longer is lost


class Lost(Exception):
    """No whole answer came; whether the call was carried out is unknown."""


class Line:
    """One connection for the calls of one rank, opened again whenever it broke."""

    def __init__(self, crowd: Crowd, who: str) -> None:
        self._crowd, self._who = crowd, who
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def call(
        self, method: str, target: str, token: str = "", body: Any = None
    ) -> tuple[int, bytes]:
        """Raises Lost."""
        number = self._crowd.asks(self._who, method, target, token, body)
        content = b"" if body is None else json.dumps(body).encode()
        try:
            async with asyncio.timeout(CALL_S):
                if self._streams is None:
                    self._streams = await self._crowd.connect()
                reader, writer = self._streams
                writer.write(head(method, target, token, content) + content)
                status, headers = await read_head(reader)
                answer = await reader.readexactly(int(headers.get("content-length", 0)))
        except (OSError, EOFError, ValueError, TimeoutError) as error:
            self.close()
            self._crowd.history.add("lost", x=number, what=type(error).__name__)
            raise Lost from error
        if headers.get("connection") == "close":
            self.close()
        self._crowd.answered(number, status, headers, answer)
        return status, answer

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
        self._streams = None


def head(method: str, target: str, token: str, content: bytes = b"", after: str = "") -> bytes:
    resume = f"Last-Event-ID: {after}\r\n" if after else ""
    return (
        f"{method} {target} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{resume}"
        f"Kvaccord-Attempt: {token}\r\nContent-Length: {len(content)}\r\n\r\n"
    ).encode()


async def read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    pairs = (line.split(": ", 1) for line in lines[1:] if ": " in line)
    return int(lines[0].split()[1]), {name.lower(): value for name, value in pairs}


@dataclass
class Crowd:
    """engines: how many. ranks: of each. pace_s: the longest a rank is busy between two calls."""

    port: int
    engines: int
    ranks: int
    pace_s: float
    rng: random.Random
    host: str = "127.0.0.1"
    history: History = field(default_factory=lambda: History("crash"))
    over: bool = False  # no new start begins
    sealed: int = 0
    calls: int = 0
    sessions: int = 0
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        began_s = time.monotonic()
        self.history.now_s = lambda: time.monotonic() - began_s

    async def play(self) -> None:
        """Start after start of every engine, until `over`; returns when the last has ended."""
        await asyncio.gather(*(self._engine(f"e{n}") for n in range(self.engines)))

    async def _engine(self, name: str) -> None:
        run, restart, starts = "run-0", 0, 0
        while not self.over:
            starts += 1
            await asyncio.gather(
                *(Rank(self, name, run, restart, rank).play() for rank in range(self.ranks))
            )
            self.sealed += 1
            if starts % 3:
                restart += 1
            else:
                run, restart = f"run-{starts}", 0

    async def nap(self, failures: int) -> None:
        """Longer after each failure: hundreds that hammer a dead port starve its successor."""
        await asyncio.sleep(self.rng.uniform(0.02, min(0.1 * 2**failures, 2.0)))

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        async with asyncio.timeout(5):
            return await asyncio.open_connection(self.host, self.port, limit=2**22)

    def asks(
        self, who: str, method: str, target: str, token: str, body: Any, after: str = ""
    ) -> int:
        self.calls += 1
        said = None if body is None else json.dumps(body)
        attempt = int(token.split(".")[1]) if token else None
        self.history.add(
            "request",
            x=self.calls,
            who=who,
            method=method,
            target=target,
            body=said,
            attempt=attempt,
            after=after or None,
        )
        return self.calls

    def answered(self, number: int, status: int, headers: dict[str, str], body: bytes) -> None:
        fields: dict[str, Any] = {"status": status}
        if "kvaccord-digest" in headers:
            fields["document"] = self.history.keep(body)
            fields["digest"] = headers["kvaccord-digest"]
            fields["outcome"] = headers["kvaccord-outcome"]
        else:
            fields["body"] = body.decode()
        self.history.add("answer", x=number, at="c", **fields)


class Rank:
    """One process of one rank of one start."""

    def __init__(self, crowd: Crowd, engine: str, run: str, restart: int, rank: int) -> None:
        self._crowd, self._engine, self._rank = crowd, engine, rank
        self.who = f"{engine}/{run}.{restart}/{rank}"
        self._base = f"/v1/engines/default/{engine}"
        self._line = Line(crowd, self.who)
        self._join = {
            "ranks": [rank],
            "layout": {"tp": crowd.ranks},
            "nonce": uuid.uuid4().hex,
            "launch": {"run": run, "restart": restart},
            "host": f"host-{rank}",
            "pid": 1 + rank,
        }
        self._token, self._after = "", ""

    async def play(self) -> None:
        crowd, rng = self._crowd, self._crowd.rng
        await self._busy()
        self._token = json.loads(await self._until("POST", "join", self._join))["token"]
        await self._busy()
        number = json.loads(await self._until("POST", "claim"))["round"]
        at = f"rounds/{number}"
        session = asyncio.create_task(self._attend(f"{self._base}/{at}/session"))
        try:
            await self._busy()
            pages = rng.randint(50, 99)
            report = {"free_bytes": 100_000, "kv_budget_bytes": pages * 1000, "classes": CLASSES}
            wait_s = rng.choice([0.2, 1, 3, 10])
            put = f"{at}/reports?wait_s={wait_s}"
            decision = await self._until("PUT", put, {str(self._rank): report})
            document = json.loads(decision)
            if document["verdict"]["outcome"] != "PASSED":
                crowd.wrong.append(f"{self.who}: {document['verdict']['message']}")
                return
            await self._busy()
            (row,) = document["plan"]["schedulers"]
            built = {"digest": digest(decision), "built": row["entries"]}
            outcome = json.loads(await self._until("PUT", f"{at}/applied?wait_s={wait_s}", built))
            if outcome["outcome"] != "SEALED":
                crowd.wrong.append(f"{self.who}: {outcome['message']}")
        finally:
            session.cancel()
            await asyncio.gather(session, return_exceptions=True)
            self._line.close()

    async def _busy(self) -> None:
        await asyncio.sleep(self._crowd.rng.uniform(0, self._crowd.pace_s))

    async def _until(self, method: str, target: str, body: Any = None) -> bytes:
        """The same request until it is answered for good."""
        failures = 0
        while True:
            failures += 1
            with contextlib.suppress(Lost):
                status, answer = await self._line.call(
                    method, f"{self._base}/{target}", self._token, body
                )
                if status == 200:
                    return answer
                code = json.loads(answer).get("code")
                if status not in (202, 503) and code != "engine_name_in_use":
                    self._crowd.wrong.append(f"{self.who}: {method} {target}: {answer!r}")
                    raise RuntimeError(self._crowd.wrong[-1])
                if status == 202:
                    failures = 0
                    continue
            await self._crowd.nap(failures)

    async def _attend(self, target: str) -> None:
        """Hold the session, and open it again whenever it breaks."""
        failures = 0
        while True:
            failures += 1
            with contextlib.suppress(OSError, EOFError, ValueError, TimeoutError):
                if await self._listen(target):
                    failures = 0
            await self._crowd.nap(failures)

    async def _listen(self, target: str) -> bool:
        """Until the stream ends; whether there was one."""
        crowd = self._crowd
        reader, writer = await crowd.connect()
        try:
            crowd.sessions += 1
            number = crowd.asks(self.who, "GET", target, self._token, None, self._after)
            writer.write(head("GET", target, self._token, after=self._after))
            status, _ = await read_head(reader)
            crowd.history.add("answer", x=number, at="c", status=status)
            if status != 200:
                if status != 503:
                    crowd.wrong.append(f"{self.who}: session {status}")
                return False
            fields: dict[str, str] = {}
            while line := (await reader.readline()).decode():
                name, _, value = line.strip().partition(": ")
                if name in ("event", "data", "id"):
                    fields[name] = value
                elif fields and not line.strip():
                    self._hear(number, fields)
                    fields = {}
            return True
        finally:
            writer.close()

    def _hear(self, number: int, fields: dict[str, str]) -> None:
        if "id" not in fields:
            return
        self._after = fields["id"]
        history, data = self._crowd.history, fields["data"].encode()
        document = history.keep(data) if fields["event"] in ("decision", "outcome") else None
        history.add(
            "fact",
            x=number,
            who=self.who,
            event=fields["event"],
            id=fields["id"],
            data=digest(data),
            document=document,
        )
