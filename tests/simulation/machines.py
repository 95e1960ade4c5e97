"""What runs in a world: coordinators, and the processes of engines. Both are shipped code."""

from __future__ import annotations

import asyncio
import copy
import random
import traceback
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import httpx
from fastapi import FastAPI

from coordinator.api import create_app
from coordinator.faults import Faults
from coordinator.logs import LogUnavailable
from coordinator.service import Service, Settings
from kvaccord import Layout, Report
from kvaccord.errors import KvaccordError, Refused
from kvaccord.layout import Groups
from kvaccord.messages import AskedBudgets, Join, Launch
from tests.simulation.loop import Machine
from tests.simulation.net import Transport
from tests.simulation.store import Handle
from worker_client.aio import AsyncDriver, AsyncRendezvous
from worker_client.arguments import Arguments
from worker_client.client import Rendezvous
from worker_client.driver import Driver
from worker_client.held import Held
from worker_client.wire import Wire

if TYPE_CHECKING:
    from tests.simulation.world import World

CHAOS = "chaos-token"
STUCK_S = 150.0  # a rank that hangs comes back after all budgets, and hears what became of it
OBSERVED_S = 20.0  # an engine that is observed goes on for longer than its start takes
OWN = {"kv": 7}
Client = Literal["async", "blocking", "observe"]
ADDRESS = "http://coordinator:8970"
OPTIONS: dict[str, Any] = {"base_url": ADDRESS, "trust_env": False}


class Coordinator:
    """One process of `kvaccord serve`."""

    def __init__(self, world: World, name: str, settings: Settings) -> None:
        self.world, self.name = world, name
        self.machine = Machine(world.loop, name)
        self.listens = False
        self.serving = asyncio.Event()
        self._settings = settings
        self.app: Any = None
        self.service: Service | None = None
        self._handle: Handle | None = None
        world.history.add("coordinator", who=name, what="starts")
        self.machine.spawn(self._start())

    @property
    def up(self) -> bool:
        return not self.machine.dead

    async def _start(self) -> None:
        while True:
            try:
                self._handle = Handle(self.world.disk, self)
                self.service = Service(self._handle, self._settings)
                await self.service.start()
                break
            except LogUnavailable:  # its process ends, and a supervisor starts another
                self._handle.release()  # type: ignore[union-attr]
                await asyncio.sleep(1.0)
        self.app = _app(self.service, self.world.staging)
        self.listens = True
        self.serving.set()
        self.world.history.add(
            "coordinator", who=self.name, what="serves", store=self._handle.store_id
        )

    def crash(self, how: str = "killed", *, vanished: bool = False) -> None:
        if self.machine.dead:
            return
        self.listens = False
        self.machine.die()
        self.world.history.add("coordinator", who=self.name, what="crash", how=how)
        self.world.net.server_died(self, vanished=vanished)
        if self._handle is not None:
            self._handle.release()

    def stall(self) -> None:
        """Its event loop stands still, as when its machine is out of memory or its disk hangs."""
        if not self.machine.paused:
            self.world.history.add("coordinator", who=self.name, what="stalls")
            self.machine.pause()

    def go_on(self) -> None:
        if self.machine.paused and self.up:
            self.world.history.add("coordinator", who=self.name, what="goes on")
            self.machine.resume()

    async def drain(self) -> None:
        """SIGTERM, as `kvaccord serve` takes it."""
        if self.service is None or not self.listens:
            self.crash()
            return
        self.world.history.add("coordinator", who=self.name, what="drains")
        self.service.stop()
        await asyncio.sleep(0.5)
        self.listens = False
        await asyncio.sleep(1.0)
        await self.service.close()
        self.world.net.server_died(self, vanished=False)
        self.world.history.add("coordinator", who=self.name, what="stopped")
        self.machine.die()


_routes: list[FastAPI] = []


def _app(service: Service, staging: bool) -> FastAPI:
    """The shipped application. FastAPI takes 100 ms to prepare its routes: they are shared."""
    app = create_app(service, faults_=Faults() if staging else None, chaos_token=CHAOS)
    if not _routes:
        _routes.append(app)
    shared = copy.copy(_routes[0])
    shared.state = app.state
    return shared


