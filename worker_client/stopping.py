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
from kvaccord.errors import Invalid, Problem, Refused, RoundEnded

RETRYABLE, FINAL = 75, 70  # EX_TEMPFAIL and EX_SOFTWARE. Source: sysexits.h
# Whoever objected goes after those whom it told: its end breaks their collectives, and they would
# die of that, in words that name nobody.
LAST_S = 0.5
GRACE_MAX_S = 86_400.0
STDERR = 2  # the descriptor itself: sys.stderr may be replaced, closed, or held by another thread

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Exit:
    """on_stop: end this process grace_s after the news, unless it has ended by then.

    A process that objected itself ends 0.5 s later than that, after those whom it told.

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


def watch_the_end() -> None:
    """Called as the interpreter ends: no thread of Python runs from then on, but one of C does."""
    for stopper in _armed:
        if (until_s := stopper.until_s) is not None:
            with contextlib.suppress(Exception):
                left_s = max(0.1, until_s - time.monotonic())
                faulthandler.dump_traceback_later(left_s, exit=True, file=STDERR)


class Stopper:
    """Acts once, in a thread of its own, on the first end of a round that it is told."""

    def __init__(self, on_stop: OnStop) -> None:
        """Raises Invalid on what cannot be done."""
        if isinstance(on_stop, Exit):
            _check(on_stop)
        elif not callable(on_stop) and not (isinstance(on_stop, str) and on_stop == "raise"):
            raise Invalid(
                f"on_stop is {on_stop!r}; give 'raise', Exit(grace_s) or a function",
                field="on_stop",
                value=repr(on_stop),
            )
        self._on_stop = on_stop
        self._told = False
        self.until_s: float | None = None  # when Exit ends this process
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
            self._act(None, text, retryable, more_s=LAST_S)

    def disarm(self) -> None:
        """The program goes on as a new attempt of its own."""
        self._disarmed.set()

    def _act(
        self, told: Told | None, sentence: str, retryable: bool, *, more_s: float = 0.0
    ) -> None:
        if self._on_stop == "raise":
            return
        with self._lock:
            if self._told:
                return
            self._told = True
        if isinstance(self._on_stop, Exit):
            grace_s = self._on_stop.grace_s + more_s
            self.until_s = time.monotonic() + grace_s
            target, args = self._exit, (sentence, retryable, grace_s, self._on_stop.code)
            name = "kvaccord-exit"
        else:
            target, args = self._call_back, (self._on_stop, told)  # type: ignore[assignment]
            name = "kvaccord-stop"
        _armed.append(self)
        thread = threading.Thread(target=target, args=args, name=name, daemon=True)
        with contextlib.suppress(RuntimeError):  # the interpreter is ending: so is the process
            thread.start()

    def _call_back(self, callback: Callable[[Told], object], told: Told) -> None:
        try:
            callback(told)
        except Exception:  # a callback of theirs must not end the thread that keeps us present
            log.exception("on_stop %r", callback)

    def _exit(self, sentence: str, retryable: bool, grace_s: float, code: int | None) -> None:
        line = " ".join(sentence.split())[:2000]
        _write(f"kvaccord: {line}; this process ends within {grace_s:g} s\n")
        assert self.until_s is not None, "it was set before this thread began"
        while (left_s := self.until_s - time.monotonic()) > 0:
            if self._disarmed.wait(left_s):
                return
        code = (RETRYABLE if retryable else FINAL) if code is None else code
        _write(f"kvaccord: exits with {code}: still there after {grace_s:g} s; its stacks:\n")
        with contextlib.suppress(Exception):
            faulthandler.dump_traceback(file=STDERR, all_threads=True)
        os._exit(code)


def _check(exit: Exit) -> None:
    """Said when it is given: when it is needed nobody is left to correct it."""
    grace_s: object = exit.grace_s
    if (
        isinstance(grace_s, bool)
        or not isinstance(grace_s, int | float)
        or not 0 <= grace_s <= GRACE_MAX_S
    ):
        raise Invalid(
            f"Exit(grace_s={grace_s!r}): it must be a number of seconds, 0 to {GRACE_MAX_S:.0f}",
            field="on_stop.grace_s",
            value=repr(grace_s),
        )
    code: object = exit.code
    if code is not None and (not isinstance(code, int) or not 0 <= code <= 255):
        raise Invalid(
            f"Exit(code={code!r}): it must be a whole number, 0 to 255, or None",
            field="on_stop.code",
            value=repr(code),
        )


def _retryable(document: Decision | Outcome) -> bool:
    try:
        return document.retryable
    except (LookupError, TypeError, ValueError):
        return True


def _write(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(STDERR, text.encode(errors="replace"))
