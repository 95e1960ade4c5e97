"""The network between processes and coordinators: HTTP as messages that are late, lost or doubled.

A call is an exchange of its own: a request that travels up, an answer or a stream that travels
down, in order. A link belongs to one process; it may be cut in one direction or both, be clogged,
or lead through a proxy that hides who has hung up.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx

from kvaccord.canonical import digest
from tests.simulation.history import History
from tests.simulation.loop import Machine, SharedLoop
from tests.simulation.threads import Threads

if TYPE_CHECKING:
    from tests.simulation.machines import Coordinator

BODY_BYTES = 200_000  # a larger one is never a report, and is not told
KEEPALIVE_S = (6.0, 12.0)  # when the kernel of either side gives up on a silent peer


@dataclass
class Weather:
    """How bad a network is: chances of each message, delays in seconds."""

    delay_s: float = 0.002
    lose_request: float = 0.0
    lose_answer: float = 0.0
    twice: float = 0.0
    late: float = 0.0  # a request that arrives long after its sender gave up
    late_s: float = 60.0


@dataclass
class Link:
    """The way of one process."""

    name: str
    up_cut: bool = False
    down_cut: bool = False
    clogged: bool = False
    hides: bool = False  # a proxy holds the server's side open
    strays: bool = False  # its next session request is reset here, and comes there all the same
    route: Coordinator | None = None  # where it leads, if not to the newest
    held: list[Any] = field(default_factory=list)  # what waits in the clog

    @property
    def cut(self) -> bool:
        return self.up_cut or self.down_cut


class Exchange:
    """One request and what comes back. Used by both ends and by what lies between."""

    def __init__(self, net: Network, number: int, link: Link, client: Machine | None) -> None:
        self.net, self.number, self.link, self.client = net, number, link, client
        self.server: Coordinator | None = None
        self.method = self.target = ""
        self.body = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.head: tuple[int, list[tuple[bytes, bytes]]] | None = None
        self.parts: deque[bytes | None] = deque()  # None: the end
        self.fault: httpx.TransportError | None = None
        self.news: asyncio.Event = asyncio.Event()
        self.left: asyncio.Event = asyncio.Event()  # the server knows that the client is gone
        self.closed = False  # by the client
        self.broken = False
        self.down_at_s = 0.0
        self.stream = False

    def __hash__(self) -> int:
        return self.number  # the client keeps its sockets in a set: in the same order every time

    # --- the client's end -----------------------------------------------------------------------

    async def wait(self, timeout_s: float | None, what: str) -> None:
        self.news.clear()
        try:
            await asyncio.wait_for(self.news.wait(), timeout_s)
        except TimeoutError:
            self.close()
            raise httpx.ReadTimeout(f"no {what} within {timeout_s:g} s") from None

    async def read(self, timeout_s: float | None) -> bytes | None:
        while not self.parts:
            if self.fault is not None:
                raise self.fault
            if self.closed:
                return None
            await self.wait(timeout_s, "more")
        return self.parts.popleft()

    def close(self) -> None:
        """By the client: it hung up, gave up, or heard all."""
        if not self.closed:
            self.closed = True
            self.news.set()
            self.net.hang_up(self)

    # As a socket, which the session keeps to end its stream from another thread.

    def setsockopt(self, *_: object) -> None: ...

    def shutdown(self, _how: int) -> None:
        self.parts.clear()
        self.close()

    # --- in between -----------------------------------------------------------------------------

    def fail(self, fault: httpx.TransportError) -> None:
        if self.fault is None:
            self.fault = fault
            self.net.open.pop(self.number, None)
            self.news.set()

    def arrive(self, part: Any) -> None:
        """Something from the server has come to the client's machine."""
        if self.fault is not None or self.closed:
            return
        if isinstance(part, tuple):
            self.head = part
        else:
            self.parts.append(part)
            self.net.heard(self, part)
            if part is None:
                self.net.open.pop(self.number, None)
        self.news.set()


