"""Faults that staging injects into a real coordinator, and the proof they leave."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.wire import Coordinator, Worker, a_report, an_engine, serving

TOKEN = "0123456789abcdef-chaos"


@pytest.fixture(scope="module")
def staging(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    file = tmp_path_factory.mktemp("chaos") / "token"
    file.write_text(TOKEN + "\n")
    with serving("--enable-faults", "--chaos-token-file", str(file)) as running:
        yield running


def arm(staging: Coordinator, **rule: Any) -> httpx.Response:
    return httpx.post(
        f"{staging.url}/v1/faults",
        json={"expires_s": 30, "reason": "a test"} | rule,
        headers={"Authorization": f"Bearer {TOKEN}"},
    )


def armed(staging: Coordinator, **rule: Any) -> str:
    answer = arm(staging, **rule)
    assert answer.status_code == 201, answer.text
    return answer.json()["id"]


def a_pair(staging: Coordinator, engine: str) -> list[Worker]:
    return [Worker(staging.url, engine, rank, tp=2).enter() for rank in range(2)]


def test_a_shrunk_report_is_planned_smaller_and_the_decision_names_the_rule(
    staging: Coordinator,
) -> None:
    engine = an_engine()
    rule = armed(
        staging,
        kind="shrink_memory",
        engine=engine,
        ranks=[1],
        field="kv_budget_bytes",
        per_cent=50,
    )
    first, second = a_pair(staging, engine)
    first.report()
    decision = second.report(wait_s=5).json()
    assert decision["plan"]["schedulers"][0]["entries"] == {"kv": 45}
    assert decision["faults"] == [
        {"id": rule, "kind": "shrink_memory", "call": "report", "ranks": [1]}
    ]
    rows = first.http.get(f"{first.at}/reports").json()["reports"]
    assert rows["1"]["sent"]["kv_budget_bytes"] == 90_000
    assert rows["1"]["planned"]["kv_budget_bytes"] == 45_000
    assert "planned" not in rows["0"]
    assert second.report().status_code == 200, "identity is compared on what was sent"


def test_shrinking_by_bytes_can_take_away_a_whole_free_memory(staging: Coordinator) -> None:
    engine = an_engine()
    armed(staging, kind="shrink_memory", engine=engine, field="free_bytes", bytes=10**9, ranks=[0])
    first, second = a_pair(staging, engine)
    first.report(total_bytes=200_000)
    verdict = second.report(wait_s=5, total_bytes=200_000).json()["verdict"]
    assert (verdict["code"], verdict["ranks"]) == ("does_not_fit", [0])


def test_a_delayed_report_comes_late_and_the_decision_names_the_rule(staging: Coordinator) -> None:
    engine = an_engine()
    rule = armed(staging, kind="delay", engine=engine, ranks=[1], delay_s=1.0, count=1)
    first, second = a_pair(staging, engine)
    first.report()
    began = time.monotonic()
    decision = second.report(wait_s=5).json()
    assert time.monotonic() - began >= 1.0
    assert decision["verdict"]["outcome"] == "PASSED"
    assert [f["id"] for f in decision["faults"]] == [rule]


def test_a_dropped_answer_was_kept_all_the_same(staging: Coordinator) -> None:
    engine = an_engine()
    rule = armed(staging, kind="drop_answer", engine=engine, ranks=[0], count=1)
    first, second = a_pair(staging, engine)
    with pytest.raises(httpx.TransportError):
        first.report()
    decision = second.report(wait_s=5)
    assert decision.json()["faults"] == [
        {"id": rule, "kind": "drop_answer", "call": "report", "ranks": [0]}
    ]
    assert first.report().content == decision.content


@pytest.mark.parametrize("call", ["join", "claim"])
def test_a_fault_before_the_round_stands_in_its_decision_too(
    staging: Coordinator, call: str
) -> None:
    engine = an_engine()
    rule = armed(staging, kind="delay", engine=engine, call=call, ranks=[1], delay_s=0.1)
    first, second = a_pair(staging, engine)
    first.report()
    faults = second.report(wait_s=5).json()["faults"]
    assert faults == [{"id": rule, "kind": "delay", "call": call, "ranks": [1]}]


def test_a_repeated_call_that_was_touched_stands_in_the_decision_too(
    staging: Coordinator,
) -> None:
    engine = an_engine()
    first, second = a_pair(staging, engine)
    first.report()
    rule = armed(staging, kind="drop_answer", engine=engine, ranks=[0], count=2)
    for _ in range(2):
        with pytest.raises(httpx.TransportError):
            first.report()
    assert [f["id"] for f in second.report(wait_s=5).json()["faults"]] == [rule]


def test_what_is_touched_after_the_end_changes_no_frozen_document(staging: Coordinator) -> None:
    engine = an_engine()
    first, _ = a_pair(staging, engine)
    first.veto("broken")
    before = first.report(wait_s=5).content
    armed(staging, kind="delay", engine=engine, delay_s=0.1)
    assert first.report().content == before
    assert first.http.get(f"{first.at}/status").json()["faults"] == []


def test_a_round_that_no_rule_touched_says_so(staging: Coordinator) -> None:
    armed(staging, kind="delay", engine="somebody-else", delay_s=1.0)
    first, second = a_pair(staging, an_engine())
    first.report()
    assert second.report(wait_s=5).json()["faults"] == []


def test_a_rule_ends_by_itself_and_at_once_when_told(staging: Coordinator) -> None:
    engine = an_engine()
    short = armed(staging, kind="drop_answer", engine=engine, expires_s=0.2)
    long = armed(staging, kind="drop_answer", engine=engine)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    time.sleep(0.3)
    active = httpx.get(f"{staging.url}/v1/faults", headers=headers).json()["faults"]
    ids = [line["id"] for line in active]
    assert short not in ids
    assert long in ids
    assert httpx.delete(f"{staging.url}/v1/faults/{long}", headers=headers).status_code == 204
    assert httpx.delete(f"{staging.url}/v1/faults/{long}", headers=headers).status_code == 404
    first, _ = a_pair(staging, engine)
    assert first.report().status_code == 202


@pytest.mark.parametrize(
    ("rule", "field"),
    [
        ({"kind": "delay"}, "delay_s"),
        ({"kind": "drop_answer", "ranks": []}, "ranks"),
        ({"kind": "delay", "delay_s": 0}, "delay_s"),
        ({"kind": "delay", "delay_s": 1, "expires_s": 3601}, "expires_s"),
        ({"kind": "drop_answer", "delay_s": 1}, "delay_s"),
        ({"kind": "shrink_memory", "field": "free_bytes"}, "bytes"),
        ({"kind": "shrink_memory", "field": "free_bytes", "per_cent": 101}, "per_cent"),
        ({"kind": "shrink_memory", "field": "free_bytes", "bytes": 1, "per_cent": 1}, "bytes"),
        ({"kind": "shrink_memory", "field": "total_bytes", "bytes": 1}, "field"),
        ({"kind": "explode"}, "kind"),
        ({"kind": "drop_answer", "probability": 1}, "probability"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(
    staging: Coordinator, rule: dict[str, Any], field: str
) -> None:
    answer = arm(staging, engine="x", **rule)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid")
    assert answer.json()["field"] == field


def test_a_rule_must_end_and_say_why(staging: Coordinator) -> None:
    body = {"kind": "drop_answer", "engine": "x"}
    answer = httpx.post(
        f"{staging.url}/v1/faults", json=body, headers={"Authorization": f"Bearer {TOKEN}"}
    )
    assert answer.json()["field"] == "expires_s"


@pytest.mark.parametrize(
    "header", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}]
)
def test_without_the_chaos_token_nothing_is_armed(
    staging: Coordinator, header: dict[str, str]
) -> None:
    answer = httpx.post(f"{staging.url}/v1/faults", json={}, headers=header)
    assert (answer.status_code, answer.json()["code"]) == (401, "unauthorized")


def test_faults_are_off_unless_enabled(url: str) -> None:
    answer = httpx.get(f"{url}/v1/faults", headers={"Authorization": f"Bearer {TOKEN}"})
    assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")


@pytest.mark.parametrize("options", [["--enable-faults"], ["--chaos-token-file", "x"]])
def test_one_setting_alone_is_an_error(options: list[str]) -> None:
    with pytest.raises(RuntimeError, match="--chaos-token-file"):
        Coordinator(*options)


def test_a_short_token_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("short")
    with pytest.raises(RuntimeError, match="16 ASCII characters"):
        Coordinator("--enable-faults", "--chaos-token-file", str(file))


def a_short_staging(tmp_path: Path) -> list[str]:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    budgets = ["--gather-s", "2", "--report-s", "2"]
    return ["--enable-faults", "--chaos-token-file", str(file), *budgets]


@pytest.mark.parametrize("call", ["claim", "report"])
def test_a_rank_that_a_rule_made_late_is_not_blamed_without_the_rule(
    tmp_path: Path, call: str
) -> None:
    with serving(*a_short_staging(tmp_path)) as running:
        engine = an_engine()
        rule = armed(running, kind="delay", engine=engine, ranks=[1], call=call, delay_s=20.0)
        first = Worker(running.url, engine, 0, tp=2).enter()
        late = Worker(running.url, engine, 1, tp=2)
        late.join()
        if call == "report":
            late.claim()
            late.attach()
        late.http.timeout = httpx.Timeout(0.5)
        with pytest.raises(httpx.TimeoutException):
            late.claim() if call == "claim" else late.report()
        decision = first.report(wait_s=10).json()
        assert decision["verdict"]["code"] == "ranks_missing"
        assert [f["id"] for f in decision["faults"]] == [rule]


def test_a_rank_whose_join_was_dropped_is_not_blamed_without_the_rule(tmp_path: Path) -> None:
    with serving(*a_short_staging(tmp_path)) as running:
        engine = an_engine()
        rule = armed(running, kind="drop_answer", engine=engine, ranks=[1], call="join")
        first = Worker(running.url, engine, 0, tp=2).enter()
        with pytest.raises(httpx.TransportError):
            Worker(running.url, engine, 1, tp=2).join()
        decision = first.report(wait_s=10).json()
        assert [f["id"] for f in decision["faults"]] == [rule]


def test_a_shrink_that_comes_after_the_report_touches_nothing(staging: Coordinator) -> None:
    engine = an_engine()
    first, second = a_pair(staging, engine)
    first.report()
    armed(
        staging,
        kind="shrink_memory",
        engine=engine,
        field="kv_budget_bytes",
        per_cent=50,
        ranks=[0],
    )
    first.report()
    decision = second.report(wait_s=5).json()
    assert decision["faults"] == []
    assert decision["plan"]["schedulers"][0]["entries"] == {"kv": 90}


def test_a_refused_call_uses_up_no_rule(staging: Coordinator) -> None:
    engine = an_engine()
    rule = armed(staging, kind="drop_answer", engine=engine, ranks=[0, 1], count=1)
    first, _ = a_pair(staging, engine)
    assert first.put("reports", {"1": {**KV_REPORT}}).status_code == 422
    headers = {"Authorization": f"Bearer {TOKEN}"}
    active = httpx.get(f"{staging.url}/v1/faults", headers=headers).json()["faults"]
    assert [line["touched"] for line in active if line["id"] == rule] == [0]


KV_REPORT = a_report()
