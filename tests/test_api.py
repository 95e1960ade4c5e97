"""The wire, spoken by hand to a real coordinator over real sockets."""

from __future__ import annotations

import json
import time

import httpx

from kvaccord.canonical import digest
from tests.wire import Worker, a_report, an_engine


def a_pair(url: str) -> list[Worker]:
    engine = an_engine()
    return [Worker(url, engine, rank, tp=2).enter() for rank in range(2)]


def agreed(workers: list[Worker]) -> str:
    """Everyone reports; the digest of the decision."""
    for worker in workers[:-1]:
        worker.report()
    answer = workers[-1].report(wait_s=5)
    assert answer.status_code == 200
    return answer.headers["Kvaccord-Digest"]


def test_every_rank_hears_the_same_bytes_with_their_digest(url: str) -> None:
    first, second = a_pair(url)
    waits = first.report()
    assert (waits.status_code, waits.json()["missing"]) == (202, [{"rank": 1, "host": "host-1"}])
    decided = second.report(kv_budget_bytes=80_500, wait_s=5)
    again = first.report()
    assert decided.content == again.content == first.decision().content
    assert decided.headers["Kvaccord-Digest"] == digest(decided.content)
    assert decided.headers["Kvaccord-Outcome"] == "open"
    (row,) = decided.json()["plan"]["schedulers"]
    assert row["entries"] == {"kv": 80}
    assert row["binding"] == {"kv": {"ranks": [1], "hosts": ["host-1"]}}


def test_a_round_is_sealed_once_every_rank_built_the_decision(url: str) -> None:
    first, second = workers = a_pair(url)
    what = agreed(workers)
    assert first.applied(what, kv=90).status_code == 202
    outcome = second.applied(what, kv=90, wait_s=5)
    assert outcome.json()["outcome"] == "SEALED"
    assert outcome.json()["decision_digest"] == what
    assert first.applied(what, kv=90).content == outcome.content


def test_a_session_tells_every_fact_of_the_round_in_order_and_the_decision_in_its_bytes(
    url: str,
) -> None:
    first, second = workers = a_pair(url)
    what = agreed(workers)
    for worker in workers:
        worker.applied(what, kv=90)
    heard = []
    for event, _, data in second.events():
        heard.append((event, json.loads(data).get("event")))
        if event == "decision":
            assert data.encode() == first.decision().content
        if event == "outcome":
            break
    assert heard == [
        ("fact", "opened"),
        ("fact", "claimed"),
        ("fact", "claimed"),
        ("fact", "reported"),
        ("fact", "reported"),
        ("decision", None),
        ("fact", "applied"),
        ("fact", "applied"),
        ("outcome", None),
    ]


def test_a_session_resumes_after_the_last_event_it_heard(url: str) -> None:
    first, _ = a_pair(url)
    _, last, _ = next(first.events())
    first.hang_up()
    first.http.headers["Last-Event-ID"] = last
    first.attach()
    event, again, data = next(first.events())
    assert (event, json.loads(data)["event"]) == ("fact", "claimed")
    assert again != last


def test_a_session_without_facts_brings_the_documents_alone_and_resumes_after_them(
    url: str,
) -> None:
    workers = a_pair(url)
    first = workers[0]
    first.hang_up()
    first.http.params = {"facts": "0"}
    first.attach()
    what = agreed(workers)
    event, last, data = next(first.events())
    assert (event, digest(data.encode())) == ("decision", what)
    first.hang_up()
    first.http.headers["Last-Event-ID"] = last
    first.attach()
    for worker in workers:
        worker.applied(what, kv=90)
    event, _, data = next(first.events())
    assert (event, json.loads(data)["outcome"]) == ("outcome", "SEALED")


def test_a_rank_whose_session_ends_is_lost_and_the_others_hear_it_within_3_s(url: str) -> None:
    first, second = a_pair(url)
    second.report()
    began = time.monotonic()
    second.hang_up()
    time.sleep(0.2)  # the end of a connection and a report on another one have no order
    verdict = first.report(wait_s=10).json()["verdict"]
    assert time.monotonic() - began < 3
    assert (verdict["code"], verdict["ranks"]) == ("rank_lost", [1])
    assert verdict["causes"][0]["host"] == "host-1"


def test_a_rank_whose_session_comes_back_in_time_is_not_lost(url: str) -> None:
    first, second = a_pair(url)
    second.hang_up()
    second.attach()
    first.report()
    assert second.report(wait_s=5).json()["verdict"]["outcome"] == "PASSED"


