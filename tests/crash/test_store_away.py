"""The store fills up, or its file is taken away, under a coordinator that serves."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.builders import mounted
from tests.crash.server import Server, serving
from tests.wire import Worker, an_engine

TIGHT = ("--gather-s", "3", "--report-s", "3", "--apply-s", "3", "--lost-after-s", "2")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", size="1m") as disk:
        yield disk


def a_pair(server: Server) -> list[Worker]:
    engine = an_engine()
    return [Worker(server.url, engine, rank, tp=2).enter() for rank in range(2)]


def fill(disk: Path) -> Path:
    ballast = disk / "ballast"
    with contextlib.suppress(OSError), ballast.open("ab", buffering=0) as file:
        while True:
            file.write(bytes(512))
    return ballast


def refusal(worker: Worker) -> str:
    """Repeats a join of another process until it is refused, which must be in one sentence."""
    for n in range(200):
        other = Worker(str(worker.http.base_url), f"filler-{n}", 0)
        answer = other.join()
        if answer.status_code != 200:
            assert answer.status_code == 503
            problem = answer.json()
            assert problem["code"] == "unavailable"
            assert answer.headers["Retry-After"] == "1"
            return str(problem["detail"])
    raise AssertionError("a full disk took 200 joins")


def test_a_full_disk_is_said_loses_nothing_and_spends_no_budget(
    small_disk: Path, tmp_path: Path
) -> None:
    with serving(tmp_path, *TIGHT, store=small_disk / "kvaccord.db") as server:
        first, second = a_pair(server)
        assert first.report().status_code == 202
        ballast = fill(small_disk)
        assert "the disk is full: make room on it" in refusal(first)
        assert server.ready() == 503
        refused = second.report()
        assert refused.status_code == 503, "nothing is acknowledged that is not kept"
        assert first.http.get(f"{first.at}/status").json()["state"] == "REPORTING", "it still reads"
        time.sleep(5)  # longer than the budget, which stands still
        ballast.unlink()
        decision = second.report(wait_s=10)
        assert decision.status_code == 200, decision.text
        assert decision.json()["verdict"]["outcome"] == "PASSED"
        assert server.ready() == 200
        digest = decision.headers["Kvaccord-Digest"]
        first.applied(digest, kv=90)
        fill(small_disk)
        server.kill()
        (small_disk / "ballast").unlink()
        server.start()
        assert first.decision().content == decision.content
        for worker in (first, second):
            worker.attach()
        assert second.applied(digest, wait_s=5, kv=90).json()["outcome"] == "SEALED"


def test_a_store_that_is_taken_away_is_said_at_once_and_nothing_more_is_acknowledged(
    tmp_path: Path,
) -> None:
    with serving(tmp_path, *TIGHT) as server:
        first, second = a_pair(server)
        assert first.report().status_code == 202
        aside = tmp_path / "aside.db"
        server.store.rename(aside)
        refused = second.report()
        assert refused.status_code == 503
        detail = refused.json()["detail"]
        assert f"{server.store} was removed or replaced while this coordinator" in detail
        assert "put the same file back" in detail
        assert server.ready() == 503
        joining = Worker(server.url, an_engine(), 0)
        assert joining.join().status_code == 503
        time.sleep(4)  # longer than the budget
        aside.replace(server.store)
        decision = second.report(wait_s=10)
        assert decision.json()["verdict"]["outcome"] == "PASSED"
        server.kill()
        server.start()
        assert first.decision().content == decision.content


def test_a_store_that_was_removed_for_good_tells_old_ranks_so(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        first, _ = a_pair(server)
        for file in tmp_path.glob("kvaccord.db*"):
            file.unlink()
        assert first.report().status_code == 503
        server.kill()
        server.start()
        answer = first.report()
        assert (answer.status_code, answer.json()["code"]) == (410, "store_replaced")


def test_a_budget_stands_still_while_the_store_is_away_also_when_nobody_calls(
    tmp_path: Path,
) -> None:
    with serving(tmp_path, "--gather-s", "5", "--lost-after-s", "20") as server:
        first = Worker(server.url, an_engine(), 0, tp=2).enter()
        aside = tmp_path / "aside.db"
        server.store.rename(aside)
        time.sleep(7)
        aside.replace(server.store)
        began_s = time.monotonic()
        verdict = first.report(wait_s=20).json()["verdict"]
        assert verdict["code"] == "ranks_missing"
        # A tick or two pass before the absence is noticed; most of the budget is left.
        assert time.monotonic() - began_s > 1.5
