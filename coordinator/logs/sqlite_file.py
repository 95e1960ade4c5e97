"""The file of a SQLite store: found, locked and read through before anything is written to it.

Beside PATH lie PATH-wal and PATH-shm, which are SQLite's, and PATH-lock, which is ours.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from coordinator.logs import LogUnavailable, StoreUnreadable

APPLICATION_ID = 0x6B766163  # "kvac": tells our file from anyone else's
# What each version added to the one before; user_version counts them. A step stays as it is.
STEPS = (
    (
        "create table store (id text not null, key blob not null)",
        "create table entries (namespace text not null, engine text not null, n integer not null,"
        " body blob not null, primary key (namespace, engine, n)) without rowid",
    ),
    (
        "create table elapsed (namespace text not null, engine text not null,"
        " round integer not null, phase text not null, elapsed_s real not null,"
        " primary key (namespace, engine)) without rowid",
    ),
)
SCHEMA_VERSION = len(STEPS)
# How many entries were ever appended: what was dropped counts.
HELD = (
    "select coalesce(sum(held), 0)"
    " from (select max(n) + 1 as held from entries group by namespace, engine)"
)
MAGIC = b"SQLite format 3\x00"
EFFECTIVE = os.access in os.supports_effective_ids
WAL_MAGIC = b"\x37\x7f\x06"  # and 82 or 83, which tells the byte order


class StoreFile:
    """A store's file, locked for as long as this is open.

    The lock is a flock on a file of its own: it ends with its process, however that ends, and
    leaves SQLite's own locks to readers, so that a backup is made while a coordinator serves.

    The same file holds a witness: how many entries were acknowledged. It is not synced, so after
    a loss of power it may say too few, never too many. A store that holds fewer has lost its -wal
    or is an older copy. `believe` takes it as it is.
    """

    def __init__(self, path: str, *, make: bool = True, believe: bool = False) -> None:
        self.path = find(path, make=make)
        self._names = [f"{self.path}{tail}" for tail in ("", "-wal", "-shm", "-lock")]
        self._known: list[tuple[int, int] | None] = []
        with said(self.path):
            _look_at_rights(self.path)
            if os.path.islink(self._names[-1]):
                raise refused(
                    self.path,
                    f"has a lock, {self._names[-1]}, that is a link",
                    "remove the link when no coordinator uses the store",
                )
            self._lock = os.open(self._names[-1], os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                self._take()
                if _size(self.path):
                    _read_through(self.path, None if believe else self._witness())
                else:
                    _look_at_place(self.path)
                    self._refuse_if_it_was_more()
                    _make(self.path)
            except BaseException:
                self.release()
                raise

    def _take(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise in_use(self.path) from error
        taken = os.fstat(self._lock)
        if (taken.st_dev, taken.st_ino) != _identity(self._names[-1]):
            raise in_use(self.path)  # somebody removed it meanwhile: what is locked is no lock

    def open(self) -> sqlite3.Connection:
        """In earnest, brought up to this version."""
        with said(self.path):
            db = connect(self.path, "mode=rw")
            try:
                db.execute("pragma synchronous = full")
                (mode,) = db.execute("pragma journal_mode = wal").fetchone()
                if mode != "wal":
                    raise refused(self.path, f"cannot be kept in WAL mode ({mode})")
                db.execute("begin immediate")  # fails now, rather than at the first append
                (version,) = db.execute("pragma user_version").fetchone()
                if version < SCHEMA_VERSION:
                    _climb(db, version)
                db.execute("commit")
                if version < SCHEMA_VERSION:
                    # The version is read from the file itself, before its -wal is looked at.
                    db.execute("pragma wal_checkpoint(truncate)").fetchone()
            except BaseException:
                db.close()
                raise
        self._known = [_identity(name) for name in self._names]
        return db

    def check(self) -> None:
        """Raises LogUnavailable when what is open is no longer what its names lead to."""
        for name, known in zip(self._names, self._known, strict=True):
            if _identity(name) != known:
                raise LogUnavailable(
                    f"{name} was removed or replaced while this coordinator has it open: put the"
                    " same file back, or restore the store and start the coordinator anew"
                )

    def acknowledge(self, store_id: str, held: int) -> None:
        """Note how many entries are durable."""
        with suppress(OSError):  # a witness that says too few is only weaker
            os.pwrite(self._lock, f"{store_id} {held:020d}\n".encode(), 0)

    def _witness(self) -> tuple[str, int] | None:
        match os.pread(self._lock, 256, 0).split():
            case [store_id, held] if held.isdigit():
                return store_id.decode(errors="replace"), int(held)
        return None

    def _refuse_if_it_was_more(self) -> None:
        """Nothing is there, yet the witness knows of entries: that is a loss, not a beginning."""
        witness = self._witness()
        if witness and witness[1]:
            raise refused(
                self.path,
                f"{'is empty' if self.path.exists() else 'is missing'}, but {witness[1]} entries"
                f" were acknowledged, as {self._names[-1]} notes",
                "bring it back or restore a backup; to accept the loss and begin anew remove"
                f" {self._names[-1]}",
            )

    def release(self) -> None:
        """Let the next one have it. The lock's file stays: to remove it would race with others."""
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1