def test_a_veto_is_heard_by_all_within_1_s_with_rank_host_and_text(url: str) -> None:
    first, second = a_pair(url)
    second.veto("RuntimeError: HIP out of memory\nwhile profiling")
    began = time.monotonic()
    verdict = first.report(wait_s=10).json()["verdict"]
    assert time.monotonic() - began < 1
    assert verdict["code"] == "rank_vetoed"
    assert verdict["causes"] == [
        {
            "rank": 1,
            "host": "host-1",
            "code": "rank_vetoed",
            "text": "RuntimeError: HIP out of memory\nwhile profiling",
        }
    ]
    assert "\n" not in verdict["message"]


def test_an_absent_rank_is_blamed_alone_and_not_before_its_budget_ends(url: str) -> None:
    engine = an_engine()
    began = time.monotonic()
    workers = [Worker(url, engine, rank, tp=3).enter() for rank in (0, 1)]
    workers[0].report()
    verdict = workers[1].report(wait_s=10).json()["verdict"]
    assert 3.0 <= time.monotonic() - began < 6
    assert (verdict["code"], verdict["ranks"]) == ("ranks_missing", [2])
    late = Worker(url, engine, 2, tp=3)
    late.join()
    assert late.claim().json()["outcome"] == "FAILED"
    assert late.report().content == workers[0].decision().content


def test_a_rank_that_claimed_and_never_reports_is_blamed_with_its_host(url: str) -> None:
    first, _ = a_pair(url)
    verdict = first.report(wait_s=10).json()["verdict"]
    assert (verdict["code"], verdict["ranks"]) == ("ranks_missing", [1])
    assert verdict["causes"][0]["host"] == "host-1"


def test_a_rank_that_never_builds_aborts_the_round_and_the_verdict_stands(url: str) -> None:
    first, second = workers = a_pair(url)
    what = agreed(workers)
    outcome = first.applied(what, kv=90, wait_s=10)
    assert (outcome.json()["outcome"], outcome.json()["ranks"]) == ("ABORTED", [1])
    assert second.decision().json()["verdict"]["outcome"] == "PASSED"


def test_layouts_that_differ_within_one_launch_are_one_verdict_for_all(url: str) -> None:
    engine = an_engine()
    first = Worker(url, engine, 0, tp=2).enter()
    second = Worker(url, engine, 1, tp=4).enter()
    verdict = first.report(wait_s=5).json()["verdict"]
    assert verdict["code"] == "inputs_disagree"
    assert "tp 4" in verdict["message"]
    assert "tp 2" in verdict["message"]
    assert second.report(wait_s=5).content == first.decision().content


def test_two_living_processes_of_one_rank_fail_the_round_and_both_are_named(url: str) -> None:
    engine = an_engine()
    first = Worker(url, engine, 0, tp=2).enter()
    twin = Worker(url, engine, 0, tp=2)
    twin.document["host"] = "host-twin"
    twin.enter()
    verdict = first.report(wait_s=5).json()["verdict"]
    assert verdict["code"] == "duplicate_rank"
    assert "host-0" in verdict["message"]
    assert "host-twin" in verdict["message"]


def test_another_launch_is_refused_while_the_first_is_alive_and_disturbs_nobody(url: str) -> None:
    first, second = a_pair(url)
    other = Worker(url, first.base.rsplit("/", 1)[1], 0, tp=2, run="run-2")
    other.join()
    refused = other.claim()
    assert (refused.status_code, refused.json()["code"]) == (409, "engine_name_in_use")
    assert "host-0" in refused.json()["detail"]
    first.report()
    assert second.report(wait_s=5).json()["verdict"]["outcome"] == "PASSED"


def test_a_greater_restart_takes_over_and_the_older_one_hears_superseded(url: str) -> None:
    first, _ = a_pair(url)
    engine = first.base.rsplit("/", 1)[1]
    newer = Worker(url, engine, 0, tp=2, restart=1).enter()
    assert newer.round == first.round + 1
    assert first.report().json()["verdict"]["code"] == "superseded"
    older = Worker(url, engine, 1, tp=2)
    older.join()
    assert older.claim().json()["code"] == "superseded"


def test_join_claim_and_report_answer_a_repetition_alike(url: str) -> None:
    worker = Worker(url, an_engine(), 0, tp=2)
    assert worker.join().content == worker.join().content
    assert worker.claim().json()["round"] == worker.claim().json()["round"] == 1
    assert worker.report().status_code == worker.report().status_code == 202


def test_status_says_who_is_there_and_whom_the_round_waits_for(url: str) -> None:
    first, second = a_pair(url)
    first.report()
    status = first.http.get(f"{first.at}/status").json()
    assert status["state"] == "REPORTING"
    assert status["missing"] == [{"rank": 1, "host": "host-1"}]
    assert [m["presence"] for m in status["members"]] == ["present", "present"]
    second.veto("no")
    assert first.http.get(f"{first.base}/rounds/current/status").json()["causes"][0]["text"] == "no"


