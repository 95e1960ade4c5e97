"""A log that ends with its process: tests, simulation, single-shot use."""

from __future__ import annotations

import secrets

from coordinator.events import EngineName, Entry, entry_from
from coordinator.logs import Elapsed, LogConflict, further


class MemoryLog:
    def __init__(self) -> None:
        self.store_id = secrets.token_hex(8)
        self.key = secrets.token_bytes(32)
        # Bytes, as every store keeps them: what cannot be read back fails here too.
        self._entries: dict[EngineName, list[bytes]] = {}
        self._first: dict[EngineName, int] = {}
        self._elapsed: dict[EngineName, Elapsed] = {}

    async def names(self) -> list[EngineName]:
        return list(self._entries)

    async def read(self, engine: EngineName) -> list[Entry]:
        return [entry_from(body) for body in self._entries.get(engine, ())]

    async def first(self, engine: EngineName) -> int:
        return self._first.get(engine, 0)

    async def append(self, engine: EngineName, entry: Entry, *, n: int) -> None:
        held = self._entries.get(engine, [])
        following = self._first.get(engine, 0) + len(held)
        if following != n:
            raise LogConflict(f"{engine}: the log holds {following} entries, not {n}")
        self._entries[engine] = [*held, entry.to_bytes()]

    async def drop(self, engine: EngineName, below: int) -> None:
        held, first = self._entries.get(engine, []), self._first.get(engine, 0)
        gone = max(0, min(below - first, len(held) - 1))
        if gone:
            self._entries[engine], self._first[engine] = held[gone:], first + gone

    async def save_elapsed(
        self, engine: EngineName, round: int, phase: str, elapsed_s: float
    ) -> None:
        self._elapsed[engine] = further((round, phase, elapsed_s), self._elapsed.get(engine))

    async def elapsed(self, engine: EngineName) -> Elapsed | None:
        return self._elapsed.get(engine)

    async def close(self) -> None:
        pass
