"""What becomes of a process whose round has ended while it cannot be raised in: on_stop.

Facts reach the session's thread while the main thread stands in a collective or a loader.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kvaccord.decision import Decision, Outcome
from kvaccord.errors import Problem, Refused, RoundEnded

RETRYABLE, FINAL = 75, 70  # EX_TEMPFAIL and EX_SOFTWARE. Source: sysexits.h
STDERR = 2  # the descriptor itself: sys.stderr may be replaced, closed, or held by another thread

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Exit:
    """on_stop: end this process grace_s after the news, unless it has ended by then.

    The cause goes to stderr at once, in one line; after grace_s the stacks of all threads follow,
    then the process exits with 75 when the start may simply be repeated, else 70, or with `code`.
    """

    grace_s: float = 20.0
    code: int | None = None


Told = Decision | Outcome | Problem
OnStop = Literal["raise"] | Exit | Callable[[Told], object]


_armed: list[Stopper] = []


def disarm_all(*, but: Stopper) -> None:
    """A process that joins anew goes on as a new attempt: earlier ends are settled."""
    for stopper in list(_armed):
        if stopper is not but:
            _armed.remove(stopper)
            stopper.disarm()


class Stopper:
    """Acts once, in a thread of its own, on the first end of a round that it is told."""

    def __init__(self, on_stop: OnStop) -> None:
        if on_stop != "raise" and not isinstance(on_stop, Exit) and not callable(on_stop):
            raise TypeError(f"on_stop is {on_stop!r}; give 'raise', Exit(grace_s) or a function")
        self._on_stop = on_stop
        self._told = False
        self._disarmed = threading.Event()
        self._lock = threading.Lock()

    def told(self, end: RoundEnded | Problem) -> None:
        """The round has ended for this process."""
        if isinstance(end, RoundEnded):
            document = end.outcome or end.decision
            retryable = _retryable(document)
            self._act(document, str(end), retryable)
        elif isinstance(end, Refused):
            self._act(end, f"{end.code}: {end}", retryable=True)

    def objected(self, text: str, *, retryable: bool = True) -> None:
        """The round ends by this process's own no; only Exit cares: its teardown may hang too."""
        if isinstance(self._on_stop, Exit):
            self._act(None, text, retryable)

    def disarm(self) -> None:
        """The program goes on as a new attempt of its own."""
        self._disarmed.set()

    def _act(self, told: Told | None, sentence: str, retryable: bool) -> None:
        if self._on_stop == "raise":
            return
        with self._lock:
            if self._told:
                return
            self._told = True
        _armed.append(self)
        if isinstance(self._on_stop, Exit):
            target, args = self._exit, (self._on_stop, sentence, retryable)
            name = "kvaccord-exit"
        else:
            target, args = self._call_back, (self._on_stop, told)  # type: ignore[assignment]
            name = "kvaccord-stop"
        thread = threading.Thread(target=target, args=args, name=name, daemon=True)
        with contextlib.suppress(RuntimeError):  # the interpreter is ending: so is the process
            thread.start()

    def _call_back(self, callback: Callable[[Told], object], told: Told) -> None:
        try:
            callback(told)
        except Exception:  # a callback of theirs must not end the thread that keeps us present
            log.exception("on_stop %r", callback)

    def _exit(self, how: Exit, sentence: str, retryable: bool) -> None:
        line = " ".join(sentence.split())[:2000]
        _write(f"kvaccord: {line}; this process ends within {how.grace_s:g} s\n")
        until_s = time.monotonic() + how.grace_s
        while (left_s := until_s - time.monotonic()) > 0:
            if self._disarmed.wait(left_s):
                return
        code = how.code if how.code is not None else RETRYABLE if retryable else FINAL
        _write(f"kvaccord: exits with {code}: still there after {how.grace_s:g} s; its stacks:\n")
        with contextlib.suppress(Exception):
            faulthandler.dump_traceback(file=STDERR, all_threads=True)
        os._exit(code)


def _retryable(document: Decision | Outcome) -> bool:
    try:
        return document.retryable
    except (LookupError, TypeError, ValueError):
        return True


def _write(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(STDERR, text.encode(errors="replace"))