def test_reports_can_be_read_back_as_sent(url: str) -> None:
    first, _ = a_pair(url)
    first.report(kv_budget_bytes=-5)
    rows = first.http.get(f"{first.at}/reports").json()["reports"]
    assert rows["0"]["sent"]["kv_budget_bytes"] == -5


def test_budgets_metrics_and_page_agree_on_what_is_in_force(url: str) -> None:
    workers = a_pair(url)
    name = workers[0].base.rsplit("/", 1)[1]
    what = agreed(workers)
    row = httpx.get(f"{url}/v1/budgets", params={"engine": name}).json()["budgets"][0]
    assert "agreed" not in row, "passed is not sealed"
    for worker in workers:
        worker.applied(what, kv=90)
    (row,) = httpx.get(f"{url}/v1/budgets", params={"engine": name}).json()["budgets"]
    assert (row["state"], row["agreed"]["digest"]) == ("SEALED", what)
    assert row["agreed"]["schedulers"][0]["entries"] == {"kv": 90}
    metrics = httpx.get(f"{url}/metrics").text
    labels = f'cache_class="kv",dp="0",engine="{name}",namespace="default"'
    assert f"kvaccord_agreed_entries{{{labels}}} 90.0" in metrics
    page = httpx.get(url)
    assert name in page.text
    assert what in page.text
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]


def test_an_engine_that_never_sealed_has_no_number_but_the_code_of_its_verdict(url: str) -> None:
    first, _ = a_pair(url)
    first.veto("broken")
    first.report(wait_s=5)
    name = first.base.rsplit("/", 1)[1]
    (row,) = httpx.get(f"{url}/v1/budgets", params={"engine": name}).json()["budgets"]
    assert (row["state"], row["code"], "agreed" in row) == ("FAILED", "rank_vetoed", False)


def test_a_failed_start_after_a_sealed_one_leaves_the_agreed_budget_in_force(url: str) -> None:
    workers = a_pair(url)
    name = workers[0].base.rsplit("/", 1)[1]
    what = agreed(workers)
    for worker in workers:
        worker.applied(what, kv=90)
    for worker in workers:
        worker.hang_up()
    time.sleep(0.2)
    second = Worker(url, name, 0, run="run-2", tp=2).enter()
    second.veto("broken")
    second.report(wait_s=5)
    (row,) = httpx.get(f"{url}/v1/budgets", params={"engine": name}).json()["budgets"]
    assert (row["state"], row["round"]) == ("FAILED", 2)
    assert (row["agreed"]["round"], row["agreed"]["digest"]) == (1, what)


def test_the_page_escapes_what_a_worker_says(url: str) -> None:
    worker = Worker(url, an_engine(), 0, tp=2).enter()
    worker.veto("<script>alert(1)</script>")
    worker.report(wait_s=5)
    page = httpx.get(url).text
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


def test_plan_answers_without_a_round(url: str) -> None:
    rows = [{"rank": rank, **a_report(kv_budget_bytes=90_000 - rank)} for rank in range(2)]
    answer = httpx.post(f"{url}/v1/plan", json={"layout": {"tp": 2}, "reports": rows}).json()
    assert answer["verdict"]["outcome"] == "PASSED"
    assert answer["plan"]["schedulers"][0]["entries"] == {"kv": 89}
    short = httpx.post(f"{url}/v1/plan", json={"layout": {"tp": 2}, "reports": rows[:1]})
    assert (short.status_code, short.json()["rank"]) == (422, 1)


def test_an_engine_that_has_only_joined_breaks_no_page(url: str) -> None:
    worker = Worker(url, an_engine(), 0, tp=2)
    worker.join()
    page = httpx.get(url)
    assert page.status_code == 200
    assert worker.base.rsplit("/", 1)[1] in page.text


def test_a_refused_join_leaves_no_engine_behind(url: str) -> None:
    worker = Worker(url, an_engine(), 0, tp=2)
    worker.document["protocol"] = 2
    assert worker.join().json()["code"] == "protocol_too_old"
    assert worker.base.rsplit("/", 1)[1] not in httpx.get(f"{url}/v1/engines").text


def test_a_glob_of_any_length_slows_nobody(url: str) -> None:
    answer = httpx.get(f"{url}/v1/budgets", params={"engine": "[a-" * 10_000})
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid")


def test_what_a_worker_says_cannot_command_a_terminal(url: str) -> None:
    worker = Worker(url, an_engine(), 0, tp=2).enter()
    worker.veto("\x1b[2J\u202ereversed\nFAKE LINE")
    message = worker.report(wait_s=5).json()["verdict"]["message"]
    assert message.isprintable()
    worker = Worker(url, an_engine(), 0, tp=2)
    worker.document["host"] = "\x1b[2Jhost"
    assert worker.join().status_code == 422
