"""Threads that take turns: the shipped session runs in one here too, on virtual time.

Each is a real thread, but the loop and all of them share one baton. It changes hands only where a
thread would block, so that the order of everything is the loop's.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import threading
from collections.abc import Callable
from typing import Any, ClassVar

from tests.simulation.loop import SharedLoop


class Gone(BaseException):
    """The world has ended under this thread."""


class Threads:
    """What stands in for the module `threading` in shipped code, and for an executor."""

    def __init__(self, loop: SharedLoop) -> None:
        self.loop = loop
        self.running: Thread | None = None
        self.all: list[Thread] = []
        self.ended = False  # the world has: no new ones
        loop.executor = self._execute

    # --- the names that shipped code uses -------------------------------------------------------

    Lock = staticmethod(threading.Lock)

    def Thread(self, *, target: Any, args: Any = (), name: str = "", daemon: Any = None) -> Thread:
        return Thread(self, lambda: target(*args), name)

    def Condition(self) -> Condition:
        return Condition(self)

    def Event(self) -> Event:
        return Event(self)

    @property
    def Future(self) -> Callable[[], Future]:
        return lambda: Future(self)

    def current_thread(self) -> Thread | None:
        return self.running

    # --- ours -----------------------------------------------------------------------------------

    def sleep(self, seconds: float) -> None:
        """Called by a thread."""
        _block(self, self.loop.create_future(), seconds)

    def block(self, future: asyncio.Future[Any]) -> Any:
        """Called by a thread: let the others run until the future is done."""
        thread = self.running
        assert thread is not None, "the loop itself never blocks"
        future.add_done_callback(lambda _: thread.turn())
        thread.rest()
        return future.result()

    def _execute(self, work: Callable[[], Any], executor: Any) -> asyncio.Future[Any]:
        future = self.loop.create_future()
        if self.ended:
            future.set_exception(RuntimeError("the world has ended"))
            return future

        def run() -> None:
            try:
                # SQLite wants its own thread; the loop stands still while that one works.
                result = work() if executor is None else executor.submit(work).result()
            except Gone:
                raise
            except BaseException as fault:  # whatever it is, for whoever awaits it
                if not future.done():
                    future.set_exception(fault)
            else:
                if not future.done():
                    future.set_result(result)

        if executor is None:
            Thread(self, run, "executor").start()
        else:
            self.loop.call_later(0.001, run)
        return future

    def end(self) -> None:
        """Wake every thread for the last time."""
        self.ended = True
        for thread in self.all:
            for _ in range(50):
                if not thread.is_alive():
                    break
                thread.gone = True
                thread.turn()
        self.all.clear()


class Worker:
    """A real thread that carries out one simulated one after another: making them costs."""

    idle: ClassVar[list[Worker]] = []

    def __init__(self) -> None:
        self._work: Callable[[], None] | None = None
        self._mine, self._theirs = threading.Lock(), threading.Lock()
        self._mine.acquire()
        self._theirs.acquire()
        threading.Thread(target=self._run, name="simulated", daemon=True).start()

    @classmethod
    def given(cls, work: Callable[[], None]) -> Worker:
        worker = cls.idle.pop() if cls.idle else cls()
        worker._work = work
        return worker

    def turn(self) -> None:
        """Let it run until it rests or its work is done."""
        self._mine.release()
        self._theirs.acquire()
        if self._work is None:
            Worker.idle.append(self)

    def rest(self) -> None:
        """In this thread: hand the baton over, and wait for it."""
        self._theirs.release()
        self._mine.acquire()

    def _run(self) -> None:
        while True:
            self._mine.acquire()
            assert self._work is not None
            self._work()
            self._work = None
            self._theirs.release()


class Thread:
    def __init__(self, threads: Threads, work: Callable[[], None], name: str) -> None:
        self._threads = threads
        self._work = work
        self.name = name
        self._alive = False
        self.gone = False
        self._ended: list[asyncio.Future[None]] = []
        self._worker: Worker | None = None

    def start(self) -> None:
        if self._threads.ended:
            raise RuntimeError("can't start new thread")
        self._context = contextvars.copy_context()
        self._alive = True
        self._threads.all.append(self)
        self._threads.loop.call_soon(self.turn)

    def is_alive(self) -> bool:
        return self._alive

    def join(self, timeout: float | None = None) -> None:
        if self._alive and self._threads.running is not None:
            ended = self._threads.loop.create_future()
            self._ended.append(ended)
            _block(self._threads, ended, timeout)

    def turn(self) -> None:
        """On the loop: let this thread run until it blocks or ends."""
        if not self._alive:
            return
        if self._worker is None:
            if self.gone:
                self._alive = False
                return
            self._worker = Worker.given(self._run)
        before, self._threads.running = self._threads.running, self
        self._worker.turn()
        self._threads.running = before

    def rest(self) -> None:
        """In this thread: let the others run."""
        assert self._worker is not None
        if not self.gone:
            self._worker.rest()
        if self.gone:
            raise Gone

    def _run(self) -> None:
        try:
            self._context.run(self._work)
        except Gone:
            pass
        except BaseException as fault:  # a thread that dies of anything is a finding
            self._threads.loop.faults.append(f"thread {self.name} ended with {fault!r}")
        finally:
            self._alive = False
            if not self.gone:
                for ended in self._ended:
                    if not ended.done():
                        ended.set_result(None)


class Condition:
    """A lock is not needed: nobody else runs until its holder waits."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._waiting: list[asyncio.Future[None]] = []

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...

    def notify_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        loop = self._threads.loop
        until_s = None if timeout is None else loop.time() + timeout
        while not predicate():
            left_s = None if until_s is None else until_s - loop.time()
            if left_s is not None and left_s <= 0:
                break
            future = loop.create_future()
            self._waiting.append(future)
            _block(self._threads, future, left_s)
        return predicate()


class Event:
    def __init__(self, threads: Threads) -> None:
        self._changed = Condition(threads)
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        self._changed.notify_all()

    def wait(self, timeout: float | None = None) -> bool:
        return self._changed.wait_for(self.is_set, timeout)


class Future(concurrent.futures.Future[Any]):
    """What one thread answers and another, or the loop, waits for."""

    def __init__(self, threads: Threads) -> None:
        super().__init__()
        self._threads = threads

    def result(self, timeout: float | None = None) -> Any:
        if not self.done() and self._threads.running is not None:
            heard = self._threads.loop.create_future()
            self.add_done_callback(lambda _: _set(heard))
            _block(self._threads, heard, timeout)
        return super().result(0)


def _block(threads: Threads, future: asyncio.Future[None], timeout_s: float | None) -> None:
    timer = None
    if timeout_s is not None:
        timer = threads.loop.call_later(timeout_s, _set, future)
    threads.block(future)
    if timer is not None:
        timer.cancel()


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
