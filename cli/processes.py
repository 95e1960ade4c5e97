"""Child processes that never outlive the command, and a coordinator that is one."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

READY_S = 20.0
STOP_S = 6.0
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class NotStarted(Exception):
    """A coordinator of our own that did not come up; the text says what it said."""


def child(
    module: str, *args: str, stderr: Any, stdin: int = subprocess.DEVNULL
) -> subprocess.Popen[str]:
    """A process that ends with this one, even when this one is killed."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def end_with_parent() -> None:
        assert libc is not None
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

    return subprocess.Popen(
        [sys.executable, "-m", module, *args],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        # Ctrl-C is for the rehearsal, which then ends its processes in order.
        start_new_session=True,
        preexec_fn=end_with_parent if libc else None,
    )


@contextmanager
def coordinator(
    host: str, port: int, store: str, options: Sequence[str], *, quiet: bool
) -> Iterator[str]:
    """A coordinator process of our own; yields its address, and stops it in the end."""
    if store.startswith("sqlite:///"):
        Path(store.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
    args = ["serve", f"--host={host}", f"--port={port}", f"--store={store}", *options]
    with tempfile.TemporaryFile("w+") as noise:
        process = child("cli", *args, stderr=noise if quiet else None)
        try:
            assert process.stdout is not None
            # Its first line names the address that it really has: "... serves http://HOST:PORT/".
            line = process.stdout.readline()
            address = next((w for w in line.split() if w.startswith("http")), "").rstrip("/")
            if not address:
                noise.seek(0)
                said = (line + noise.read()).strip()[-500:] or "it said why above"
                raise NotStarted(f"the coordinator did not start: {said}")
            _wait_ready(address, process)
            yield address
        finally:
            _stop(process)


def _wait_ready(address: str, process: subprocess.Popen[str]) -> None:
    deadline_s = time.monotonic() + READY_S
    with httpx.Client(trust_env=False, timeout=2.0) as client:
        while time.monotonic() < deadline_s and process.poll() is None:
            try:
                if client.get(f"{address}/readyz").status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.05)
    raise NotStarted(f"the coordinator at {address} was not ready within {READY_S:.0f} s")


def _stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
