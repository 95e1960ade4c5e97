"""Mode observe: the same steps beside the engine, which never waits for them nor hears of them."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from typing import Any

from worker_client.driver import Abandoned, Driver
from worker_client.flow import ENTER_S, Flow

log = logging.getLogger(__name__)


class Observer:
    """Performs steps in order in a thread that lives while there are any. Never raises."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._steps: deque[Flow[Any]] = deque()
        self._lock = threading.Lock()
        self._busy = False
        self._pid = os.getpid()

    def later(self, steps: Flow[Any]) -> None:
        """After all steps before."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._steps.append(steps)
            if self._busy:
                return
            self._busy = True
        self._start(self._work)

    def at_once(self, steps: Flow[Any]) -> None:
        """These are the last: said beside whatever still waits, which is given up then."""
        if os.getpid() == self._pid:
            self._start(lambda: self._last(steps))

    def wind_up(self, steps: Flow[Any]) -> None:
        """These are the last, after all steps before, which are given up when they take long."""
        self._driver.until_s = time.monotonic() + ENTER_S
        self.later(steps)

    def _start(self, target: Any) -> None:
        thread = threading.Thread(target=target, name="kvaccord-observer", daemon=True)
        try:
            thread.start()
        except RuntimeError as fault:  # no thread left, or the interpreter is ending
            log.info("not observed: %s", fault)

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._steps:
                    self._busy = False
                    return
                steps = self._steps.popleft()
            self._perform(steps)

    def _last(self, steps: Flow[Any]) -> None:
        self._perform(steps)
        self._driver.abandoned.set()
        self._driver.detach(0.0)

    def _perform(self, steps: Flow[Any]) -> None:
        try:
            self._driver.run(steps)
        except Abandoned:
            self._driver.detach(0.0)
        except BaseException as fault:  # whatever it is, the engine goes its own way
            log.info("observed: %s: %s", type(fault).__name__, fault)
