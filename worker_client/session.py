"""The session thread: one long stream that shows this process present and brings every fact.

Presence is the kernel's word: the stream stays up while the main thread holds the GIL, and ends
when the process does. The thread never raises and never prints.
"""

from __future__ import annotations

import contextlib
import json
import logging
import random
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import httpx

from kvaccord.decision import Frozen
from kvaccord.errors import Problem, Retryable, Unavailable
from worker_client.flow import Seat, What, decision_in, outcome_in, problem_in
from worker_client.wire import Wire

READ_S = 15.0  # the server sends a comment every 5 s
REATTACH_S = 1.0  # the server's reattach_s: so long a cut stream is only suspect
QUICK_S = 0.2
CALM_S = 5.0
EVENT_MAX_BYTES = 2**20

log = logging.getLogger(__name__)
chance = random.SystemRandom()  # engines seed the module's own generator alike on all ranks


@dataclass(frozen=True)
class News:
    """What a session has on a question, and whether it is attached."""

    document: Frozen | None
    problem: Problem | None
    attached: bool


class Session:
    """Holds the stream of one seat until it is closed, the round ends, or it is refused."""

    def __init__(self, wire: Wire, seat: Seat) -> None:
        self._wire = wire
        self._seat = seat
        self._changed = threading.Condition()
        self._documents: dict[What, Frozen] = {}
        self._problem: Problem | None = None
        self._attached = False
        self._closing = False
        self._socket: socket.socket | None = None
        self._last_id = ""
        self._thread = threading.Thread(target=self._run, name="kvaccord-session", daemon=True)

    def start(self, *, wait_s: float) -> None:
        """Start the thread, and give it so long to attach: a death after that is seen at once."""
        self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._attached or self._over, wait_s)

    def hear(self, what: What, timeout_s: float, *, through_cuts: bool = False) -> News:
        """Wait for the document or a problem; a cut ends the wait too, unless through_cuts."""

        def has_news() -> bool:
            if what in self._documents or self._problem is not None:
                return True
            return not (self._attached or through_cuts)

        with self._changed:
            self._changed.wait_for(has_news, timeout_s)
            return News(self._documents.get(what), self._problem, self._attached)

    def close(self, *, wait_s: float) -> None:
        """End the stream and the thread, also while it is blocked in a read."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._shut()
        if self._thread.is_alive():
            self._thread.join(wait_s)

    @property
    def _over(self) -> bool:
        ended = any(d.result in ("FAILED", "ABORTED") for d in self._documents.values())
        return self._closing or ended or self._problem is not None

    # --- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        cut_s = time.monotonic()
        while not self._over:
            began_s, pause_s = time.monotonic(), QUICK_S
            try:
                pause_s = self._hold()
            except httpx.ConnectError as fault:
                pause_s = REATTACH_S
                log.debug("session of %s: %s", self._seat, fault)
            except Exception as fault:  # presence must outlive any fault of its own
                log.debug("session of %s: %s %s", self._seat, type(fault).__name__, fault)
            finally:
                with self._changed:
                    self._attached, self._socket = False, None
                    self._changed.notify_all()
            now_s = time.monotonic()
            if now_s - began_s >= REATTACH_S:
                cut_s = now_s  # it had held
            if now_s - cut_s >= REATTACH_S:
                pause_s = CALM_S
            with self._changed:
                self._changed.wait_for(lambda: self._over, chance.uniform(0, pause_s))

    def _hold(self) -> float:
        """Attach once and read to the end. Returns the longest pause before the next try."""
        headers = {**self._seat.headers, "Accept": "text/event-stream"}
        if self._last_id:
            headers["Last-Event-ID"] = self._last_id
        path = f"{self._seat.path}/session"
        with self._wire.stream(path, headers, read_s=READ_S, opened=self._opened) as response:
            if response.status_code != 200:
                return self._refused(response.status_code, response.read())
            if not response.headers.get("content-type", "").startswith("text/event-stream"):
                return REATTACH_S
            with self._changed:
                self._attached = True
                self._changed.notify_all()
            for event in events(response.iter_raw()):
                if event.name == "move":
                    return float(json.loads(event.data).get("after_s", REATTACH_S))
                self._take(event)
                if self._over:
                    break
        return QUICK_S

    def _refused(self, status: int, body: bytes) -> float:
        problem = problem_in(status, body)
        if problem is not None and not isinstance(problem, Unavailable | Retryable):
            with self._changed:
                self._problem = problem
                self._changed.notify_all()
        return REATTACH_S

    def _take(self, event: Event) -> None:
        if event.name == "decision":
            self._keep("decision", decision_in(event.data, self._seat))
        elif event.name == "outcome":
            self._keep("outcome", outcome_in(event.data, self._seat))
        # Only what was understood counts as received: the rest is asked for again.
        self._last_id = event.id or self._last_id

    def _keep(self, what: What, document: Frozen) -> None:
        with self._changed:
            self._documents[what] = document
            self._changed.notify_all()

    def _opened(self, opened: socket.socket) -> None:
        with self._changed:
            self._socket = opened
            if self._closing:
                self._shut()

    def _shut(self) -> None:
        # Closing a socket does not wake a thread that reads it; shutting it down does.
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)


@dataclass(frozen=True)
class Event:
    name: str
    id: str
    data: bytes


def events(parts: Iterator[bytes]) -> Iterator[Event]:
    """Server-sent events. Raises ValueError on one that is too large to be ours.

    Source: the WHATWG HTML standard, "Interpreting an event stream".
    """
    rest = b""
    name, ident = "", ""
    data: list[bytes] = []
    for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        if len(rest) + sum(len(line) for line in data) > EVENT_MAX_BYTES:
            raise ValueError("an event without end")
        for line in lines:
            line = line.removesuffix(b"\r")
            if not line:
                if data:
                    yield Event(name, ident, b"\n".join(data))
                name, data = "", []
                continue
            field, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if field == b"data":
                data.append(value)
            elif field == b"event":
                name = value.decode(errors="replace")
            elif field == b"id":
                ident = value.decode(errors="replace")
