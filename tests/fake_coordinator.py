"""A coordinator of a few lines on a real socket, that can be told to misbehave."""

from __future__ import annotations

import contextlib
import json
import queue
import re
import socket
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

from kvaccord.canonical import canonical
from kvaccord.decision import Decision, Outcome
from kvaccord.layout import Layout
from kvaccord.messages import Report, page, state
from kvaccord.plan import plan, plan_document

REPORT = Report(
    free_bytes=1000,
    kv_budget_bytes=900,
    max_num_seqs=2,
    classes=(page("kv", 100), state("s", 50, entries_per_req=1)),
)
VERDICT: dict[str, Any] = {"ranks": [], "causes": [], "retryable": True, "message": "as it came"}
CLAIMED = {
    "round": 7,
    "outcome": "open",
    "budgets": {"gather_s": 30, "report_s": {"hard": 70}, "apply_s": {"hard": 50}},
    "remaining_s": 30,
}
WAITING = {"missing": [{"rank": 1}], "remaining_s": 20}
FITS = {"fits": True, "code": "fits", "ranks": []}
CUT = object()


def a_decision(result: str = "PASSED", *, report: Report = REPORT, **changes: Any) -> Decision:
    code = "agreed" if result == "PASSED" else "rank_vetoed"
    verdict = VERDICT | {"outcome": result, "code": code}
    document: dict[str, Any] = {"engine": "default/e", "round": 7, "verdict": verdict}
    if result == "PASSED":
        document["plan"] = plan_document(plan(Layout(), {0: report}), {})
    return Decision(canonical(document | changes))


def an_outcome(result: str = "SEALED") -> Outcome:
    about = {"engine": "default/e", "round": 7, "outcome": result, "code": result.lower()}
    return Outcome(canonical(VERDICT | about))


class FakeCoordinator(ThreadingHTTPServer):
    """Answers by the last word of the path; keeps what it was told.

    answers: word -> (status, document or frozen bytes), or None to never answer.
    push: events for the session; CUT ends the stream.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self.server_address[1]}"
        if tls:
            self.socket = tls.wrap_socket(self.socket, server_side=True)
        self.answers: dict[str, Any] = {
            "join": (200, {"attempt": 1, "token": "t0k3n", "patience_s": 90}),
            "claim": (200, CLAIMED),
            "session": (200, b""),
            "reports": (200, a_decision()),
            "applied": (200, an_outcome()),
            "veto": (202, WAITING),
            "leave": (202, WAITING),
            "phase": (204, b""),
            "serving": (200, {"standing": "whole", "ranks": []}),
            "check": (200, FITS),
        }
        self.headers: dict[str, dict[str, str]] = {}  # word -> more headers of its answer
        self.told: list[tuple[str, dict[str, str], Any]] = []
        self.openings: list[str | None] = []  # the numbers of the session requests
        self.events: queue.Queue[Any] = queue.Queue()
        self.attached = threading.Semaphore(0)
        self.ended = threading.Semaphore(0)

    def push(self, name: str, body: bytes, ident: str = "1.0") -> None:
        self.events.put(f"event: {name}\nid: {ident}\ndata: ".encode() + body + b"\n\n")

    def words(self) -> list[str]:
        """What was called, except the session."""
        return [word for word, _, _ in self.told if word != "session"]

    def said(self, word: str) -> Any:
        """The last document sent with this call."""
        return [body for told, _, body in self.told if told == word][-1]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeCoordinator

    def log_message(self, format: str, *args: Any) -> None: ...

    def answer(self) -> None:
        word = re.split(r"[/?]", self.path.partition("?")[0])[-1]
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.told.append((word, headers, json.loads(body) if body else None))
        if word == "session":
            query = parse_qs(self.path.partition("?")[2])
            self.server.openings += query.get("opening", [None])
        answer = self.server.answers[word]
        if answer is None:
            threading.Event().wait(30)
            return
        if callable(answer):
            answer = answer()
        status, document = answer
        if word == "session" and status == 200:
            self.stream()
            return
        self.send_response(status)
        if isinstance(document, Decision | Outcome):
            self.send_header("Kvaccord-Digest", document.digest)
            document = document.body
        elif not isinstance(document, bytes):
            document = json.dumps(document).encode()
        for name, value in self.server.headers.get(word, {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(document)))
        self.end_headers()
        self.wfile.write(document)

    def stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        for name, value in self.server.headers.get("session", {}).items():
            self.send_header(name, value)
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(b": hello\n\n")
        self.server.attached.release()
        with contextlib.suppress(OSError):
            while (event := self.next_event()) is not CUT:
                self.wfile.write(event)
        self.server.ended.release()
        self.close_connection = True

    def next_event(self) -> Any:
        while True:
            with contextlib.suppress(queue.Empty):
                return self.server.events.get(timeout=0.05)
            if isinstance(self.connection, ssl.SSLSocket):
                continue  # it cannot be peeked into
            self.connection.setblocking(False)
            try:
                if self.connection.recv(1, socket.MSG_PEEK) == b"":
                    return CUT
            except BlockingIOError:
                pass
            except OSError:
                return CUT
            finally:
                self.connection.setblocking(True)

    do_GET = do_PUT = do_POST = answer


@contextlib.contextmanager
def fake_coordinator(tls: ssl.SSLContext | None = None) -> Iterator[FakeCoordinator]:
    with FakeCoordinator(tls) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.events.put(CUT)
            server.shutdown()
            thread.join()
