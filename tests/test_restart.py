"""The coordinator is killed or stopped and started again on its SQLite store."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.wire import Coordinator, Worker, an_engine, serving


@pytest.fixture
def durable(tmp_path: Path) -> Iterator[Coordinator]:
    budgets = ("--gather-s", "4", "--report-s", "4", "--apply-s", "4", "--lost-after-s", "2")
    with serving(*budgets, store=f"sqlite:///{tmp_path}/kvaccord.db") as running:
        yield running


def a_pair(durable: Coordinator) -> list[Worker]:
    engine = an_engine()
    return [Worker(durable.url, engine, rank, tp=2).enter() for rank in range(2)]


def test_what_was_acknowledged_survives_kill_9(durable: Coordinator) -> None:
    first, second = a_pair(durable)
    first.report()
    durable.kill()
    durable.start()
    for worker in (first, second):
        worker.attach()
    decision = second.report(wait_s=5)
    assert decision.json()["verdict"]["outcome"] == "PASSED"
    durable.kill()
    durable.start()
    assert first.decision().content == decision.content
    assert first.report().content == decision.content
    what = decision.headers["Kvaccord-Digest"]
    for worker in (first, second):
        worker.attach()
        sealed = worker.applied(what, kv=90, wait_s=1)
    assert sealed.json()["outcome"] == "SEALED"


def test_a_repeated_join_gets_the_same_token_after_kill_9(durable: Coordinator) -> None:
    worker = Worker(durable.url, an_engine(), 0, tp=2)
    before = worker.join().json()
    durable.kill()
    durable.start()
    assert worker.join().json() == before


def test_a_rank_killed_under_a_coordinator_only_seconds_old_is_known_within_3_s(
    durable: Coordinator,
) -> None:
    first, second = a_pair(durable)
    durable.kill()
    durable.start()
    for worker in (first, second):
        worker.attach()
    second.hang_up()
    began = time.monotonic()
    verdict = first.report(wait_s=10).json()["verdict"]
    assert (verdict["code"], verdict["ranks"]) == ("rank_lost", [1])
    assert time.monotonic() - began < 3


def test_a_rank_that_does_not_come_back_to_a_new_coordinator_is_lost_after_its_time(
    durable: Coordinator,
) -> None:
    first, _ = a_pair(durable)
    durable.kill()
    durable.start()
    began = time.monotonic()
    first.attach()
    verdict = first.report(wait_s=10).json()["verdict"]
    assert (verdict["code"], verdict["ranks"]) == ("rank_lost", [1])
    assert 2.0 <= time.monotonic() - began < 2 + 3


def test_a_rank_killed_after_the_verdict_aborts_the_round_within_lost_after_s_and_3_s(
    durable: Coordinator,
) -> None:
    first, second = a_pair(durable)
    first.report()
    what = second.report(wait_s=5).headers["Kvaccord-Digest"]
    second.hang_up()
    began = time.monotonic()
    outcome = first.applied(what, wait_s=10, kv=90).json()
    assert (outcome["outcome"], outcome["code"], outcome["ranks"]) == ("ABORTED", "rank_lost", [1])
    assert 2.0 <= time.monotonic() - began < 2 + 3


def test_sigterm_answers_waiting_calls_ends_streams_and_makes_nobody_suspect(
    durable: Coordinator,
) -> None:
    first, second = a_pair(durable)
    first.report()
    began = time.monotonic()
    durable.stop()
    assert time.monotonic() - began < 3
    assert [event for event, _, _ in second.events()][-1] == "move"
    durable.start()
    status = first.http.get(f"{first.at}/status").json()
    assert [m["presence"] for m in status["members"]] == ["unwatched", "unwatched"]
    for worker in (first, second):
        worker.attach()
    assert second.report(wait_s=5).json()["verdict"]["outcome"] == "PASSED"


def test_a_store_in_use_is_refused_and_told_what_to_do(
    durable: Coordinator, tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError, match="in use by another coordinator; stop that one"):
        Coordinator(store=f"sqlite:///{tmp_path}/kvaccord.db")


def test_an_unknown_store_is_refused() -> None:
    with pytest.raises(RuntimeError, match="expected memory or sqlite:///PATH"):
        Coordinator(store="redis://x")


def test_a_budget_goes_on_after_a_restart_where_it_was(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/kvaccord.db"
    with serving("--gather-s", "8", store=store) as running:
        began = time.monotonic()
        first = Worker(running.url, an_engine(), 0, tp=2).enter()
        time.sleep(4.5)
        running.kill()
        running.start()
        first.attach()
        verdict = first.report(wait_s=20).json()["verdict"]
        took = time.monotonic() - began
    assert verdict["code"] == "ranks_missing"
    assert 8.0 <= took < 8 + 4, "not early, and not the whole budget again"


def test_old_rounds_are_dropped_and_the_agreed_budget_outlives_them(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("rules:\n- set: {keep_rounds: 2}\n")
    store = f"sqlite:///{tmp_path}/kvaccord.db"
    with serving("--policy", str(policy), store=store) as running:
        engine = an_engine()
        pair = [Worker(running.url, engine, rank, tp=2).enter() for rank in range(2)]
        pair[0].report()
        decision = pair[1].report(wait_s=5)
        for worker in pair:
            worker.applied(decision.headers["Kvaccord-Digest"], kv=90)
        for worker in pair:
            worker.hang_up()
        time.sleep(0.2)
        for n in range(7):
            worker = Worker(running.url, engine, 0, tp=2, run=f"run-{n + 2}").enter()
            worker.veto("broken")
            worker.report(wait_s=5)
        running.kill()
        running.start()
        http, base = worker.http, worker.base
        rounds = [r["round"] for r in http.get(f"{base}/rounds").json()["rounds"]]
        assert rounds[0] == 8
        assert rounds[-1] == 1
        assert len(rounds) <= 2 * 2 + 2
        assert http.get(f"{base}/rounds/1/decision").content == decision.content
        assert http.get(f"{base}/rounds/2/decision").status_code == 404
        (row,) = http.get("/v1/budgets", params={"engine": engine}).json()["budgets"]
        assert row["agreed"]["round"] == 1


@pytest.mark.parametrize("after_s", [0.3, 0.45])
def test_sigterm_in_the_grace_of_a_veto_stops_too(after_s: float) -> None:
    with serving() as running:
        first = Worker(running.url, an_engine(), 0, tp=2).enter()
        slow = socket.create_connection(("127.0.0.1", running.port))
        slow.sendall(b"POST /v1/plan HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
        first.veto("broken")
        time.sleep(after_s)
        began = time.monotonic()
        running.stop()
        assert time.monotonic() - began < 6
        slow.close()