class Network:
    def __init__(
        self, loop: SharedLoop, threads: Threads, history: History, rng: random.Random
    ) -> None:
        self.loop, self.threads, self.history, self.rng = loop, threads, history, rng
        self.weather = Weather()
        self.signed = False  # a proxy lies between, and says so with every request
        self.links: dict[str, Link] = {}
        self.open: dict[int, Exchange] = {}
        self.hidden: list[Exchange] = []  # ends that a proxy keeps from the server
        self.coordinators: list[Coordinator] = []
        self._count = 0
        self._nobody = contextvars.copy_context()  # messages on their way belong to no machine

    def link(self, name: str) -> Link:
        return self.links.setdefault(name, Link(name, hides=self.signed))

    def _later(self, after_s: float, work: Any, *args: Any) -> None:
        self.loop.call_later(after_s, work, *args, context=self._nobody.copy())

    def _delay_s(self) -> float:
        return self.rng.expovariate(1 / self.weather.delay_s)

    # --- up -------------------------------------------------------------------------------------

    def exchange(
        self,
        who: str,
        client: Machine | None,
        method: str,
        target: str,
        headers: list[tuple[bytes, bytes]],
        body: bytes,
    ) -> Exchange:
        """One that is about to begin."""
        self._count += 1
        exchange = Exchange(self, self._count, self.link(who), client)
        exchange.method, exchange.target = method, target
        exchange.headers, exchange.body = headers, body
        said = {k.decode(): v.decode() for k, v in headers}
        self.history.add(
            "request",
            x=exchange.number,
            who=who,
            method=method,
            target=target,
            body=body.decode(errors="replace") if len(body) < BODY_BYTES else f"{len(body)} bytes",
            **_token_in(said.get("kvaccord-attempt")),
            after=said.get("last-event-id"),
        )
        return exchange

    async def send(
        self, exchange: Exchange, *, connect_s: float | None = 5.0, read_s: float | None = 30.0
    ) -> None:
        """Send the request and wait for the head of its answer. Raises httpx.TransportError."""
        link = exchange.link
        if link.cut:
            await asyncio.sleep(connect_s or 5.0)
            raise httpx.ConnectTimeout(f"{link.name} is cut off")
        self.open[exchange.number] = exchange
        weather, rng = self.weather, self.rng
        fate = rng.random()
        if link.strays and "/session" in exchange.target:
            link.strays = False
            self.history.add("lost", x=exchange.number, what="request, for now; reset")
            self._later(rng.uniform(0.1, 4.0), self._deliver, exchange)
            self._later(self._delay_s(), exchange.fail, httpx.ReadError("connection reset"))
        elif fate < weather.lose_request:
            self.history.add("lost", x=exchange.number, what="request")
        else:
            after_s = self._delay_s()
            if fate > 1 - weather.late:
                after_s = rng.uniform(1.0, weather.late_s)
                self.history.add("lost", x=exchange.number, what="request, for now")
            self._later(after_s, self._deliver, exchange)
            # A stream is never doubled: nobody would hold the second one open.
            if rng.random() < weather.twice and "/session" not in exchange.target:
                double = Exchange(self, exchange.number, link, None)
                double.method, double.target = exchange.method, exchange.target
                double.headers, double.body = exchange.headers, exchange.body
                double.closed = True
                self._later(after_s + self._delay_s() * 50, self._deliver, double)
        try:
            while exchange.head is None:
                if exchange.fault is not None:
                    raise exchange.fault
                await exchange.wait(read_s, "answer")
        except BaseException:  # a cancelled call, too, leaves nothing open
            exchange.close()
            raise

    def _deliver(self, exchange: Exchange) -> None:
        link = exchange.link
        if link.clogged:
            link.held.append((self._deliver, exchange))
            return
        if link.up_cut:
            self.break_(exchange)
            return
        server = link.route if link.route and link.route.listens else self._newest()
        if server is None:
            self._later(self._delay_s(), exchange.fail, httpx.ConnectError("connection refused"))
            return
        exchange.server = server
        if exchange.closed and not link.hides and exchange.client is not None:
            # Whoever hung up while it was on its way: it is read, and the answer goes nowhere.
            exchange.left.set()
        self.history.add("arrived", x=exchange.number, at=server.name)
        server.machine.spawn(self._serve(server, exchange))

    def _newest(self) -> Coordinator | None:
        return next((c for c in reversed(self.coordinators) if c.listens), None)

    # --- the server's end -----------------------------------------------------------------------

    async def _serve(self, server: Coordinator, exchange: Exchange) -> None:
        path, _, query = exchange.target.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": exchange.method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [*exchange.headers, *([(b"via", b"1.1 proxy")] if self.signed else [])],
            "client": ("client", 1),
            "server": ("coordinator", 8970),
            "state": {},
        }
        answer: dict[str, Any] = {"status": 0, "body": b"", "whole": False}
        first = True

        async def receive() -> dict[str, Any]:
            nonlocal first
            if first:
                first = False
                return {"type": "http.request", "body": exchange.body, "more_body": False}
            await exchange.left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                answer["status"] = message["status"]
                headers = list(message["headers"])
                answer["headers"] = headers
                exchange.stream = any(v.startswith(b"text/event-stream") for _, v in headers)
                self._push(exchange, (message["status"], headers))
                if exchange.stream:
                    self.history.add("answer", x=exchange.number, at=server.name, status=200)
                return
            part, more = message.get("body", b""), message.get("more_body", False)
            if exchange.stream:
                if part:
                    self._push(exchange, part)
                    self._told(exchange, server, part)
            else:
                answer["body"] += part
                if part:
                    self._push(exchange, part)
            if not more:
                answer["whole"] = True
                if not exchange.stream:
                    self._answered(exchange, server, answer)
                self._push(exchange, None)

        try:
            await server.app(scope, receive, send)  # type: ignore[arg-type]
            if exchange.stream:
                self.history.add("closed", x=exchange.number, at=server.name)
        except Exception as fault:  # no handler may raise: the checker `sound` judges it
            self.history.add(
                "fault", at=server.name, x=exchange.number, text=f"{type(fault).__name__}: {fault}"
            )
        if not answer["whole"]:
            self.history.add("lost", x=exchange.number, what="answer, cut by the coordinator")
            reset = httpx.RemoteProtocolError("closed before the answer was whole")
            self._later(self._delay_s(), exchange.fail, reset)

    def _answered(self, exchange: Exchange, server: Coordinator, answer: dict[str, Any]) -> None:
        headers = {k.decode().lower(): v.decode() for k, v in answer["headers"]}
        fields: dict[str, Any] = {"status": answer["status"]}
        body = answer["body"]
        if "kvaccord-digest" in headers:
            fields["document"] = self.history.keep(body)
            fields["digest"] = headers["kvaccord-digest"]
            fields["outcome"] = headers["kvaccord-outcome"]
        else:
            fields["body"] = body.decode(errors="replace")[:2000]
        self.history.add("answer", x=exchange.number, at=server.name, **fields)

    def _told(self, exchange: Exchange, server: Coordinator, part: bytes) -> None:
        for name, ident, data in facts_in(part):
            document = self.history.keep(data) if name in ("decision", "outcome") else None
            self.history.add(
                "pushed",
                x=exchange.number,
                at=server.name,
                event=name,
                id=ident,
                document=document,
            )

    # --- down -----------------------------------------------------------------------------------

    def _push(self, exchange: Exchange, part: Any) -> None:
        if exchange.broken:
            return
        begins = isinstance(part, tuple) and not exchange.stream
        if begins and self.rng.random() < self.weather.lose_answer:
            self.history.add("lost", x=exchange.number, what="answer")
            exchange.broken = True
            if self.rng.random() < 0.5:
                gone = httpx.ReadError("connection reset")
                self._later(self._delay_s(), exchange.fail, gone)
            return
        # Later than what went before: timers of one moment have no order.
        at_s = self.loop.time() + self._delay_s()
        exchange.down_at_s = max(exchange.down_at_s + 1e-6, at_s)
        self.loop.call_at(
            exchange.down_at_s, self._arrive, exchange, part, context=self._nobody.copy()
        )

    def _arrive(self, exchange: Exchange, part: Any) -> None:
        link = exchange.link
        if link.clogged:
            link.held.append((self._arrive, exchange, part))
        elif link.down_cut:
            self.break_(exchange)
        elif exchange.client is not None and exchange.client.dead:
            if not link.hides:  # else the proxy takes it
                self._notice(exchange)
        else:
            exchange.arrive(part)

    def heard(self, exchange: Exchange, part: bytes | None) -> None:
        if exchange.stream and part:
            for name, ident, data in facts_in(part):
                self.history.add(
                    "fact",
                    x=exchange.number,
                    who=exchange.link.name,
                    event=name,
                    id=ident,
                    data=digest(data),
                )

    # --- ends -----------------------------------------------------------------------------------

    def hang_up(self, exchange: Exchange) -> None:
        self.open.pop(exchange.number, None)
        if exchange.link.hides:
            self.hidden.append(exchange)
        elif exchange.link.cut:
            self._later(self.rng.uniform(*KEEPALIVE_S), self._notice, exchange)
        else:
            self._later(self._delay_s(), self._notice, exchange)

    def _notice(self, exchange: Exchange) -> None:
        if exchange.server is not None and not exchange.left.is_set():
            exchange.left.set()

    def break_(self, exchange: Exchange) -> None:
        """The path of an open exchange is gone: each kernel notices in its own time."""
        if exchange.broken:
            return
        exchange.broken = True
        gone = httpx.ReadError("connection timed out")
        self._later(self.rng.uniform(*KEEPALIVE_S), exchange.fail, gone)
        if exchange.link.hides:
            self.hidden.append(exchange)
        else:
            self._later(self.rng.uniform(*KEEPALIVE_S), self._notice, exchange)

    def cut_streams(self, share: float, *, hard: bool) -> list[Link]:
        """End some streams, as a proxy does that is restarted. hard: one side learns it late."""
        hit = []
        for exchange in list(self.open.values()):
            if exchange.stream and self.rng.random() < share:
                late_s = self.rng.uniform(*KEEPALIVE_S) if hard else 0.0
                self.history.add("cut", x=exchange.number, who=exchange.link.name)
                exchange.broken = True
                hit.append(exchange.link)
                self._later(late_s + self._delay_s(), exchange.fail, httpx.ReadError("reset"))
                self._later(self._delay_s(), self._notice, exchange)
        return hit

    def cut(self, link: Link, *, up: bool, down: bool) -> None:
        link.up_cut, link.down_cut = up, down
        for exchange in list(self.open.values()):
            if exchange.link is link:
                self.break_(exchange)

    def release(self, link: Link) -> None:
        """Undo what was done to a link; what was held in a clog comes through in any order."""
        for exchange in [x for x in self.hidden if x.link is link]:
            self.hidden.remove(exchange)
            self._later(self._delay_s(), self._notice, exchange)
        link.up_cut = link.down_cut = link.clogged = link.hides = False
        link.route = None
        held, link.held = link.held, []
        for work, *args in held:
            # Requests are connections of their own; what came down one of them stays in order.
            late_s = self._delay_s() if work == self._deliver else 0.0
            self._later(late_s, work, *args)

    def client_died(self, machine: Machine, *, vanished: bool) -> None:
        for exchange in list(self.open.values()):
            if exchange.client is machine:
                self.open.pop(exchange.number, None)
                exchange.closed = True
                if exchange.link.hides:
                    self.hidden.append(exchange)
                    continue
                late_s = self.rng.uniform(*KEEPALIVE_S) if vanished else self._delay_s()
                self._later(late_s, self._notice, exchange)

    def server_died(self, server: Coordinator, *, vanished: bool) -> None:
        for exchange in list(self.open.values()):
            if exchange.server is server:
                late_s = self.rng.uniform(*KEEPALIVE_S) if vanished else self._delay_s()
                self._later(late_s, exchange.fail, httpx.ReadError("connection reset"))


