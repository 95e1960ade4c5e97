"""A log that ends with its process: tests, simulation, single-shot use."""

from __future__ import annotations

import secrets

from coordinator.events import EngineName, Entry, entry_from
from coordinator.logs import LogConflict


class MemoryLog:
    def __init__(self) -> None:
        self.store_id = secrets.token_hex(8)
        self.key = secrets.token_bytes(32)
        # Bytes, as every store keeps them: what cannot be read back fails here too.
        self._entries: dict[EngineName, list[bytes]] = {}

    async def names(self) -> list[EngineName]:
        return list(self._entries)

    async def read(self, engine: EngineName) -> list[Entry]:
        return [entry_from(body) for body in self._entries.get(engine, ())]

    async def append(self, engine: EngineName, entry: Entry, *, n: int) -> None:
        held = self._entries.get(engine, [])
        if len(held) != n:
            raise LogConflict(f"{engine}: the log holds {len(held)} entries, not {n}")
        self._entries[engine] = [*held, entry.to_bytes()]

    async def close(self) -> None:
        pass
