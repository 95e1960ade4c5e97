"""What a store is started from: what is not ours, lost, taken away, copied, of an older version."""

from __future__ import annotations

import os
import random
import re
import shutil
import sqlite3
import stat
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from coordinator.logs import StoreUnreadable
from coordinator.logs.sqlite import SqliteLog
from coordinator.logs.sqlite_file import SCHEMA_VERSION
from tests.builders import lacking
from tests.stores.files import (
    beside,
    changed,
    files_of,
    killed,
    no_wal,
    one_sentence,
    refusal,
    store,
    the_three_of_version_1,
    url,
)
from tests.test_logs import LLAMA, an_entry, filled, read_all, run

# --- what it does not start from ----------------------------------------------------------------


def a_folder(path: Path) -> None:
    path.mkdir()


def a_dangling_link(path: Path) -> None:
    path.symlink_to(path.parent / "elsewhere.db")


def a_link_to_itself(path: Path) -> None:
    path.symlink_to(path)


def a_device(path: Path) -> None:
    path.symlink_to("/dev/null")


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_second_name(path: Path) -> None:
    filled(path)
    os.link(path, beside(path, ".same"))


def a_wal_alone(path: Path) -> None:
    killed(path)
    path.unlink()


def an_empty_file_with_a_wal(path: Path) -> None:
    killed(path)
    os.truncate(path, 0)


def an_empty_file_with_a_journal(path: Path) -> None:
    path.touch()
    beside(path, "-journal").write_bytes(b"something")


def an_empty_wal(path: Path) -> None:
    killed(path)
    os.truncate(beside(path, "-wal"), 0)


def a_garbage_wal(path: Path) -> None:
    killed(path)
    wal = beside(path, "-wal")
    wal.write_bytes(random.Random(1).randbytes(wal.stat().st_size))


def a_garbage_wal_where_none_was(path: Path) -> None:
    filled(path)
    beside(path, "-wal").write_bytes(b"garbage" * 1000)


