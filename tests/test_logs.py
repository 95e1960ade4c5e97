"""One contract over every store: an entry is kept whole, in order, once, or not at all."""

from __future__ import annotations

import asyncio
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from coordinator.events import (
    Applied,
    Cause,
    Claimed,
    Cleared,
    Decided,
    Departed,
    Ended,
    EngineName,
    Entry,
    Event,
    Floor,
    Kept,
    Objected,
    Opened,
    Reported,
    Reserved,
    Retired,
    Serving,
    StillReserved,
    Suspected,
    Touch,
    Touched,
    entry_from,
)
from coordinator.logs import EngineLog, LogConflict, StoreUnreadable, open_log
from coordinator.logs.sqlite import SqliteLog
from coordinator.logs.sqlite_file import SCHEMA_VERSION
from coordinator.policy import Policy
from kvaccord import Layout, page, state
from kvaccord.messages import Device
from tests.builders import Log, a_join, a_launch, a_report

LLAMA = EngineName("default", "llama")
QWEN = EngineName("default", "qwen")
OTHER = EngineName("staging", "llama")
ODD_TEXT = 'NUL \x00 quote " back \\ line \n \u2028 face 😂 end'

TOUCH = Touch(
    rule="fault-1",
    kind="shrink_memory",
    call="report",
    ranks=(0, 3),
    field="free_bytes",
    before=2**53 - 1,
    after=1,
)
CAUSE = Cause(code="rank_vetoed", ranks=(3, 1), host="höst", text=ODD_TEXT, retryable=False)
JOIN = a_join(
    3,
    1,
    layout=Layout(dp=2, tp=2, equal_over=("dp",)),
    launch=a_launch("10.0.0.1:29500", 7, "master"),
    inputs={"flag": True, "n": -(2**53) + 1, "text": ODD_TEXT},
    engine_version="atom 1",
    device=Device(uuid="GPU-1", total_bytes=2**50),
)
REPORT = a_report(
    -5,
    total_bytes=2**53 - 1,
    max_num_seqs=8,
    inputs={"a": True, "b": 1},
    inputs_stage={},
    parts={"utilization_ppm": 900000},
    classes=[page("kv", 1000, min_entries=0), state("slot", 10, extra_entries=2)],
)
EVENTS: list[Event] = [
    Reserved(attempt=1, join=JOIN, touched=(TOUCH,)),
    Reserved(attempt=2, join=a_join(0)),
    Opened(
        round=1,
        launch=JOIN.launch,
        layout=JOIN.layout,
        mode="enforce",
        policy=Policy(gather_s=0.75),
    ),
    Claimed(round=1, attempt=1),
    Reported(round=1, attempt=1, reports={3: REPORT, 1: a_report()}, planned={3: a_report(1)}),
    Objected(round=1, attempt=1, gone=True, cause=CAUSE, trace=ODD_TEXT),
    Objected(round=1, attempt=1, gone=False, cause=Cause(code="superseded", ranks=(), text="x")),
    Suspected(round=1, attempt=1, connection="abc"),
    Cleared(round=1, attempt=1),
    Applied(round=1, attempt=1, built={"kv": 2**53 - 1, "slot": 0}),
    Applied(round=1, attempt=1, built={3: {"kv": 70}, 1: {"kv": 70, "slot": 4}, 0: {}}),
    Applied(round=1, attempt=1, built={}),
    Touched(round=1, touches=(TOUCH, TOUCH)),
    Decided(round=1, result="PASSED", document='{"text":"' + "\\u0000 😂" + '"}'),
    Ended(round=1, result="ABORTED", document="{}"),
    Serving(round=1, attempt=1),
    Departed(round=1, attempt=1, why="left"),
    Retired(round=1, reason="moved"),
    Kept(round=1, snapshot={"number": 1}),
    Kept(round=1, snapshot={"members": {}}, more=True),
    StillReserved(reservations={}),
    Floor(rounds=(1,), last_attempt=7, left_runs={"run-0": 3}),
    Floor(rounds=(1,), last_attempt=7, left_runs={"run-0": 3}, reservations={}),
]


