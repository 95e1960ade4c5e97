"""What the blocking and the awaited rendezvous have in common: all but how they wait."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from kvaccord.canonical import INT_LIMIT
from kvaccord.errors import Problem, RoundEnded
from kvaccord.layout import Layout
from worker_client import process
from worker_client.arguments import Arguments, Mode
from worker_client.goodbye import truth, words
from worker_client.steps import Agreed, Steps
from worker_client.stopping import OnStop, Stopper, disarm_all

if TYPE_CHECKING:
    from worker_client.driver import Line
    from worker_client.observing import Observer

PHASE_CHARS = 64
PROGRESS_MAX = INT_LIMIT // 2  # and from there on by one: it never reaches what is refused

log = logging.getLogger(__name__)

Own = Mapping[str, int] | Mapping[int, Mapping[str, int]]


class Held:
    """One process's way through one start. Made by join(); used by one thread or task at a time.

    Raises Failed and Aborted (with the decision, the same on every rank), Superseded, NoVerdict,
    and Refused. After any of them: allocate nothing, exit, let the launcher start new processes.
    """

    def __init__(self, said: Arguments, on_stop: OnStop) -> None:
        """Use join()."""
        self._said = said
        self._steps = Steps(said)
        # Nobody is stopped whose engine goes its own way, and nothing wrong in it may stop a start.
        self._stopper = Stopper(on_stop if said.mode == "enforce" else "raise")
        self._once = process.OneAtATime()
        self._line: Line | None = None
        self._observer: Observer | None = None
        self._progress = -1  # as it was sent
        self._offset = 0
        self._built = False  # in mode observe: applied() was called

    @property
    def mode(self) -> Mode:
        """off, observe or enforce."""
        return self._said.mode

    @property
    def engine(self) -> str:
        return self._said.name

    @property
    def layout(self) -> Layout:
        return self._said.layout

    @property
    def ranks(self) -> tuple[int, ...]:
        return self._said.ranks

    @property
    def round(self) -> int:
        """The round this process takes part in; 0 where it takes part in none (yet)."""
        return self._steps.seat.round if self._steps.seat else 0

    # --- beside the steps -----------------------------------------------------------------------

    def _tell_phase(self, name: str, progress: int, done: int | None, total: int | None) -> None:
        if self.mode == "off" or self._line is None:
            return
        if self._observer is not None:
            with suppress(Exception):
                self._line.tell_phase(self._phase(name, progress, done, total))
            return
        self._once.must_be_parent("phase")
        if self._steps.gone:
            return
        body = self._phase(name, progress, done, total)
        session = self._line.session
        if session is not None and (end := session.end()) is not None:
            raise end
        self._line.tell_phase(body)

    def _phase(self, name: object, progress: object, done: object, total: object) -> bytes:
        """A phase is a sign and no more: what is wrong in it is mended, and never ends a start."""
        document = {
            "phase": words(name)[:PHASE_CHARS] or "unnamed",
            "progress": self._grown(whole(progress)),
        }
        for field, number in (("done", whole(done)), ("total", whole(total))):
            if number is not None and number < INT_LIMIT:
                document[field] = number
        return json.dumps(document).encode()

    def _grown(self, progress: int | None) -> int:
        """What counts anew in every phase must still only grow: that is what shows progress."""
        if progress is None:  # no number: no sign of progress
            self._progress = max(0, self._progress)
        else:
            # One that is too large for the wire, as nanoseconds are, counts on from what was sent.
            if not self._progress <= progress + self._offset <= PROGRESS_MAX:
                self._offset = self._progress + 1 - progress
            self._progress = progress + self._offset
        return self._progress

    def _own(self, own: Own | None) -> Agreed:
        try:
            return Agreed(None, None if own is None else self._rows(own))
        except Exception as fault:  # nobody checks the engine's own counts; they go back to it
            log.info("own is %s, no counts by class: %s", type(own).__name__, fault)
            return Agreed(None, None)

    def _rows(self, own: Own) -> dict[int, dict[str, int]]:
        if any(isinstance(row, Mapping) for row in own.values()):
            rows = cast(Mapping[int, Mapping[str, int]], own)
            return {rank: dict(row) for rank, row in rows.items()}
        row = cast(Mapping[str, int], own)
        return {rank: dict(row) for rank in self.ranks}

    # --- what the process is told, and its end --------------------------------------------------

    def _told(self, end: RoundEnded | Problem) -> None:
        if not self._steps.gone:  # else it is an echo of this process's own word
            self._stopper.told(end)

    def _has_gone(
        self, fault: BaseException | None, text: object = "", retryable: bool = True
    ) -> None:
        process.let_go(self)
        if not self._steps.objected:
            return
        end = self._steps.end
        if end is not None:
            said, retryable = end.sentence, end.retryable
            if fault is not None and not self._steps.is_first_cause(end):
                fault.add_note(f"kvaccord: {said}")
        else:
            said = (
                f"{self.engine} round {self.round}: this process objected: {words(text or fault)}"
            )
        self._stopper.objected(said, retryable=truth(retryable))

    def _has_entered(self) -> None:
        disarm_all(but=self._stopper)
        if self._line is not None:
            process.hold(self)

    def _observe_going(self, fault: BaseException | None) -> None:
        assert self._observer is not None, "only mode observe goes this way"
        going = self._steps.going(fault)
        if self._built and fault is None:  # what was built is still being said
            self._observer.wind_up(going)
        else:
            self._observer.at_once(going)

    def _process_ends(self, fault: BaseException | None) -> None:
        """Called at exit by a process that has not said goodbye."""
        if self._once.in_child or self._observer is not None or self._line is None:
            return
        with suppress(Exception):
            self._line.blocking().run(
                self._steps.going(fault, reason="the process ended without leaving the rendezvous")
            )

    def _is_in_child(self) -> None:
        if self._line is not None:
            self._line.hang_up_in_child()


def whole(number: Any) -> int | None:
    """A number of any kind as a whole one of 0 or more; None where it is none."""
    with suppress(Exception):
        if not isinstance(number, str | bytes) and int(number) >= 0:
            return int(number)
    return None
