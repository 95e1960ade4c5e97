"""The embedded store: one SQLite file, one writer thread, durable before an append returns."""

from __future__ import annotations

import asyncio
import sqlite3
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from coordinator.events import EngineName, Entry, entry_from
from coordinator.logs import (
    PHASES,
    Elapsed,
    LogConflict,
    LogUnavailable,
    StoreUnreadable,
    further,
)
from coordinator.logs.sqlite_file import HELD, StoreFile, primary_code

T = TypeVar("T")

ONE = "where namespace = ? and engine = ?"
SAVE_ELAPSED = f"""
insert into elapsed values (?, ?, ?, ?, ?)
on conflict do update set round = excluded.round, phase = excluded.phase,
    elapsed_s = excluded.elapsed_s
where (excluded.round, instr('{PHASES}', excluded.phase), excluded.elapsed_s)
    > (elapsed.round, instr('{PHASES}', elapsed.phase), elapsed.elapsed_s)
"""


INSERT, ROW, MOST_ROWS = "insert into entries values ", "(?, ?, ?, ?)", 200


@dataclass
class _Append:
    engine: EngineName
    body: bytes
    n: int
    # What its caller hears: until it is known to be durable, that it may not be.
    error: Exception | None = field(default_factory=lambda: LogUnavailable("it was not tried"))


