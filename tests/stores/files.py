"""A store's files: made, looked at, damaged, filled up; and the command that tends them."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.store import store_app
from coordinator.logs import StoreUnreadable
from coordinator.logs.sqlite import SqliteLog
from tests.test_logs import LLAMA, OTHER, an_entry, run

VERSION_1 = Path(__file__).parent / "version-1.db"  # made at tag issue-a-candidate


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


def no_wal(path: Path) -> None:
    killed(path)
    beside(path, "-wal").unlink()


def changed(path: Path, sql: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute(sql)


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


def fill(disk: Path) -> Path:
    """A file that takes all the room there is."""
    ballast = disk / "ballast"
    with suppress(OSError), ballast.open("ab", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    assert shutil.disk_usage(disk).free == 0
    return ballast


def url(path: Path) -> str:
    return f"sqlite:///{path}"


def store(*args: str, code: int = 0) -> str:
    result = CliRunner().invoke(store_app, [*args])
    assert result.exit_code == code, result.output
    return result.output