class _Wire(Wire):
    """The client's connections, over the simulated network."""

    transport: Transport

    @property
    def _client(self) -> httpx.Client:
        if self._made is None:
            self._made = httpx.Client(**OPTIONS, transport=self.transport)
        return self._made


@dataclass(frozen=True)
class Start:
    """What a launcher starts: one launch, one layout, some processes."""

    launch: Launch
    layout: Layout
    engine: str = "llama"
    mode: Any = "enforce"
    groups: dict[int, Groups] | None = None  # of every rank, where they are no grid
    budgets: AskedBudgets | None = None
    patience_s: float | None = None


@dataclass
class Script:
    """What one process will do. Times are seconds from its own beginning; None: it does not."""

    client: Client = "async"
    after_s: float = 0.0
    load_s: float = 1.0
    phases: int = 1
    build_s: float = 0.5
    reports: dict[int, Report] = field(default_factory=dict)
    inputs: dict[str, Any] | None = None
    veto: str | None = None  # where it raises: load, build
    leaves: str | None = None  # where it goes away: load, build
    never_reports: bool = False
    never_builds: bool = False
    builds_otherwise: bool = False
    serves_s: float | None = None
    dies_s: float | None = None
    vanishes: bool = False
    pauses: list[tuple[float, float]] = field(default_factory=list)  # (when, for how long)


class Blocking:
    """A blocking rendezvous, told as if it were awaited: one program for both."""

    def __init__(self, said: Arguments, on_stop: Any, driver: Driver) -> None:
        self._rdzv = Rendezvous._entered(said, on_stop, driver)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._rdzv, name)
        return partial(_awaited, found) if callable(found) else found

    async def __aenter__(self) -> None:
        self._rdzv.__enter__()

    async def __aexit__(self, *fault: Any) -> None:
        self._rdzv.__exit__(*fault)


async def _awaited(call: Callable[..., Any], *args: Any, **named: Any) -> Any:
    return call(*args, **named)


def _run(program: Coroutine[Any, Any, None]) -> None:
    """In a thread: to its end, since nothing in it awaits anything but blocking calls."""
    try:
        program.send(None)
    except StopIteration:
        return
    raise AssertionError("a blocking program awaits the loop")


