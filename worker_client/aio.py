"""The rendezvous for an engine that runs on asyncio: the same steps, awaited.

    async with await AsyncRendezvous.join(engine="llama-70b", ranks=[3], layout=layout) as rdzv:
        agreed = await rdzv.report(report)
        await build_pools(agreed.entries["kv"])
        await rdzv.applied(built=agreed.entries)

The session stays in a thread: a busy event loop must not make its rank look lost.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeVar

from kvaccord.errors import RoundEnded, Superseded
from kvaccord.layout import Groups, Layout
from kvaccord.messages import Device, Launch
from worker_client.arguments import Arguments, Mode, settle
from worker_client.client import run_alone
from worker_client.driver import Driver, Line, answer_of, log, pause_of, wire_of
from worker_client.flow import (
    Answer,
    Attach,
    Call,
    Detach,
    Effect,
    Fit,
    Flow,
    Hear,
    Sleep,
    Standing,
    What,
)
from worker_client.held import Held, Own
from worker_client.observing import Observer
from worker_client.session import Session
from worker_client.steps import Agreed, Built, Reports
from worker_client.stopping import OnStop
from worker_client.wire import Begun

T = TypeVar("T")


class AsyncDriver(Line):
    """Performs what a flow asks for by awaiting."""

    async def run(self, steps: Flow[T]) -> T:
        """Perform what a flow asks for until it returns or raises."""
        try:
            effect = next(steps)
            while True:
                effect = steps.send(await self._perform(effect))
        except StopIteration as end:
            result: T = end.value
            return result

    async def _perform(self, effect: Effect) -> Answer:
        match effect:
            case Call():
                answer = await self._call(effect)
                if answer.error is not None:
                    log.debug("%s %s: %s", effect.method, effect.path, answer.error)
                return answer
            case Sleep(unless=what):
                if what is not None and self.session is not None:
                    return await self._hear(what, pause_of(effect), through_cuts=True)
                await asyncio.sleep(pause_of(effect))
            case Hear(what, timeout_s):
                return await self._hear(what, timeout_s, through_cuts=False)
            case Attach(wait_s=wait_s):
                if (session := self.open_session(effect)) is not None:
                    await _until(session, lambda: session.is_settled, wait_s)
            case Detach(wait_s):
                await self._detach(wait_s)
        return Answer(time.monotonic())

    async def _call(self, call: Call) -> Answer:
        begun = Begun(self.wire, call)
        try:
            async with asyncio.timeout(call.timeout_s):
                return await asyncio.wrap_future(begun.answer)
        except TimeoutError:
            return begun.late()
        finally:
            begun.give_up()

    async def _hear(self, what: What, timeout_s: float, *, through_cuts: bool) -> Answer:
        if (session := self.session) is None:
            return Answer(time.monotonic())
        await _until(session, lambda: session.has_news(what, through_cuts), timeout_s)
        return answer_of(session.news(what))

    async def _detach(self, wait_s: float) -> None:
        if self.session is not None:
            await asyncio.to_thread(self.session.close, wait_s=wait_s)
        self.wire.close()


async def _until(session: Session, done: Callable[[], bool], timeout_s: float) -> None:
    """Wait for a change of the session that makes it so."""
    loop, changed = asyncio.get_running_loop(), asyncio.Event()
    until_s = loop.time() + timeout_s
    with session.listening(lambda: _wake(loop, changed)):
        while not done() and (left_s := until_s - loop.time()) > 0:
            # Not wait_for(): until Python 3.12 it loses a cancellation that comes with the change.
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await changed.wait()
            changed.clear()


def _wake(loop: asyncio.AbstractEventLoop, changed: asyncio.Event) -> None:
    loop.call_soon_threadsafe(changed.set)


class AsyncRendezvous(Held):
    __doc__ = Held.__doc__

    _driver: AsyncDriver | None = None

    @classmethod
    async def join(
        cls,
        *,
        ranks: Iterable[int],
        layout: Layout | None = None,
        groups: Groups | Mapping[int, Groups] | None = None,
        engine: str | None = None,
        url: str | None = None,
        namespace: str | None = None,
        launch: Launch | str | None = None,
        inputs: Mapping[str, int | bool | str] | None = None,
        engine_version: str | None = None,
        device: Device | None = None,
        patience_s: float | None = None,
        mode: Mode | None = None,
        on_stop: OnStop = "raise",
        trust_env: bool = False,
    ) -> Self:
        """As Rendezvous.join."""
        said = settle(
            ranks=ranks,
            layout=layout,
            groups=groups,
            engine=engine,
            url=url,
            namespace=namespace,
            launch=launch,
            inputs=inputs,
            engine_version=engine_version,
            device=device,
            patience_s=patience_s,
            mode=mode,
            trust_env=trust_env,
        )
        return await cls._entered(said, on_stop)

    @classmethod
    async def _entered(
        cls, said: Arguments, on_stop: OnStop, driver: AsyncDriver | None = None
    ) -> Self:
        self = cls(said, on_stop)
        if said.mode == "off" or not said.url:
            return self
        if said.mode == "observe":
            try:
                beside = Driver(wire_of(said))
            except Exception:  # whatever is wrong, who only observes goes on
                return cls(Arguments("off", said.ranks, said.layout), on_stop)
            self._line, self._observer = beside, Observer(beside)
            self._observer.later(self._steps.enter())
            return self
        self._line = self._driver = driver or AsyncDriver(wire_of(said), self._told)
        try:
            await self._run("join", self._steps.enter())
        except BaseException as fault:
            await self._go(fault)
            raise
        self._has_entered()
        return self

    # --- the steps ------------------------------------------------------------------------------

    async def phase(
        self, name: str, progress: int = 0, *, done: int | None = None, total: int | None = None
    ) -> None:
        """As Rendezvous.phase; never waits."""
        self._tell_phase(name, progress, done, total)

    async def report(self, report: Reports, *, own: Own | None = None) -> Agreed:
        """As Rendezvous.report."""
        return await self._call("report", self._steps.report(report), lambda: self._own(own))

    async def applied(self, *, built: Built | None) -> None:
        """As Rendezvous.applied."""
        self._built = True
        await self._call("applied", self._steps.applied(built), lambda: None)
        if self._observer is None and self._driver is not None and not self._steps.serves:
            self._has_gone(None)

    async def serving(self) -> Standing:
        """As Rendezvous.serving."""
        standing: Standing = await self._call(
            "serving", self._steps.serving(), lambda: Standing(True)
        )
        if self._observer is None:
            self._has_entered()
        return standing

    async def check(self, report: Reports) -> Fit:
        """As Rendezvous.check."""
        return await self._call("check", self._steps.check(report), lambda: Fit(True))

    async def veto(
        self,
        text: str,
        *,
        rank: int | None = None,
        code: str | None = None,
        retryable: bool = True,
        trace: str | None = None,
    ) -> None:
        """As Rendezvous.veto."""
        steps = self._steps.veto(text, rank=rank, code=code, retryable=retryable, trace=trace)
        await self._say("veto", steps)
        self._has_gone(None, text, retryable)

    async def leave(self, reason: str | None = None) -> None:
        """As Rendezvous.leave."""
        await self._say("leave", self._steps.leave(reason))
        self._has_gone(None)

    async def close(self) -> None:
        """As Rendezvous.close."""
        await self._go(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        await self._go(fault)

    # --- how they are carried out ---------------------------------------------------------------

    async def _call(self, name: str, steps: Flow[T], otherwise: Callable[[], Any]) -> T:
        if self.mode == "off":
            result: T = otherwise()
            return result
        if self._observer is not None:
            self._observer.later(steps)
            result = otherwise()
            return result
        return await self._run(name, steps)

    async def _run(self, name: str, steps: Flow[T], *, going: bool = False) -> T:
        with self._once.call(name, going=going):
            try:
                if self._driver is None:
                    return run_alone(steps)
                return await self._driver.run(steps)
            except (RoundEnded, Superseded) as end:
                self._told(end)
                raise
            finally:
                if self._steps.left and self._driver is not None:
                    self._driver.wire.close()  # a call that others left beside has opened it again

    async def _say(self, name: str, steps: Flow[None]) -> None:
        if self.mode == "off":
            return
        if self._observer is not None:
            self._observer.at_once(steps)
        else:
            await self._run(name, steps, going=True)

    async def _go(self, fault: BaseException | None) -> None:
        if self._once.in_child or self.mode == "off":
            return
        if self._observer is not None:
            self._observe_going(fault)
            return
        with suppress(Exception):
            await self._run("close", self._steps.going(fault), going=True)
        self._has_gone(fault)
