"""The session thread: one long stream that shows this process present and brings every fact.

Presence is the kernel's word: the stream stays up while the main thread holds the GIL, and ends
when the process does. The threads never raise and never print.
"""

from __future__ import annotations

import contextlib
import json
import logging
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import httpx

from kvaccord.decision import Decision, Frozen, Outcome
from kvaccord.errors import (
    Aborted,
    Failed,
    Problem,
    Retryable,
    RoundEnded,
    StoreReplaced,
    Superseded,
    Unavailable,
)
from worker_client.flow import Call, Seat, What
from worker_client.reading import decision_in, object_in, outcome_in, problem_in
from worker_client.wire import Wire

READ_S = 15.0  # the server sends a comment every 5 s
REATTACH_S = 1.0  # the server's reattach_s: so long a cut stream is only suspect
QUICK_S = 0.2
CALM_S = 5.0  # spreads those who were all cut at once: a restart, a drain
PHASE_PAUSE_S = 0.2  # of phases that come faster the last one counts
PHASE_CALL_S = 5.0
BEAT_S = 10.0  # behind a proxy the stream alone proves nothing
EVENT_MAX_BYTES = 2**20
# Room for the largest decision, 512 KiB: where this process does not read for a while, what the
# kernel cannot take ends the stream after the user timeout. It grants what its own limit allows.
RECEIVE_BYTES = 2**19

log = logging.getLogger(__name__)
chance = random.SystemRandom()  # engines seed the module's own generator alike on all ranks


@dataclass(frozen=True)
class News:
    """What a session has on a question, and whether it is attached."""

    document: Frozen | None
    problem: Problem | None
    attached: bool


