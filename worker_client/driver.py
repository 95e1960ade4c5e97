"""Performs what a flow asks for by blocking: the calls of an engine's own thread."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from kvaccord.errors import Problem, RoundEnded
from worker_client.arguments import Arguments
from worker_client.flow import (
    Answer,
    Attach,
    Call,
    Detach,
    Effect,
    Flow,
    Hear,
    Sleep,
    What,
)
from worker_client.session import News, Session
from worker_client.wire import Wire

T = TypeVar("T")

log = logging.getLogger(__name__)
# Not the module's own generator: engines seed that one, alike on all ranks, and count on it.
chance = random.SystemRandom()


class Abandoned(Exception):
    """Nobody waits for these steps any more."""


class Line:
    """What both drivers hold: a wire, and the session once a seat is taken."""

    def __init__(
        self, wire: Wire, told: Callable[[RoundEnded | Problem], None] | None = None
    ) -> None:
        self.wire = wire
        self.session: Session | None = None
        self.early_phase: bytes | None = None  # said before there was a session to send it
        self.holds_sessions = True
        self._told = told

    def open_session(self, attach: Attach) -> Session | None:
        """The session of this seat, begun unless it is up."""
        if not self.holds_sessions:
            return None
        if self.session is None or self.session.is_over:
            self.session = Session(self.wire, attach.seat, on_end=self._told)
            self.session.begin()
            if self.early_phase is not None:
                self.session.tell_phase(self.early_phase)
        return self.session

    def tell_phase(self, body: bytes) -> None:
        self.early_phase = body
        if self.session is not None:
            self.session.tell_phase(body)

    def blocking(self) -> Driver:
        """One that blocks, for the end of a process whose event loop is closed."""
        driver = Driver(self.wire)
        driver.session = self.session
        return driver

    def hang_up_in_child(self) -> None:
        self.wire.hang_up_in_child()


def wire_of(said: Arguments) -> Wire:
    return Wire(
        said.url,
        token=said.token,
        ca_file=said.ca_file,
        trust_env=said.trust_env,
        proxied=said.proxied,
    )


def answer_of(news: News) -> Answer:
    return Answer(
        time.monotonic(), document=news.document, problem=news.problem, attached=news.attached
    )


def pause_of(sleep: Sleep) -> float:
    return sleep.after_s + chance.uniform(0.0, sleep.at_most_s)


class Driver(Line):
    """Blocks.

    abandoned: set by those who no longer want what is being waited for; until_s: when that is so
    by itself.
    """

    def __init__(
        self, wire: Wire, told: Callable[[RoundEnded | Problem], None] | None = None
    ) -> None:
        super().__init__(wire, told)
        self.abandoned = threading.Event()
        self.until_s = float("inf")

    def blocking(self) -> Driver:
        return self

    def run(self, steps: Flow[T]) -> T:
        """Perform what a flow asks for until it returns or raises."""
        try:
            effect = next(steps)
            while True:
                effect = steps.send(self._perform(effect))
        except StopIteration as end:
            result: T = end.value
            return result

    def _perform(self, effect: Effect) -> Answer:
        if self.abandoned.is_set() or time.monotonic() > self.until_s:
            raise Abandoned
        match effect:
            case Call():
                answer = self.wire.call(effect)
                if answer.error is not None:
                    log.debug("%s %s: %s", effect.method, effect.path, answer.error)
                return answer
            case Sleep(unless=what):
                if what is not None and self.session is not None:
                    return self._hear(what, pause_of(effect), through_cuts=True)
                self.abandoned.wait(pause_of(effect))
            case Hear(what, timeout_s):
                return self._hear(what, timeout_s, through_cuts=False)
            case Attach(wait_s=wait_s):
                if (session := self.open_session(effect)) is not None:
                    session.wait_settled(wait_s)
                if self.abandoned.is_set():  # meanwhile: nobody else will end this session
                    self.detach(0.0)
            case Detach(wait_s):
                self.detach(wait_s)
        return Answer(time.monotonic())

    def _hear(self, what: What, timeout_s: float, *, through_cuts: bool) -> Answer:
        if self.session is None:
            return Answer(time.monotonic())
        return answer_of(self.session.hear(what, timeout_s, through_cuts=through_cuts))

    def detach(self, wait_s: float) -> None:
        if self.session is not None:
            self.session.close(wait_s=wait_s)
        self.wire.close()
