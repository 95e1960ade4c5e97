"""The rendezvous as an engine calls it: join, report, build, applied. Blocking.

    with Rendezvous.join(engine="llama-70b", ranks=[3], layout=Layout(tp=4, pcp=2)) as rdzv:
        agreed = rdzv.report(cuda_report(classes=[page("kv", 1_399_040)]))
        build_pools(agreed.entries["kv"])
        rdzv.applied(built=agreed.entries)

Every step is a plain call on a held object too; then close() stands for the end of the block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from kvaccord.errors import RoundEnded, Superseded
from kvaccord.layout import Groups, Layout
from kvaccord.messages import Device, Launch
from worker_client.arguments import Arguments, Mode, settle
from worker_client.flow import Answer, Fit, Flow, Standing
from worker_client.held import Held, Own
from worker_client.steps import Agreed, Built, Reports
from worker_client.stopping import OnStop

if TYPE_CHECKING:
    from worker_client.driver import Driver

T = TypeVar("T")


class Rendezvous(Held):
    __doc__ = Held.__doc__

    _driver: Driver | None = None

    @classmethod
    def join(
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
        """Take the slot of these ranks in the start that is being made.

        What is not given comes from KVACCORD_URL, _NAMESPACE, _ENGINE, _LAUNCH, _PATIENCE_S, _MODE.
        groups: of this process's ranks, where they are no grid.
        inputs: settings that must be equal on all ranks; a difference fails before weights load.
        patience_s: how long each call waits for a verdict, instead of the server's ends + 60 s.
        mode: enforce where there is a coordinator; without one, off for a world larger than 1.
        on_stop: what else happens when the round has ended for this process: nothing but raising
        at the next call, a function that is told the document, or Exit(grace_s).
        trust_env: let proxy and certificate variables count.
        """
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
        return cls._entered(said, on_stop)

    @classmethod
    def _entered(cls, said: Arguments, on_stop: OnStop, driver: Driver | None = None) -> Self:
        self = cls(said, on_stop)
        if said.mode == "off" or not said.url:
            return self
        # Only now: an engine that goes its own way has no use for an HTTP client.
        from worker_client.driver import Driver, wire_of

        observes = said.mode == "observe"
        try:
            self._driver = driver or Driver(wire_of(said), None if observes else self._told)
        except Exception:
            if observes:  # whatever is wrong, who only observes goes on
                return cls(Arguments("off", said.ranks, said.layout), on_stop)
            raise
        self._line = self._driver
        if observes:
            from worker_client.observing import Observer

            self._observer = Observer(self._driver)
            self._observer.later(self._steps.enter())
            return self
        try:
            self._run("join", self._steps.enter())
        except BaseException as fault:
            self._go(fault)
            raise
        self._has_entered()
        return self

    # --- the steps ------------------------------------------------------------------------------

    def phase(
        self, name: str, progress: int = 0, *, done: int | None = None, total: int | None = None
    ) -> None:
        """Say what this process does and how far it is; any thread may. Sent in the background.

        progress: a number that grows while there is progress. done, total: for people to read.
        Raises what the session has heard meanwhile, and nothing of the network's.
        """
        self._tell_phase(name, progress, done, total)

    def report(self, report: Reports, *, own: Own | None = None) -> Agreed:
        """Send what was measured, and wait for the plan. One report per rank of this process.

        own: the engine's own counts, which come back in the modes off and observe.
        """
        return self._call("report", self._steps.report(report), lambda: self._own(own))

    def applied(self, *, built: Built | None) -> None:
        """Say that the pools stand, and wait until every rank has built: the round is sealed.

        built: {class: entries}, or {rank: {class: entries}} where the ranks of a process differ.
        """
        self._built = True
        self._call("applied", self._steps.applied(built), lambda: None)
        if self._observer is None and self._driver is not None and not self._steps.serves:
            self._has_gone(None)

    def serving(self) -> Standing:
        """Keep the session from now on, and hear how the sealed round stands."""
        standing = self._call("serving", self._steps.serving(), lambda: Standing(True))
        if self._observer is None:
            self._has_entered()
        return standing

    def check(self, report: Reports) -> Fit:
        """Whether there is room for the plan in force. Where there is not, allocate nothing."""
        return self._call("check", self._steps.check(report), lambda: Fit(True))

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
        steps = self._steps.veto(text, rank=rank, code=code, retryable=retryable, trace=trace)
        self._say("veto", steps)
        self._has_gone(None, text, retryable)

    def leave(self, reason: str | None = None) -> None:
        """Say that this process goes away. Before the seal that ends the round for all."""
        self._say("leave", self._steps.leave(reason))
        self._has_gone(None)

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

    # --- how they are carried out ---------------------------------------------------------------

    def _call(self, name: str, steps: Flow[T], otherwise: Callable[[], Any]) -> T:
        """Perform them; in mode observe do so beside, and in mode off not at all."""
        if self.mode == "off":
            result: T = otherwise()
            return result
        if self._observer is not None:
            self._observer.later(steps)
            result = otherwise()
            return result
        return self._run(name, steps)

    def _run(self, name: str, steps: Flow[T], *, going: bool = False) -> T:
        with self._once.call(name, going=going):
            try:
                if self._driver is None:
                    return run_alone(steps)
                return self._driver.run(steps)
            except (RoundEnded, Superseded) as end:
                self._told(end)
                raise
            finally:
                if self._steps.left and self._driver is not None:
                    self._driver.wire.close()  # a call that others left beside has opened it again

    def _say(self, name: str, steps: Flow[None]) -> None:
        if self.mode == "off":
            return
        if self._observer is not None:
            self._observer.at_once(steps)
        else:
            self._run(name, steps, going=True)

    def _go(self, fault: BaseException | None) -> None:
        """Say why this process goes, unless it is said. Never masks the fault itself."""
        if self._once.in_child or self.mode == "off":
            return
        if self._observer is not None:
            self._observe_going(fault)
            return
        with suppress(Exception):
            self._run("close", self._steps.going(fault), going=True)
        self._has_gone(fault)


def run_alone(steps: Flow[T]) -> T:
    """Steps of a world of one without a coordinator: there is nobody to ask."""
    try:
        next(steps)
        while True:
            steps.send(Answer(0.0))  # only Detach is asked for
    except StopIteration as end:
        result: T = end.value
        return result
