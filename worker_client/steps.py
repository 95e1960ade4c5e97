"""One process's way through one start: what each call of an engine says, hears and leaves behind.

Every method is a flow: it asks a driver for all that touches the world, so that the blocking and
the awaited rendezvous cannot drift apart.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel

from kvaccord.decision import Decision, Frozen
from kvaccord.errors import Failed, Invalid, NoVerdict, Problem, RoundEnded, Superseded
from kvaccord.layout import named
from kvaccord.messages import Applied, Leave, Report, Veto
from worker_client import alone, flow, goodbye
from worker_client.arguments import Arguments
from worker_client.causes import first_cause, masked_inputs
from worker_client.flow import Attach, Detach, Fit, Flow, Hear, Seat, Standing

ATTACH_S = 1.0  # join returns with the session up, or without it after so long
SEALED_CLOSE_S = 1.0
LEFT_CLOSE_S = 0.2
GOODBYE_S = 2.0  # a coordinator that is dead or slow delays an exit by no more
VERDICT_S = 1.0  # the round waits grace_s (0.5) for other causes before it ends

Reports = Report | Mapping[int, Report]
Built = Mapping[str, int] | Mapping[int, Mapping[str, int]]


@dataclass(frozen=True)
class Agreed:
    """What every rank builds.

    by_rank: entries of this process's ranks. In the modes off and observe they are what the caller
    gave as its own, or None; then nothing was agreed and there is no decision.
    """

    decided: Decision | None
    by_rank: dict[int, dict[str, int]] | None

    @property
    def decision(self) -> Decision:
        """Everyone's document. Raises ValueError where none was made: modes off and observe."""
        if self.decided is None:
            raise ValueError("nothing was agreed: KVACCORD_MODE is off or observe")
        return self.decided

    @property
    def entries(self) -> dict[str, int] | None:
        """Entries per cache class, where they are the same on all ranks of this process."""
        if not self.by_rank:
            return None
        first, *others = self.by_rank.values()
        if any(row != first for row in others):
            raise ValueError(f"{named(list(self.by_rank))} hold different entries: use by_rank")
        return dict(first)


