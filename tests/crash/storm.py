"""A coordinator that is killed with -9 again and again, at random moments, under many engines."""

from __future__ import annotations

import asyncio
import json
import random
import resource
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tests.crash.checks import check
from tests.crash.crowd import Crowd
from tests.crash.judge import judge, judged
from tests.crash.server import Server

SETTLE_S = 300.0


@dataclass(frozen=True)
class Storm:
    engines: int
    kills: int
    seed: int
    ranks: int = 3
    pace_s: float = 0.5
    lives_s: tuple[float, float] = (0.1, 4.0)  # of a coordinator, from its spawning on
    pauses_s: float = 0.0  # SIGSTOP for so long before every fifth kill
    keep_rounds: int | None = None


@dataclass(frozen=True)
class Weathered:
    """What came of it: starts that were sealed, calls, sessions, what was compared, seconds."""

    sealed: int
    calls: int
    sessions: int
    compared: Counter[str]
    took_s: float


def weather(storm: Storm, folder: Path) -> Weathered:
    """Raises AssertionError for whatever was lost, decided twice, or did not end SEALED."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    began_s = time.monotonic()
    options = []
    if storm.keep_rounds:
        policy = folder / "policy.yaml"
        policy.write_text(f"rules:\n- set: {{keep_rounds: {storm.keep_rounds}}}\n")
        options = ["--policy", str(policy)]
    server = Server(folder, *options)
    rng = random.Random(storm.seed)
    crowd = Crowd(server.port, storm.engines, storm.ranks, storm.pace_s, rng)
    crowd.history.seed = str(storm.seed)
    try:
        server.start()
        asyncio.run(_rage(storm, server, crowd))
        try:
            assert not crowd.wrong, f"{len(crowd.wrong)} went wrong: {crowd.wrong[:5]}"
            server.kill()
            server.start()
            compared = check(crowd.history, server.url)
            if storm.keep_rounds is None:  # the log is whole
                compared += judged(judge(crowd.history, server.store))
        except AssertionError:
            (folder / "history.json").write_bytes(crowd.history.to_bytes())
            raise
    finally:
        server.close()
    took_s = time.monotonic() - began_s
    return Weathered(crowd.sealed, crowd.calls, crowd.sessions, compared, took_s)


async def _rage(storm: Storm, server: Server, crowd: Crowd) -> None:
    rng = random.Random(storm.seed + 1)
    playing = asyncio.create_task(crowd.play())
    for n in range(storm.kills):
        await asyncio.sleep(rng.uniform(*storm.lives_s))
        if playing.done():
            break
        if storm.pauses_s and n % 5 == 4:
            server.pause()
            await asyncio.sleep(storm.pauses_s)
            if rng.random() < 0.5:
                server.go_on()
                await asyncio.sleep(rng.uniform(0, 1))
        crowd.history.add("coordinator", who="c", what="crash", how="kill -9")
        await asyncio.to_thread(server.kill)
        server.spawn()
    crowd.over = True
    async with asyncio.timeout(SETTLE_S):
        await playing


def told(storm: Storm, weathered: Weathered) -> str:
    lines = [
        f"{storm.engines} engines x {storm.ranks} ranks, {storm.kills} kills, seed {storm.seed}:"
        f" {weathered.sealed} starts, all SEALED, in {weathered.took_s:.0f} s",
        f"  {weathered.calls} calls and sessions, of these {weathered.sessions} sessions",
        *(f"  {n} {what}" for what, n in weathered.compared.items()),
    ]
    return "\n".join(lines)


def as_json(weathered: Weathered) -> str:
    return json.dumps(weathered.__dict__)
