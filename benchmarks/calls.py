"""Calls of many ranks on connections that they share, and what came of them."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections import Counter, defaultdict
from typing import Any

from worker_client.flow import BACKOFF_MAX_S, BACKOFF_MIN_S, CALL_S
from worker_client.wire import CONNECT_S

NO_ANSWER = (OSError, EOFError, TimeoutError, asyncio.IncompleteReadError)


async def connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """As the client does it: not longer than CONNECT_S, then anew."""
    async with asyncio.timeout(CONNECT_S):
        return await asyncio.open_connection("127.0.0.1", port, limit=2**20)


class Calls:
    """Keep-alive connections for calls: as many as are in flight at once, at most `at_once`.

    Counts what came of calls and of the sessions beside them.
    """

    def __init__(self, port: int, at_once: int) -> None:
        self.port = port
        self._free = asyncio.Semaphore(at_once)
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self.latencies_s: dict[str, list[float]] = defaultdict(list)
        self.refusals: Counter[str] = Counter()
        self.unanswered = 0
        self.sessions: Counter[str] = Counter()
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
        pause_s, call_s = BACKOFF_MIN_S, CALL_S
        while True:
            try:
                status, answer = await self.ask("POST", path, token, body, timeout_s=call_s)
                if status != 503:
                    return json.loads(answer)
            except TimeoutError:
                call_s *= 2
            except NO_ANSWER:
                pass
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
        return await connect(self.port)

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()


def request(method: str, path: str, token: str, more: str = "") -> bytes:
    return (
        f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Kvaccord-Attempt: {token}\r\n{more}\r\n"
    ).encode()
