"""Progress, operators' orders, and what follows the seal, over the wire."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.wire import Coordinator, Worker, a_report, an_engine, serving

POLICY = """
rules:
- match: {engine: "engine-*"}
  set:
    report_s: {soft: 1.0, hard: 30.0}
    stall_s: 1.5
    shortfall_grace_s: 0.5
"""


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    """A coordinator that calls a rank stuck after 1.5 s without progress."""
    file = tmp_path_factory.mktemp("policy") / "policy.yaml"
    file.write_text(POLICY)
    with serving("--policy", str(file)) as running:
        yield running


def a_pair(url: str, **changes: object) -> list[Worker]:
    engine = an_engine()
    workers = []
    for rank in range(2):
        worker = Worker(url, engine, rank, tp=2)
        worker.document |= changes
        workers.append(worker.enter())
    return workers


def sealed(workers: list[Worker]) -> None:
    for worker in workers:
        answer = worker.report(wait_s=0.2)
    for worker in workers:
        worker.applied(answer.headers["Kvaccord-Digest"], kv=90)


def post(worker: Worker, what: str, body: object = None) -> httpx.Response:
    return worker.http.post(f"{worker.at}/{what}", json=body, headers=worker.headers)


def progress(worker: Worker, n: int) -> None:
    answer = post(worker, "phase", {"phase": "loading weights", "progress": n})
    assert answer.status_code == 204


def test_a_rank_without_progress_is_stuck_at_the_soft_end_and_says_where(
    strict: Coordinator,
) -> None:
    first, second = a_pair(strict.url)
    progress(second, 1)
    began = time.monotonic()
    for n in range(8):
        progress(first, n)
        time.sleep(0.25)
    verdict = first.report(wait_s=5).json()["verdict"]
    assert (verdict["code"], verdict["ranks"]) == ("rank_stuck", [1])
    assert "'loading weights'" in verdict["message"]
    assert 1.5 <= time.monotonic() - began < 5


def test_whoever_makes_progress_may_go_on_past_the_soft_end(strict: Coordinator) -> None:
    first, second = a_pair(strict.url)
    first.report()
    for n in range(10):
        progress(second, n)
        time.sleep(0.25)
    assert second.report(wait_s=5).json()["verdict"]["outcome"] == "PASSED"


def test_the_same_progress_again_is_none(strict: Coordinator) -> None:
    first, second = a_pair(strict.url)
    first.report()
    for _ in range(10):
        progress(second, 7)
        time.sleep(0.25)
    assert first.report(wait_s=5).json()["verdict"]["code"] == "rank_stuck"


def test_a_shortfall_is_told_before_the_others_have_reported(strict: Coordinator) -> None:
    first, second = a_pair(strict.url)
    progress(second, 1)
    began = time.monotonic()
    verdict = first.report(kv_budget_bytes=-1, wait_s=5).json()["verdict"]
    assert (verdict["code"], verdict["ranks"], verdict["not_heard"]) == ("does_not_fit", [0], [1])
    assert 0.5 <= time.monotonic() - began < 1.5


def test_an_operator_cancels_and_every_rank_hears_why(url: str) -> None:
    first, second = a_pair(url)
    answer = post(first, "cancel", {"reason": "wrong checkpoint"})
    assert answer.json()["verdict"]["code"] == "cancelled"
    assert second.report().content == answer.content
    assert post(first, "cancel", {}).status_code == 422


def test_an_operator_retires_what_is_in_force(url: str) -> None:
    first, second = workers = a_pair(url)
    sealed(workers)
    name = first.base.rsplit("/", 1)[1]
    assert post(first, "retire", {"reason": "moved"}).json()["standing"] == "retired"
    (row,) = httpx.get(f"{url}/v1/budgets", params={"engine": name}).json()["budgets"]
    assert "agreed" not in row
    assert second.round == 1


def test_a_member_that_serves_and_dies_breaks_the_standing(durable: Coordinator) -> None:
    first, second = workers = a_pair(durable.url)
    sealed(workers)
    for worker in workers:
        assert post(worker, "serving").json() == {"standing": "whole", "ranks": []}
    second.hang_up()
    deadline = time.monotonic() + 6
    while time.monotonic() < deadline:
        standing = post(first, "serving").json()
        if standing["standing"] == "broken":
            break
        time.sleep(0.1)
    assert standing == {"standing": "broken", "ranks": [1]}
    assert first.http.get(f"{first.at}/status").json()["state"] == "SEALED"


def test_who_keeps_its_session_is_alive_after_a_restart_until_judged(durable: Coordinator) -> None:
    first, _ = workers = a_pair(durable.url)
    sealed(workers)
    for worker in workers:
        post(worker, "serving")
    durable.kill()
    durable.start()
    other = Worker(durable.url, first.base.rsplit("/", 1)[1], 0, tp=2, run="run-2")
    other.join()
    assert other.claim().json()["code"] == "engine_name_in_use"
    time.sleep(3)
    assert other.claim().status_code == 200


@pytest.fixture
def durable(tmp_path: Path) -> Iterator[Coordinator]:
    with serving("--lost-after-s", "2", store=f"sqlite:///{tmp_path}/kvaccord.db") as running:
        yield running


def test_check_asks_whether_the_plan_in_force_still_has_room(url: str) -> None:
    first, _ = workers = a_pair(url)
    sealed(workers)
    assert post(first, "check", {"0": a_report()}).json()["fits"]
    short = post(first, "check", {"0": a_report(kv_budget_bytes=5_000)}).json()
    assert (short["fits"], short["code"]) == (False, "plan_no_longer_fits")
    assert short["ranks"] == [{"rank": 0, "class": "kv", "planned": 90, "room": 5}]


def test_nothing_fits_of_a_planned_class_that_a_check_leaves_out(url: str) -> None:
    first, _ = workers = a_pair(url)
    sealed(workers)
    other = [{"kind": "page", "name": "other", "entry_bytes": 1}]
    answer = post(first, "check", {"0": a_report(classes=other)}).json()
    assert not answer["fits"]
    assert {"rank": 0, "class": "kv", "planned": 90, "room": 0} in answer["ranks"]


def test_an_observed_round_is_listed_and_never_in_force(url: str) -> None:
    workers = a_pair(url, mode="observe")
    for worker in workers:
        answer = worker.report(wait_s=0.2)
    for worker in workers:
        outcome = worker.applied(answer.headers["Kvaccord-Digest"], kv=12, wait_s=1)
    assert outcome.json()["outcome"] == "SEALED"
    name = workers[0].base.rsplit("/", 1)[1]
    (row,) = httpx.get(f"{url}/v1/budgets", params={"engine": name}).json()["budgets"]
    assert (row["mode"], "agreed" in row) == ("observe", False)


def test_a_join_may_ask_for_shorter_budgets(url: str) -> None:
    worker = Worker(url, an_engine(), 0, tp=2)
    worker.document["budgets"] = {"gather_s": 1.0}
    began = time.monotonic()
    worker.enter()
    verdict = worker.report(wait_s=5).json()["verdict"]
    assert verdict["code"] == "ranks_missing"
    assert 1.0 <= time.monotonic() - began < 2.5


def test_the_round_can_be_waited_for(url: str) -> None:
    first, _ = a_pair(url)
    began = time.monotonic()
    waited = first.http.get(f"{first.at}", params={"wait_s": 0.5})
    assert waited.json()["state"] == "REPORTING"
    assert time.monotonic() - began >= 0.5


def test_a_policy_is_read_again_on_sighup_and_a_broken_one_changes_nothing(tmp_path: Path) -> None:
    def gather_s(running: Coordinator) -> float:
        worker = Worker(running.url, an_engine(), 0, tp=2)
        worker.join()
        return float(worker.claim().json()["budgets"]["gather_s"])

    file = tmp_path / "policy.yaml"
    file.write_text("rules: [{set: {gather_s: 100}}]")
    with serving("--policy", str(file)) as running:
        assert gather_s(running) == 100
        for text, expected in (
            ("rules: [{set: {gather_s: 50}}]", 50),
            ("rules: [{set: {x: 1}}]", 50),
        ):
            file.write_text(text)
            running.process.send_signal(signal.SIGHUP)
            time.sleep(0.3)
            assert gather_s(running) == expected


def test_sighup_ends_no_coordinator_that_has_no_policy_file() -> None:
    with serving() as running:
        running.process.send_signal(signal.SIGHUP)
        time.sleep(0.3)
        assert httpx.get(f"{running.url}/readyz").status_code == 200


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rules: [{set: {grace: 1}}]", "grace"),
        ("rules: [{set: {gather_s: -1}}]", "gather_s"),
        ("rules: [{set: {report_s: {soft: 99999}}}]", "soft"),
        ("rule: []", "rule"),
        ("a: b: c", "no YAML"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused_at_start(
    tmp_path: Path, text: str, said: str
) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(text)
    with pytest.raises(RuntimeError, match=said):
        Coordinator("--policy", str(file))
