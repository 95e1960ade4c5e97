"""The rendezvous as an engine calls it: join, report, build, applied. Sync; one thread beside it.

    with Rendezvous.join(engine="llama-70b", ranks=[3], layout=Layout(tp=4, pcp=2)) as rdzv:
        agreed = rdzv.report(cuda_report(classes=[page("kv", 1_399_040)]))
        build_pools(agreed.entries["kv"])
        rdzv.applied(built=agreed.entries)

Every step is a plain call on a held object too; then close() stands for the end of the block.
"""

from __future__ import annotations

import logging
import os
import random
import re
import socket
import threading
import time
import traceback
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from kvaccord.decision import Decision
from kvaccord.errors import Failed, Invalid, NoVerdict, RoundEnded, Superseded
from kvaccord.layout import Layout, named
from kvaccord.messages import (
    Applied,
    Device,
    EngineWord,
    Join,
    Launch,
    Leave,
    Report,
    Veto,
)
from worker_client import alone, flow
from worker_client.flow import Answer, Call, Effect, Flow, Hear, Seat, Sleep
from worker_client.launch import launch_from, parse
from worker_client.session import Session
from worker_client.wire import Wire

ATTACH_S = 1.0  # join returns with the session up, or without it after so long
SEALED_CLOSE_S = 1.0
LEFT_CLOSE_S = 0.2
GOODBYE_S = 2.0  # a dead coordinator delays an exit by no more

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)

log = logging.getLogger(__name__)
# Not the module's own generator: engines seed that one, alike on all ranks, and count on it.
chance = random.SystemRandom()


@dataclass(frozen=True)
class Agreed:
    """What every rank builds. decision: everyone's; by_rank: entries of this process's ranks."""

    decision: Decision
    by_rank: dict[int, dict[str, int]]

    @property
    def entries(self) -> dict[str, int]:
        """Entries per cache class, where they are the same on all ranks of this process."""
        first, *others = self.by_rank.values()
        if any(row != first for row in others):
            raise ValueError(f"{named(list(self.by_rank))} hold different entries: use by_rank")
        return dict(first)


