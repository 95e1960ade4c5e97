"""A coordinator in a process of its own that can be killed and replaced; figures as rows."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from calls import Calls


class Coordinator:
    """A real one in a process of its own, on a store in `folder`. cpu: the core it is held to."""

    def __init__(self, folder: str, cpu: int | None = None) -> None:
        self._command = [sys.executable, "-m", "cli", "serve"]
        self._command += ["--store", f"sqlite:///{folder}/kvaccord.db"]
        self._cpu = cpu
        self._spent_s = 0.0  # CPU of those that were killed
        self.port = 0

    async def start(self) -> None:
        """Returns when it answers that it is ready."""
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            "--port",
            str(self.port),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            preexec_fn=self._settle_in,
        )
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        found = re.search(rb":(\d+)/ on ", line)
        assert found, f"the coordinator did not start: {line!r}"
        self.port = int(found[1])
        # It listens before it has read its store; who calls meanwhile is answered then.
        calls = Calls(self.port, at_once=1)
        await calls.ask("GET", "/readyz", timeout_s=120.0)
        calls.close()

    def _settle_in(self) -> None:
        raise_descriptor_limit()
        if self._cpu is not None:
            os.sched_setaffinity(0, {self._cpu})

    async def terminate(self) -> float:
        """SIGTERM. Seconds until it was gone."""
        self._spent_s, began_s = self.cpu_s, time.monotonic()
        self._process.terminate()
        await self._process.wait()
        return time.monotonic() - began_s

    async def kill(self) -> None:
        self._spent_s = self.cpu_s
        self._process.kill()
        await self._process.wait()

    @property
    def cpu_s(self) -> float:
        """CPU seconds of this coordinator and of those before it."""
        if self._process.returncode is not None:
            return self._spent_s
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return self._spent_s + (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def resident_bytes(self) -> int:
        pages = Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    @property
    def peak_bytes(self) -> int:
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]


def raise_descriptor_limit() -> int:
    """To the hard limit, which is returned."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


@contextlib.asynccontextmanager
async def serving(folder: str, cpu: int | None = None) -> Any:
    coordinator = Coordinator(folder, cpu)
    await coordinator.start()
    try:
        yield coordinator
    finally:
        await coordinator.kill()


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0


def milliseconds(values: list[float]) -> str:
    p50, p99 = (percentile(values, share) * 1000 for share in (0.5, 0.99))
    return f"p50 {p50:.1f} ms, p99 {p99:.1f} ms, most {max(values, default=0) * 1000:.1f} ms"


def rows(title: str, values: dict[str, str]) -> Iterator[str]:
    yield title
    for name, value in values.items():
        yield f"  {name:44}{value}"
