"""A real coordinator process that is killed, stopped and started again on one address and store."""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import httpx


class Server:
    """`kvaccord serve`. Nobody waits for it: spawn() returns at once, await_ready() does not."""

    def __init__(
        self,
        folder: Path,
        *options: str,
        host: str = "127.0.0.1",
        under: Sequence[str] = (),
        store: Path | None = None,
    ) -> None:
        self.host, self.port = host, _a_port(host if not under else "127.0.0.1")
        self.store = store or folder / "kvaccord.db"
        self.said = folder / "coordinator.log"
        serve = [sys.executable, "-m", "cli", "serve", "--store", f"sqlite:///{self.store}"]
        self._command = [*under, *serve, "--host", host, "--port", str(self.port), *options]
        self._log: IO[bytes] | None = None
        self.process: subprocess.Popen[Any] | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def spawn(self) -> None:
        self._log = self._log or self.said.open("ab")
        self.process = subprocess.Popen(self._command, stdout=self._log, stderr=self._log)

    def start(self) -> None:
        self.spawn()
        self.await_ready()

    def await_ready(self, within_s: float = 30.0) -> None:
        until_s = time.monotonic() + within_s
        while time.monotonic() < until_s:
            assert self.process is not None
            assert self.process.poll() is None, self.said.read_text()[-2000:]
            if self.ready() == 200:
                return
            time.sleep(0.03)
        raise AssertionError(f"not ready within {within_s} s: {self.said.read_text()[-2000:]}")

    def ready(self) -> int:
        """The status of /readyz, 0 when nobody answers."""
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/readyz", trust_env=False, timeout=5).status_code
        return 0

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)

    def end(self) -> int:
        """Stop it in order; its exit code."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(10)

    def pause(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        if self._log is not None:
            self._log.close()


@contextlib.contextmanager
def serving(folder: Path, *options: str, **how: Any) -> Iterator[Server]:
    server = Server(folder, *options, **how)
    try:
        server.start()
        yield server
    finally:
        server.close()


def _a_port(host: str) -> int:
    # Below the ports that the kernel gives to clients: one that asks for a dead server's port in
    # a loop would in the end be connected to itself, and hold the port.
    for _ in range(200):
        port = random.randint(20_000, 30_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port
    raise RuntimeError("no free port from 20000 to 30000")
