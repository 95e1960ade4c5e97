"""Where the entries of each engine are kept: a port of few verbs, and its backends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from coordinator.events import EngineName, Entry

Elapsed = tuple[int, str, float]  # round, phase, seconds spent of its budget
PHASES = "gather report apply"  # in their order


class LogConflict(Exception):
    """The log does not hold the number of entries it was said to: read again, decide again."""


class LogUnavailable(Exception):
    """The store cannot keep or read anything now. Whether the last append took is unknown."""


class StoreUnreadable(Exception):
    """The store cannot be opened or read; the text says what to do. Nothing was changed in it."""


class EngineLog(Protocol):
    """Keeps the entries of each engine, in order. The log is the truth; the rest is a cache.

    append() returns once the entry is durable. It raises LogConflict unless the engine's next
    number was `n`, and LogUnavailable when the store does not answer: then the entry may or may
    not have been kept, so read before deciding again.

    read() answers the entries that were not dropped, from number first() on. It raises
    StoreUnreadable for one that no version up to this one wrote. drop() deletes the entries below
    a number, never the last one: numbers go on where they were.

    save_elapsed() is lossy and never goes back: of several the furthest in (round, phase, seconds)
    is kept, and a loss of power may take it. Time may so be counted late, never early.
    """

    store_id: str  # made with the store; stands in every token and decision
    key: bytes  # 32 secret bytes made with the store; attempt tokens are derived from it

    async def names(self) -> list[EngineName]: ...
    async def read(self, engine: EngineName) -> list[Entry]: ...
    async def first(self, engine: EngineName) -> int: ...
    async def append(self, engine: EngineName, entry: Entry, *, n: int) -> None: ...
    async def drop(self, engine: EngineName, below: int) -> None: ...
    async def save_elapsed(
        self, engine: EngineName, round: int, phase: str, elapsed_s: float
    ) -> None: ...
    async def elapsed(self, engine: EngineName) -> Elapsed | None: ...
    async def close(self) -> None: ...


def further(one: Elapsed, other: Elapsed | None) -> Elapsed:
    """Of two the one that is further in (round, phase, seconds)."""
    return max(one, other or one, key=lambda e: (e[0], PHASES.find(e[1]), e[2]))


def open_log(url: str) -> EngineLog:
    """The store that `--store` names: `memory` or `sqlite:///PATH` (four slashes: absolute).

    Raises ValueError for another spelling, StoreUnreadable when the file cannot be used.
    """
    scheme = url.partition(":")[0]
    if scheme not in OPENERS or (scheme == "memory" and url != "memory"):
        raise ValueError(f"--store {url}: expected memory or sqlite:///PATH")
    return OPENERS[scheme](url)


def path_of(url: str) -> str:
    """The file of a SQLite store. Raises ValueError for another spelling."""
    path = url.removeprefix("sqlite:///")
    if path in (url, "", ":memory:"):
        raise ValueError(f"--store {url}: expected sqlite:///PATH, e.g. sqlite:///var/kvaccord.db")
    return path


def _memory(url: str) -> EngineLog:
    from coordinator.logs.memory import MemoryLog

    return MemoryLog()


def _sqlite(url: str) -> EngineLog:
    from coordinator.logs.sqlite import SqliteLog

    return SqliteLog(path_of(url))


OPENERS: dict[str, Callable[[str], EngineLog]] = {"memory": _memory, "sqlite": _sqlite}
