"""A world: from a seed to a history. What goes wrong in it is drawn from the seed alone."""

from __future__ import annotations

import asyncio
import contextvars
import json
import logging
import shutil
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import Any

import httpx

from kvaccord.messages import Launch
from tests.simulation import scenario
from tests.simulation.history import History
from tests.simulation.loop import MACHINE, SharedLoop
from tests.simulation.machines import CHAOS, Coordinator, Process, Script, Start
from tests.simulation.net import Network, Weather
from tests.simulation.scenario import a_script
from tests.simulation.seams import Wall, replaced
from tests.simulation.store import Disk, Mood
from tests.simulation.threads import Threads
from tests.simulation.trouble import Trouble

SEAL_S = 120.0  # within it a start without any fault seals


class World:
    """Everything in one process on one loop; `run` makes its history."""

    def __init__(self, seed: str, mode: str | None = None) -> None:
        self.seed = seed
        self.rng = Random(f"world/{seed}")
        self.mode = mode or scenario.a_mode(self.rng)
        self.loop = SharedLoop()
        self.threads = Threads(self.loop)
        self.wall = Wall(self.loop)
        self.history = History(seed, self.mode, now_s=lambda: self.loop.now_s)
        self.net = Network(self.loop, self.threads, self.history, Random(f"net/{seed}"))
        self.net.signed = self.rng.random() < 0.15
        self.settings = scenario.some_settings(self.rng)
        self.staging = self.rng.random() < 0.8  # else no fault rule can be armed
        self.waits = self.rng.random() < 0.1  # each start hangs: its budgets are spent to the end
        self.processes: list[Process] = []
        self.sealed: list[Process] = []
        self.healed = self.mode == "calm"
        self._pids = 0
        self._folder: Path | None = None
        self._names = 0

    def run(self) -> History:
        logging.disable(logging.CRITICAL)
        on_sqlite = self.rng.random() < 0.1
        if on_sqlite:
            memory = Path("/dev/shm")
            self._folder = Path(tempfile.mkdtemp(dir=memory if memory.exists() else None))
        try:
            with replaced(self.loop, self.threads, self.seed, self.wall):
                self.disk = Disk(self.history, Random(f"disk/{self.seed}"), self._folder)
                policy = self.settings.policies.defaults
                self.history.settings = {
                    "policy": policy.model_dump(),
                    "reattach_s": self.settings.reattach_s,
                    "lost_after_s": self.settings.lost_after_s,
                    "silent_for_s": self.settings.proxied_lost_after_s
                    - self.settings.silent_after_s,
                    "store": "sqlite" if on_sqlite else "memory",
                    "healed_at_s": 0.0 if self.mode == "calm" else None,
                }
                asyncio.set_event_loop(None)
                self.loop.run_until_complete(self._main())
                self.history.closed = True
                self.history.settings["faults_of_nobody"] = self.loop.unheard_faults()
                self._end()
        finally:
            logging.disable(logging.NOTSET)
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
        return self.history

    def _end(self) -> None:
        for machine in [p.machine for p in self.processes] + [
            c.machine for c in self.net.coordinators
        ]:
            machine.dead = machine.paused = False
        for exchange in list(self.net.open.values()):
            exchange.fail(httpx.ReadError("the world has ended"))
        self.threads.end()
        self.loop.wind_up()
        for coordinator in self.net.coordinators:
            if coordinator._handle is not None:
                coordinator._handle.release()
        self.loop.close()

    # --- what others ask of it ------------------------------------------------------------------

    def pids(self) -> int:
        self._pids += 1
        return self._pids

    def nobody(self) -> contextvars.Context:
        """A context that belongs to no machine."""
        context = contextvars.copy_context()
        context.run(MACHINE.set, None)
        return context

    def new_name(self, what: str) -> str:
        self._names += 1
        return f"{what}{self._names}"

    def new_coordinator(self) -> Coordinator:
        coordinator = Coordinator(self, self.new_name("c"), self.settings)
        self.net.coordinators.append(coordinator)
        return coordinator

    @property
    def coordinators(self) -> list[Coordinator]:
        """Those that have not died."""
        return [c for c in self.net.coordinators if c.up]

    def begin(self, start: Start, scripts: list[tuple[tuple[int, ...], Script]]) -> list[Process]:
        begun = []
        for ranks, script in scripts:
            name = f"p{len(self.processes)}r{ranks[0]}"
            begun.append(Process(self, name, start, ranks, script))
            self.processes.append(begun[-1])
        return begun

    async def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        token: str | None = None,
        bearer: str | None = None,
        who: str = "stranger",
        read_s: float = 10.0,
    ) -> tuple[int, dict[str, str], bytes] | None:
        """A bare HTTP call; None when no answer came."""
        headers = [(b"host", b"coordinator")]
        data = b""
        if body is not None:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            headers += [(b"content-type", b"application/json")]
            headers += [(b"content-length", str(len(data)).encode())]
        if token is not None:
            headers.append((b"kvaccord-attempt", token.encode()))
        if bearer is not None:
            headers.append((b"authorization", f"Bearer {bearer}".encode()))
        try:
            exchange = self.net.exchange(who, None, method, path, headers, data)
            await self.net.send(exchange, read_s=read_s)
            whole = b""
            while (part := await exchange.read(read_s)) is not None:
                whole += part
        except httpx.TransportError:
            return None
        assert exchange.head is not None
        status, answered = exchange.head
        return status, {k.decode().lower(): v.decode() for k, v in answered}, whole

    # --- the course of events -------------------------------------------------------------------

    async def _main(self) -> None:
        self.new_coordinator()
        await asyncio.sleep(0.1)
        trouble = Trouble(self)
        trouble.begin()
        launching = self.loop.create_task(self._launch_all())
        if self.mode == "calm":
            await launching
            await self._ended(self.processes, within_s=900.0)
            trouble.end()
            await self._last_start()
        else:
            await asyncio.sleep(self.rng.uniform(15, 60))
            if self.mode == "liveness":
                await self._heal(trouble)
                await launching
                await self._ended(self.processes, within_s=900.0)
                await self._last_start()
        trouble.end()
        launching.cancel()
        if self.healed:
            await asyncio.sleep(1.0)  # what follows an end has been done by then
        await self._read_back()

    async def _launch_all(self) -> None:
        async with asyncio.TaskGroup() as engines:
            engines.create_task(self._launch("llama"))
            if self.rng.random() < 0.12:
                engines.create_task(self._launch("qwen"))

    async def _launch(self, engine: str) -> None:
        rng = Random(f"launch/{engine}/{self.seed}")
        layout, run, restart = scenario.a_layout(rng), "run-0", 0
        source = rng.choices(["env", "master"], [5, 1])[0]
        mode = rng.choices(["enforce", "observe"], [8, 2])[0]
        common = scenario.what_all_share(rng)
        trouble = (
            0.0
            if self.mode == "calm"
            else rng.choice([0.0, 0.03, 0.1]) * (4 / max(4, layout.world_size))
        )
        begun: list[Process] = []
        for number in range(rng.choices([1, 2, 3, 4], [3, 4, 2, 1])[0]):
            if self.mode == "calm" and number:
                await self._ended(begun, within_s=300.0)
            if number:
                run, restart = self._next_launch(rng, run, restart, number)
                if rng.random() < 0.1:
                    layout = scenario.a_layout(rng)
            launch = Launch(run=run, restart=restart, source=source)
            start = Start(
                launch,
                layout,
                engine,
                mode,
                scenario.some_groups(rng, layout),
                scenario.some_budgets(rng),
            )
            scripts = [
                (ranks, a_script(rng, ranks, common, trouble, self.mode != "calm"))
                for ranks in scenario.ranks_of_processes(rng, layout)
            ]
            if mode == "observe" and rng.random() < 0.7:  # else it is a raw client that says so
                for _, script in scripts:
                    script.client = "observe"
            if self.mode != "calm":
                self._spoil(rng, start, scripts)
                if scripts and self.net.signed:  # a death that the proxy hides
                    rng.choice(scripts)[1].dies_s = rng.uniform(0.5, 6)
                if scripts and self.waits:
                    script = rng.choice(scripts)[1]
                    script.never_reports = rng.random() < 0.5
                    script.never_builds = not script.never_reports
            begun = self.begin(start, scripts)
            if self.mode == "calm":
                continue
            if rng.random() < 0.6:
                await self._ended(begun, within_s=rng.uniform(20, 60))
            else:
                await asyncio.sleep(rng.uniform(0, 15))
            if begun and rng.random() < 0.3 and not self.healed:
                await self._replace_one(rng, begun, start, common)

    def _spoil(
        self, rng: Random, start: Start, scripts: list[tuple[tuple[int, ...], Script]]
    ) -> None:
        """One never comes up, comes twice, or was started with another layout or no groups."""
        if rng.random() < 0.05:
            scripts.pop(rng.randrange(len(scripts)))
        if scripts and rng.random() < 0.1:
            ranks, script = rng.choice(scripts)
            scripts.append((ranks, replace(script, after_s=rng.uniform(0, 9))))
        if len(scripts) > 1 and rng.random() < (0.3 if start.groups else 0.05):
            ranks, script = scripts.pop()
            odd = replace(start, groups=None)
            if start.groups is None:
                odd = replace(start, layout=scenario.a_layout(rng))
            if rng.random() < 0.2:
                script.client = "observe"
            if max(ranks) < odd.layout.world_size:
                self.begin(odd, [(ranks, script)])

    def _next_launch(self, rng: Random, run: str, restart: int, number: int) -> tuple[str, int]:
        kinds = ["same", "greater", "lower", "run", "first"]
        match rng.choices(kinds, [4, 3, 1, 3, 1] if self.mode != "calm" else [2, 2, 0, 2, 0])[0]:
            case "same":
                return run, restart
            case "greater":
                return run, restart + rng.choice([1, 1, 3])
            case "lower":
                return run, max(0, restart - 1)
            case "first":
                return "run-0", 0
        return f"run-{number}", 0

    async def _replace_one(
        self, rng: Random, begun: list[Process], start: Start, common: dict[str, Any]
    ) -> None:
        """A launcher starts one process anew: the old one is dead, or still there."""
        old = rng.choice(begun)
        if rng.random() < 0.7:
            old.kill()
        await asyncio.sleep(rng.choice([0.0, 0.3, rng.uniform(0, 3)]))
        begun += self.begin(start, [(old.ranks, a_script(rng, old.ranks, common, 0.0, False))])

    async def _ended(self, processes: list[Process], *, within_s: float) -> bool:
        until_s = self.loop.time() + within_s
        for process in list(processes):
            left_s = until_s - self.loop.time()
            if process.alive and left_s > 0:
                try:
                    await asyncio.wait_for(process.end.wait(), left_s)
                except TimeoutError:
                    return False
        return all(not p.alive for p in processes)

    async def _heal(self, trouble: Trouble) -> None:
        """Everything outside is well from now on; who was paused goes on."""
        trouble.end()
        self.healed = True
        self.net.weather = Weather()
        self.disk.mood = Mood()
        for link in self.net.links.values():
            self.net.release(link)
        for process in self.processes:
            process.wake()
        living = self.coordinators
        for coordinator in living[:-1]:
            coordinator.crash("by the supervisor, which wants one")
        if living:
            living[-1].go_on()
        else:
            self.new_coordinator()
        self.history.settings["healed_at_s"] = round(self.loop.time(), 6)
        self.history.add("healed")

    async def _last_start(self) -> None:
        """All is well, nobody else is there: this start must seal."""
        await self.ask("DELETE", "/v1/faults", bearer=CHAOS, who="operator")
        rng = Random(f"last/{self.seed}")
        for process in self.processes:
            process.kill(vanished=False)
        layout = rng.choice(scenario.SMALL)
        common = scenario.what_all_share(rng) | {"ragged": False, "pages": (90, 100)}
        start = Start(Launch(run="run-last"), layout)
        scripts = [
            (ranks, scenario.good_script(rng, ranks, common))
            for ranks in scenario.ranks_of_processes(rng, layout)
        ]
        self.history.add("last start", world=layout.world_size, processes=len(scripts))
        await self._ended(self.begin(start, scripts), within_s=SEAL_S)

    async def _read_back(self) -> None:
        """After all coordinators have died, a new one still knows all that was told."""
        for coordinator in list(self.coordinators):
            coordinator.crash("at the end")
        for process in self.processes:
            process.kill(vanished=False)
        self.net.weather = Weather()
        self.disk.mood = Mood(slow_s=0.0)
        for link in self.net.links.values():
            self.net.release(link)
        self.history.add("reading back")
        reader = self.new_coordinator()
        await reader.serving.wait()
        for name in sorted(self.disk.kept):
            answer = await self.ask("GET", f"/v1/engines/{name}/rounds", who="reader")
            assert answer is not None
            for row in json.loads(answer[2]).get("rounds", ()):
                base = f"/v1/engines/{name}/rounds/{row['round']}"
                await self.ask("GET", f"{base}/decision", who="reader")
                await self.ask("GET", f"{base}/outcome", who="reader")
        await self.ask("GET", "/v1/budgets", who="reader")
        self.history.add("end", steps=self.loop.steps)


def run(seed: int | str, mode: str | None = None) -> History:
    """The history of a seed. The same seed gives the same bytes, on every machine."""
    return World(str(seed), mode).run()


__all__ = ["CHAOS", "World", "asdict", "run"]
