"""A real coordinator process, and a bare HTTP worker: the wire without our client."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from typing import Any

import httpx

KV = [{"kind": "page", "name": "kv", "entry_bytes": 1000}]


class Coordinator:
    """`kvaccord serve` on a free port, in a process of its own."""

    def __init__(self, *options: str, store: str = "memory") -> None:
        self._command = [sys.executable, "-m", "cli", "serve", "--store", store, *options]
        self.port = 0
        self.start()

    def start(self) -> None:
        command = [*self._command, "--port", str(self.port)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r":(\d+)/ on ", line)
        if not found:
            raise RuntimeError(f"{line}{self.process.communicate()[1]}")
        self.port = int(found[1])
        assert self.process.stderr is not None
        # Its log must not fill the pipe.
        self._log = threading.Thread(target=self.process.stderr.read, daemon=True)
        self._log.start()
        for _ in range(200):
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/readyz").status_code == 200:
                    return
            threading.Event().wait(0.02)
        raise RuntimeError("not ready")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def kill(self) -> None:
        self.process.kill()
        self._reap()

    def _reap(self) -> int:
        code = self.process.wait(10)
        self._log.join()
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()
        return code

    def stop(self) -> int:
        self.process.terminate()
        return self._reap()


@contextlib.contextmanager
def serving(*options: str, store: str = "memory") -> Iterator[Coordinator]:
    coordinator = Coordinator(*options, store=store)
    try:
        yield coordinator
    finally:
        coordinator.kill()


_numbers = itertools.count()
_workers: list[Worker] = []


def an_engine() -> str:
    return f"engine-{next(_numbers)}-{uuid.uuid4().hex[:6]}"


def close_workers() -> None:
    while _workers:
        worker = _workers.pop()
        if worker._stream is not None:
            worker.hang_up()
        worker.http.close()


def a_report(**fields: Any) -> dict[str, Any]:
    return {"free_bytes": 100_000, "kv_budget_bytes": 90_000, "classes": KV} | fields


class Worker:
    """One process of an engine, spoken for by hand."""

    def __init__(
        self,
        url: str,
        engine: str,
        *ranks: int,
        run: str = "run-1",
        restart: int = 0,
        **layout: int,
    ) -> None:
        self.http = httpx.Client(base_url=url, timeout=30, trust_env=False)
        self.base = f"/v1/engines/default/{engine}"
        self.ranks = list(ranks)
        self.document: dict[str, Any] = {
            "ranks": self.ranks,
            "layout": layout,
            "nonce": uuid.uuid4().hex,
            "launch": {"run": run, "restart": restart},
            "host": f"host-{ranks[0]}",
            "pid": 100 + ranks[0],
        }
        self.token = ""
        self.round = 0
        self._stream: httpx.Response | None = None
        _workers.append(self)

    def join(self) -> httpx.Response:
        answer = self.http.post(f"{self.base}/join", json=self.document)
        if answer.status_code == 200:
            self.token = answer.json()["token"]
        return answer

    def claim(self) -> httpx.Response:
        answer = self.http.post(f"{self.base}/claim", headers=self.headers)
        if answer.status_code == 200:
            self.round = answer.json()["round"]
        return answer

    def enter(self) -> Worker:
        """Join, claim and open the session."""
        assert self.join().status_code == 200
        assert self.claim().status_code == 200
        self.attach()
        return self

    @property
    def headers(self) -> dict[str, str]:
        return {"Kvaccord-Attempt": self.token}

    @property
    def at(self) -> str:
        return f"{self.base}/rounds/{self.round}"

    def attach(self) -> None:
        request = self.http.build_request("GET", f"{self.at}/session", headers=self.headers)
        self._stream = self.http.send(request, stream=True)
        assert self._stream.status_code == 200
        self._lines = self._stream.iter_lines()
        next(self._lines)  # the first comment: the session is open

    def events(self) -> Iterator[tuple[str, str, str]]:
        """(event, id, data) as they come; comments are passed over."""
        fields: dict[str, str] = {}
        for line in self._lines:
            name, _, value = line.partition(": ")
            if line == "" and fields:
                yield fields["event"], fields.get("id", ""), fields["data"]
                fields = {}
            elif name:
                fields[name] = value

    def hang_up(self) -> None:
        """The session ends without goodbye, as when the process is killed."""
        assert self._stream is not None
        self._stream.close()

    def report(self, wait_s: float = 0, **fields: Any) -> httpx.Response:
        body = {str(rank): a_report(**fields) for rank in self.ranks}
        return self.put("reports", body, wait_s=wait_s)

    def applied(self, digest: str, wait_s: float = 0, **built: int) -> httpx.Response:
        return self.put("applied", {"digest": digest, "built": built}, wait_s=wait_s)

    def veto(self, text: str) -> httpx.Response:
        return self.put("veto", {"rank": self.ranks[0], "text": text})

    def put(self, what: str, body: Any, wait_s: float = 0) -> httpx.Response:
        return self.http.put(
            f"{self.at}/{what}",
            content=json.dumps(body),
            params={"wait_s": wait_s},
            headers=self.headers | {"Content-Type": "application/json"},
        )

    def decision(self) -> httpx.Response:
        return self.http.get(f"{self.at}/decision")
