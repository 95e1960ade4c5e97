"""Where the entries of each engine are kept: a port of three verbs, and its backends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from coordinator.events import EngineName, Entry


class LogConflict(Exception):
    """The log does not hold the number of entries it was said to: read again, decide again."""


class LogUnavailable(Exception):
    """The store cannot keep or read anything now. Whether the last append took is unknown."""


class StoreUnreadable(Exception):
    """The store cannot be opened at all; the text says what to do. Nothing was changed in it."""


class EngineLog(Protocol):
    """Keeps the entries of each engine, in order. The log is the truth; the rest is a cache.

    append() returns once the entry is durable. It raises LogConflict unless the log held exactly
    `n` entries, and LogUnavailable when the store does not answer: then the entry may or may not
    have been kept, so read before deciding again.
    """

    store_id: str  # made with the store; stands in every token and decision
    key: bytes  # 32 secret bytes made with the store; attempt tokens are derived from it

    async def names(self) -> list[EngineName]: ...
    async def read(self, engine: EngineName) -> list[Entry]: ...
    async def append(self, engine: EngineName, entry: Entry, *, n: int) -> None: ...
    async def close(self) -> None: ...


def open_log(url: str) -> EngineLog:
    """The store that `--store` names: `memory` or `sqlite:///PATH` (four slashes: absolute).

    Raises ValueError for another spelling, StoreUnreadable when the file cannot be used.
    """
    scheme = url.partition(":")[0]
    if scheme not in OPENERS:
        raise ValueError(f"--store {url}: expected memory or sqlite:///PATH")
    return OPENERS[scheme](url)


def _memory(url: str) -> EngineLog:
    from coordinator.logs.memory import MemoryLog

    return MemoryLog()


def _sqlite(url: str) -> EngineLog:
    from coordinator.logs.sqlite import SqliteLog

    path = url.removeprefix("sqlite:///")
    if path in (url, ""):
        raise ValueError(f"--store {url}: expected sqlite:///PATH, e.g. sqlite:///var/kvaccord.db")
    return SqliteLog(path)


OPENERS: dict[str, Callable[[str], EngineLog]] = {"memory": _memory, "sqlite": _sqlite}