def an_entry(n: int = 1) -> Entry:
    return Entry(events=(Claimed(round=1, attempt=n),))


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(coroutine)


@pytest.fixture(params=["memory", "sqlite"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], EngineLog]:
    """Opens a new store of this kind."""
    if request.param == "memory":
        return lambda: open_log("memory")
    return lambda: open_log(f"sqlite:///{tmp_path / 'kvaccord.db'}")


# --- the contract -------------------------------------------------------------------------------


def test_every_event_has_an_example_here():
    assert {type(event) for event in EVENTS} == set(Event.__args__)


def test_entries_are_read_as_they_were_appended_in_order(opened):
    async def story():
        log = opened()
        entries = [Entry(events=(event,)) for event in EVENTS] + [Entry(events=tuple(EVENTS))]
        for n, entry in enumerate(entries):
            await log.append(LLAMA, entry, n=n)
        assert await log.read(LLAMA) == entries
        await log.close()

    run(story())


def test_a_whole_start_comes_back_as_it_was(opened):
    told = Log()
    told.sealed(90, 70)

    async def story():
        log = opened()
        for n, body in enumerate(told.entries):
            await log.append(LLAMA, entry_from(body), n=n)
        assert [entry.to_bytes() for entry in await log.read(LLAMA)] == told.entries
        await log.close()

    run(story())


@pytest.mark.parametrize("n", [0, 1, 3, -1])
def test_an_entry_is_appended_at_its_number_or_not_at_all(opened, n):
    async def story():
        log = opened()
        await log.append(LLAMA, an_entry(1), n=0)
        await log.append(LLAMA, an_entry(2), n=1)
        with pytest.raises(LogConflict, match=r"default/llama: the log holds 2 entries, not"):
            await log.append(LLAMA, an_entry(3), n=n)
        assert await log.read(LLAMA) == [an_entry(1), an_entry(2)]
        await log.append(LLAMA, an_entry(4), n=2)
        await log.close()

    run(story())


def test_of_many_writers_at_one_number_one_wins(opened):
    async def story():
        log = opened()
        said = await asyncio.gather(
            *(log.append(LLAMA, an_entry(i), n=0) for i in range(20)), return_exceptions=True
        )
        assert sum(answer is None for answer in said) == 1
        assert sum(isinstance(answer, LogConflict) for answer in said) == 19
        assert await log.read(LLAMA) == [an_entry(said.index(None))]
        await log.close()

    run(story())


def test_engines_have_logs_of_their_own(opened):
    async def story():
        log = opened()
        for n, name in enumerate([LLAMA, QWEN, OTHER]):
            await log.append(name, an_entry(n), n=0)
        assert set(await log.names()) == {LLAMA, QWEN, OTHER}
        assert await log.read(OTHER) == [an_entry(2)]
        await log.close()

    run(story())


def test_an_engine_that_never_was_has_no_entries_and_no_name(opened):
    async def story():
        log = opened()
        assert await log.read(LLAMA) == []
        with pytest.raises(LogConflict):
            await log.append(LLAMA, an_entry(), n=5)
        assert await log.names() == []
        await log.close()

    run(story())


@pytest.mark.parametrize(
    ("below", "kept"), [(-1, [0, 1, 2]), (0, [0, 1, 2]), (1, [1, 2]), (2, [2]), (3, [2]), (9, [2])]
)
def test_what_is_dropped_is_gone_and_numbers_go_on(opened, below, kept):
    async def story():
        log = opened()
        for n in range(3):
            await log.append(LLAMA, an_entry(n), n=n)
        await log.append(QWEN, an_entry(7), n=0)
        for _ in range(2):  # to drop what is gone is nothing
            await log.drop(LLAMA, below)
        assert await log.first(LLAMA) == kept[0]
        assert await log.read(LLAMA) == [an_entry(n) for n in kept]
        for wrong in (0, 2, len(kept) if len(kept) < 3 else 5):
            with pytest.raises(LogConflict, match="holds 3 entries, not"):
                await log.append(LLAMA, an_entry(9), n=wrong)
        await log.append(LLAMA, an_entry(3), n=3)
        assert await log.read(LLAMA) == [an_entry(n) for n in [*kept, 3]]
        assert (await log.read(QWEN), await log.first(QWEN)) == ([an_entry(7)], 0)
        assert set(await log.names()) == {LLAMA, QWEN}
        await log.close()

    run(story())


