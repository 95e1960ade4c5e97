"""Where shipped code meets the world: every place that the simulation replaces, and no other."""

from __future__ import annotations

import gc
import random
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import worker_client.driver
import worker_client.observing
import worker_client.process
import worker_client.session
import worker_client.wire
from tests.simulation.loop import SharedLoop
from tests.simulation.threads import Threads


@contextmanager
def replaced(loop: SharedLoop, threads: Threads, seed: str, wall: Wall) -> Iterator[None]:
    """Time, chance and threads are the simulation's; the wall clock is a liar."""
    chance = random.Random(f"chance/{seed}")
    hidden = random.Random(f"secrets/{seed}")
    places: list[tuple[Any, str, Any]] = [
        (time, "monotonic", loop.time),
        (time, "time", wall.time),
        (secrets, "token_hex", lambda n=32: hidden.randbytes(n).hex()),
        (secrets, "token_bytes", lambda n=32: hidden.randbytes(n)),
        (worker_client.driver, "chance", chance),
        (worker_client.session, "chance", chance),
        (worker_client.session, "threading", threads),
        (worker_client.wire, "threading", threads),
        (worker_client.wire, "Future", threads.Future),
        (worker_client.driver, "threading", threads),
        (worker_client.observing, "threading", threads),
    ]
    collects = gc.isenabled()
    gc.disable()  # what it ends, it ends at no moment of ours
    try:
        with ExitStack() as replacing:
            for place, name, ours in places:
                replacing.enter_context(mock.patch.object(place, name, ours))
            yield
    finally:
        worker_client.process._held.clear()  # those who were killed say no goodbye at our own exit
        if collects:
            gc.enable()


class Wall:
    """What `time.time()` says: right, until somebody sets the clock."""

    def __init__(self, loop: SharedLoop) -> None:
        self._loop = loop
        self.offset_s = 1.7e9

    def time(self) -> float:
        return self._loop.time() + self.offset_s
