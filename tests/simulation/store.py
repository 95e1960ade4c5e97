"""One store under all coordinators of a world, through the shipped port, and what befalls it.

`Disk` is what outlives a coordinator; `Handle` is one coordinator's way to it. What is kept is kept
by shipped code: `MemoryLog`, which several may share, or a SQLite file, which one may have open.
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from coordinator.events import EngineName, Entry
from coordinator.logs import Elapsed, EngineLog, LogConflict, LogUnavailable
from coordinator.logs.memory import MemoryLog
from coordinator.logs.sqlite import SqliteLog
from coordinator.logs.upkeep import back_up, restored
from tests.simulation.history import History

if TYPE_CHECKING:
    from tests.simulation.machines import Coordinator


@dataclass
class Mood:
    """How a store behaves: chances of each append, delays in seconds."""

    slow_s: float = 0.001
    fail: float = 0.0  # not kept, and said so
    unheard: float = 0.0  # kept, and the answer lost
    full: bool = False  # reads go on, nothing can be written
    down: bool = False
    # The coordinator dies at an append: before it, or once it is kept and nobody was told.
    crash_before: float = 0.0
    crash_after: float = 0.0


class Disk:
    def __init__(self, history: History, rng: random.Random, folder: Path | None) -> None:
        self.history, self.rng, self.folder = history, rng, folder
        self.mood = Mood()
        self.memory = None if folder else MemoryLog()
        self.kept: dict[str, int] = {}  # how many entries of an engine the history knows
        self.store_id = self.memory.store_id if self.memory else ""
        self._copies: list[tuple[MemoryLog | Path, dict[str, int], str]] = []

    @property
    def _path(self) -> Path:
        assert self.folder is not None
        return self.folder / "kvaccord.db"

    @property
    def shared(self) -> bool:
        """Whether two coordinators may have it open at once."""
        return self.memory is not None

    def open(self) -> EngineLog:
        if self.memory is not None:
            return self.memory
        log = SqliteLog(str(self._path))
        self.store_id = log.store_id
        return log

    def copy(self) -> None:
        """Somebody makes a backup."""
        if self.memory is not None:
            self._copies.append((copy.deepcopy(self.memory), dict(self.kept), self.store_id))
        elif self._path.exists():
            target = self._path.with_suffix(f".{len(self._copies)}")
            back_up(str(self._path), target)
            self._copies.append((target, dict(self.kept), self.store_id))

    def restore(self) -> bool:
        """Put an older copy in its place, as an operator does, and say so. No coordinator runs."""
        if not self._copies:
            return False
        older, kept, of = self._copies[self.rng.randrange(len(self._copies))]
        self.kept = dict(kept)
        if isinstance(older, MemoryLog):
            fresh = MemoryLog()  # with a new id and key, as `kvaccord store restored` gives
            self.memory = copy.deepcopy(older)
            self.memory.store_id, self.memory.key = fresh.store_id, fresh.key
            self.store_id = fresh.store_id
        else:
            for tail in ("-wal", "-shm"):
                Path(f"{self._path}{tail}").unlink(missing_ok=True)
            shutil.copy(older, self._path)
            self.store_id = restored(str(self._path)).store_id
        self.history.add("restored", store=self.store_id, of=of, kept=dict(self.kept))
        return True

    def found(self, engine: EngineName, first: int, entries: list[Entry], at: str) -> None:
        """Entries that were kept in the moment in which their coordinator died."""
        for n in range(self.kept.get(str(engine), 0), first + len(entries)):
            self.note(engine, n, entries[n - first], at, found=True)

    def note(self, engine: EngineName, n: int, entry: Entry, at: str, *, found: bool) -> None:
        self.kept[str(engine)] = n + 1
        self.history.add(
            "append",
            at=at,
            store=self.store_id,
            engine=str(engine),
            n=n,
            events=json.loads(entry.to_bytes())["events"],
            found=found or None,
        )


class Handle:
    """The port, as one coordinator has it."""

    def __init__(self, disk: Disk, owner: Coordinator) -> None:
        self._disk, self._owner = disk, owner
        self._log = disk.open()
        self.store_id, self.key = self._log.store_id, self._log.key

    async def names(self) -> list[EngineName]:
        await self._reachable()
        return await self._log.names()

    async def read(self, engine: EngineName) -> list[Entry]:
        await self._reachable()
        entries = await self._log.read(engine)
        self._disk.found(engine, await self._log.first(engine), entries, self._owner.name)
        return entries

    async def first(self, engine: EngineName) -> int:
        await self._reachable()
        return await self._log.first(engine)

    async def append(self, engine: EngineName, entry: Entry, *, n: int) -> None:
        disk, at = self._disk, self._owner.name
        mood, fate = disk.mood, disk.rng.random()
        await self._reachable(writing=True)
        if fate < mood.fail:
            disk.history.add("store", what="failed", at=at, n=n)
            raise LogUnavailable("the disk says no")
        fate -= mood.fail
        if fate < mood.crash_before:
            disk.history.add("store", what="crash before", at=at, n=n)
            await self._die()
        fate -= mood.crash_before
        try:
            await self._log.append(engine, entry, n=n)
        except LogConflict:
            disk.history.add("store", what="conflict", at=at, n=n, engine=str(engine))
            raise
        disk.note(engine, n, entry, at, found=False)
        if fate < mood.crash_after:
            disk.history.add("store", what="crash after", at=at, n=n)
            await self._die()
        fate -= mood.crash_after
        if mood.slow_s > 0.01:
            await asyncio.sleep(disk.rng.expovariate(1 / mood.slow_s))
        if fate < mood.unheard:
            disk.history.add("store", what="unheard", at=at, n=n)
            raise LogUnavailable("the answer was lost")
        disk.history.add("appended", at=at, engine=str(engine), n=n)

    async def drop(self, engine: EngineName, below: int) -> None:
        await self._reachable(writing=True)
        await self._log.drop(engine, below)
        self._disk.history.add("dropped", at=self._owner.name, engine=str(engine), below=below)

    async def save_elapsed(
        self, engine: EngineName, round: int, phase: str, elapsed_s: float
    ) -> None:
        await self._reachable(writing=True)
        await self._log.save_elapsed(engine, round, phase, elapsed_s)

    async def elapsed(self, engine: EngineName) -> Elapsed | None:
        await self._reachable()
        return await self._log.elapsed(engine)

    async def close(self) -> None:
        if self._disk.memory is None:
            await self._log.close()

    def release(self) -> None:
        """Its process has died: the kernel closes its files and its lock."""
        if isinstance(self._log, SqliteLog) and not self._log._closed:
            log = self._log
            log._closed = True
            log._thread.submit(log._close).result()
            log._thread.shutdown()

    async def _reachable(self, *, writing: bool = False) -> None:
        mood = self._disk.mood
        if mood.slow_s:
            await asyncio.sleep(self._disk.rng.expovariate(1 / mood.slow_s))
        if mood.down or (mood.full and writing):
            self._disk.history.add("store", what="down", at=self._owner.name)
            raise LogUnavailable("the store is away")

    async def _die(self) -> None:
        self._owner.crash("at an append")
        await asyncio.get_running_loop().create_future()