def a_damaged_wal(path: Path) -> None:
    killed(path)
    wal = beside(path, "-wal")
    body = bytearray(wal.read_bytes())
    body[len(body) // 2] ^= 0xFF
    wal.write_bytes(body)


def a_shortened_wal(path: Path) -> None:
    killed(path)
    wal = beside(path, "-wal")
    os.truncate(wal, wal.stat().st_size // 2)


def a_damaged_page_under_a_wal(path: Path) -> None:
    filled(path, entries=400)
    body = path.read_bytes()

    async def story() -> None:
        log = SqliteLog(str(path))
        await log.append(LLAMA, an_entry(), n=400)
        for tail in ("", "-wal", "-lock"):
            shutil.copy2(beside(path, tail), beside(path, f"{tail}.kept"))
        await log.close()

    run(story())
    for tail in ("", "-wal", "-lock"):
        beside(path, f"{tail}.kept").replace(beside(path, tail))
    damaged = bytearray(body)
    damaged[-4096 * 3 : -4096 * 3 + 600] = b"\xff" * 600
    path.write_bytes(damaged)


def an_older_copy(path: Path) -> None:
    filled(path)
    shutil.copy(path, beside(path, ".copy"))

    async def story() -> None:
        log = SqliteLog(str(path))
        await log.append(LLAMA, an_entry(3), n=3)
        await log.close()

    run(story())
    beside(path, ".copy").replace(path)


def a_backup_over_a_wal(path: Path) -> None:
    killed(path)
    copy = path.parent / "copy.db"
    store("backup", str(copy), "--store", url(path))
    copy.replace(path)


def one_without_its_table(path: Path) -> None:
    filled(path)
    changed(path, "drop table entries")


def one_without_its_key(path: Path) -> None:
    filled(path)
    changed(path, "delete from store")


def one_with_two_ids(path: Path) -> None:
    filled(path)
    changed(path, "insert into store values ('more', x'00')")


def a_newer_one_that_was_killed(path: Path) -> None:
    filled(path)
    changed(path, f"pragma user_version = {SCHEMA_VERSION + 1}")
    beside(path, "-wal").write_bytes(b"of a newer version")


def a_newer_version_in_the_wal(path: Path) -> None:
    filled(path)
    db = sqlite3.connect(path, isolation_level=None)
    db.execute(f"pragma user_version = {SCHEMA_VERSION + 1}")
    kept = [(beside(path, tail), beside(path, tail).read_bytes()) for tail in ("", "-wal")]
    db.close()
    for file, body in kept:
        file.write_bytes(body)


def one_that_was_emptied(path: Path) -> None:
    filled(path)
    os.truncate(path, 0)


def one_that_was_removed(path: Path) -> None:
    filled(path)
    path.unlink()


def a_link_for_a_lock(path: Path) -> None:
    filled(path)
    beside(path, "-lock").unlink()
    beside(path, "-lock").symlink_to(path.parent / "nowhere")


REFUSED = [
    (a_folder, r"is a folder, not a file"),
    (a_dangling_link, r"is a link to \S+elsewhere.db, where nothing is; mend the link"),
    (a_link_to_itself, r"is a link to|not a file"),
    (a_device, r"/dev/null is a device"),
    (a_pipe, r"is a device, a pipe"),
    (a_second_name, r"has a second name \(a hard link\).*remove that name"),
    (a_wal_alone, r"is missing, but \S+-wal is there; bring back the two, or restore a backup"),
    (an_empty_file_with_a_wal, r"is empty, but \S+-wal is there; bring back the two"),
    (an_empty_file_with_a_journal, r"is empty, but \S+-journal is there"),
    (no_wal, r"holds 0 entries where 40 were acknowledged.*lost \S+-wal.*bring back"),
    (an_empty_wal, r"holds 0 entries where 40 were acknowledged"),
    (a_garbage_wal, r"-wal do not belong together"),
    (a_garbage_wal_where_none_was, r"-wal do not belong together"),
    (a_damaged_wal, r"holds \d+ entries where 40 were acknowledged"),
    (a_shortened_wal, r"holds \d+ entries where 40 were acknowledged"),
    (a_damaged_page_under_a_wal, r"is no readable SQLite file .*restore a backup"),
    (one_that_was_emptied, r"is empty, but 3 entries were acknowledged.*remove \S+-lock, or name"),
    (one_that_was_removed, r"is missing, but 3 entries were acknowledged.*restore a backup"),
    (a_link_for_a_lock, r"has a lock, \S+-lock, that is a link; remove the link"),
    (an_older_copy, r"holds 3 entries where 4 were.*older copy.*`kvaccord store restored --store"),
    (a_backup_over_a_wal, r"-wal do not belong together.*remove the second"),
    (one_without_its_table, r"no such table: entries.*restore a backup"),
    (one_without_its_key, r"has lost its id or its key; restore a backup"),
    (one_with_two_ids, r"has lost its id or its key"),
    (a_newer_version_in_the_wal, r"was written by a newer kvaccord .*; install that one"),
    (a_newer_one_that_was_killed, r"was written by a newer kvaccord .*; install that one"),
]


@pytest.mark.parametrize(("make", "why"), REFUSED, ids=lambda v: getattr(v, "__name__", ""))
def test_what_cannot_be_read_is_never_started_from(tmp_path, path, make, why):
    make(path)
    before = files_of(tmp_path)
    names = sorted(os.listdir(tmp_path))
    text = refusal(path)
    assert re.search(why, text)
    assert "--store" in text
    assert files_of(tmp_path) == before
    assert sorted(os.listdir(tmp_path)) == names


def test_whoever_accepts_the_loss_of_a_store_begins_anew(path):
    one_that_was_removed(path)
    beside(path, "-lock").unlink()
    filled(path)
    assert len(run(read_all(path))) == 3


def test_a_killed_ones_files_are_read_whole(path):
    killed(path)
    assert run(read_all(path)) == [an_entry(n) for n in range(40)]


def test_one_that_was_killed_in_the_middle_of_a_checkpoint_is_read_whole(path, tmp_path):
    killed(path, entries=200)
    done = tmp_path / "done"
    done.mkdir()
    for file in files_of(tmp_path):
        shutil.copy(tmp_path / file, done)
    run(read_all(done / path.name))
    with path.open("r+b") as file:
        file.write((done / path.name).read_bytes()[:4096])  # says already how many pages there are
    assert path.stat().st_size < (done / path.name).stat().st_size
    assert run(read_all(path)) == [an_entry(n) for n in range(200)]


def test_a_start_that_was_killed_while_it_made_the_store_makes_it_now(path):
    path.touch()
    beside(path, "-new").write_bytes(b"half a store")
    beside(path, "-new-journal").write_bytes(b"half a journal")
    filled(path)
    assert len(run(read_all(path))) == 3
    assert sorted(p.name for p in path.parent.iterdir()) == [path.name, f"{path.name}-lock"]


def test_only_its_owner_reads_a_store(path):
    path.touch(0o644)
    killed(path)
    for file in path.parent.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file


@contextmanager
def as_nobody() -> Iterator[None]:
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize(("file_mode", "folder_mode"), [(0o444, 0o777), (0o666, 0o755)])
def test_a_file_or_folder_that_may_not_be_written_is_said(file_mode, folder_mode):
    if os.geteuid() != 0:
        lacking("root, which may become another user")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "kvaccord.db"
        filled(path)
        for file in folder.iterdir():
            file.chmod(0o666)
        path.chmod(file_mode)
        folder.chmod(folder_mode)
        before = files_of(folder)
        with as_nobody():
            text = refusal(path)
        assert "is read-only for user 65534; make both the file and its folder writable" in text
        assert files_of(folder) == before


def test_a_folder_that_cannot_be_made_is_said(tmp_path):
    (tmp_path / "file").touch()
    assert "check that it and its folder exist" in refusal(tmp_path / "file" / "kvaccord.db")


def test_two_links_lead_to_one_store(tmp_path, path):
    (tmp_path / "a.db").symlink_to(path)
    (tmp_path / "b").symlink_to(tmp_path)
    assert "where nothing is" in refusal(tmp_path / "a.db")
    filled(path)
    first = SqliteLog(str(tmp_path / "a.db"))
    assert "in use by another coordinator" in refusal(tmp_path / "b" / path.name)
    run(first.close())


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"garbage", "cannot be read: install the kvaccord that wrote it, or restore a backup"),
        (b'{"version":2,"events":[]}', "cannot be read: install the kvaccord that wrote it"),
        (7, "cannot be read"),
        (None, "is missing: restore a backup"),
    ],
)
def test_an_entry_that_cannot_be_read_is_named(path, body, why):
    filled(path)
    if body is None:
        changed(path, "delete from entries where n = 1")
    else:
        with closing(sqlite3.connect(path, isolation_level=None)) as db:
            db.execute("update entries set body = ? where n = 1", (body,))
    with pytest.raises(StoreUnreadable) as refused:
        run(read_all(path))
    text = one_sentence(refused.value)
    assert f"{path}: entry 1 of default/llama {why}" in text
    changed(path, "select 1")  # it was let go