def test_of_an_engine_that_never_was_nothing_is_dropped(opened):
    async def story():
        log = opened()
        await log.drop(LLAMA, 5)
        assert await log.first(LLAMA) == 0
        assert await log.names() == []
        await log.append(LLAMA, an_entry(), n=0)
        await log.close()

    run(story())


@pytest.mark.parametrize(
    ("saved", "kept"),
    [
        ([(1, "gather", 2.5)], (1, "gather", 2.5)),
        ([(1, "gather", 2.5), (1, "gather", 1.0)], (1, "gather", 2.5)),
        ([(1, "gather", 9.0), (1, "report", 0.0)], (1, "report", 0.0)),
        ([(1, "report", 0.5), (1, "gather", 9.0)], (1, "report", 0.5)),
        ([(1, "apply", 0.5), (1, "report", 9.0)], (1, "apply", 0.5)),
        ([(1, "apply", 9.0), (2, "gather", 0.0)], (2, "gather", 0.0)),
        ([(10, "gather", 0.0), (9, "apply", 9.0)], (10, "gather", 0.0)),
    ],
)
@pytest.mark.parametrize("at_once", [False, True])
def test_of_what_has_elapsed_the_furthest_is_kept(opened, saved, kept, at_once):
    async def story():
        log = opened()
        assert await log.elapsed(LLAMA) is None
        await log.save_elapsed(QWEN, 1, "gather", 99.0)
        saves = [log.save_elapsed(LLAMA, *each) for each in saved]
        if at_once:
            await asyncio.gather(*saves)
        else:
            for save in saves:
                await save
        assert await log.elapsed(LLAMA) == kept
        assert await log.names() == []  # it is no entry
        await log.close()

    run(story())


def test_a_store_may_be_closed_twice(opened):
    async def story():
        log = opened()
        await log.append(LLAMA, an_entry(), n=0)
        await log.close()
        await log.close()

    run(story())


def test_every_store_has_an_id_and_a_key_of_its_own(tmp_path):
    logs = [open_log("memory"), open_log("memory")]
    logs += [open_log(f"sqlite:///{tmp_path}/{n}.db") for n in range(2)]
    assert len({log.store_id for log in logs}) == len({log.key for log in logs}) == 4
    assert all(len(log.key) == 32 for log in logs)
    assert all("." not in log.store_id for log in logs)  # it is the first part of a token
    for log in logs:
        run(log.close())


# --- what is stored -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"garbage",
        b'{"version":1,"events":[{"event":"unheard_of","round":1}]}',
        b'{"version":1,"events":[{"event":"claimed","round":1}]}',
        b'{"version":1,"events":[],"more":1}',
    ],
)
def test_what_no_version_wrote_is_not_read(body):
    with pytest.raises(ValueError):  # noqa: PT011  pydantic's own
        entry_from(body)


@pytest.mark.parametrize("version", [0, 2, 99])
def test_an_entry_of_another_version_is_not_read(version):
    body = an_entry().to_bytes().replace(b'"version":1', b'"version":%d' % version)
    with pytest.raises(ValueError):  # noqa: PT011  pydantic's own
        entry_from(body)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.event)
def test_bytes_that_are_read_are_written_again_as_they_were(event):
    body = Entry(events=(event,)).to_bytes()
    assert entry_from(body).to_bytes() == body


