"""For the tests of an engine: a real coordinator, the other ranks, and troubles on the way.

    def test_my_engine_starts(coordinator):            # pytest_plugins = ["worker_client.testing"]
        start = Start(coordinator.url, Layout(tp=4), report)
        with Peers(start, without=[3]):
            my_engine.start(rank=3, environ=start.environ)

Needs `kvaccord[testing]`: pytest, and the coordinator that runs beside the test.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import re
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import pytest

from kvaccord.canonical import canonical
from kvaccord.decision import Decision, Outcome
from kvaccord.errors import PROBLEMS
from kvaccord.layout import Layout
from kvaccord.messages import Report
from kvaccord.plan import agreed_sentence, plan, plan_document
from worker_client.aio import AsyncDriver, AsyncRendezvous
from worker_client.arguments import Arguments, settle
from worker_client.client import Rendezvous
from worker_client.driver import Driver
from worker_client.flow import Answer, Call
from worker_client.stopping import OnStop
from worker_client.wire import Trace, Wire

# --- a coordinator, and the way to it -----------------------------------------------------------


class Coordinator:
    """`kvaccord serve` in a process of its own, and a relay before it that makes trouble.

    url: of the relay. direct_url: of the coordinator itself.
    """

    def __init__(self, *options: str, store: str = "memory") -> None:
        command = [sys.executable, "-m", "cli", "serve", "--port", "0", "--store", store, *options]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        found = re.search(r":(\d+)/ on ", line)
        if found is None:
            self.close()
            raise RuntimeError(f"no coordinator: {line or 'install kvaccord[testing]'}")
        self._port = int(found[1])
        self._relay = Relay(self._port)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._relay.port}"

    @property
    def direct_url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def cut(self, for_s: float = 0.0) -> None:
        """End every connection now, and refuse new ones for so long."""
        self._relay.cut(for_s)

    @contextlib.contextmanager
    def late(self, by_s: float) -> Iterator[None]:
        """Deliver whatever is sent to the coordinator so much later."""
        with self._relay.doing(late_s=by_s):
            yield

    @contextlib.contextmanager
    def garbage(self) -> Iterator[None]:
        """Answer new connections with a page that no coordinator would send."""
        with self._relay.doing(garbage=True):
            self._relay.cut(0.0)  # also those that are kept open between calls
            yield
        self._relay.cut(0.0)

    def kill(self) -> None:
        """As kill -9: the connections end, and nobody answers any more."""
        self._process.kill()
        self._process.wait(10)

    def close(self) -> None:
        self.kill()
        if self._process.stdout is not None:
            self._process.stdout.close()
        if hasattr(self, "_relay"):
            self._relay.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    """A coordinator of this test alone, with budgets of seconds, for its store is memory."""
    with Coordinator("--gather-s", "10", "--report-s", "10", "--apply-s", "10") as running:
        yield running


PAGE = b"<html><body>502 Bad Gateway</body></html>"
GARBAGE = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nConnection: close\r\nContent-Length: "
GARBAGE += f"{len(PAGE)}\r\n\r\n".encode() + PAGE


class Relay:
    """Carries bytes between a port of its own and another, except when it is told otherwise."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._late_s = 0.0
        self._garbage = False
        self._refuse_until_s = 0.0
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port: int = self._listener.getsockname()[1]
        self._start(self._accept)

    @contextlib.contextmanager
    def doing(self, *, late_s: float = 0.0, garbage: bool = False) -> Iterator[None]:
        self._late_s, self._garbage = late_s, garbage
        try:
            yield
        finally:
            self._late_s, self._garbage = 0.0, False

    def cut(self, for_s: float) -> None:
        self._refuse_until_s = time.monotonic() + for_s
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut(0.0)

    def _start(self, target: Callable[..., None], *args: Any) -> None:
        threading.Thread(target=target, args=args, name="testing-relay", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if time.monotonic() < self._refuse_until_s:
                client.close()
            else:
                self._start(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            if self._garbage:
                client.recv(65536)
                client.sendall(GARBAGE)
                return
            with socket.create_connection(("127.0.0.1", self._target)) as server:
                for end in (client, server):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with self._lock:
                    self._open |= {client, server}
                back = threading.Thread(target=self._carry, args=(server, client), daemon=True)
                back.start()
                self._carry(client, server, late=True)
                back.join()
                with self._lock:
                    self._open -= {client, server}

    def _carry(self, source: socket.socket, sink: socket.socket, late: bool = False) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if late and self._late_s:
                    time.sleep(self._late_s)
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


# --- the other ranks ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    """One start of an engine. reports: of every rank, or one for all."""

    url: str
    layout: Layout
    reports: Report | Mapping[int, Report]
    engine: str = field(default_factory=lambda: f"test-{uuid.uuid4().hex[:8]}")
    launch: str = field(default_factory=lambda: f"run-{uuid.uuid4().hex[:8]}")
    patience_s: float = 30.0

    @property
    def environ(self) -> dict[str, str]:
        """What a process that takes part in this start needs in its environment."""
        return {
            "KVACCORD_URL": self.url,
            "KVACCORD_ENGINE": self.engine,
            "KVACCORD_LAUNCH": self.launch,
            "KVACCORD_PATIENCE_S": str(self.patience_s),
        }

    def report_of(self, rank: int) -> Report:
        return self.reports if isinstance(self.reports, Report) else self.reports[rank]

    def join(self, rank: int, **fields: Any) -> Rendezvous:
        """Take part as this rank."""
        given: dict[str, Any] = {
            "url": self.url,
            "engine": self.engine,
            "launch": self.launch,
            "layout": self.layout,
            "patience_s": self.patience_s,
        }
        return Rendezvous.join(ranks=[rank], **given | fields)


class Peers:
    """Plays every rank of a start but those of `without`, each in a thread of this process.

    raising: {rank: text}, raises this instead of reporting. dying: ranks whose session ends
    without a word instead of their report, as when their process is killed.
    heard: {rank: how it ended}: "SEALED", or the exception.
    """

    def __init__(
        self,
        start: Start,
        *,
        without: Collection[int] = (),
        raising: Mapping[int, str] | None = None,
        dying: Collection[int] = (),
    ) -> None:
        self.start = start
        self.heard: dict[int, str | Exception] = {}
        self._raising = dict(raising or {})
        self._dying = set(dying)
        self._threads = [
            threading.Thread(target=self._play, args=(rank,), name=f"peer-{rank}", daemon=True)
            for rank in range(start.layout.world_size)
            if rank not in without
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.join()

    def join(self, within_s: float = 60.0) -> dict[int, str | Exception]:
        """Wait until each has ended; what they heard."""
        until_s = time.monotonic() + within_s
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        return dict(self.heard)

    def _play(self, rank: int) -> None:
        try:
            with self.start.join(rank) as rdzv:
                if rank in self._dying:
                    _die(rdzv)
                    return
                if rank in self._raising:
                    raise RuntimeError(self._raising[rank])
                agreed = rdzv.report(self.start.report_of(rank))
                rdzv.applied(built=agreed.entries)
            self.heard[rank] = "SEALED"
        except Exception as fault:
            self.heard[rank] = fault


def _die(rdzv: Rendezvous) -> None:
    rdzv._steps.gone = True  # so that the end of the block says nothing
    assert rdzv._driver is not None, "a peer has a coordinator"
    rdzv._driver.detach(0.0)


# --- any answer, without a server ---------------------------------------------------------------

# What a round may end as either before or after its verdict.
EITHER = {
    "duplicate_rank",
    "rank_left",
    "rank_lost",
    "rank_stuck",
    "rank_replaced",
    "ranks_missing",
    "superseded",
    "cancelled",
}
FAILED = EITHER | {
    "reserve_exceeds_free",
    "no_free_memory",
    "request_exceeds_free",
    "state_floor_exceeds_budget",
    "does_not_fit",
    "inputs_disagree",
    "implausible_report",
    "spread_too_wide",
    "plan_too_large",
    "rank_vetoed",
}
ABORTED = EITHER | {"apply_failed", "applied_differently"}
STEPS = ("join", "report", "applied", "serving", "check", "veto", "leave")
FINAL = {
    "state_floor_exceeds_budget",
    "does_not_fit",
    "inputs_disagree",
    "implausible_report",
    "spread_too_wide",
    "plan_too_large",
    "applied_differently",
    "cancelled",
}
CLAIMED = {
    "round": 1,
    "outcome": "open",
    "budgets": {
        "gather_s": 1,
        "report_s": {"soft": 1, "hard": 1},
        "apply_s": {"soft": 1, "hard": 1},
    },
    "remaining_s": 1,
}


class Scripted:
    """Stands for `Rendezvous.join`: the one who joins hears what the script says. No socket.

        monkeypatch.setattr(my_engine.Rendezvous, "join", scripted("rank_lost").join)
        monkeypatch.setattr(my_engine.AsyncRendezvous, "join", scripted("rank_lost").async_join)

    code: any verdict, abort or refusal code, "agreed", or "no_verdict".
    at: "report" or "applied", where both can be meant; any step for a refusal or silence.
    """

    def __init__(self, code: str, *, at: str | None = None) -> None:
        known = {"agreed", "sealed", "no_verdict", *FAILED, *ABORTED, *PROBLEMS}
        if code not in known:
            raise ValueError(f"no code {code!r}; known: {', '.join(sorted(known))}")
        self.code = code
        if at is None:
            at = "applied" if code not in FAILED and code in ABORTED else "report"
            if code in PROBLEMS and code not in FAILED:
                at = "join"
        self.at = at
        self._check()

    def _check(self) -> None:
        """Raise ValueError where this code is never heard at this step: a test of it would pass."""
        if self.at not in STEPS:
            raise ValueError(f"no step {self.at!r}; known: {', '.join(STEPS)}")
        heard: set[str] = {"agreed", "sealed", "no_verdict", *PROBLEMS}
        heard |= {"report": FAILED, "applied": ABORTED}.get(self.at, set())
        if self.code not in heard:
            where = "report" if self.code in FAILED else "applied"
            raise ValueError(f"{self.code} is never heard at {self.at!r}; give at={where!r}")

    def join(self, *, on_stop: OnStop = "raise", **fields: Any) -> Rendezvous:
        """As Rendezvous.join; the coordinator's address is of no matter."""
        said = _settled(fields)
        driver = Driver(_ScriptedWire(self, said))
        driver.holds_sessions = False
        return Rendezvous._entered(said, on_stop, driver)

    async def async_join(self, *, on_stop: OnStop = "raise", **fields: Any) -> AsyncRendezvous:
        """As AsyncRendezvous.join, likewise."""
        said = _settled(fields)
        driver = AsyncDriver(_ScriptedWire(self, said))
        driver.holds_sessions = False
        return await AsyncRendezvous._entered(said, on_stop, driver)


def _settled(fields: dict[str, Any]) -> Arguments:
    given: dict[str, Any] = dict.fromkeys(inspect.signature(settle).parameters)
    given |= {"trust_env": False, "patience_s": 0.1, "engine": "scripted"} | fields
    given |= {"url": "http://scripted.invalid", "launch": given["launch"] or "scripted"}
    return settle(**given)


def scripted(code: str, *, at: str | None = None) -> Scripted:
    """A stand-in for `Rendezvous.join` that answers this code without a server."""
    return Scripted(code, at=at)


class _ScriptedWire(Wire):
    def __init__(self, script: Scripted, said: Arguments) -> None:
        super().__init__(said.url)
        self._script = script
        self._arguments = said

    def perform(self, call: Call, trace: Trace | None = None) -> Answer:
        script = self._script
        word = call.path.partition("?")[0].rpartition("/")[2]
        step = {"reports": "report", "claim": "join"}.get(word, word)
        if script.at == step and word != "claim":
            if script.code == "no_verdict":
                return Answer(time.monotonic(), error="ConnectError: scripted to be silent")
            if script.code in PROBLEMS and not self._is_verdict(step):
                kind = PROBLEMS[script.code]
                problem = kind(f"scripted: {script.code}").document()
                return _json(kind.http_status, problem)
        if word == "join":
            return _json(200, {"attempt": 1, "token": "scripted.1.0", "patience_s": 1})
        if word == "claim":
            return _json(200, CLAIMED)
        if word == "reports":
            return _frozen(self._decision(call).body, "open")
        if word == "applied":
            return _frozen(self._outcome().body, "SEALED")
        if word == "serving":
            return _json(200, {"standing": "whole", "ranks": []})
        if word == "check":
            return _json(200, {"fits": True, "code": "fits", "ranks": []})
        return _json(202, {"missing": [], "remaining_s": 1})

    def _is_verdict(self, step: str) -> bool:
        codes = {"report": FAILED, "applied": ABORTED}.get(step, set())
        return self._script.code in codes

    def _decision(self, call: Call) -> Decision:
        script, said = self._script, self._arguments
        document: dict[str, Any] = {
            "engine": said.name,
            "round": 1,
            "store_id": "scripted",
            "layout": said.layout.model_dump(mode="json"),
            "faults": [],
        }
        if script.at == "report" and script.code in FAILED:
            verdict = {"outcome": "FAILED", **self._blamed()}
        else:
            sent = json.loads(call.body or b"{}")
            one = Report.model_validate(next(iter(sent.values())))
            reports = {
                rank: Report.model_validate(sent[str(rank)]) if str(rank) in sent else one
                for rank in range(said.layout.world_size)
            }
            planned = plan(said.layout, reports)
            if planned.findings:
                raise ValueError(f"no plan for this report: {planned.findings[0].text}")
            verdict = {
                "outcome": "PASSED",
                "code": "agreed",
                "message": agreed_sentence(planned),
                "retryable": True,
                "ranks": [],
                "causes": [],
                "also": [],
                "not_heard": [],
                "more_causes": 0,
            }
            document["plan"] = plan_document(planned, {})
        return Decision(canonical(document | {"verdict": verdict}))

    def _outcome(self) -> Outcome:
        fields: dict[str, Any]
        if self._script.at == "applied" and self._script.code in ABORTED:
            fields = {"outcome": "ABORTED", **self._blamed()}
        else:
            fields = {"outcome": "SEALED", "code": "sealed", "message": "every rank built its row"}
            fields |= {"ranks": [], "causes": [], "retryable": True}
        about = {"engine": self._arguments.name, "round": 1, "store_id": "scripted"}
        return Outcome(canonical(about | fields))

    def _blamed(self) -> dict[str, Any]:
        code = self._script.code
        rank = self._arguments.layout.world_size - 1
        return {
            "code": code,
            "message": f"rank {rank} on host-{rank}: scripted {code}",
            "ranks": [rank],
            "causes": [
                {"code": code, "text": f"scripted {code}", "rank": rank, "host": f"host-{rank}"}
            ],
            "also": [],
            "not_heard": [],
            "more_causes": 0,
            "retryable": code not in FINAL,
        }


def _json(status: int, document: dict[str, Any]) -> Answer:
    return Answer(time.monotonic(), status, {}, json.dumps(document).encode())


def _frozen(body: bytes, outcome: str) -> Answer:
    digest = Decision(body).digest
    headers = {"kvaccord-digest": digest, "kvaccord-outcome": outcome}
    return Answer(time.monotonic(), 200, headers, body)


__all__ = [
    "Coordinator",
    "Peers",
    "Scripted",
    "Start",
    "coordinator",
    "scripted",
]