# --- versions -----------------------------------------------------------------------------------


def test_a_store_of_version_1_is_read_and_goes_on(version_1):
    run(the_three_of_version_1(version_1))
    assert len(run(read_all(version_1))) == 4
    with closing(sqlite3.connect(version_1)) as db:
        assert db.execute("pragma user_version").fetchone() == (SCHEMA_VERSION,)


def test_a_store_of_version_1_that_was_killed_is_read_too(version_1, tmp_path):
    with closing(sqlite3.connect(version_1, isolation_level=None)) as db:
        db.execute("update entries set body = body")  # into the -wal
        live = tmp_path / "copy"
        live.mkdir()
        for tail in ("", "-wal"):
            shutil.copy(beside(version_1, tail), live)
    run(the_three_of_version_1(live / version_1.name))


def test_the_version_stands_in_the_file_itself_at_once(version_1):
    log = SqliteLog(str(version_1))
    assert int.from_bytes(version_1.read_bytes()[60:64], "big") == SCHEMA_VERSION
    run(log.close())


def test_a_store_that_version_1_has_open_is_in_use(version_1):
    with closing(sqlite3.connect(version_1, isolation_level=None)) as db:
        db.execute("pragma locking_mode = exclusive")
        db.execute("begin immediate")
        db.execute("commit")
        assert "in use by another coordinator" in refusal(version_1)