@pytest.mark.parametrize("seconds", [float("inf"), float("nan")])
def test_a_budget_has_an_end(seconds):
    # JSON has neither: it would be written as null, and the log never read again.
    with pytest.raises(ValueError):  # noqa: PT011  pydantic's own
        Policy(gather_s=seconds)


# --- SQLite -------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kvaccord.db"


def filled(path: Path, entries: int = 3) -> str:
    """A store with some entries of one engine; its id."""

    async def story() -> str:
        log = SqliteLog(str(path))
        for n in range(entries):
            await log.append(LLAMA, an_entry(n), n=n)
        await log.close()
        return log.store_id

    return run(story())


def test_a_store_is_the_same_when_it_is_opened_again(path):
    store_id = filled(path)

    async def story():
        log = SqliteLog(str(path))
        assert log.store_id == store_id
        assert len(log.key) == 32
        assert await log.names() == [LLAMA]
        assert await log.read(LLAMA) == [an_entry(n) for n in range(3)]
        with pytest.raises(LogConflict):
            await log.append(LLAMA, an_entry(), n=0)
        await log.append(LLAMA, an_entry(3), n=3)
        await log.close()

    run(story())


WRITER = """
import asyncio, sys
from coordinator.events import Claimed, EngineName, Entry
from coordinator.logs.sqlite import SqliteLog

async def main():
    log, llama = SqliteLog(sys.argv[1]), EngineName("default", "llama")
    for n in range(10**6):
        await log.append(llama, Entry(events=(Claimed(round=1, attempt=n),)), n=n)
        print(n, flush=True)

asyncio.run(main())
"""
HOLDER = """
import sys
from coordinator.logs.sqlite import SqliteLog
log = SqliteLog(sys.argv[1])
print("open", flush=True)
sys.stdin.read()
"""


def child(code: str, path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=Path(__file__).parents[1],
    )


@pytest.mark.parametrize("lines", [1, 50, 400])
def test_what_was_acknowledged_survives_a_kill(path, lines):
    with child(WRITER, path) as writer:
        for _ in range(lines):
            last = int(writer.stdout.readline())
        writer.send_signal(signal.SIGKILL)
        acknowledged = [last, *(int(line) for line in writer.stdout if line.endswith("\n"))]
    entries = run(read_all(path))
    assert entries == [an_entry(n) for n in range(len(entries))]
    # One more may have been kept than was heard of, never one less.
    assert len(entries) - 1 in (acknowledged[-1], acknowledged[-1] + 1)


async def read_all(path: Path) -> list[Entry]:
    log = SqliteLog(str(path))
    entries = await log.read(LLAMA)
    await log.close()
    return entries


def test_a_second_process_is_refused_until_the_first_is_gone(path):
    with child(HOLDER, path) as holder:
        assert holder.stdout.readline() == "open\n"
        with pytest.raises(StoreUnreadable, match="in use by another coordinator"):
            SqliteLog(str(path))
        holder.kill()
    assert filled(path)


def test_a_second_log_in_one_process_is_refused_too(path):
    first = SqliteLog(str(path))
    with pytest.raises(StoreUnreadable, match="in use by another coordinator"):
        SqliteLog(str(path))
    run(first.append(LLAMA, an_entry(), n=0))
    run(first.close())


def test_a_refused_second_log_leaves_the_first_ones_lock(path):
    # POSIX drops all of a process's locks on a file when it closes any descriptor of that file.
    first = SqliteLog(str(path))
    with pytest.raises(StoreUnreadable):
        SqliteLog(str(path))
    with child(HOLDER, path) as third:
        third.stdin.close()
        assert third.stdout.read() == ""
    run(first.close())


def test_missing_folders_are_made(tmp_path):
    path = tmp_path / "var" / "lib" / "kvaccord.db"
    filled(path)
    assert path.exists()


def test_an_empty_file_is_a_new_store(path):
    path.touch()
    filled(path)
    assert len(run(read_all(path))) == 3


