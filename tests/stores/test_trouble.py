"""Trouble while it runs: the disk is full, fails, or has its files taken away."""

from __future__ import annotations

import asyncio
import resource
import shutil
import sqlite3
import subprocess
from contextlib import closing
from typing import Any

import pytest

from coordinator.events import EngineName, Entry
from coordinator.logs import LogUnavailable
from coordinator.logs.sqlite import SqliteLog
from tests.stores.files import beside, files_of, fill, one_sentence, refusal
from tests.test_logs import LLAMA, an_entry, filled, read_all, run


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