def find(path: str, *, make: bool = False) -> Path:
    """The file that `path` means, whatever links lead to it, once it looks like a store of ours.

    Changes nothing but that it makes missing folders. Raises StoreUnreadable.
    """
    with said(Path(path)):
        place = Path(os.path.realpath(path))
        if os.path.lexists(path) and not os.path.lexists(place):
            raise refused(Path(path), f"is a link to {place}, where nothing is", "mend the link")
        if make:
            place.parent.mkdir(parents=True, exist_ok=True)
        if _size(place):
            _look_at_header(place)
        elif make:
            _look_at_place(place)
        else:
            raise refused(place, "holds no store")
    return place


def connect(place: Path, how: str) -> sqlite3.Connection:
    return sqlite3.connect(f"{place.as_uri()}?{how}", uri=True, timeout=1.0, isolation_level=None)


@contextmanager
def said(place: Path) -> Iterator[None]:
    """Says in one sentence why a store cannot be opened, and what to do."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise _sentence(place, error) from error


def refused(place: Path, what: str, remedy: str = "") -> StoreUnreadable:
    remedies = f"{remedy}, or name" if remedy else "name"
    return StoreUnreadable(
        f"{place} {what}; {remedies} another file with --store (nothing was changed in this one)"
    )


def in_use(place: Path) -> StoreUnreadable:
    return StoreUnreadable(
        f"{place} is in use by another coordinator; stop that one, or name another file with"
        " --store"
    )


def primary_code(error: BaseException) -> int | None:
    """SQLite's own code of an error, such as sqlite3.SQLITE_FULL."""
    code = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF


def _sentence(place: Path, error: sqlite3.Error | OSError) -> StoreUnreadable:
    code = primary_code(error)
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return in_use(place)
    if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_ERROR):
        return refused(place, f"is no readable SQLite file ({error})", "restore a backup")
    if code == sqlite3.SQLITE_FULL or getattr(error, "errno", None) == errno.ENOSPC:
        return refused(place, "lies on a disk that is full", "make room there")
    return refused(
        place,
        f"cannot be opened ({error})",
        f"check that it and its folder exist and are writable for user {os.geteuid()}",
    )


def _size(place: Path) -> int:
    """0 when nothing is there. Raises StoreUnreadable for what is no ordinary file."""
    try:
        found = place.lstat()
    except FileNotFoundError:
        return 0
    if not stat.S_ISREG(found.st_mode):
        kind = "a folder" if stat.S_ISDIR(found.st_mode) else "a device, a pipe or a link"
        raise refused(place, f"is {kind}, not a file")
    if found.st_nlink > 1:
        raise refused(
            place, "has a second name (a hard link) that would escape the lock", "remove that name"
        )
    return found.st_size


def _identity(name: str) -> tuple[int, int] | None:
    try:
        found = os.lstat(name)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _look_at_rights(place: Path) -> None:
    # SQLite would open a file that it cannot write, and say so only at the first append.
    for needed in (place, place.parent):
        if needed.exists() and not os.access(needed, os.W_OK, effective_ids=EFFECTIVE):
            raise refused(
                place,
                f"cannot be used: {needed} is read-only for user {os.geteuid()}",
                "make both the file and its folder writable for it",
            )


def _look_at_place(place: Path) -> None:
    """Nothing is there, or nothing yet: may a store be made?"""
    for tail in ("-wal", "-journal"):
        if _size(beside := Path(f"{place}{tail}")):
            what = "is empty" if place.exists() else "is missing"
            raise refused(
                place, f"{what}, but {beside} is there", "bring back the two, or restore a backup"
            )


