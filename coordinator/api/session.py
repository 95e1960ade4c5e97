"""The session stream: presence one way, every fact of a round the other. Server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
from bisect import bisect_right
from collections.abc import AsyncGenerator

from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from coordinator.cell import Fact
from coordinator.presence import Connection
from coordinator.rules.members import refuse_if_taken_over
from coordinator.service import Service
from kvaccord.errors import Superseded

PROXY_HEADERS = ("via", "forwarded", "x-forwarded-for")
COMMENT_S = 5.0
MOVE_S = 5.0  # all sessions come back within it, not at one moment


def is_proxied(headers: Headers) -> bool:
    """Whether a proxy has signed the request: it may hold the stream without the process."""
    return any(name in headers for name in PROXY_HEADERS)


class SessionStream(Response):
    """Streams until the peer goes, the round has ended badly, or the coordinator stops.

    Who ended it matters: only a stream that the peer ended makes a member suspect. So this is
    no StreamingResponse, which answers both with a cancellation.

    facts: False leaves the documents. A start of 1,024 ranks has some 380 kB of facts: more than
    a rank that does not read for a while has room for, and then the kernel ends its stream.
    """

    media_type = "text/event-stream"

    def __init__(
        self, service: Service, connection: Connection, after: str | None, *, facts: bool = True
    ) -> None:
        super().__init__()
        self._service = service
        self._connection = connection
        self._cell = service.cell(connection.seat.name)
        entry, index = map(int, after.split(".")) if after else (-1, -1)
        self._heard = (entry, index)
        self._all = facts
        self._gave_way = False  # it was told that a greater restart has taken over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        by_peer = False
        pushing = asyncio.create_task(self._push(send))
        leaving = asyncio.create_task(_disconnected(receive))
        try:
            done, _ = await asyncio.wait({pushing, leaving}, return_when=asyncio.FIRST_COMPLETED)
            by_peer = leaving in done or pushing.exception() is not None
        finally:
            for task in (pushing, leaving):
                task.cancel()
            self._service.presence.detach(self._connection, by_peer=by_peer)
            if self._gave_way and not by_peer:
                # Told to exit, it hardly comes back, and it must not be taken for alive for ever.
                within_s = self._service.settings.lost_after_s
                self._service.presence.expect(self._connection.seat, within_s=within_s)
            await asyncio.gather(pushing, leaving, return_exceptions=True)

    async def _push(self, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        if self._connection.proxied:  # a client that was not told hears that it must send beats
            headers.append((b"kvaccord-proxied", b"1"))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async with contextlib.aclosing(self._events()) as events:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    @property
    def _facts(self) -> list[Fact]:
        return self._cell.facts[self._connection.seat.round]

    def _is_for_it(self, fact: Fact) -> bool:
        seat = self._connection.seat
        round_ = self._cell.engine.rounds[seat.round]
        if fact.kind == "decision" and round_.verdict == "PASSED":
            # Who holds no slot has no part in the plan and must not build; it hears how this ends.
            return round_.members[seat.attempt].seated
        return self._all or fact.kind != "fact"

    async def _events(self) -> AsyncGenerator[bytes]:
        loop = asyncio.get_running_loop()
        yield KEEPALIVE_COMMENT  # at once: whoever reads it knows that the session is open
        quiet_since_s = loop.time()
        while not self._service.stopping:
            if self._connection.seat.round not in self._cell.engine.rounds:
                return  # dropped: nothing more will come of it
            facts = self._facts
            if fresh := facts[bisect_right(facts, self._heard, key=lambda fact: fact.place) :]:
                self._heard = fresh[-1].place
                if wanted := [fact for fact in fresh if self._is_for_it(fact)]:
                    yield b"".join(map(_event, wanted))
                    quiet_since_s = loop.time()
                continue
            engine = self._cell.engine
            round_ = engine.rounds[self._connection.seat.round]
            if round_.ended in ("FAILED", "ABORTED"):
                return
            try:
                refuse_if_taken_over(engine, round_)
            except Superseded as problem:
                self._gave_way = True
                yield format_sse_event(event="problem", data_str=json.dumps(problem.document()))
                return
            if (left_s := quiet_since_s + COMMENT_S - loop.time()) > 0:
                await self._cell.change(left_s, "fact" if self._all else "document")
            else:
                yield KEEPALIVE_COMMENT
                quiet_since_s = loop.time()
        yield format_sse_event(event="move", data_str=f'{{"after_s":{MOVE_S}}}')


def _event(fact: Fact) -> bytes:
    return format_sse_event(event=fact.kind, id=fact.id, data_str=fact.data)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
