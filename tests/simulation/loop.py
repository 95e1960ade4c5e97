"""A loop on virtual time (tests/virtual.py), shared by machines that can pause and die.

Every callback belongs to the machine in whose context it was scheduled: of a machine that is
paused callbacks wait, in their order; of a dead one they never run again, which is what kill -9
means.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import Context, ContextVar
from typing import Any

import httpx

from tests.virtual import Stuck, VirtualLoop

MAX_STEPS = 300_000  # a world of 64 ranks takes some 60,000


class Machine:
    """Something that runs by itself: a coordinator, a process of an engine."""

    def __init__(self, loop: SharedLoop, name: str) -> None:
        self.loop = loop
        self.name = name
        self.dead = False
        self.paused = False
        self.waiting: list[asyncio.Handle] = []  # what came due in a pause
        self.context = contextvars.copy_context()
        self.context.run(MACHINE.set, self)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run it on this machine. A copy: a context can be entered by one at a time."""
        return self.loop.create_task(work, context=self.context.copy())

    def call(self, work: Callable[..., object], *args: object) -> None:
        self.loop.call_soon(work, *args, context=self.context.copy())

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        if self.paused:
            self.paused = False
            waiting, self.waiting = self.waiting, []
            self.loop.ready(waiting)

    def die(self) -> None:
        self.dead = True


MACHINE: ContextVar[Machine | None] = ContextVar("MACHINE", default=None)


def machine() -> Machine | None:
    """Whose code is running."""
    return MACHINE.get()


class _Gated:
    __slots__ = ()

    def _run(self) -> None:
        owner: Machine = self.owner  # type: ignore[attr-defined]
        if owner.paused:
            owner.waiting.append(self)  # type: ignore[arg-type]
        elif not owner.dead:
            super()._run()  # type: ignore[misc]


class _Soon(_Gated, asyncio.Handle):
    __slots__ = ("owner",)


class _Timer(_Gated, asyncio.TimerHandle):
    __slots__ = ("owner",)


class SharedLoop(VirtualLoop):
    """`executor` carries out what others would give to a thread."""

    executor: Callable[[Callable[[], Any], Any], asyncio.Future[Any]]

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self.tasks: list[asyncio.Task[Any]] = []  # strong: no task ends by garbage collection
        self.faults: list[str] = []  # what nobody awaited
        self.set_task_factory(_task)
        self.set_exception_handler(_noted)

    def select(self, timeout: float | None) -> tuple[()]:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise Stuck(f"{MAX_STEPS} steps and no end, at {self.now_s:.3f} s")
        return super().select(timeout)

    # --- scheduling -----------------------------------------------------------------------------

    def call_soon(self, callback: Any, *args: Any, context: Context | None = None) -> Any:
        handle = self._handle(callback, args, context)
        self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    call_soon_threadsafe = call_soon  # one thread runs at a time here

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:
        owner = MACHINE.get() if context is None else context.get(MACHINE)
        timer: asyncio.TimerHandle
        if owner is None:
            timer = asyncio.TimerHandle(when, callback, args, self, context)
        else:
            timer = _Timer(when, callback, args, self, context)
            timer.owner = owner  # type: ignore[attr-defined]
        heapq.heappush(self._scheduled, timer)  # type: ignore[attr-defined]
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    def _handle(self, callback: Any, args: Any, context: Context | None) -> asyncio.Handle:
        owner = MACHINE.get() if context is None else context.get(MACHINE)
        if owner is None:
            return asyncio.Handle(callback, args, self, context)
        handle = _Soon(callback, args, self, context)
        handle.owner = owner
        return handle

    def ready(self, handles: list[asyncio.Handle]) -> None:
        self._ready.extend(handles)  # type: ignore[attr-defined]

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        return self.executor(lambda: func(*args), executor)

    def unheard_faults(self) -> list[str]:
        """Of tasks that ended in an error which nobody looked at."""
        found = list(self.faults)
        for task in self.tasks:
            if task.done() and task._log_traceback:  # type: ignore[attr-defined]
                fault = task.exception()  # and now somebody has
                if not isinstance(fault, httpx.TransportError):  # of a thread that died meanwhile
                    found.append(f"{task.get_coro().__qualname__} ended in {fault!r}")  # type: ignore[union-attr]
        return found

    # --- the end --------------------------------------------------------------------------------

    def wind_up(self) -> None:
        """End what still runs, so that nothing is left for the garbage collector."""
        for _ in range(20):
            left = [task for task in self.tasks if not task.done()]
            if not left:
                break
            for task in left:
                task.cancel()
            for _ in range(20):
                self.call_soon(self.stop)
                self.run_forever()
        for task in self.tasks:
            if not task.done():  # what woke it fell into the time in which its machine was dead
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                with suppress(BaseException):  # its cleanup may await: nothing runs any more
                    task.get_coro().close()  # type: ignore[union-attr]
        self.tasks.clear()


def _task(loop: Any, work: Any, context: Context | None = None) -> asyncio.Task[Any]:
    task = asyncio.Task(work, loop=loop, context=context)
    loop.tasks.append(task)
    return task


def _noted(loop: Any, context: dict[str, Any]) -> None:
    fault = context.get("exception")
    loop.faults.append(f"{context['message']}: {type(fault).__name__} {fault}")
