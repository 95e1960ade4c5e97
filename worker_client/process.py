"""What a whole process owes its rendezvous: a word at its exit, and none from a forked child."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from kvaccord.errors import Invalid
from worker_client import stopping


class Held(Protocol):
    """A rendezvous that has not ended."""

    def _process_ends(self, fault: BaseException | None) -> None: ...
    def _is_in_child(self) -> None: ...


_held: list[Held] = []  # strong: one that is dropped without a word must still be said goodbye for
_hooked = threading.Lock()


def hold(held: Held) -> None:
    """From now on this process's end and its forks concern this object."""
    if _hooked.acquire(blocking=False):  # the first one; never released
        os.register_at_fork(after_in_child=_forked)
        # Registered late, so that it runs before what engines registered at import.
        atexit.register(_exiting)
    _held.append(held)


def let_go(held: Held) -> None:
    if held in _held:
        _held.remove(held)


def _forked() -> None:
    while _held:
        _held.pop()._is_in_child()


def _exiting() -> None:
    # Python keeps here what it could not raise any further; sys.exit leaves nothing.
    fault = getattr(sys, "last_value", None)
    while _held:
        _held.pop()._process_ends(fault if isinstance(fault, BaseException) else None)
    stopping.watch_the_end()


class OneAtATime:
    """Refuses a second call beside the one that runs, and every call in a forked child."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()  # a signal handler may come while its own thread holds it
        self._running: tuple[str, int] | None = None

    @property
    def in_child(self) -> bool:
        return os.getpid() != self._pid

    @contextmanager
    def call(self, name: str, *, going: bool = False) -> Iterator[None]:
        """going: a goodbye gets through in the middle of any call, of whichever thread.

        Refused, the cause would be lost: peers would hear that this rank is gone, and not why.
        """
        self.must_be_parent(name)
        ours = (name, threading.get_ident())
        with self._lock:
            before = self._running
            if before is not None and not going:
                raise Invalid(
                    f"{name}() while {before[0]}() runs in thread {before[1]}: one rendezvous is"
                    " used by one thread or task at a time; only phase(), and what ends its part,"
                    " may be called beside another call",
                    field=name,
                )
            if before is None:
                self._running = ours
        try:
            yield
        finally:
            with self._lock:
                if self._running is ours:
                    self._running = None

    def must_be_parent(self, name: str) -> None:
        if self.in_child:
            raise Invalid(
                f"{name}() in process {os.getpid()}, a forked child of process {self._pid}, which"
                " joined: the seat is the parent's; join in the child itself, or start helpers"
                " with spawn",
                field=name,
            )