class _Shared:
    """Work for the thread that is done once for all who ask for it before it begins."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._asked = False
        self._done: asyncio.Future[None] | None = None

    async def once(self, start: Callable[[Callable[[], None]], asyncio.Future[None]]) -> None:
        if not self._asked or self._done is None:
            self._asked = True  # first: the thread may begin at once
            self._done = start(self._begin)
        # Shielded: a caller that goes away leaves nothing behind for some later one.
        await asyncio.shield(self._done)

    def _begin(self) -> None:
        # First this: what is asked for from now on may come too late for this time.
        self._asked = False
        self._work()


class SqliteLog:
    """WAL with synchronous=FULL: a commit that returned survives power loss.

    Appends that wait at one moment share one transaction, and so one sync.
    """

    def __init__(self, path: str) -> None:
        self._waiting: deque[_Append] = deque()
        self._next: dict[EngineName, int] = {}  # numbers, as far as they are known
        self._commit, self._save = _Shared(self._commit_waiting), _Shared(self._save_elapsed)
        self._elapsed: dict[EngineName, Elapsed] = {}
        self._closed = self._failed = False
        self._sync = ""  # the pragma as it stands
        # SQLite's calls block; one thread keeps them off the loop and in order.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvaccord-sqlite")
        try:
            self._thread.submit(self._open, path).result()
        except BaseException:
            self._thread.shutdown()
            raise

    def _open(self, path: str) -> None:
        self._file = StoreFile(path)
        try:
            self._db = self._file.open()
            self.store_id, self.key = self._db.execute("select id, key from store").fetchone()
            (self._held,) = self._db.execute(HELD).fetchone()
        except BaseException:
            self._file.release()
            raise

    # --- reading --------------------------------------------------------------------------------

    async def names(self) -> list[EngineName]:
        rows = await self._query("select distinct namespace, engine from entries order by 1, 2")
        return [EngineName(*row) for row in rows]

    async def read(self, engine: EngineName) -> list[Entry]:
        rows = await self._query(f"select n, body from entries {ONE} order by n", engine)
        entries = []
        for at, (n, body) in enumerate(rows, start=rows[0][0] if rows else 0):
            if n != at:
                raise self._unreadable(engine, at, "is missing: restore a backup")
            try:
                entries.append(entry_from(body))
            except ValueError as error:
                remedy = "install the kvaccord that wrote it, or restore a backup"
                raise self._unreadable(engine, n, f"cannot be read: {remedy}") from error
        return entries

    async def first(self, engine: EngineName) -> int:
        ((first,),) = await self._query(f"select coalesce(min(n), 0) from entries {ONE}", engine)
        return int(first)

    async def elapsed(self, engine: EngineName) -> Elapsed | None:
        rows = await self._query(f"select round, phase, elapsed_s from elapsed {ONE}", engine)
        return rows[0] if rows else None

    def _unreadable(self, engine: EngineName, n: int, what: str) -> StoreUnreadable:
        return StoreUnreadable(f"{self._file.path}: entry {n} of {engine} {what}")

    async def _query(self, sql: str, engine: EngineName | None = None) -> list[Any]:
        def work() -> list[Any]:
            self._file.check()
            return self._db.execute(sql, _key(engine) if engine else ()).fetchall()

        return await self._run(work)

    # --- writing --------------------------------------------------------------------------------

    async def append(self, engine: EngineName, entry: Entry, *, n: int) -> None:
        self._refuse_if_closed()
        append = _Append(engine, entry.to_bytes(), n)
        self._waiting.append(append)
        await self._commit.once(self._start)
        if append.error:
            raise append.error

    def _commit_waiting(self) -> None:
        batch: list[_Append] = []
        while self._waiting:
            batch.append(self._waiting.popleft())
        if not batch:
            return
        following: dict[EngineName, int] = {}
        try:
            kept = [one for one in batch if self._is_next(one, following)]
            self._transact(lambda: self._insert(kept))
            self._held += len(kept)
            self._file.check()  # else it may have gone into files that nobody finds again
        except (sqlite3.Error, LogUnavailable) as error:
            for one in batch:
                one.error = self._unavailable(error)
                self._next.pop(one.engine, None)  # it may have been kept, or not
            return
        self._next |= following
        self._file.acknowledge(self.store_id, self._held)
        for one in kept:
            one.error = None

    def _is_next(self, append: _Append, following: dict[EngineName, int]) -> bool:
        # This process alone writes the file; should it not, the primary key has the last word.
        engine = append.engine
        held = following.get(engine, self._next.get(engine))
        if held is None:
            sql = f"select coalesce(max(n) + 1, 0) from entries {ONE}"
            (held,) = self._db.execute(sql, _key(engine)).fetchone()
        fits = bool(held == append.n)
        if not fits:
            append.error = LogConflict(f"{engine}: the log holds {held} entries, not {append.n}")
        following[engine] = held + fits
        return fits

    def _insert(self, kept: list[_Append]) -> None:
        # One statement: each gives the interpreter away to the loop, and waits to have it back.
        for at in range(0, len(kept), MOST_ROWS):
            some = kept[at : at + MOST_ROWS]
            values = [value for one in some for value in (*_key(one.engine), one.n, one.body)]
            self._db.execute(INSERT + ", ".join([ROW] * len(some)), values)

    async def drop(self, engine: EngineName, below: int) -> None:
        key = _key(engine)
        sql = f"delete from entries {ONE} and n < ? and n < (select max(n) from entries {ONE})"
        await self._run(lambda: self._transact(lambda: self._db.execute(sql, (*key, below, *key))))

    async def save_elapsed(
        self, engine: EngineName, round: int, phase: str, elapsed_s: float
    ) -> None:
        self._elapsed[engine] = further((round, phase, elapsed_s), self._elapsed.get(engine))
        try:
            await self._save.once(self._start)
        except sqlite3.Error as error:
            raise self._unavailable(error) from error

    def _save_elapsed(self) -> None:
        rows = []
        while self._elapsed:
            engine, elapsed = self._elapsed.popitem()
            rows.append((*_key(engine), *elapsed))
        if rows:
            # Not synced by itself: a crash loses none of it, a loss of power may.
            self._transact(lambda: self._db.executemany(SAVE_ELAPSED, rows), sync="normal")

    def _transact(self, work: Callable[[], T], *, sync: str = "full") -> T:
        self._file.check()
        if self._failed:
            # What an earlier commit left to a later sync may be lost without a word after a sync
            # that failed. All of it is written once more, or nothing goes on.
            (busy, *_) = self._db.execute("pragma wal_checkpoint(truncate)").fetchone()
            if busy:
                raise LogUnavailable(f"{self._file.path}: a reader delays recovery; end it")
            self._failed = False
        if sync != self._sync:
            self._db.execute(f"pragma synchronous = {sync}")
            self._sync = sync
        self._db.execute("begin immediate")
        try:
            answer = work()
            self._db.execute("commit")
        except BaseException as error:
            self._failed = primary_code(error) == sqlite3.SQLITE_IOERR
            if self._db.in_transaction:
                with suppress(sqlite3.Error):  # the first error is the one to tell
                    self._db.execute("rollback")
            raise
        return answer

    # --- life -----------------------------------------------------------------------------------

    async def close(self) -> None:
        """May be called again. What was appended before is kept, what comes later is refused."""
        if not self._closed:
            self._closed = True
            await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
            self._thread.shutdown()

    def _close(self) -> None:
        try:
            with suppress(sqlite3.Error):  # every append has been answered already
                self._db.close()
        finally:
            self._file.release()

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise LogUnavailable(f"{self._file.path} has been closed: the coordinator stops")

    def _start(self, work: Callable[[], T]) -> asyncio.Future[T]:
        self._refuse_if_closed()
        return asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _run(self, work: Callable[[], T]) -> T:
        try:
            return await self._start(work)
        except sqlite3.Error as error:
            raise self._unavailable(error) from error

    def _unavailable(self, error: Exception) -> LogUnavailable:
        if isinstance(error, LogUnavailable):
            return LogUnavailable(str(error))
        match primary_code(error):
            case sqlite3.SQLITE_FULL:
                what = "the disk is full: make room on it, and the coordinator goes on by itself"
            case sqlite3.SQLITE_BUSY:
                what = "another program keeps the file locked: end that program"
            case sqlite3.SQLITE_IOERR:
                what = f"{error}: look at the disk and the kernel's log"
            case _:
                what = f"{error}: look at the file and its disk"
        return LogUnavailable(f"{self._file.path}: {what}")


def _key(engine: EngineName) -> tuple[str, str]:
    return engine.namespace, engine.engine