def _look_at_header(place: Path) -> None:
    # Its bytes and not through SQLite, which would take a file that was killed in the middle of a
    # checkpoint for a damaged one, or else look at its -wal, and that may change something.
    header = _bytes(place, 0, 100)
    version, application = (int.from_bytes(header[at : at + 4], "big") for at in (60, 68))
    if not header.startswith(MAGIC) or len(header) < 100:
        raise refused(place, "is no readable SQLite file", "restore a backup")
    if application != APPLICATION_ID:
        found = f"application_id {application:#x}, user_version {version}"
        raise refused(place, f"is not a kvaccord store ({found})")
    _look_at_version(place, version)


def _look_at_version(place: Path, version: int) -> None:
    if not 1 <= version <= SCHEMA_VERSION:
        raise refused(
            place,
            f"was written by a newer kvaccord (version {version} of the store, this one knows"
            f" {SCHEMA_VERSION})",
            "install that one",
        )


def _read_through(place: Path, witness: tuple[str, int] | None) -> None:
    """All of it, while nothing is written: not even what closing a database usually writes."""
    wal, shm = Path(f"{place}-wal"), Path(f"{place}-shm")
    written = _size(wal) > 0
    if written and not _belong_together(place, wal):
        raise refused(
            place,
            f"and {wal} do not belong together",
            "bring back the right one, remove the second if the first is a restored backup",
        )
    had_shm = shm.exists()
    try:
        with closing(connect(place, "mode=ro" if written else "immutable=1")) as db:
            (faults,) = db.execute("pragma quick_check(1)").fetchone()
            if faults != "ok":
                fault = faults.splitlines()[-1]  # after a headline
                raise refused(place, f"is no readable SQLite file ({fault})", "restore a backup")
            _look_at_version(place, *db.execute("pragma user_version").fetchone())
            stores = db.execute("select id, key from store").fetchall()
            (held,) = db.execute(HELD).fetchone()
        match stores:
            case [(str(store_id), bytes(key))] if store_id and len(key) == 32:
                pass
            case _:
                raise refused(place, "has lost its id or its key", "restore a backup")
        if witness and witness[0] == store_id and held < witness[1]:
            raise refused(
                place,
                f"holds {held} entries where {witness[1]} were acknowledged, so it has lost {wal}"
                " or is an older copy",
                "bring back the newer files, or accept the loss with `kvaccord store restored"
                f" --store sqlite:///{place}`",
            )
    except BaseException:
        if not had_shm:
            shm.unlink(missing_ok=True)
        raise


def _belong_together(place: Path, wal: Path) -> bool:
    # A copy by `kvaccord store backup` is not in WAL mode yet. A -wal that begins with zeros was
    # cut off by a loss of power before anything in it was acknowledged.
    return _bytes(place, 18, 2) == b"\2\2" and _bytes(wal, 0, 3) in (WAL_MAGIC, bytes(3))


def _bytes(place: Path, offset: int, size: int) -> bytes:
    with place.open("rb") as file:
        file.seek(offset)
        return file.read(size)


def _make(place: Path) -> None:
    """A new store, whole or not there. For its owner alone: it holds a key."""
    new = Path(f"{place}-new")
    for left in (new, Path(f"{new}-journal"), Path(f"{new}-wal"), Path(f"{new}-shm")):
        left.unlink(missing_ok=True)
    with suppress(FileExistsError):  # then it is empty: nobody else's file is written over
        os.close(os.open(place, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    os.close(os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    with closing(connect(new, "mode=rw")) as db:
        db.execute("pragma synchronous = full")
        db.execute("begin immediate")
        _climb(db, 0)
        db.execute(f"pragma application_id = {APPLICATION_ID}")
        identify(db)
        db.execute("commit")
        db.execute("pragma journal_mode = wal")
    new.replace(place)
    sync_folder(place.parent)


def _climb(db: sqlite3.Connection, version: int) -> None:
    for step in STEPS[version:]:
        for statement in step:
            db.execute(statement)
    db.execute(f"pragma user_version = {SCHEMA_VERSION}")


def identify(db: sqlite3.Connection) -> str:
    """Give the store a new id, and a key that no token was made with."""
    store_id = secrets.token_hex(8)
    db.execute("delete from store")
    db.execute("insert into store values (?, ?)", (store_id, secrets.token_bytes(32)))
    return store_id


def sync_folder(folder: Path) -> None:
    """Make the names in it durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