class Session:
    """Holds the stream of one seat until it is closed, the round ends, or it is refused.

    on_end: told once, in the session's thread, what ended the round for this process.
    """

    def __init__(
        self,
        wire: Wire,
        seat: Seat,
        *,
        on_end: Callable[[RoundEnded | Problem], None] | None = None,
    ) -> None:
        self._wire = wire
        self._seat = seat
        self._on_end = on_end
        self._listeners: list[Callable[[], None]] = []
        self._phase: bytes | None = None
        self._beat = b'{"phase":"started","progress":0}'
        self._changed = threading.Condition()
        self._documents: dict[What, Frozen] = {}
        self._problem: Problem | None = None
        self._attached = False
        self._closing = False
        self._beating = wire.proxied  # or once the coordinator has seen a proxy
        self._socket: socket.socket | None = None
        self._last_id = ""
        self._openings = 0  # requests for the stream so far
        self._thread = threading.Thread(target=self._run, name="kvaccord-session", daemon=True)
        self._teller: threading.Thread | None = None

    def begin(self) -> None:
        """Start the thread."""
        self._thread.start()
        if self._beating:
            self._start_telling()

    def start(self, *, wait_s: float) -> None:
        """Start the thread, and give it so long to attach: a death after that is seen at once."""
        self.begin()
        self.wait_settled(wait_s)

    def wait_settled(self, wait_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.is_settled, wait_s)

    @property
    def is_settled(self) -> bool:
        """Whether it is up, or never will be."""
        return self._attached or self._over

    @property
    def is_over(self) -> bool:
        return self._over

    def end(self) -> RoundEnded | Problem | None:
        """What has ended the round for this process, as far as it was heard."""
        with self._changed:
            if self._problem is not None:
                return self._problem
            decision = self._documents.get("decision")
            outcome = self._documents.get("outcome")
        if isinstance(outcome, Outcome) and not outcome.sealed:
            known = decision if isinstance(decision, Decision) else Decision(b"{}")
            return Aborted(known, outcome)
        if isinstance(decision, Decision) and not decision.passed:
            return Failed(decision)
        return None

    def tell_phase(self, body: bytes) -> None:
        """Have it sent by a thread of this session; of several in a row the last one counts."""
        with self._changed:
            self._phase = self._beat = body
            if not self._over:
                self._start_telling()
            self._changed.notify_all()

    @contextlib.contextmanager
    def listening(self, listener: Callable[[], None]) -> Iterator[None]:
        """Have the listener called after every change, in whatever thread made it."""
        with self._changed:
            self._listeners.append(listener)
        try:
            yield
        finally:
            with self._changed:
                self._listeners.remove(listener)

    def hear(self, what: What, timeout_s: float, *, through_cuts: bool = False) -> News:
        """Wait for the document or a problem; a cut ends the wait too, unless through_cuts."""

        with self._changed:
            self._changed.wait_for(lambda: self.has_news(what, through_cuts), timeout_s)
            return self.news(what)

    def has_news(self, what: What, through_cuts: bool) -> bool:
        if what in self._documents or self._problem is not None:
            return True
        return not (self._attached or through_cuts)

    def news(self, what: What) -> News:
        return News(self._documents.get(what), self._problem, self._attached)

    def close(self, *, wait_s: float) -> None:
        """End the stream and the thread, also while it is blocked in a read."""
        with self._changed:
            self._closing = True
            self._notify()
            self._shut()
        until_s = time.monotonic() + wait_s
        for thread in (self._thread, self._teller):
            if thread is not None and thread is not threading.current_thread():
                with contextlib.suppress(RuntimeError):  # it was never started
                    thread.join(max(0.0, until_s - time.monotonic()))

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
                pause_s = CALM_S
                log.debug("session of %s: %s", self._seat, fault)
            except Exception as fault:  # presence must outlive any fault of its own
                log.debug("session of %s: %s %s", self._seat, type(fault).__name__, fault)
            finally:
                with self._changed:
                    self._attached, self._socket = False, None
                    self._notify()
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
        # What others said is not for a rank: in a large start it would fill the receive buffer of
        # one that is busy, and the kernel end its stream.
        # The number tells a request that was held up and given up from the one that counts.
        self._openings += 1
        path = f"{self._seat.path}/session?facts=0&opening={self._openings}"
        if self._wire.proxied:
            path += "&proxied=1"
        with self._wire.stream(path, headers, read_s=READ_S, opened=self._opened) as response:
            if response.status_code != 200:
                if response.status_code == 503:
                    return CALM_S
                return self._refused(response.status_code, response.read())
            if not response.headers.get("content-type", "").startswith("text/event-stream"):
                return REATTACH_S
            with self._changed:
                self._attached = True
                if response.headers.get("kvaccord-proxied") == "1" and not self._beating:
                    self._beating, self._phase = True, self._phase or self._beat
                    self._start_telling()
                self._notify()
            for event in events(response.iter_raw()):
                if event.name == "move":
                    return max(CALM_S, float(json.loads(event.data).get("after_s", CALM_S)))
                self._take(event)
                if self._over:
                    break
        return QUICK_S

    def _refused(self, status: int, body: bytes) -> float:
        problem = problem_in(status, body)
        if problem is not None and not isinstance(problem, Unavailable | Retryable):
            self._refuse(problem)
        return REATTACH_S

    def _refuse(self, problem: Problem) -> None:
        with self._changed:
            if self._problem is not None:
                return
            self._problem = problem
            self._notify()
        self._ended()

    def _take(self, event: Event) -> None:
        if event.name == "decision":
            self._keep("decision", decision_in(event.data, self._seat))
        elif event.name == "outcome":
            self._keep("outcome", outcome_in(event.data, self._seat))
        elif event.name == "problem":
            self._refused(int(object_in(event.data).get("status", 0)), event.data)
        # Only what was understood counts as received: the rest is asked for again.
        self._last_id = event.id or self._last_id

    def _keep(self, what: What, document: Frozen) -> None:
        with self._changed:
            self._documents[what] = document
            self._notify()
        self._ended()

    def _notify(self) -> None:
        self._changed.notify_all()
        for listener in self._listeners:
            with contextlib.suppress(RuntimeError):  # its event loop is closed
                listener()

    def _ended(self) -> None:
        end = self.end()
        if end is not None and self._on_end is not None and not self._closing:
            told, self._on_end = self._on_end, None
            told(end)

    # --- phases ---------------------------------------------------------------------------------

    def _start_telling(self) -> None:
        if self._teller is None:
            self._teller = threading.Thread(target=self._tell, name="kvaccord-phase", daemon=True)
            self._teller.start()

    def _tell(self) -> None:
        while True:
            with self._changed:
                every_s = BEAT_S if self._beating else None
                self._changed.wait_for(lambda: self._phase is not None or self._over, every_s)
                if self._over:
                    return
                body, self._phase = self._phase or self._beat, None
            headers = {**self._seat.headers, "Content-Type": "application/json"}
            call = Call("POST", f"{self._seat.path}/phase", body, headers, timeout_s=PHASE_CALL_S)
            try:
                self._heard_of_phase(call)
            except Exception as fault:  # a phase that is lost is followed by another
                log.debug("phase of %s: %s %s", self._seat, type(fault).__name__, fault)
            with self._changed:
                self._changed.wait_for(lambda: self._over, PHASE_PAUSE_S)
            if self._closing:
                self._wire.close()  # that call may have come too late for whoever closed it

    def _heard_of_phase(self, call: Call) -> None:
        answer = self._wire.perform(call)
        if answer.error is None and answer.status == 410:
            problem = problem_in(answer.status, answer.body)
            # Any other refusal concerns the phase alone; an older coordinator knows none.
            if isinstance(problem, Superseded | StoreReplaced):
                self._refuse(problem)

    def _opened(self, opened: socket.socket) -> None:
        with self._changed:
            self._socket = opened
            with contextlib.suppress(OSError):
                opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
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
