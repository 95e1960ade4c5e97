"""What an operator does with a SQLite store: copy it while it is in use, tell that it is a copy."""

from __future__ import annotations

import os
import sqlite3
import tempfile
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from coordinator.logs import StoreUnreadable
from coordinator.logs.sqlite_file import StoreFile, connect, find, identify, said, sync_folder


@dataclass(frozen=True)
class Summary:
    store_id: str
    engines: int
    entries: int


def back_up(path: str, target: Path) -> Summary:
    """Write a whole, consistent copy, also while a coordinator serves; it is never held up.

    Raises StoreUnreadable; then there is no copy.
    """
    source = find(path)
    if os.path.lexists(target):
        raise StoreUnreadable(f"{target} is there already; name another file for the backup")
    try:
        # Whole or not there, and for its owner alone: it holds the key.
        fd, part = tempfile.mkstemp(prefix=f"{target.name}.", suffix=".part", dir=target.parent)
    except OSError as error:
        raise StoreUnreadable(f"{target} cannot be written ({error}); name another") from error
    try:
        with said(source), closing(connect(source, "mode=ro")) as db:
            db.execute("select id from store").fetchone()  # what fails from here on is the copying
            try:
                db.execute("vacuum into ?", (part,))
                os.fsync(fd)
                with closing(connect(Path(part).absolute(), "immutable=1")) as copy:
                    summary = _summary(copy)
                os.replace(part, target)
                sync_folder(target.parent)
            except (sqlite3.Error, OSError) as error:
                raise StoreUnreadable(
                    f"{source} could not be copied to {target} ({error}); there is no backup"
                ) from error
    finally:
        os.close(fd)
        Path(part).unlink(missing_ok=True)
    return summary


def restored(path: str) -> Summary:
    """Give the store a new id and key: tokens of the time before the loss are worth nothing here.

    Raises StoreUnreadable, also while a coordinator has it open.
    """
    file = StoreFile(path, make=False, believe=True)
    try:
        with closing(file.open()) as db, said(file.path):
            db.execute("begin immediate")
            identify(db)
            db.execute("commit")
            return _summary(db)
    finally:
        file.release()


def _summary(db: sqlite3.Connection) -> Summary:
    (store_id,) = db.execute("select id from store").fetchone()
    engines, entries = db.execute(
        "select count(distinct namespace || '/' || engine), count(*) from entries"
    ).fetchone()
    return Summary(store_id, engines, entries)
