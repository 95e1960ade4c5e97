"""The SQLite file and its world: what is not ours, lost, full, taken away, killed, copied."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import re
import resource
import shutil
import sqlite3
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.store import store_app
from coordinator.events import EngineName, Entry
from coordinator.logs import LogConflict, LogUnavailable, StoreUnreadable
from coordinator.logs.sqlite import SqliteLog
from coordinator.logs.sqlite_file import SCHEMA_VERSION
from tests.builders import lacking
from tests.test_logs import HOLDER, LLAMA, OTHER, an_entry, child, filled, read_all, run

VERSION_1 = Path(__file__).parent / "stores" / "version-1.db"  # made at tag issue-a-candidate


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kvaccord.db"


def beside(path: Path, tail: str) -> Path:
    return Path(f"{path}{tail}")


def one_sentence(error: BaseException) -> str:
    text = str(error)
    assert "\n" not in text
    assert len(text) < 500
    return text


def refusal(path: Path) -> str:
    with pytest.raises(StoreUnreadable) as refused:
        SqliteLog(str(path))
    return one_sentence(refused.value)


def files_of(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {p.name: (p.stat().st_mode, p.read_bytes()) for p in folder.iterdir() if p.is_file()}


def killed(path: Path, entries: int = 40) -> None:
    """Leaves the files of a coordinator that was killed with entries in its -wal."""

    async def story() -> None:
        live = path.parent / "live"
        live.mkdir()
        log = SqliteLog(str(live / path.name))
        for n in range(entries):
            await log.append(LLAMA, an_entry(n), n=n)
        for tail in ("", "-wal", "-lock"):  # the -shm ends with its host
            shutil.copy2(beside(live / path.name, tail), path.parent)
        await log.close()
        shutil.rmtree(live)

    run(story())
    assert beside(path, "-wal").stat().st_size > 0


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


def no_wal(path: Path) -> None:
    killed(path)
    beside(path, "-wal").unlink()


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
    assert CliRunner().invoke(store_app, ["backup", str(copy), "--store", url(path)]).exit_code == 0
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


def changed(path: Path, sql: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute(sql)


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


@pytest.fixture
def version_1(path: Path) -> Path:
    shutil.copy(VERSION_1, path)
    return path


async def the_three_of_version_1(path: Path) -> None:
    log = SqliteLog(str(path))
    assert log.store_id == "784fd3c0a72ae4be"
    assert log.key.hex().startswith("954a4067ec336df3")
    assert await log.read(LLAMA) == [an_entry(n) for n in range(3)]
    assert await log.read(OTHER) == [an_entry(9)]
    assert await log.elapsed(LLAMA) is None
    await log.save_elapsed(LLAMA, 1, "gather", 1.0)
    await log.append(LLAMA, an_entry(3), n=3)
    await log.close()


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


# --- group commit -------------------------------------------------------------------------------


def test_appends_that_wait_at_one_moment_share_a_transaction_and_fail_alone(path):
    async def story() -> list[str]:
        log = SqliteLog(str(path))
        said: list[str] = []
        await log._run(lambda: log._db.set_trace_callback(said.append))
        hold = asyncio.ensure_future(log._run(lambda: time.sleep(0.2)))
        names = [EngineName("default", f"e{i}") for i in range(64)]
        appends = [log.append(name, an_entry(i), n=0) for i, name in enumerate(names)]
        appends += [log.append(names[3], an_entry(99), n=5), log.append(names[4], an_entry(1), n=1)]
        answers = await asyncio.gather(*appends, return_exceptions=True)
        await hold
        assert [a for a in answers if a is not None] == [answers[64]]
        assert isinstance(answers[64], LogConflict)
        assert "default/e3: the log holds 1 entries, not 5" in str(answers[64])
        for i, name in enumerate(names):
            assert (await log.read(name))[0] == an_entry(i)
        assert len(await log.read(names[4])) == 2
        await log.close()
        return said

    said = run(story())
    assert said.count("commit") == 1
    assert said.index("pragma synchronous = full") < said.index("begin immediate")


def test_every_append_is_synced_whatever_was_saved_in_between(path):
    async def story() -> None:
        log = SqliteLog(str(path))
        said: list[str] = []
        await log._run(lambda: log._db.set_trace_callback(said.append))
        await log.save_elapsed(LLAMA, 1, "gather", 1.0)
        await log.append(LLAMA, an_entry(), n=0)
        await log.save_elapsed(LLAMA, 1, "gather", 2.0)
        await log.drop(LLAMA, 0)
        syncs = [text.rpartition(" ")[2] for text in said if "synchronous" in text]
        assert syncs == ["normal", "full", "normal", "full"]
        await log.close()

    run(story())


def test_what_has_elapsed_of_many_engines_is_saved_in_one_transaction(path):
    async def story() -> None:
        log = SqliteLog(str(path))
        said: list[str] = []
        await log._run(lambda: log._db.set_trace_callback(said.append))
        names = [EngineName("default", f"e{i}") for i in range(64)]
        await asyncio.gather(*(log.save_elapsed(n, 1, "gather", 1.0) for n in names))
        assert said.count("commit") == 1
        assert [await log.elapsed(name) for name in names] == [(1, "gather", 1.0)] * 64
        await log.close()

    run(story())


def test_after_a_commit_that_failed_the_log_is_asked_what_it_holds(path):
    async def story() -> None:
        log = SqliteLog(str(path))
        await log.append(LLAMA, an_entry(), n=0)
        other = sqlite3.connect(path)
        other.execute("begin immediate")
        with pytest.raises(LogUnavailable):
            await log.append(LLAMA, an_entry(1), n=1)
        # As a commit that was kept though it failed would have: not by this process's account.
        other.execute("insert into entries select namespace, engine, 1, body from entries")
        other.commit()
        other.close()
        with pytest.raises(LogConflict, match="holds 2 entries, not 1"):
            await log.append(LLAMA, an_entry(1), n=1)
        await log.append(LLAMA, an_entry(2), n=2)
        await log.close()

    run(story())


def test_a_caller_that_goes_away_leaves_nothing_behind(path):
    async def story() -> None:
        log = SqliteLog(str(path))
        hold = asyncio.ensure_future(log._run(lambda: time.sleep(0.1)))
        gone = asyncio.ensure_future(log.append(LLAMA, an_entry(1), n=0))
        await asyncio.sleep(0)
        gone.cancel()
        with pytest.raises(LogConflict):  # it was kept in its turn
            await log.append(LLAMA, an_entry(2), n=0)
        assert await log.read(LLAMA) == [an_entry(1)]
        await hold
        await log.close()

    run(story())


def test_what_waits_when_it_is_closed_is_kept_and_what_comes_later_is_refused(path):
    async def story() -> None:
        log = SqliteLog(str(path))
        waiting = asyncio.ensure_future(log.append(LLAMA, an_entry(0), n=0))
        await asyncio.sleep(0)
        await asyncio.gather(log.close(), log.close())
        await waiting
        for call in (log.append(LLAMA, an_entry(1), n=1), log.read(LLAMA), log.names()):
            with pytest.raises(LogUnavailable, match="has been closed"):
                await call
        await log.close()

    run(story())
    assert run(read_all(path)) == [an_entry(0)]


# --- trouble while it runs ----------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        lacking("root, which may mount a file system")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", disk], check=True)
    try:
        yield disk
    finally:
        subprocess.run(["umount", disk], check=True)


def fill(disk: Path) -> Path:
    """A file that takes all the room there is."""
    ballast = disk / "ballast"
    with suppress(OSError), ballast.open("ab", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    assert shutil.disk_usage(disk).free == 0
    return ballast


def test_a_full_disk_loses_nothing_and_is_left_behind_by_itself(small_disk):
    path = small_disk / "kvaccord.db"
    names = [EngineName("default", f"e{i}") for i in range(8)]
    kept: dict[EngineName, list[Entry]] = {name: [] for name in names}

    async def append(log: SqliteLog, name: EngineName) -> None:
        entry = an_entry(len(kept[name]))
        await log.append(name, entry, n=len(kept[name]))
        kept[name].append(entry)

    async def round_of(log: SqliteLog) -> list[Any]:
        return await asyncio.gather(*(append(log, n) for n in names), return_exceptions=True)

    async def story() -> None:
        log = SqliteLog(str(path))
        assert await round_of(log) == [None] * 8
        for _ in range(3):
            ballast = fill(small_disk)
            refused = [answer for _ in range(40) for answer in await round_of(log) if answer]
            assert refused
            assert {type(answer) for answer in refused} == {LogUnavailable}
            assert one_sentence(refused[-1]) == (
                f"{path}: the disk is full: make room on it, and the coordinator goes on by itself"
            )
            for name in names:  # it still reads
                assert await log.read(name) == kept[name]
            ballast.unlink()
            for _ in range(3):
                assert await round_of(log) == [None] * 8
        fill(small_disk)
        await log.close()

    run(story())

    async def again() -> None:
        (small_disk / "ballast").unlink()
        log = SqliteLog(str(path))
        for name in names:
            assert await log.read(name) == kept[name]
        await log.close()

    run(again())


def test_a_start_on_a_full_disk_is_said(small_disk):
    path = small_disk / "kvaccord.db"
    fill(small_disk)
    assert "lies on a disk that is full; make room there" in refusal(path)
    (small_disk / "ballast").unlink()
    filled(path)


def test_a_read_only_disk_is_said(small_disk):
    path = small_disk / "kvaccord.db"
    filled(path)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    assert "is read-only for user 0" in refusal(path)


def test_after_an_error_of_the_disk_it_goes_on_by_itself(path):
    async def story() -> None:
        log = SqliteLog(str(path))
        for n in range(5):
            await log.append(LLAMA, an_entry(n), n=n)
        await log.save_elapsed(LLAMA, 1, "gather", 3.0)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))  # writes fail beyond it
        try:
            for _ in range(3):
                with pytest.raises(LogUnavailable) as refused:
                    await log.append(LLAMA, an_entry(5), n=5)
                assert "disk I/O error: look at the disk and the kernel's log" in one_sentence(
                    refused.value
                )
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        await log.append(LLAMA, an_entry(5), n=5)
        # What was not synced before the error has been written once more.
        assert beside(path, "-wal").stat().st_size < 3 * 4096 + 200
        assert await log.elapsed(LLAMA) == (1, "gather", 3.0)
        await log.close()

    run(story())
    assert len(run(read_all(path))) == 6


@pytest.mark.parametrize("tail", ["", "-wal", "-shm", "-lock"])
@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_files_that_go_away_are_noticed_before_anything_is_acknowledged(path, tail, how):
    file, aside = beside(path, tail), beside(path, ".aside")

    async def story() -> None:
        log = SqliteLog(str(path))
        await log.append(LLAMA, an_entry(0), n=0)
        file.rename(aside)
        if how == "replaced":
            shutil.copy(aside, file)
        for call in (log.append(LLAMA, an_entry(1), n=1), log.read(LLAMA), log.names()):
            with pytest.raises(LogUnavailable) as refused:
                await call
            text = one_sentence(refused.value)
            assert text.startswith(f"{file} was removed or replaced while")
            assert "put the same file back" in text
        for call in (log.drop(LLAMA, 1), log.save_elapsed(LLAMA, 1, "gather", 1.0)):
            with pytest.raises(LogUnavailable):
                await call
        aside.replace(file)
        await log.append(LLAMA, an_entry(1), n=1)
        await log.close()

    run(story())
    assert run(read_all(path)) == [an_entry(0), an_entry(1)]


def test_a_file_that_goes_away_during_a_commit_is_noticed_too(path):
    async def story() -> None:
        log = SqliteLog(str(path))

        def slip(text: str) -> None:
            if text == "commit":
                path.rename(beside(path, ".aside"))

        await log._run(lambda: log._db.set_trace_callback(slip))
        with pytest.raises(LogUnavailable, match="was removed or replaced"):
            await log.append(LLAMA, an_entry(0), n=0)
        await log.close()

    run(story())


def test_a_closed_store_leaves_the_file_that_took_its_place(path, tmp_path):
    async def story() -> None:
        log = SqliteLog(str(path))
        await log.append(LLAMA, an_entry(0), n=0)
        for file in list(tmp_path.iterdir()):
            file.unlink()
        path.write_bytes(b"another")
        beside(path, "-wal").write_bytes(b"another's")
        await log.close()

    run(story())
    assert {n: body for n, (_, body) in files_of(tmp_path).items()} == {
        path.name: b"another",
        f"{path.name}-wal": b"another's",
    }


def test_another_program_that_locks_the_file_is_said(path):
    async def story() -> None:
        log = SqliteLog(str(path))
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("begin immediate")
            with pytest.raises(LogUnavailable, match="another program keeps the file locked"):
                await log.append(LLAMA, an_entry(0), n=0)
        await log.append(LLAMA, an_entry(0), n=0)
        await log.close()

    run(story())


# --- kill -9 ------------------------------------------------------------------------------------

ENGINES = [EngineName("default", f"e{i}") for i in range(8)]


def append_for_ever(path: str, acknowledged: Connection) -> None:
    async def one(log: SqliteLog, index: int) -> None:
        n = len(await log.read(ENGINES[index]))
        while True:
            await log.append(ENGINES[index], an_entry(n), n=n)
            n += 1
            acknowledged.send_bytes(b"kept %d %d" % (index, n))
            if n % 3 == 0:
                await log.save_elapsed(ENGINES[index], 1, "gather", float(n))
                acknowledged.send_bytes(b"elapsed %d %d" % (index, n))

    async def all_of_them() -> None:
        log = SqliteLog(path)
        await asyncio.gather(*(one(log, index) for index in range(len(ENGINES))))

    asyncio.run(all_of_them())


def test_nothing_acknowledged_is_lost_in_twenty_kills_under_concurrent_appends(path):
    chance = random.Random(8970)
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(["tests.test_store"])
    heard, elapsed = [0] * len(ENGINES), [0] * len(ENGINES)

    async def check() -> None:
        log = SqliteLog(str(path))
        for index, name in enumerate(ENGINES):
            entries = await log.read(name)
            assert entries == [an_entry(n) for n in range(len(entries))]
            # One more may have been kept than was heard of, never one less.
            assert len(entries) - heard[index] in (0, 1)
            _, _, seconds = await log.elapsed(name) or (1, "gather", 0.0)
            assert elapsed[index] <= seconds <= len(entries)
            heard[index], elapsed[index] = len(entries), int(seconds)
        await log.close()

    for _ in range(20):
        ours, theirs = forks.Pipe(duplex=False)
        writer = forks.Process(target=append_for_ever, args=(str(path), theirs))
        writer.start()
        theirs.close()
        assert ours.poll(20)
        time.sleep(chance.uniform(0, 0.05))
        writer.kill()
        with suppress(EOFError):
            while True:
                what, index, n = ours.recv_bytes().split()
                {b"kept": heard, b"elapsed": elapsed}[what][int(index)] = int(n)
        writer.join()
        run(check())
    assert min(heard) >= 20


# --- the command --------------------------------------------------------------------------------


def url(path: Path) -> str:
    return f"sqlite:///{path}"


def store(*args: str, code: int = 0) -> str:
    result = CliRunner().invoke(store_app, [*args])
    assert result.exit_code == code, result.output
    return result.output


def test_a_backup_is_whole_while_a_coordinator_appends(path, tmp_path):
    async def story() -> tuple[int, str]:
        log, n, done = SqliteLog(str(path)), 0, False

        async def append() -> None:
            nonlocal n
            while not done:
                await log.append(LLAMA, an_entry(n), n=n)
                n += 1

        appending = asyncio.ensure_future(append())
        for index in range(5):
            before = n
            copy = tmp_path / "backups" / f"{index}.db"
            copy.parent.mkdir(exist_ok=True)
            said = await asyncio.to_thread(store, "backup", str(copy), "--store", url(path))
            after = n
            assert f"{copy} holds store {log.store_id} with" in said
            assert stat.S_IMODE(copy.stat().st_mode) == 0o600
            entries = await read_all(copy)
            assert before <= len(entries) <= after + 1
            assert entries == [an_entry(i) for i in range(len(entries))]
        done = True
        await appending
        await log.close()
        return n, log.store_id

    n, _ = run(story())
    assert len(run(read_all(path))) == n
    assert not list((tmp_path / "backups").glob("*.part"))


@pytest.mark.parametrize("make", [killed, filled])
def test_a_store_at_rest_is_backed_up_and_stays_as_it_is(path, tmp_path, make):
    make(path)
    before = files_of(tmp_path)
    copies = tmp_path / "copies"
    copies.mkdir()
    store("backup", str(copies / "copy.db"), "--store", url(path))
    for tail in ("", "-lock"):
        assert files_of(tmp_path)[path.name + tail] == before[path.name + tail]
    assert run(read_all(copies / "copy.db")) == run(read_all(path)) != []


def test_a_backup_of_an_older_version_is_one(version_1, tmp_path):
    store("backup", str(tmp_path / "copy.db"), "--store", url(version_1))
    run(the_three_of_version_1(tmp_path / "copy.db"))


def test_what_cannot_be_backed_up_is_said(path, tmp_path):
    copy = tmp_path / "copies" / "copy.db"
    said = store("backup", str(copy), "--store", url(path), code=1)
    assert f"{path} holds no store" in said
    filled(path)
    said = store("backup", str(copy), "--store", url(path), code=1)
    assert f"{copy} cannot be written" in said
    said = store("backup", str(path), "--store", url(path), code=1)
    assert f"{path} is there already; name another file for the backup" in said
    assert "expected sqlite:///PATH" in store("backup", str(copy), "--store", "memory", code=1)
    path.write_bytes(b"something else" * 1000)
    copy.parent.mkdir()
    assert "no readable SQLite file" in store("backup", str(copy), "--store", url(path), code=1)
    assert not list(copy.parent.iterdir())


def test_a_backup_that_finds_no_room_leaves_nothing(path, small_disk):
    filled(path)
    fill(small_disk)
    said = store("backup", str(small_disk / "copy.db"), "--store", url(path), code=1)
    assert "there is no backup" in said
    assert [p.name for p in small_disk.iterdir()] == ["ballast"]


def test_a_restored_store_has_a_new_id_and_key_and_all_entries(path, tmp_path):
    old_id = filled(path)
    copy = tmp_path / "copy.db"
    store("backup", str(copy), "--store", url(path))

    async def go_on() -> bytes:
        log = SqliteLog(str(path))
        await log.append(LLAMA, an_entry(3), n=3)
        await log.close()
        return log.key

    old_key = run(go_on())
    copy.replace(path)
    assert "older copy" in refusal(path)
    said = store("restored", "--store", url(path), "--json")
    assert '"entries": 3' in said

    async def story() -> None:
        log = SqliteLog(str(path))
        assert log.store_id not in ("", old_id)
        assert log.store_id in said
        assert log.key != old_key
        assert len(log.key) == 32
        assert await log.read(LLAMA) == [an_entry(n) for n in range(3)]
        await log.append(LLAMA, an_entry(3), n=3)
        await log.close()

    run(story())
    assert len(run(read_all(path))) == 4


def test_a_store_that_lost_its_wal_goes_on_when_it_is_told_to(path):
    no_wal(path)
    refusal(path)
    store("restored", "--store", url(path))
    assert run(read_all(path)) == []


def test_restored_is_refused_while_a_coordinator_runs(path):
    with child(HOLDER, path) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "open\n"
        said = store("restored", "--store", url(path), code=1)
        assert "is in use by another coordinator; stop that one" in said
        holder.kill()
    store("restored", "--store", url(path))


def test_restored_makes_no_store(path, tmp_path):
    assert "holds no store" in store("restored", "--store", url(path), code=1)
    path.touch()
    assert "holds no store" in store("restored", "--store", url(path), code=1)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
