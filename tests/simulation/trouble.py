"""What befalls a world from outside: links, coordinators, the store, the clock, and strangers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from random import Random
from typing import TYPE_CHECKING, Any

from tests.simulation import scenario
from tests.simulation.machines import CHAOS, Process
from tests.simulation.net import Weather
from tests.simulation.store import Mood

if TYPE_CHECKING:
    from tests.simulation.world import World


class Trouble:
    def __init__(self, world: World) -> None:
        self.world = world
        self._tasks: list[asyncio.Task[None]] = []
        self.rng = Random(f"trouble/{world.seed}")

    def begin(self) -> None:
        kinds: list[Callable[[Random], Coroutine[Any, Any, None]]]
        kinds = [self.links, self.streams, self.coordinators, self.store, self.clock]
        if self.world.mode != "calm":
            for kind in kinds:
                often = self.world.waits and kind == self.coordinators
                if self.rng.random() < 0.4 or often:
                    self._start(kind)
            if self.rng.random() < 0.5:
                self._weather()
        if self.rng.random() < 0.5:
            self._start(self.strangers)
        if self.rng.random() < 0.15:
            self._start(self.rules)
        if self.rng.random() < 0.15 and self.world.mode != "calm":
            self._start(self.operators)
        if self.world.coordinators:
            self._start(self._supervise)

    def _start(self, kind: Callable[[Random], Coroutine[Any, Any, None]]) -> None:
        rng = Random(f"{kind.__name__}/{self.world.seed}")
        self._tasks.append(self.world.loop.create_task(kind(rng)))

    def end(self) -> None:
        for task in self._tasks[:-1] if not self.world.healed else self._tasks:
            task.cancel()

    def _weather(self) -> None:
        self.world.net.weather = scenario.a_weather(self.rng)
        self.world.history.add("weather", **vars(self.world.net.weather))

    async def links(self, rng: Random) -> None:
        """Cut, clog or bend the way of some processes, and undo it."""
        net, history = self.world.net, self.world.history
        while True:
            await asyncio.sleep(rng.expovariate(1 / 4))
            if not self.world.processes:
                continue
            some = rng.sample(
                self.world.processes, min(len(self.world.processes), rng.choice([1, 1, 2, 99]))
            )
            what = rng.choice(["up", "down", "both", "clog", "clog", "hide"])
            links = [net.link(p.name) for p in some]
            history.add("link", what=what, who=[link.name for link in links])
            for link in links:
                match what:
                    case "clog":
                        link.clogged = True
                    case "hide":
                        link.hides = True
                    case _:
                        net.cut(link, up=what != "down", down=what != "up")
            await asyncio.sleep(rng.choice([rng.uniform(0.1, 3), rng.uniform(3, 40)]))
            history.add("link", what="released", who=[link.name for link in links])
            for link in links:
                net.release(link)

    async def streams(self, rng: Random) -> None:
        net = self.world.net
        while True:
            await asyncio.sleep(rng.expovariate(1 / 5))
            share = rng.choice([0.1, 0.5, 1.0])
            hit = net.cut_streams(share, hard=rng.random() < 0.3)
            if rng.random() < 0.3:
                for link in hit:
                    link.strays = True
            if hit and rng.random() < 0.5:
                # They come back at about the moment in which they are given up.
                self.world.history.add("link", what="clog", who=[link.name for link in hit])
                for link in hit:
                    link.clogged = True
                await asyncio.sleep(rng.uniform(0.6, 1.4))
                for link in hit:
                    net.release(link)

    async def coordinators(self, rng: Random) -> None:
        """Crash, stall, drain; or a second one serves before the first has gone."""
        world = self.world
        while True:
            await asyncio.sleep(rng.expovariate(1 / 8))
            if not world.coordinators:
                continue
            one = world.coordinators[-1]
            what = rng.choice(["crash", "crash", "stall", "drain", "second"])
            match what:
                case "crash":
                    one.crash(vanished=rng.random() < 0.2)
                    await asyncio.sleep(rng.choice([0.0, 1.0, rng.uniform(0, 30)]))
                case "stall":
                    one.stall()
                    await asyncio.sleep(rng.choice([0.5, 3.0, rng.uniform(3, 60)]))
                    one.go_on()
                case "drain":
                    one.machine.spawn(one.drain())
                    await asyncio.sleep(rng.uniform(1.6, 5))
                case "second" if world.disk.shared and one.listens:
                    await self._overlap(rng, one)
            self.ensure_one()

    async def _overlap(self, rng: Random, old: Any) -> None:
        """The old one is cut off or only slow, and does not know that another serves."""
        world = self.world
        if rng.random() < 0.5:
            old.stall()
        new = world.new_coordinator()
        world.history.add("coordinator", who=new.name, what="second beside", old=old.name)
        for process in world.processes:
            if rng.random() < 0.5:
                world.net.link(process.name).route = old
        await asyncio.sleep(rng.uniform(0.1, 15))
        old.go_on()
        await asyncio.sleep(rng.uniform(0.1, 10))
        for link in world.net.links.values():
            link.route = None
        old.crash("the old one is found and ended")

    def ensure_one(self) -> None:
        if not self.world.coordinators:
            self.world.new_coordinator()

    async def _supervise(self, rng: Random) -> None:
        """Whatever crashed is started again."""
        while True:
            await asyncio.sleep(rng.uniform(0.5, 4))
            self.ensure_one()

    async def store(self, rng: Random) -> None:
        world = self.world
        while True:
            await asyncio.sleep(rng.expovariate(1 / 5))
            if rng.random() < 0.15:
                await self._restore(rng)
                continue
            mood = scenario.a_mood(rng)
            world.history.add("mood", **vars(mood))
            world.disk.mood = mood
            await asyncio.sleep(rng.choice([rng.uniform(0.2, 3), rng.uniform(3, 20)]))
            world.disk.mood = Mood()
            world.history.add("mood", **vars(world.disk.mood))

    async def _restore(self, rng: Random) -> None:
        """The store is replaced by an older copy of itself, and somebody says so."""
        world = self.world
        world.disk.copy()
        await asyncio.sleep(rng.uniform(1, 15))
        for coordinator in list(world.coordinators):
            coordinator.crash("for a restore")
        if world.disk.restore():
            self.ensure_one()

    async def clock(self, rng: Random) -> None:
        while True:
            await asyncio.sleep(rng.expovariate(1 / 5))
            self.world.wall.offset_s += rng.choice([-3600, 3600])
            self.world.history.add("clock", offset_s=self.world.wall.offset_s)

    # --- people ---------------------------------------------------------------------------------

    def _somebody(self, rng: Random) -> Process | None:
        joined = [p for p in self.world.processes if p.joined]
        return rng.choice(joined) if joined else None

    async def strangers(self, rng: Random) -> None:
        """Who reads, and who calls wrongly."""
        world = self.world
        while True:
            await asyncio.sleep(rng.expovariate(1 / 2.5))
            somebody = self._somebody(rng)
            base = f"/v1/engines/default/{somebody.start.engine if somebody else 'llama'}"
            token = somebody.token if somebody else "a.1.b"
            number = somebody.rendezvous.round if somebody and somebody.rendezvous else 1
            at = f"{base}/rounds/{number}"
            match rng.randrange(18):
                case 0 | 1:
                    await world.ask("GET", f"{base}/rounds/current/decision")
                case 2 | 3:
                    await world.ask("GET", f"{base}/rounds/current/outcome")
                case 4:
                    await world.ask("GET", f"{base}/rounds/current?wait_s=3")
                case 5:
                    await world.ask("GET", "/v1/budgets")
                    await world.ask("GET", "/readyz")
                case 6:
                    await world.ask("GET", f"{at}/reports")
                    await world.ask("GET", "/metrics")
                case 7:
                    await world.ask("POST", f"{base}/claim", token="no token")
                case 8:
                    await world.ask("POST", f"{base}/join", {"ranks": [0], "nonce": "12345678"})
                case 9:
                    await world.ask(
                        "POST",
                        f"{base}/join",
                        {
                            "ranks": [0],
                            "nonce": "123456789",
                            "host": "h",
                            "pid": 1,
                            "launch": {"run": "odd"},
                            "protocol": 9,
                        },
                    )
                case 10:
                    await world.ask("POST", f"{base}/join", b"x" * (2**20 + 9))
                case 11:
                    await world.ask("PUT", f"{at}/reports", {"0": {"free_bytes": -1}}, token=token)
                case 12 if somebody:
                    other = {
                        str(r): report.model_copy(update={"reserve_bytes": 1}).model_dump(
                            exclude_none=True, mode="json"
                        )
                        for r, report in somebody.script.reports.items()
                    }
                    if somebody.sealed or somebody.ended:
                        await world.ask("PUT", f"{at}/reports", other, token=token)
                case 13:
                    wrong = {"digest": f"sha256:{'0' * 64}", "built": {"kv": 1}}
                    await world.ask("PUT", f"{at}/applied", wrong, token=token)
                case 14:
                    await world.ask(
                        "POST",
                        f"{at}/check",
                        {
                            str(r): report.model_dump(exclude_none=True, mode="json")
                            for r, report in (somebody.script.reports if somebody else {}).items()
                        }
                        or {"0": {}},
                        token=token,
                    )
                case 15:
                    await world.ask("POST", f"{at}/serving", token=token)
                case 16:
                    await world.ask("GET", "/v1/faults", bearer="not the token")
                case 17:
                    await world.ask(
                        "POST",
                        f"{base}/join",
                        {
                            "ranks": [0],
                            "nonce": f"stranger-{rng.randrange(99)}",
                            "host": "h",
                            "pid": 1,
                            "launch": {"run": "a-stranger"},
                            "layout": {},
                        },
                    )

    async def operators(self, rng: Random) -> None:
        """Cancel, retire."""
        while True:
            await asyncio.sleep(rng.expovariate(1 / 10))
            answer = await self.world.ask("GET", "/v1/engines/default/llama/rounds", who="operator")
            if answer is None or answer[0] != 200:
                continue
            for row in json.loads(answer[2])["rounds"][:1]:
                what = "retire" if row["state"] == "SEALED" else "cancel"
                at = f"/v1/engines/default/llama/rounds/{row['round']}/{what}"
                await self.world.ask("POST", at, {"reason": "because"}, who="operator")

    async def rules(self, rng: Random) -> None:
        """Staging arms fault rules at the coordinator itself."""
        while True:
            call = rng.choice(["join", "claim", "report", "report", "veto", "leave", "applied"])
            rule: dict[str, Any] = {"engine": "*", "expires_s": rng.uniform(1, 20), "reason": "x"}
            match rng.choice(["delay", "shrink_memory", "drop_answer"]):
                case "delay":
                    rule |= {"kind": "delay", "call": call, "delay_s": rng.uniform(0.1, 8)}
                case "shrink_memory":
                    field = rng.choice(["free_bytes", "kv_budget_bytes"])
                    rule |= {"kind": "shrink_memory", "field": field, "per_cent": 20}
                case "drop_answer":
                    rule |= {"kind": "drop_answer", "call": call}
            if rng.random() < 0.5:
                rule["count"] = rng.randint(1, 3)
            if rng.random() < 0.02:
                for _ in range(101):
                    await self._arm(rule | {"engine": "nobody"})
            else:
                await self._arm(rule)
            await asyncio.sleep(rng.expovariate(1 / 8))
            if rng.random() < 0.2:
                await self.world.ask("DELETE", "/v1/faults", bearer=CHAOS, who="operator")

    async def _arm(self, rule: dict[str, Any]) -> None:
        await self.world.ask("POST", "/v1/faults", rule, bearer=CHAOS, who="operator")


__all__ = ["Trouble", "Weather"]