class Process:
    """One process of an engine: the shipped client, and what its program does in between."""

    def __init__(
        self, world: World, name: str, start: Start, ranks: tuple[int, ...], script: Script
    ) -> None:
        self.world, self.name, self.start, self.ranks = world, name, start, ranks
        self.script = script
        self.rng = random.Random(f"{world.seed}/{name}")
        self.machine = Machine(world.loop, name)
        self.ended: str | None = None
        self.end = asyncio.Event()
        self.token = ""
        self.rendezvous: Held | None = None
        self.joined = self.sealed = False
        self.machine.spawn(self._live())

    @property
    def alive(self) -> bool:
        return self.ended is None

    def _said(self) -> Arguments:
        start, pid = self.start, 1000 + self.world.pids()
        join = Join(
            ranks=self.ranks,
            layout=start.layout,
            nonce=f"nonce-{self.name}-{pid}",
            launch=start.launch,
            groups=start.groups and {r: start.groups[r] for r in self.ranks},
            budgets=start.budgets,
            mode="observe" if self.script.client == "observe" else start.mode,
            inputs=self.script.inputs,
            host=f"host-{self.ranks[0] // 2}",
            pid=pid,
        )
        return Arguments(
            mode="observe" if self.script.client == "observe" else "enforce",
            ranks=self.ranks,
            layout=start.layout,
            engine=start.engine,
            url=ADDRESS,
            join=join,
            patience_s=start.patience_s,
        )

    async def _live(self) -> None:
        await asyncio.sleep(self.script.after_s)
        self._note(
            "begins",
            ranks=list(self.ranks),
            launch=str(self.start.launch),
            engine=self.start.engine,
            run=self.start.launch.run,
            restart=self.start.launch.restart,
            client=self.script.client,
        )
        if self.script.dies_s is not None:
            self.world.loop.call_later(self.script.dies_s, self.kill, context=self.world.nobody())
        for at_s, for_s in self.script.pauses:
            self.world.loop.call_later(at_s, self._pause, for_s, context=self.world.nobody())
        if self.script.client == "async":
            await self._program(AsyncRendezvous._entered, AsyncDriver, asyncio.sleep)
        else:
            threads = self.world.threads
            blocking = partial(_awaited, Blocking), Driver, partial(_awaited, threads.sleep)
            threads.Thread(target=_run, args=(self._program(*blocking),), name=self.name).start()

    async def _program(self, enter: Any, driver: Any, sleep: Any) -> None:
        try:
            await self._go(enter, driver, sleep)
            end = "done"
        except KvaccordError as error:
            end = f"{type(error).__name__}: {error}"
        except RuntimeError as error:
            end = f"raised {error}"
        except Exception as error:  # of our client, or of this simulation: no world is judged by it
            end = f"broke: {type(error).__name__}: {error}"
            where = traceback.extract_tb(error.__traceback__)[-1]
            self.world.history.add(
                "fault", who=self.name, text=f"{end} at {Path(where.filename).name}:{where.lineno}"
            )
        self._finish(end)

    def _finish(self, end: str) -> None:
        if self.ended is None:
            self.ended = end
            self._note("ends", how=end[:300])
            self.machine.die()
            self.world.net.client_died(self.machine, vanished=False)
            self.end.set()

    async def _go(self, enter: Any, driver: Any, sleep: Any) -> None:
        script, observes = self.script, self.script.client == "observe"
        wire = _Wire(ADDRESS)
        wire.transport = Transport(self.world.net, self.name, self.machine)
        rdzv = await enter(self._said(), "raise", driver(wire))
        if not observes:  # who only observes need not even know whether it has entered
            self.rendezvous, self.joined = rdzv, True
            self.token = rdzv._steps.seat.token
            self._note("entered", round=rdzv.round, attempt=int(self.token.split(".")[1]))
        async with rdzv:
            for n in range(script.phases):
                await rdzv.phase("load", n + 1)
                await sleep(script.load_s / script.phases)
            if script.veto == "load":
                raise RuntimeError("CUDA out of memory while loading")
            if script.leaves == "load":
                return
            if script.never_reports:
                await sleep(STUCK_S)
            agreed = await rdzv.report(script.reports, own=OWN if observes else None)
            if not observes:
                self._note("agreed", digest=agreed.decision.digest, round=rdzv.round)
            if script.veto == "build":
                raise RuntimeError("hipMalloc failed while building")
            await sleep(script.build_s)
            if script.leaves == "build":
                return
            if script.never_builds:
                await sleep(STUCK_S)
            built = agreed.by_rank
            assert built is not None
            if script.builds_otherwise:
                built = {r: {k: n + 1 for k, n in row.items()} for r, row in built.items()}
            await rdzv.applied(built=built)
            if observes:
                await sleep(script.serves_s or OBSERVED_S)
                return
            self.sealed = True
            self._note("sealed", digest=agreed.decision.digest, round=rdzv.round)
            self.world.sealed.append(self)
            if script.serves_s is not None:
                standing = await rdzv.serving()
                self._note("serves", whole=standing.whole)
                await sleep(script.serves_s / 2)
                fit = await rdzv.check(script.reports)
                self._note("checked", fits=fit.fits)
                await sleep(script.serves_s / 2)

    def kill(self, *, vanished: bool | None = None) -> None:
        if self.ended is None:
            self._note("killed")
            self.ended = "killed"
            self.machine.die()
            gone = self.script.vanishes if vanished is None else vanished
            self.world.net.client_died(self.machine, vanished=gone)
            self.end.set()

    def _pause(self, for_s: float) -> None:
        if self.ended is None and not self.machine.paused:
            self._note("paused", for_s=round(for_s, 3))
            self.machine.pause()
            self.world.loop.call_later(for_s, self.wake, context=self.world.nobody())

    def wake(self) -> None:
        if self.machine.paused:
            self._note("wakes")
            self.machine.resume()

    def _note(self, what: str, **fields: Any) -> None:
        self.world.history.add("process", who=self.name, what=what, **fields)


__all__ = ["Coordinator", "Process", "Refused", "Script", "Start"]