class Steps:
    """seat: None in a world of one without a coordinator, and before enter() has ended."""

    def __init__(self, said: Arguments) -> None:
        self.said = said
        self.ranks = said.ranks
        self.seat: Seat | None = None
        self.token = ""  # of a claim that was sent and not refused: it may have won a seat
        self.decision: Decision | None = None
        self.sealed = False
        self.serves = False
        self.gone = False  # this process's part has ended, and that was said as far as it could be
        self.left = False  # that was all: its connections are closed
        self.objected = False  # it ended with its own no
        self.end: Frozen | None = None  # and this is what the round then ended with

    @property
    def alone(self) -> bool:
        return not self.said.url

    # --- the way there --------------------------------------------------------------------------

    def enter(self) -> Flow[None]:
        said = self.said
        if self.alone:
            return
        assert said.join is not None, "only mode off has none"
        try:
            self.seat = yield from flow.enter(
                said.address,
                said.namespace,
                said.engine,
                said.join,
                now_s=time.monotonic(),
                patience_s=said.patience_s,
                reserved=self._has_reserved,
            )
        except Problem:
            self.token = ""
            raise
        yield Attach(self.seat, ATTACH_S)

    def _has_reserved(self, token: str) -> None:
        self.token = token

    def report(self, reports: Reports) -> Flow[Agreed]:
        self._must_take_part("report")
        each = self._of_each_rank(reports)
        if self.seat is None:
            decision = alone.decide(self.said.name, self.said.layout, each[0])
            if not decision.passed:
                raise Failed(decision)
        else:
            decision = yield from flow.agree(
                self.seat, each, now_s=time.monotonic(), patience_s=self.said.patience_s
            )
        self.decision = decision
        return Agreed(decision, {rank: decision.entries(rank) for rank in self.ranks})

    def applied(self, built: Built | None) -> Flow[None]:
        self._must_take_part("applied")
        if self.decision is None:
            raise Invalid("applied() before report() has returned a plan", field="built")
        if not isinstance(built, Mapping):
            raise Invalid(
                f"applied() built {str(built)[:80]!r}, a {type(built).__name__}; give what was"
                " built: built={class: entries}, or {rank: {class: entries}}",
                field="built",
                value=str(built)[:80],
            )
        applied = Applied(digest=self.decision.digest, built=dict(built))
        if self.seat is not None:
            yield from flow.build(
                self.seat,
                self.decision,
                as_bytes(applied),
                now_s=time.monotonic(),
                patience_s=self.said.patience_s,
            )
        self.sealed = True
        if not self.serves:
            yield Detach(SEALED_CLOSE_S)

    # --- after the seal -------------------------------------------------------------------------

    def serving(self) -> Flow[Standing]:
        self._must_be_sealed("serving")
        if self.seat is None:
            return Standing(True)
        self.serves = True
        yield Attach(self.seat, ATTACH_S)
        return (
            yield from flow.standing(
                self.seat, now_s=time.monotonic(), patience_s=self.said.patience_s
            )
        )

    def check(self, reports: Reports) -> Flow[Fit]:
        self._must_be_sealed("check")
        each = self._of_each_rank(reports)
        if self.seat is None:
            assert self.decision is not None, "it was sealed"
            return alone.check(self.decision, each[0])
        asked = flow.check(self.seat, each, now_s=time.monotonic(), patience_s=self.said.patience_s)
        if self.serves:
            return (yield from asked)
        try:
            fit = yield from asked
        except Exception:  # not `finally`: a flow that is only closed must yield nothing more
            yield Detach(0.0)
            raise
        yield Detach(0.0)
        return fit

    # --- going ----------------------------------------------------------------------------------

    def veto(
        self, text: str, *, rank: int | None, code: str | None, retryable: bool, trace: str | None
    ) -> Flow[None]:
        if trace is None and isinstance(text, BaseException):
            trace = trace_of(text)
        veto = goodbye.veto(
            self.ranks, text, rank=rank, code=code, retryable=retryable, trace=trace
        )
        self.objected = not self.sealed
        yield from self._say("veto", veto)

    def leave(self, reason: str | None) -> Flow[None]:
        yield from self._say("leave", goodbye.leave(reason))

    def going(self, fault: BaseException | None, *, reason: str = "") -> Flow[None]:
        """Say why this process goes, unless it is said."""
        if self.gone:
            yield Detach(LEFT_CLOSE_S)
        elif self.sealed:
            # The end of a session that nobody kept only makes its ranks unwatched.
            if self.serves:
                yield from self.leave(reason or "closed while serving")
            else:
                self.gone = True
                yield Detach(LEFT_CLOSE_S)
        elif fault is None:
            yield from self.leave(reason or "left before the round was sealed")
        elif isinstance(first := first_cause(fault), RoundEnded | Superseded | NoVerdict):
            # A consequence, never a cause: peers that still wait must not be told it as one.
            yield from self.leave(type(first).__name__)
        else:
            yield from self.veto(
                goodbye.words(first), rank=None, code=None, retryable=True, trace=trace_of(fault)
            )

    def _say(self, noun: Literal["veto", "leave"], message: Veto | Leave) -> Flow[None]:
        self.gone = True
        now_s = time.monotonic()
        if self.seat is None and self.token and self.said.join is not None:
            # A claim that was given up may have won a seat. Nobody would ever sit there, and what
            # joins next would meet it as a duplicate. Claimed again, it tells its round.
            self.seat = yield from flow.claim_again(
                self.said.address,
                self.said.namespace,
                self.said.engine,
                self.said.join,
                self.token,
                now_s=now_s,
            )
        if self.seat is not None:
            answer = yield from flow.say(
                self.seat,
                noun,
                as_bytes(message),
                least=as_bytes(goodbye.least(message)),
                now_s=time.monotonic(),
                deadline_s=now_s + flow.SAY_S,
            )
            if self.objected and answer is not None and answer.status in (200, 202):
                # Whoever goes before the verdict breaks the collectives of those who have not
                # heard the cause yet; and who raises because another has gone learns why.
                left_s = max(0.0, now_s + GOODBYE_S - time.monotonic())
                what: flow.What = "decision" if self.decision is None else "outcome"
                news = yield Hear(what, min(VERDICT_S, left_s))
                self.end = news.document
        yield Detach(LEFT_CLOSE_S)
        self.left = True

    def is_first_cause(self, end: Frozen) -> bool:
        """Whether a rank of this process was the first to object."""
        with suppress(LookupError, TypeError, ValueError):
            return end.causes[0].get("rank") in self.ranks
        return True

    # --- what must be so ------------------------------------------------------------------------

    def _of_each_rank(self, reports: Reports) -> dict[int, Report]:
        if not isinstance(reports, Report | Mapping):
            raise _no_report("", reports)
        each = {self.ranks[0]: reports} if isinstance(reports, Report) else dict(reports)
        for rank, report in each.items():
            if not isinstance(report, Report):
                raise _no_report(f" of rank {rank}", report)
        if set(each) != set(self.ranks):
            raise Invalid(
                f"reports for ranks {sorted(each, key=str)} from the process of"
                f" {named(self.ranks)}; send one report of each rank: {{rank: report}}",
                field="reports",
            )
        return {rank: _masked(report) for rank, report in each.items()}

    def _must_take_part(self, call: str) -> None:
        if self.gone or self.sealed:
            how = "is sealed" if self.sealed else "has ended for this process"
            raise Invalid(f"{call}(): the round {how}; a round is not joined twice", field=call)

    def _must_be_sealed(self, call: str) -> None:
        if self.gone or not self.sealed:
            why = "after this process has left" if self.gone else "before applied() has returned"
            raise Invalid(f"{call}() {why}; it is about a plan that was sealed", field=call)


def _masked(report: Report) -> Report:
    changed = {
        name: masked_inputs(inputs)
        for name in ("inputs", "inputs_stage")
        if (inputs := getattr(report, name)) and masked_inputs(inputs) != inputs
    }
    return report.model_copy(update=changed) if changed else report


def _no_report(whose: str, given: object) -> Invalid:
    return Invalid(
        f"the report{whose} is {str(given)[:80]!r}, a {type(given).__name__}; give a"
        " kvaccord.Report, or {rank: report}",
        field="reports",
        value=str(given)[:80],
    )


def trace_of(fault: BaseException) -> str:
    """Its traceback as text; empty where one of the exceptions cannot be shown."""
    with suppress(Exception):
        return "".join(traceback.format_exception(fault))
    return ""


def as_bytes(message: BaseModel) -> bytes:
    return message.model_dump_json(exclude_none=True).encode()
