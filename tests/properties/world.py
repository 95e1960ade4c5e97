"""The shipped application in this process, on a clock that jumps: calls, sessions, a crash."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import httpx

from coordinator.api import create_app
from coordinator.logs.memory import MemoryLog
from coordinator.policies import Policies
from coordinator.policy import Ends, Policy
from coordinator.service import Service, Settings
from tests.virtual import VirtualLoop

T = TypeVar("T")

GATHER_S, REPORT_S, APPLY_S = 20.0, 30.0, 25.0
STALL_S, LOST_AFTER_S, REATTACH_S = 8.0, 5.0, 1.0
POLICY = Policy(
    gather_s=GATHER_S,
    report_s=Ends(soft=15.0, hard=REPORT_S),
    apply_s=Ends(soft=10.0, hard=APPLY_S),
    stall_s=STALL_S,
    keep_rounds=3,
)


class World:
    """One coordinator on one log. Whatever it raises comes through to the test."""

    def __init__(self) -> None:
        self.loop = VirtualLoop()
        self._log = MemoryLog()
        self.crashes = 0
        self._serve()

    def _serve(self) -> None:
        settings = Settings(
            policies=Policies(POLICY), reattach_s=REATTACH_S, lost_after_s=LOST_AFTER_S
        )
        self.service = Service(self._log, settings)
        self.app = create_app(self.service)
        self.run(self.service.start())

    @property
    def now_s(self) -> float:
        return self.loop.time()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    def sleep(self, seconds: float) -> None:
        self.run(asyncio.sleep(seconds))

    async def call(self, method: str, path: str, token: str | None, body: Any) -> httpx.Response:
        transport = httpx.ASGITransport(app=self.app)
        headers = {} if token is None else {"Kvaccord-Attempt": token}
        async with httpx.AsyncClient(transport=transport, base_url="http://world") as client:
            content = b"" if body is None else json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
            return await client.request(method, path, content=content, headers=headers)

    def crash(self) -> None:
        """As kill -9: what ran ends where it stands, and another one reads the log."""
        self.crashes += 1
        self.service.stopping = True  # so that nothing of it takes a finding to the log any more
        self.run(self._end_all())
        self._serve()

    async def _end_all(self) -> None:
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def close(self) -> None:
        self.service.stopping = True
        self.run(self._end_all())
        self.loop.close()


class Session:
    """A session stream from the side of the rank. `events` grows as facts come."""

    def __init__(self, world: World, path: str, token: str, after: str | None = None) -> None:
        self.status = 0
        self.body = b""
        self.ended = False  # by the coordinator
        self._world = world
        self._crashes = world.crashes
        self._answered, self._gone = asyncio.Event(), asyncio.Event()
        headers = [(b"kvaccord-attempt", token.encode())]
        if after:
            headers.append((b"last-event-id", after.encode()))
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "GET",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": headers,
            "client": ("127.0.0.1", 1),
            "server": ("world", 80),
        }
        self._task = world.loop.create_task(self._run(world.app, scope))

    async def _run(self, app: Callable[..., Awaitable[None]], scope: dict[str, Any]) -> None:
        await app(scope, self._receive, self._send)
        self.ended = not self._gone.is_set()

    async def _receive(self) -> dict[str, Any]:
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.body += message["body"]
            self._answered.set()

    async def answered(self) -> None:
        answered = asyncio.create_task(self._answered.wait())
        await asyncio.wait([answered, self._task], return_when=asyncio.FIRST_COMPLETED)
        answered.cancel()
        if self._task.done():
            self._task.result()  # what it raised

    @property
    def open(self) -> bool:
        return (
            self._crashes == self._world.crashes
            and self.status == 200
            and not self.ended
            and not self._gone.is_set()
        )

    async def hang_up(self) -> None:
        self._gone.set()
        await asyncio.wait([self._task])

    @property
    def events(self) -> list[tuple[str, str, str]]:
        """(event, id, data) in the order they came."""
        found = []
        for block in self.body.decode().split("\n\n"):
            fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
            if "event" in fields:
                found.append((fields["event"], fields.get("id", ""), fields["data"]))
        return found