def files_of(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def someone_elses(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("create table photos (id integer, body blob)")
        db.execute("insert into photos values (1, 'mine')")
    db.close()


def someone_elses_in_wal(path: Path) -> None:
    someone_elses(path)
    db = sqlite3.connect(path)
    db.execute("pragma journal_mode = wal")
    db.close()


def a_newer_one(path: Path) -> None:
    filled(path)
    db = sqlite3.connect(path)
    db.execute(f"pragma user_version = {SCHEMA_VERSION + 1}")
    db.close()


def a_text(path: Path) -> None:
    path.write_bytes(b"budgets:\n  gather_s: 1800\n" * 100)


def a_short_text(path: Path) -> None:
    path.write_bytes(b"TOKEN=abc\n")


def a_truncated_one(path: Path) -> None:
    filled(path, entries=400)
    path.write_bytes(path.read_bytes()[:4096])


def one_with_a_torn_page(path: Path) -> None:
    filled(path, entries=400)
    body = bytearray(path.read_bytes())
    body[4096 : 4096 + 512] = b"\xff" * 512
    path.write_bytes(body)


REFUSED = [
    (someone_elses, "not a kvaccord store"),
    (someone_elses_in_wal, "not a kvaccord store"),
    (a_newer_one, "written by a newer kvaccord"),
    (a_text, "no readable SQLite file"),
    (a_short_text, "no readable SQLite file"),
    (a_truncated_one, "no readable SQLite file"),
    (one_with_a_torn_page, "no readable SQLite file"),
]


@pytest.mark.parametrize(("make", "why"), REFUSED, ids=lambda v: getattr(v, "__name__", ""))
def test_what_is_not_ours_to_read_is_refused_with_a_sentence(path, make, why):
    make(path)
    with pytest.raises(StoreUnreadable) as refused:
        SqliteLog(str(path))
    assert why in str(refused.value)
    assert str(path) in str(refused.value)
    assert "--store" in str(refused.value)


@pytest.mark.parametrize(("make", "why"), REFUSED, ids=lambda v: getattr(v, "__name__", ""))
def test_what_is_refused_is_left_as_it_is(tmp_path, path, make, why):
    make(path)
    before = files_of(tmp_path)
    with pytest.raises(StoreUnreadable):
        SqliteLog(str(path))
    assert files_of(tmp_path) == before


def test_a_refused_file_is_let_go(path):
    someone_elses(path)
    try:
        SqliteLog(str(path))
    except StoreUnreadable as error:
        kept = error  # a traceback must not keep the file locked
    db = sqlite3.connect(path, timeout=0.1)
    db.execute("insert into photos values (2, 'more')")
    db.close()
    assert kept


def test_a_failed_append_leaves_the_store_usable(path):
    async def story():
        log = SqliteLog(str(path))
        await log.append(LLAMA, an_entry(0), n=0)
        with pytest.raises(LogConflict):
            await log.append(LLAMA, an_entry(9), n=9)
        await log.append(LLAMA, an_entry(1), n=1)
        assert len(await log.read(LLAMA)) == 2
        await log.close()

    run(story())


def test_a_copy_of_the_files_is_a_backup(path, tmp_path):
    async def story():
        log = SqliteLog(str(path))
        for n in range(5):
            await log.append(LLAMA, an_entry(n), n=n)
        copy = tmp_path / "copy"
        copy.mkdir()
        for file in path.parent.glob("kvaccord.db*"):
            shutil.copy(file, copy)
        await log.close()
        return copy / path.name

    copy = run(story())
    assert run(read_all(copy)) == [an_entry(n) for n in range(5)]


@pytest.mark.parametrize("url", ["", "sqlite", "sqlite:", "sqlite://x", "sqlite:///", "etcd://h"])
def test_another_spelling_of_a_store_is_refused(url):
    with pytest.raises(ValueError, match="expected"):
        open_log(url)
