"""An asyncio loop whose clock jumps to the next timer: hours pass in no time, always alike."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

READING_S = 1e-6  # each reading of the clock costs it: code that polls the clock makes progress


class Stuck(Exception):
    """The world waits for nothing, or turns without time passing: a fault of whoever waits."""


class VirtualLoop(asyncio.BaseEventLoop):
    """No sockets and no selector: to wait for what comes next is to move the clock there."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self._selector = self

    def time(self) -> float:
        self.now_s += READING_S
        return self.now_s

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> asyncio.Future[Any]:
        """At once and here: what another thread takes is no time on this clock."""
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # for whoever awaits it
            done.set_exception(error)
        return done

    # --- what BaseEventLoop asks of a selector --------------------------------------------------

    def select(self, timeout: float | None) -> tuple[()]:
        if timeout is None:
            raise Stuck(f"nothing is ready and nothing is due, at {self.now_s:.3f} s")
        if timeout > 0:
            # To the timer exactly: a sum of differences may fall short of it.
            self.now_s = max(self.now_s, self._scheduled[0]._when)  # type: ignore[attr-defined]
        return ()

    def _process_events(self, event_list: object) -> None: ...
    def _write_to_self(self) -> None: ...


def run_virtually(story: Coroutine[Any, Any, T]) -> T:
    """Run to its end on a clock of its own that begins at 0 s."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(story)
