"""`kvaccord store`: a backup while a coordinator runs, and a restored one."""

from __future__ import annotations

import asyncio
import stat

import pytest

from coordinator.logs.sqlite import SqliteLog
from tests.stores.files import (
    files_of,
    fill,
    killed,
    no_wal,
    refusal,
    store,
    the_three_of_version_1,
    url,
)
from tests.test_logs import HOLDER, LLAMA, an_entry, child, filled, read_all, run


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
