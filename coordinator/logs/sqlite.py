"""The embedded store: one SQLite file, one writer thread, durable before an append returns."""

from __future__ import annotations

import asyncio
import os
import secrets
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import TypeVar

from coordinator.events import EngineName, Entry, entry_from
from coordinator.logs import LogConflict, LogUnavailable, StoreUnreadable

T = TypeVar("T")

APPLICATION_ID = 0x6B766163  # "kvac": tells our file from anyone else's
SCHEMA_VERSION = 1
SCHEMA = """
create table store (id text not null, key blob not null);
create table entries (
    namespace text not null, engine text not null, n integer not null, body blob not null,
    primary key (namespace, engine, n)
) without rowid;
"""


class SqliteLog:
    """WAL with synchronous=FULL: a commit that returned survives power loss.

    The file is locked for as long as it is open: a second coordinator on it is refused.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        # SQLite's calls block; one thread keeps them off the loop and in order.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvaccord-sqlite")
        try:
            self._db = self._thread.submit(self._open).result()
        except BaseException:
            self._thread.shutdown()
            raise

    def _open(self) -> sqlite3.Connection:
        try:
            _prepare_file(Path(self._path))
            db = sqlite3.connect(self._path, timeout=1.0, isolation_level=None)
            try:
                self._check_and_create(db)
            except BaseException:
                db.close()
                raise
        except (sqlite3.Error, OSError) as error:
            raise StoreUnreadable(_what_to_do(self._path, error)) from error
        return db

    def _check_and_create(self, db: sqlite3.Connection) -> None:
        db.execute("pragma locking_mode = exclusive")
        db.execute("pragma synchronous = full")
        db.execute("begin immediate")  # takes the lock now, not at the first append
        (faults,) = db.execute("pragma quick_check(1)").fetchone()
        if faults != "ok":
            raise sqlite3.DatabaseError(f"database disk image is malformed: {faults}")
        (tables,) = db.execute("select count(*) from sqlite_master").fetchone()
        if not tables:
            for statement in SCHEMA.split(";"):
                db.execute(statement)
            db.execute(f"pragma application_id = {APPLICATION_ID}")
            db.execute(f"pragma user_version = {SCHEMA_VERSION}")
            db.execute(
                "insert into store values (?, ?)", (secrets.token_hex(8), secrets.token_bytes(32))
            )
        self.store_id, self.key = db.execute("select id, key from store").fetchone()
        db.execute("commit")
        # Only now: what tells our file from another's is in the file itself, not in its WAL.
        db.execute("pragma journal_mode = wal")

    async def names(self) -> list[EngineName]:
        rows = await self._run(
            lambda: self._db.execute(
                "select distinct namespace, engine from entries order by 1, 2"
            ).fetchall()
        )
        return [EngineName(*row) for row in rows]

    async def read(self, engine: EngineName) -> list[Entry]:
        key = (engine.namespace, engine.engine)
        rows = await self._run(
            lambda: self._db.execute(
                "select body from entries where namespace = ? and engine = ? order by n", key
            ).fetchall()
        )
        return [entry_from(body) for (body,) in rows]

    async def append(self, engine: EngineName, entry: Entry, *, n: int) -> None:
        await self._run(lambda: self._append(engine, entry.to_bytes(), n))

    def _append(self, engine: EngineName, body: bytes, n: int) -> None:
        key = (engine.namespace, engine.engine)
        self._db.execute("begin immediate")
        try:
            (held,) = self._db.execute(
                "select coalesce(max(n) + 1, 0) from entries where namespace = ? and engine = ?",
                key,
            ).fetchone()
            if held != n:
                raise LogConflict(f"{engine}: the log holds {held} entries, not {n}")
            self._db.execute("insert into entries values (?, ?, ?, ?)", (*key, n, body))
            self._db.execute("commit")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("rollback")
            raise

    async def close(self) -> None:
        await self._run(self._db.close)
        self._thread.shutdown()

    async def _run(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except sqlite3.Error as error:
            raise LogUnavailable(f"{self._path}: {error}") from error


def _prepare_file(path: Path) -> None:
    """Make the file, readable for its owner alone (it holds a key), or see that it is ours.

    A file of somebody else is not opened in earnest: that alone may change it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    if path.is_file() and path.stat().st_size == 0:
        return
    # Immutable: reads the header and neither locks, nor looks at or makes any other file.
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?immutable=1", uri=True)) as db:
        (application,) = db.execute("pragma application_id").fetchone()
        (version,) = db.execute("pragma user_version").fetchone()
    if (application, version) != (APPLICATION_ID, SCHEMA_VERSION):
        ours = application == APPLICATION_ID
        kind = "written by another version of kvaccord" if ours else "not a kvaccord store"
        raise StoreUnreadable(
            f"{path} is {kind} (application_id {application:#x}, user_version {version}); name"
            " another file with --store, nothing was changed in this one"
        )


def _what_to_do(path: str, error: Exception) -> str:
    text = str(error)
    if "locked" in text:
        return (
            f"{path} is in use by another coordinator; stop that one, or name another file with"
            " --store"
        )
    if "not a database" in text or "malformed" in text:
        return (
            f"{path} is no readable SQLite file ({text}); restore it from a backup, or name"
            " another file with --store, nothing was changed in this one"
        )
    return f"{path} cannot be opened ({text}); check that its folder exists and is writable"
