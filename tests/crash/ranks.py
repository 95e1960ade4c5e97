"""Real rank processes, seen from the test that starts, stops and kills them."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import httpx


class RankProcess:
    def __init__(
        self,
        url: str,
        engine: str,
        rank: int,
        tp: int,
        *options: str,
        launch: str = "run-1",
        under: Sequence[str] = (),
    ) -> None:
        self.engine, self.rank = engine, rank
        names = ["--url", url, "--engine", engine, "--launch", launch]
        numbers = ["--rank", str(rank), "--tp", str(tp)]
        command = [*under, sys.executable, "-m", "tests.crash.rank", *names, *numbers, *options]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.children: list[int] = []

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)

    def says(self, now: str, within_s: float = 30.0) -> dict[str, Any]:
        """What it says next, which must be this."""
        said: dict[str, Any] = json.loads(self._lines.get(timeout=within_s))
        assert said["now"] == now, said
        if said.get("child"):
            self.children.append(said["child"])
        return said

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.kill()
        for child in self.children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        self._reader.join(10)
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                if pipe is not None:
                    pipe.close()


@contextlib.contextmanager
def a_start(
    url: str, *options: str, tp: int = 2, urls: dict[int, str] | None = None, **how: Any
) -> Iterator[list[RankProcess]]:
    """Every rank of a start of its own engine, claimed. urls: of ranks that go another way."""
    engine = how.pop("engine", None) or f"engine-{uuid.uuid4().hex[:8]}"
    ranks = []
    try:
        for rank in range(tp):
            where = (urls or {}).get(rank, url)
            ranks.append(RankProcess(where, engine, rank, tp, *options, **how))
        for each in ranks:
            each.says("claimed")
        yield ranks
    finally:
        for each in ranks:
            each.close()


def seal(ranks: Sequence[RankProcess], within_s: float = 30.0) -> None:
    """Let them go on to the end; all must have heard one decision."""
    for each in ranks:
        each.go()
    assert len({each.says("reported", within_s)["digest"] for each in ranks}) == 1
    for each in ranks:
        each.go()
    for each in ranks:
        each.says("sealed", within_s)


def status(url: str, ranks: Sequence[RankProcess]) -> dict[str, Any]:
    """The last round of the engine of these ranks."""
    with httpx.Client(base_url=url, trust_env=False) as http:
        path = f"/v1/engines/default/{ranks[0].engine}/rounds/current"
        answer: dict[str, Any] = http.get(path).json()
        return answer
