"""An asyncio loop whose clock jumps to the next timer: hours pass in no time, always alike."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

READING_S = 1e-6  # each reading of the clock costs it: code that polls the clock makes progress


class _Jump(selectors.SelectSelector):
    """Waits for nothing: whatever is not ready now comes when the clock has jumped."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or (timeout is not None and timeout <= 0):
            return ready
        if timeout is None:
            raise RuntimeError("nothing is ready and nothing is due: the story waits for ever")
        self.loop.now_s += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.now_s = 0.0
        jump = _Jump()
        jump.loop = self
        super().__init__(jump)

    def time(self) -> float:
        self.now_s += READING_S
        return self.now_s

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> asyncio.Future[Any]:
        """At once and here: what another thread takes is no time on this clock."""
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done


def run_virtually(story: Coroutine[Any, Any, T]) -> T:
    """Run to its end on a clock of its own that begins at 0 s."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(story)
