"""Whatever a sender gets wrong: its own code, one sentence, and nobody else's round suffers."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.wire import KV, Coordinator, Worker, a_report, an_engine, serving


@pytest.fixture
def worker(url: str) -> Worker:
    return Worker(url, an_engine(), 0, tp=2).enter()


def problem(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    document = answer.json()
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert (answer.status_code, document["status"], document["code"]) == (status, status, code)
    assert document["detail"]
    assert "\n" not in document["detail"]
    return document


@pytest.mark.parametrize(
    ("fields", "field", "value"),
    [
        ({"free_bytes": -1}, "free_bytes", "-1"),
        ({"free_bytes": 2**53}, "free_bytes", str(2**53)),
        ({"free_bytes": 1.5}, "free_bytes", "1.5"),
        ({"free_bytes": "1"}, "free_bytes", "1"),
        ({"free_bytes": True}, "free_bytes", "True"),
        ({"free_bytes": float("nan")}, "free_bytes", "nan"),
        ({"kv_budget_bytes": float("inf")}, "kv_budget_bytes", "inf"),
        ({"kv_budget_bytes": -(2**53)}, "kv_budget_bytes", str(-(2**53))),
        ({"total_bytes": 99_999}, "free_bytes", "100000"),
        ({"total_bytes": 100_000, "kv_budget_bytes": 100_001}, "kv_budget_bytes", "100001"),
        ({"fre_bytes": 1}, "fre_bytes", "1"),
        ({"classes": []}, "classes", "(a JSON array)"),
        ({"classes": [KV[0] | {"entry_bytes": 0}]}, "classes.0.entry_bytes", "0"),
        ({"classes": [KV[0] | {"kind": "pages"}]}, "classes.0.kind", "pages"),
        ({"inputs": {"dtype": 1.5}}, "inputs.dtype", "1.5"),
    ],
)
def test_an_impossible_report_is_refused_with_rank_field_value_and_remedy(
    worker: Worker, fields: dict[str, Any], field: str, value: str
) -> None:
    document = problem(worker.report(**fields), 422, "invalid")
    assert document["rank"] == 0
    assert document["field"].startswith(field)
    assert document["value"] == value
    assert f"rank 0: {field}" in document["detail"]
    assert worker.report().status_code == 202, "nothing of the refused report was kept"


def test_state_class_without_sequences_is_refused(worker: Worker) -> None:
    state = {"kind": "state", "name": "slot", "entry_bytes": 10, "entries_per_req": 1}
    document = problem(worker.report(classes=[*KV, state]), 422, "invalid")
    assert document["field"] == "max_num_seqs"


def test_a_rank_outside_the_layout_is_refused(url: str) -> None:
    document = problem(Worker(url, an_engine(), 7, tp=2).join(), 422, "invalid")
    assert (document["rank"], document["field"], document["value"]) == (7, "ranks", "7")


def test_a_world_without_a_launch_is_refused_and_told_what_to_set(url: str) -> None:
    worker = Worker(url, an_engine(), 0, tp=2)
    del worker.document["launch"]
    document = problem(worker.join(), 422, "launch_missing")
    assert "KVACCORD_LAUNCH" in document["detail"]


def test_a_report_for_a_rank_of_another_process_is_refused(worker: Worker) -> None:
    document = problem(worker.put("reports", {"1": a_report()}), 422, "invalid")
    assert document["rank"] == 1


@pytest.mark.parametrize("key", ["03", "-1", "x", "1e3", "99999", ""])
def test_a_key_that_is_no_rank_is_refused(worker: Worker, key: str) -> None:
    problem(worker.put("reports", {key: a_report()}), 422, "invalid")


def test_a_second_different_report_is_refused_and_the_first_stands(worker: Worker) -> None:
    worker.report()
    document = problem(worker.report(free_bytes=5), 409, "conflict")
    assert document["rank"] == 0
    assert "free_bytes 100000 and now says 5" in document["detail"]


def test_a_round_that_never_was_and_a_round_of_others_are_refused(worker: Worker) -> None:
    worker.round = 99
    problem(worker.report(), 404, "not_found")
    engine = worker.base.rsplit("/", 1)[1]
    worker.round = 1
    newer = Worker(str(worker.http.base_url), engine, 0, tp=2, restart=1).enter()
    worker.round = newer.round
    problem(worker.report(), 410, "superseded")


@pytest.mark.parametrize(
    ("token", "status", "code"),
    [
        ("", 401, "unauthorized"),
        ("nonsense", 401, "unauthorized"),
        ("a.b.c", 401, "unauthorized"),
        ("0123456789abcdef.1.{mac}", 410, "store_replaced"),
        ("{store}.1.{wrong}", 401, "unauthorized"),
        ("{store}.999.{mac}", 410, "superseded"),
        ("{store}.1.{mac}é", 401, "unauthorized"),
    ],
)
def test_a_wrong_token_has_its_own_code(worker: Worker, token: str, status: int, code: str) -> None:
    store, _, mac = worker.token.split(".")
    wrong = ("0" if mac[0] != "0" else "1") + mac[1:]
    headers = {"Kvaccord-Attempt": token.format(store=store, mac=mac, wrong=wrong).encode()}
    answer = worker.http.put(f"{worker.at}/reports", json={"0": a_report()}, headers=headers)
    problem(answer, status, code)


def test_the_token_of_one_engine_does_not_open_another(url: str, worker: Worker) -> None:
    other = Worker(url, an_engine(), 0, tp=2).enter()
    other.token = worker.token
    problem(other.report(), 401, "unauthorized")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b'"x"',
        b"{",
        b"[" * 100_000,
        b'{"0":{"free_bytes":' + b"9" * 6000 + b"}}",
        b'{"0":\xff}',
        b'{"0":{"free_bytes":1,"kv_budget_bytes":1,"classes":[{"kind":"page","name":"\\ud800","entry_bytes":1}]}}',
    ],
)
def test_a_body_that_is_no_report_is_refused(worker: Worker, body: bytes) -> None:
    answer = worker.http.put(
        f"{worker.at}/reports",
        content=body,
        headers=worker.headers | {"Content-Type": "application/json"},
    )
    problem(answer, 422, "invalid")


def presence(worker: Worker) -> list[str]:
    return [m["presence"] for m in worker.http.get(f"{worker.at}/status").json()["members"]]


@pytest.mark.parametrize(
    ("what", "body", "status"),
    [
        ("reports", b"{", 422),
        ("reports", b'{"1":{}}', 422),
        ("reports", b'{"0":{}}', 422),
        ("veto", b'{"rank":1,"text":"x","more":1}', 422),
        ("phase", b"[]", 422),
        ("reports", b"x" * (2**20 + 1), 413),
        ("applied", b'{"digest":"sha256:0","built":{"kv":1}}', 422),
    ],
)
def test_whoever_is_refused_has_been_answered_and_is_not_suspect(
    url: str, worker: Worker, what: str, body: bytes, status: int
) -> None:
    other = Worker(url, worker.base.rsplit("/", 1)[1], 1, tp=2).enter()
    other.hang_up()
    while presence(worker) == ["present", "present"]:
        time.sleep(0.01)
    assert presence(worker) == ["present", "suspect"]
    answer = other.http.request(
        "POST" if what == "phase" else "PUT",
        f"{other.at}/{what}",
        content=body,
        headers=other.headers | {"Content-Type": "application/json"},
    )
    assert answer.status_code == status
    assert presence(worker) == ["present", "unwatched"]


@pytest.mark.parametrize("round_", [99, "x"])
def test_a_call_of_another_round_is_an_answer_to_its_process_too(
    url: str, worker: Worker, round_: Any
) -> None:
    other = Worker(url, worker.base.rsplit("/", 1)[1], 1, tp=2).enter()
    other.hang_up()
    while presence(worker) == ["present", "present"]:
        time.sleep(0.01)
    other.round = round_
    assert other.report().status_code in (404, 422)
    assert presence(worker) == ["present", "unwatched"]


def test_a_wrong_token_clears_nobody(url: str, worker: Worker) -> None:
    other = Worker(url, worker.base.rsplit("/", 1)[1], 1, tp=2).enter()
    other.hang_up()
    while presence(worker) == ["present", "present"]:
        time.sleep(0.01)
    other.token = other.token[:-4] + "0000"
    problem(other.report(), 401, "unauthorized")
    assert presence(worker) == ["present", "suspect"]


def test_a_process_of_a_dropped_round_hears_that_it_was_dropped(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("rules:\n- set: {keep_rounds: 1}\n")
    with serving("--policy", str(policy)) as running:
        engine = an_engine()
        oldest = Worker(running.url, engine, 0, tp=2).enter()
        oldest.veto("broken")
        oldest.report(wait_s=5)
        for n in range(4):
            worker = Worker(running.url, engine, 0, tp=2, run=f"run-{n + 2}").enter()
            worker.veto("broken")
            worker.report(wait_s=5)
        document = problem(oldest.report(), 410, "superseded")
        assert "round 1 of" in document["detail"]
        assert "was dropped" in document["detail"]
        assert "must exit" in document["detail"]


def test_whoever_may_not_arm_faults_is_told_so_whatever_the_body(url: str, tmp_path: Path) -> None:
    garbage = {"content": b"{", "headers": {"Content-Type": "application/json"}}
    problem(httpx.post(f"{url}/v1/faults", **garbage), 403, "forbidden")
    token = tmp_path / "token"
    token.write_text("0123456789abcdef")
    with serving("--enable-faults", "--chaos-token-file", str(token)) as running:
        problem(httpx.post(f"{running.url}/v1/faults", **garbage), 401, "unauthorized")
        garbage["headers"]["Authorization"] = "Bearer 0123456789abcdef"
        problem(httpx.post(f"{running.url}/v1/faults", **garbage), 422, "invalid")


def test_an_unknown_path_and_method_are_problems_too(url: str) -> None:
    problem(httpx.get(f"{url}/v2/engines"), 404, "not_found")
    problem(httpx.delete(f"{url}/v1/budgets"), 405, "invalid")
    problem(httpx.get(f"{url}/v1/engines/default/nobody/rounds/current/status"), 404, "not_found")
    problem(httpx.post(f"{url}/v1/engines/default/a b/join", json={}), 422, "invalid")


def many(value: Any, n: int = 50_000) -> dict[str, Any]:
    return {f"k{i}": value for i in range(n)}


def held_mb(running: Coordinator) -> int:
    """The most memory that its process ever held."""
    status = Path(f"/proc/{running.process.pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) // 1024


def test_a_body_that_is_wrong_throughout_is_refused_with_one_fault_and_little_memory() -> None:
    with serving() as running:
        worker = Worker(running.url, an_engine(), 0, tp=2).enter()
        before_mb = held_mb(running)

        def said(path: str, body: Any) -> str:
            content = json.dumps(body, separators=(",", ":"))
            headers = worker.headers | {"Content-Type": "application/json"}
            method = "PUT" if path.endswith(("reports", "applied")) else "POST"
            answer = worker.http.request(method, path, content=content, headers=headers)
            return str(problem(answer, 422, "invalid")["detail"])

        ranks = [{}] * 300_000
        assert "(3 more faults" in said("/v1/plan", {"layout": {"tp": 1}, "reports": ranks})
        applied = {"digest": "sha256:" + "0" * 64, "built": many("x")}
        for path, body in (
            (f"{worker.at}/reports", many(1)),
            (f"{worker.at}/reports", {"0": many(1)}),
            (f"{worker.at}/applied", applied),
            (f"{worker.base}/join", worker.document | {"groups": many({})}),
            (f"{worker.base}/join", worker.document | {"inputs": many(1.5)}),
            (f"{worker.base}/join", worker.document | many(1)),
        ):
            assert " faults): it is wrong throughout" in said(path, body)
        assert held_mb(running) - before_mb < 200
        assert worker.report().status_code == 202


def test_a_field_that_is_misspelt_on_every_rank_is_named(url: str, worker: Worker) -> None:
    wrong = {"free_bytes": 1, "kv_budget": 1, "classes": KV}
    answer = worker.put("reports", {str(rank): wrong for rank in range(1024)})
    detail = problem(answer, 422, "invalid")["detail"]
    assert detail.startswith("rank 0: kv_budget_bytes absent")


def test_a_body_of_100_mb_is_refused_and_slows_nobody(url: str, worker: Worker) -> None:
    other = Worker(url, worker.base.rsplit("/", 1)[1], 1, tp=2).enter()
    answers: list[httpx.Response] = []

    def flood() -> None:
        answers.append(
            httpx.put(
                f"{url}{worker.at}/reports",
                content=b"x" * 100_000_000,
                headers=worker.headers | {"Content-Type": "application/json"},
                timeout=30,
            )
        )

    flooding = threading.Thread(target=flood)
    flooding.start()
    slowest = 0.0
    while flooding.is_alive():
        began = time.monotonic()
        assert other.report().status_code == 202
        slowest = max(slowest, time.monotonic() - began)
    flooding.join()
    document = problem(answers[0], 413, "too_large")
    assert "1048576" in document["detail"]
    assert slowest < 1.0
    assert worker.report(wait_s=5).json()["verdict"]["outcome"] == "PASSED"