class Rendezvous:
    """One process's way through one start. Made by join(); used by one thread at a time.

    Raises Failed and Aborted (with the decision, the same on every rank), Superseded, NoVerdict,
    and Refused. After any of them: allocate nothing, exit, let the launcher start new processes.
    """

    def __init__(
        self,
        *,
        engine: str,
        layout: Layout,
        ranks: tuple[int, ...],
        wire: Wire | None,
        patience_s: float | None,
    ) -> None:
        """Use join()."""
        self.engine = engine
        self.layout = layout
        self.ranks = ranks
        self._wire = wire
        self._patience_s = patience_s
        self._seat: Seat | None = None
        self._session: Session | None = None
        self._decision: Decision | None = None
        self._goodbye = True  # whether going away still has to be said

    @classmethod
    def join(
        cls,
        *,
        ranks: Iterable[int],
        layout: Layout | None = None,
        engine: str | None = None,
        url: str | None = None,
        namespace: str | None = None,
        launch: Launch | str | None = None,
        inputs: Mapping[str, int | bool | str] | None = None,
        engine_version: str | None = None,
        device: Device | None = None,
        patience_s: float | None = None,
    ) -> Self:
        """Take the slot of these ranks in the start that is being made.

        What is not given comes from KVACCORD_URL, _NAMESPACE, _ENGINE, _LAUNCH, _PATIENCE_S.
        inputs: settings that must be equal on all ranks; a difference fails before weights load.
        patience_s: how long each call waits for a verdict, instead of the server's ends + 60 s.
        """
        env = os.environ
        layout = Layout() if layout is None else layout
        nonce = uuid.uuid4().hex
        join = _valid(
            Join,
            ranks=tuple(ranks),
            layout=layout,
            nonce=nonce,
            launch=_launch(launch, layout.world_size, nonce),
            inputs=None if inputs is None else dict(inputs),
            host=_host(),
            pid=os.getpid(),
            engine_version=engine_version,
            device=device,
        )
        engine = _name("KVACCORD_ENGINE", engine or env.get("KVACCORD_ENGINE", ""))
        namespace = _name(
            "KVACCORD_NAMESPACE", namespace or env.get("KVACCORD_NAMESPACE") or "default"
        )
        if patience_s is None:
            patience_s = _seconds("KVACCORD_PATIENCE_S")
        url = url or env.get("KVACCORD_URL")
        if not url and layout.world_size > 1:
            raise Invalid(
                f"no KVACCORD_URL and a world of {layout.world_size} ranks: one rank of many never"
                " plans alone; set KVACCORD_URL to the coordinator, http://HOST:PORT",
                field="KVACCORD_URL",
            )
        self = cls(
            engine=f"{namespace}/{engine}",
            layout=layout,
            ranks=join.ranks,
            wire=Wire(url) if url else None,
            patience_s=patience_s,
        )
        if self._wire is not None:
            self._enter(self._wire, namespace, engine, join)
        return self

    def _enter(self, wire: Wire, namespace: str, engine: str, join: Join) -> None:
        try:
            self._seat = self._drive(
                flow.enter(
                    wire.address,
                    namespace,
                    engine,
                    join,
                    now_s=time.monotonic(),
                    patience_s=self._patience_s,
                )
            )
            self._session = Session(wire, self._seat)
            self._session.start(wait_s=ATTACH_S)
        except BaseException as fault:
            self._go(fault)
            raise

    @property
    def round(self) -> int:
        """The round this process takes part in; 0 in a world of one without a coordinator."""
        return self._seat.round if self._seat else 0

    # --- the steps ------------------------------------------------------------------------------

    def report(self, report: Report | Mapping[int, Report]) -> Agreed:
        """Send what was measured, and wait for the plan. One report per rank of this process."""
        reports = {self.ranks[0]: report} if isinstance(report, Report) else dict(report)
        if sorted(reports) != sorted(self.ranks):
            raise Invalid(
                f"reports for ranks {sorted(reports)} from the process of"
                f" {named(self.ranks)}; send one report of each rank: {{rank: report}}",
                field="reports",
            )
        if self._seat is None:
            decision = alone.decide(self.engine, self.layout, reports[0])
            if not decision.passed:
                raise Failed(decision)
        else:
            decision = self._drive(
                flow.agree(self._seat, reports, now_s=time.monotonic(), patience_s=self._patience_s)
            )
        self._decision = decision
        return Agreed(decision, {rank: decision.entries(rank) for rank in self.ranks})

    def applied(self, *, built: Mapping[str, int]) -> None:
        """Say that the pools stand, and wait until every rank has built: the round is sealed."""
        if self._decision is None:
            raise Invalid("applied() before report() has returned a plan", field="built")
        applied = _valid(Applied, digest=self._decision.digest, built=dict(built))
        if self._seat is not None:
            self._drive(
                flow.build(
                    self._seat,
                    self._decision,
                    _bytes(applied),
                    now_s=time.monotonic(),
                    patience_s=self._patience_s,
                )
            )
        self._goodbye = False
        self._end(SEALED_CLOSE_S)

    def veto(
        self,
        text: str,
        *,
        rank: int | None = None,
        code: str | None = None,
        retryable: bool = True,
        trace: str | None = None,
    ) -> None:
        """Say no for all: every rank hears this text at once. Ends this process's part."""
        self._say(
            "veto",
            _valid(
                Veto,
                rank=self.ranks[0] if rank is None else rank,
                code=code,
                text=_masked(text),
                trace=_masked(trace) if trace else None,
                retryable=retryable,
            ),
        )
        self._end(LEFT_CLOSE_S)

    def leave(self, reason: str | None = None) -> None:
        """Say that this process goes away. Before the seal that ends the round for all."""
        self._say("leave", _valid(Leave, reason=reason[:1024] if reason else None))
        self._end(LEFT_CLOSE_S)

    def close(self) -> None:
        """End this process's part; like the end of the with-block. Safe to call twice."""
        self._go(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._go(fault)

    # --- going ----------------------------------------------------------------------------------

    def _go(self, fault: BaseException | None) -> None:
        """Say why this process goes, unless it is said. Never masks the fault itself."""
        with suppress(Exception):
            if not self._goodbye:
                self._end(LEFT_CLOSE_S)
            elif fault is None:
                self.leave("left before the round was sealed")
            elif isinstance(first := first_cause(fault), RoundEnded | Superseded | NoVerdict):
                # A consequence, never a cause: peers that still wait must not be told it as one.
                self.leave(type(first).__name__)
            else:
                trace = "".join(traceback.format_exception(fault))
                self.veto(cause_text(first), trace=trace)

    def _say(self, noun: Any, message: Veto | Leave) -> None:
        self._goodbye = False
        if self._seat is None:
            return
        said = flow.say(self._seat, noun, _bytes(message), now_s=time.monotonic())
        # In a thread of its own: looking up a name has no timeout, and the exit must go on.
        goodbye = threading.Thread(
            target=self._drive_quietly, args=(said,), name="kvaccord-goodbye", daemon=True
        )
        goodbye.start()
        goodbye.join(GOODBYE_S)

    def _drive_quietly(self, steps: Flow[Any]) -> None:
        with suppress(Exception):  # a goodbye that fails is one that was not heard
            self._drive(steps)

    def _end(self, wait_s: float) -> None:
        if self._session is not None:
            self._session.close(wait_s=wait_s)
        if self._wire is not None:
            self._wire.close()

    # --- the driver -----------------------------------------------------------------------------

    def _drive(self, steps: Flow[T]) -> T:
        """Perform what a flow asks for until it returns or raises."""
        try:
            effect = next(steps)
            while True:
                effect = steps.send(self._perform(effect))
        except StopIteration as end:
            result: T = end.value
            return result

    def _perform(self, effect: Effect) -> Answer:
        match effect:
            case Call():
                assert self._wire is not None, "a flow runs only with a coordinator"
                answer = self._wire.call(effect)
                if answer.error is not None:
                    log.debug("%s %s: %s", effect.method, effect.path, answer.error)
                return answer
            case Sleep(at_most_s, after_s, unless):
                pause_s = after_s + chance.uniform(0.0, at_most_s)
                if unless is not None and self._session is not None:
                    return self._hear(Hear(unless, pause_s), through_cuts=True)
                time.sleep(pause_s)
                return Answer(time.monotonic())
            case Hear():
                return self._hear(effect, through_cuts=False)

    def _hear(self, effect: Hear, *, through_cuts: bool) -> Answer:
        assert self._session is not None, "only a claimed process hears"
        news = self._session.hear(effect.what, effect.timeout_s, through_cuts=through_cuts)
        return Answer(
            time.monotonic(),
            document=news.document,
            problem=news.problem,
            attached=news.attached,
        )


# --- causes -------------------------------------------------------------------------------------


def first_cause(fault: BaseException) -> BaseException:
    """The innermost first exception: what the others were raised from, or while handling it."""
    seen = {id(fault)}
    while True:
        below = fault.__cause__ or (None if fault.__suppress_context__ else fault.__context__)
        if below is None or id(below) in seen:
            return fault
        seen.add(id(below))
        fault = below


def cause_text(fault: BaseException) -> str:
    """ "TypeName: message", whatever the exception's own __str__ does."""
    try:
        said = str(fault)
    except Exception:
        said = "its message cannot be shown"
    return f"{type(fault).__name__}: {said}" if said else type(fault).__name__


_SECRET = re.compile(
    r"(?i)((?:token|secret|passw(?:or)?d|api[_-]?key|authorization|credential)s?[\"']?\s*[=:]\s*"
    r"(?:bearer\s+)?[\"']?)[^\s\"',;&]+"
)


def _masked(text: str) -> str:
    # A cause is shown to every rank and on the page, and kept.
    return _SECRET.sub(r"\1***", text)


# --- arguments ----------------------------------------------------------------------------------


def _name(variable: str, template: str) -> str:
    """A namespace or engine name, with {POD_NAME} and the like expanded."""

    def expanded(match: re.Match[str]) -> str:
        name = match[1]
        value = os.environ.get(name) or (socket.gethostname() if name == "HOSTNAME" else "")
        if not value:
            raise Invalid(
                f"{variable} is {template!r} and the environment has no {name}; set {name}, on"
                " Kubernetes from the pod's fields or labels",
                field=variable,
                value=template,
            )
        return value

    name = re.sub(r"\{(POD_NAME|HOSTNAME|LWS_GROUP_INDEX)\}", expanded, template)
    try:
        return TypeAdapter[str](EngineWord).validate_python(name)
    except ValidationError:
        raise Invalid(
            f"{variable} is {name!r}; it must be 1 to 128 of A-Z a-z 0-9 . _ - and begin with a"
            " letter or digit",
            field=variable,
            value=name,
        ) from None


def _host() -> str:
    # Whatever a machine is called must not keep it from starting.
    return re.sub(r"[^\x21-\x7e]", "?", socket.gethostname())[:255] or "unknown"


def _launch(launch: Launch | str | None, world_size: int, nonce: str) -> Launch:
    if isinstance(launch, Launch):
        return launch
    if launch is not None:
        return parse(launch)
    return launch_from(os.environ, world_size=world_size, nonce=nonce)


def _seconds(variable: str) -> float | None:
    text = os.environ.get(variable, "").strip()
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise Invalid(
            f"{variable} is {text!r}; it must be a number of seconds above 0",
            field=variable,
            value=text,
        )
    return seconds


def _valid(kind: type[M], **fields: Any) -> M:
    """A message, or Invalid with its first fault in one sentence."""
    try:
        return kind(**fields)
    except ValidationError as fault:
        first = fault.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"])) or None
        raise Invalid(
            f"{field}: {first['msg']}" if field else first["msg"],
            field=field or first.get("ctx", {}).get("field"),
        ) from None


def _bytes(message: BaseModel) -> bytes:
    return message.model_dump_json(exclude_none=True).encode()
