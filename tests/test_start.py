"""A recorded start, played by eight operating-system processes over real sockets."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.wire import Coordinator, serving

HEALTHY = list(range(8))


def rehearse(*options: str) -> dict[str, Any]:
    """`kvaccord rehearse --json`; its report."""
    done = subprocess.run(
        [sys.executable, "-m", "cli", "rehearse", "--json", *options],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["exit_code"] == done.returncode
    return report


def heard_by(report: dict[str, Any], ranks: list[int]) -> str:
    """The one text that all of these ranks heard."""
    rows = {row["rank"]: row for row in report["ranks"]}
    (text,) = {rows[rank]["text"] for rank in ranks}
    assert len(report["digests"]) == 1
    assert {rows[rank]["digest"] for rank in ranks} == set(report["digests"])
    return text


def others(rank: int) -> list[int]:
    return [r for r in HEALTHY if r != rank]


def test_eight_ranks_with_budgets_of_their_own_leave_with_one_decision() -> None:
    report = rehearse()
    assert report["exit_code"] == 0
    assert report["verdict"] == "SEALED"
    text = heard_by(report, HEALTHY)
    assert "86310 kv" in text
    assert "kv bound by ranks 1, 7" in text


def test_a_rank_that_raises_is_known_to_all_by_rank_and_text_within_1_s() -> None:
    report = rehearse("--raise-rank", "5")
    assert report["exit_code"] == 2
    text = heard_by(report, others(5))
    assert "rank_vetoed: rank 5 on " in text
    assert "out of memory while profiling" in text
    assert report["last_heard_s"] < 1.0


def test_a_rank_killed_before_the_verdict_is_known_to_all_within_3_s() -> None:
    # The coordinator is seconds old: it was started for this rehearsal.
    report = rehearse("--kill-rank", "3")
    assert report["exit_code"] == 2
    assert "rank_lost: rank 3 on " in heard_by(report, others(3))
    assert report["last_heard_s"] < 3.0


def test_a_rank_that_never_comes_is_blamed_alone_when_the_budget_ends_and_not_before() -> None:
    report = rehearse("--absent-rank", "6", "--gather-s", "5")
    assert report["exit_code"] == 2
    assert "ranks_missing: rank 6: never joined within gather_s 5 s" in heard_by(report, others(6))
    assert report["last_heard_s"] >= 5.0


@pytest.fixture
def kept(tmp_path: Any) -> Any:
    with serving(store=f"sqlite:///{tmp_path}/kvaccord.db") as running:
        yield running


def test_a_second_start_of_the_same_name_takes_over_once_the_first_has_left(
    kept: Coordinator,
) -> None:
    first = rehearse("--url", kept.url)
    second = rehearse("--url", kept.url)
    assert "round 1 PASSED" in first["text"]
    assert "round 2 PASSED" in second["text"]


def test_no_coordinator_is_no_verdict_with_the_address() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cli", "rehearse", "--json", "--url", "http://127.0.0.1:9"],
        capture_output=True,
        text=True,
        timeout=60,
        env={"KVACCORD_PATIENCE_S": "1", "PATH": "/usr/bin"},
    )
    report = json.loads(done.stdout)
    assert done.returncode == 3
    assert all("127.0.0.1:9" in row["text"] for row in report["ranks"])