def _token_in(token: str | None) -> dict[str, Any]:
    """Whose call it is: an attempt, and the store that gave it out."""
    parts = (token or "").split(".")
    if len(parts) != 3 or not parts[1].isdigit():
        return {}
    return {"attempt": int(parts[1]), "store": parts[0]}


def facts_in(part: bytes) -> Iterator[tuple[str, str, bytes]]:
    """(event, id, data) of what a stream carries; the coordinator pushes whole events."""
    for block in part.split(b"\n\n"):
        fields = dict(
            line.split(b": ", 1)
            for line in block.split(b"\n")
            if b": " in line and line[:1] != b":"
        )
        if b"event" in fields:
            yield fields[b"event"].decode(), fields.get(b"id", b"").decode(), fields[b"data"]


# --- what httpx needs -----------------------------------------------------------------------------


class Transport(httpx.BaseTransport):
    """A process's sockets. Blocks the thread that calls, as sockets do."""

    def __init__(self, net: Network, who: str, machine: Machine) -> None:
        self._net, self._who, self._machine = net, who, machine

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if self._net.threads.ended:
            raise httpx.ConnectError("the world has ended")
        timeout = request.extensions.get("timeout", {})
        trace = request.extensions.get("trace", lambda event, info: None)
        headers = [(k.lower(), v) for k, v in request.headers.raw]
        target = request.url.raw_path.decode()
        exchange = self._net.exchange(
            self._who, self._machine, request.method, target, headers, request.content
        )
        if exchange.link.cut:
            trace("connection.connect_tcp.started", {})
        else:
            trace("connection.connect_tcp.complete", {"return_value": _Stream(exchange)})
            trace("http11.send_request_headers.started", {})
        sending = self._net.send(
            exchange, connect_s=timeout.get("connect"), read_s=timeout.get("read")
        )
        threads, loop = self._net.threads, self._net.loop
        threads.block(loop.create_task(sending))
        assert exchange.head is not None
        status, answered = exchange.head
        return httpx.Response(
            status,
            headers=answered,
            stream=_Body(exchange, threads, timeout.get("read")),
            extensions={"network_stream": _Stream(exchange)},
        )


class _Body(httpx.SyncByteStream):
    def __init__(self, exchange: Exchange, threads: Threads, read_s: float | None) -> None:
        self._exchange, self._threads, self._read_s = exchange, threads, read_s

    def __iter__(self) -> Iterator[bytes]:
        while True:
            if self._exchange.parts:
                part = self._exchange.parts.popleft()
            else:
                reading = self._exchange.read(self._read_s)
                part = self._threads.block(self._threads.loop.create_task(reading))
            if part is None:
                return
            yield part

    def close(self) -> None:
        self._exchange.close()


class _Stream:
    """Shows the session something to shut down."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def get_extra_info(self, _name: str) -> Exchange:
        return self._exchange
