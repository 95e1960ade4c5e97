"""Appends at one moment, and kill -9 in the middle of them."""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import sqlite3
import time
from contextlib import suppress
from multiprocessing.connection import Connection

import pytest

from coordinator.events import EngineName
from coordinator.logs import LogConflict, LogUnavailable
from coordinator.logs.sqlite import SqliteLog
from tests.test_logs import LLAMA, an_entry, read_all, run

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
    forks.set_forkserver_preload([__name__])
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
