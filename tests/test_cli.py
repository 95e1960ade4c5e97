"""The command against a real coordinator: plan, status, watch, budgets, history, doctor."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from cli.starts import LIBRARY
from tests.wire import Coordinator, Worker, an_engine, serving

COMMAND = [sys.executable, "-m", "cli"]
LAUNCHERS = ("KVACCORD_", "TORCHELASTIC_", "SLURM_", "MASTER_")
BARE = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}


def kvaccord(*words: str, **env: str) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    done = subprocess.run(
        [*COMMAND, *words], capture_output=True, text=True, timeout=60, env=BARE | env
    )
    return done.returncode, done.stdout, done.stderr


def as_json(*words: str, **env: str) -> tuple[int, Any]:
    code, written, complaint = kvaccord(*words, "--json", **env)
    assert written, complaint
    return code, json.loads(written)


@pytest.fixture(scope="module")
def patient() -> Any:
    """A coordinator with the usual budgets."""
    with serving() as running:
        yield running


@pytest.fixture
def at(patient: Coordinator) -> str:
    return f"--url={patient.url}"


def trickling() -> socket.socket:
    """Listens, and answers whoever calls a byte every second, without end."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer(caller: socket.socket) -> None:
        with caller, contextlib.suppress(OSError):
            caller.recv(4096)
            caller.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 4000\r\n\r\n")
            while True:
                caller.sendall(b" ")
                time.sleep(1.0)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                caller, _ = listener.accept()
                threading.Thread(target=answer, args=(caller,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return listener


@pytest.mark.parametrize("words", [["healthcheck"], ["budgets"]])
def test_no_command_waits_for_ever_for_an_answer_that_trickles_in(words: list[str]) -> None:
    with trickling() as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        code, _, complaint = kvaccord(*words, f"--url={url}")
        listener.shutdown(socket.SHUT_RDWR)
    assert code == 1
    assert "its answer had no end" in complaint


def sealed(url: str, engine: str, run: str = "run-1") -> None:
    worker = Worker(url, engine, 0, run=run).enter()
    digest = worker.report(wait_s=5).headers["Kvaccord-Digest"]
    assert worker.applied(digest, wait_s=5, kv=90).status_code == 200


def failed(url: str, engine: str, run: str = "run-1") -> None:
    worker = Worker(url, engine, 0, run=run).enter()
    assert worker.veto("RuntimeError: \x1b[31mno weights").status_code in (200, 202)
    for _ in range(100):
        if worker.http.get(f"{worker.at}/outcome").status_code == 200:
            return
        threading.Event().wait(0.05)
    raise AssertionError("the round did not end")


# plan


def test_a_recorded_start_is_planned_without_a_coordinator() -> None:
    code, answer = as_json("plan", str(LIBRARY / "tp8-eight-counts.json"))
    assert (code, answer["verdict"]["code"]) == (0, "agreed")
    assert answer["plan"]["schedulers"][0]["entries"] == {"kv": 29453}


def test_a_start_is_planned_by_its_name_too_and_shown_as_text() -> None:
    code, written, _ = kvaccord("plan", "pp2-unequal-layers")
    assert code == 0
    assert "PASSED agreed: every rank builds 28796 kv entries" in written
    assert "bound by rank 1" in written


def test_a_plan_that_fails_exits_with_2_and_says_what_is_missing() -> None:
    code, written, _ = kvaccord("plan", "short")
    assert code == 2
    assert "FAILED does_not_fit: rank 2" in written
    assert "GiB" in written


def test_a_plan_is_what_the_coordinator_answers(patient: Coordinator, tmp_path: Path) -> None:
    report = {"free_bytes": 10**6, "kv_budget_bytes": 900_000}
    kv = [{"kind": "page", "name": "kv", "entry_bytes": 1000}]
    rows = [{"rank": r, **report, "kv_budget_bytes": 900_000 - r, "classes": kv} for r in range(2)]
    question = {"layout": {"tp": 2}, "reports": rows}
    file = tmp_path / "question.json"
    file.write_text(json.dumps(question))
    answer = httpx.post(f"{patient.url}/v1/plan", json=question).json()
    assert as_json("plan", str(file)) == (0, answer)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("no json", "JSON"),
        ("[" * 100_000, "JSON"),
        ("[]", "a JSON object"),
        ('{"layout": {"tp": 2}, "reports": []}', "reports"),
        ('{"reports": [{"rank": 0, "free_bytes": -1}]}', "rank 0: free_bytes -1"),
        ('{"ranks": [7]}', "ranks"),
    ],
)
def test_a_file_that_cannot_be_planned_is_explained(
    tmp_path: Path, content: str, said: str
) -> None:
    file = tmp_path / "bad.json"
    file.write_text(content)
    code, written, complaint = kvaccord("plan", str(file))
    assert (code, written) == (1, "")
    assert said in complaint
    assert "Traceback" not in complaint


def test_a_name_that_is_no_start_lists_those_there_are() -> None:
    code, _, complaint = kvaccord("plan", "nothing-like-it")
    assert code == 1
    assert "tp8-eight-counts" in complaint


# status


def test_the_status_of_a_round_under_way_is_no_verdict(patient: Coordinator, at: str) -> None:
    engine = an_engine()
    Worker(patient.url, engine, 1, tp=2).enter()
    code, written, _ = kvaccord("status", engine, at)
    assert code == 3
    assert f"default/{engine} round 1 GATHERING" in written
    assert "waits for    rank 0" in written
    assert "present" in written


def test_the_status_of_a_round_that_ended_has_its_sentence(patient: Coordinator, at: str) -> None:
    engine = an_engine()
    sealed(patient.url, engine)
    code, written, _ = kvaccord("status", f"default/{engine}", at)
    assert code == 0
    assert "SEALED sealed" in written


def test_what_a_rank_raised_cannot_paint_the_terminal(patient: Coordinator, at: str) -> None:
    engine = an_engine()
    failed(patient.url, engine)
    for words in (["status", engine], ["watch", engine], ["history", engine], ["budgets", engine]):
        code, written, _ = kvaccord(*words, at)
        assert code == (2 if words[0] in ("status", "watch") else 0)
        assert "\x1b" not in written
        assert "rank_vetoed" in written


def test_an_earlier_round_is_shown_by_number(patient: Coordinator, at: str) -> None:
    engine = an_engine()
    failed(patient.url, engine, "run-1")
    sealed(patient.url, engine, "run-2")
    code, answer = as_json("status", engine, "--round", "1", at)
    assert (code, answer["status"]["state"]) == (2, "FAILED")
    assert answer["decision"]["verdict"]["code"] == "rank_vetoed"
    code, answer = as_json("status", engine, at)
    assert (code, answer["status"]["round"], answer["outcome"]["code"]) == (0, 2, "sealed")


@pytest.mark.parametrize("command", ["status", "history"])
def test_an_engine_that_never_joined_is_one_sentence(command: str, at: str) -> None:
    code, written, complaint = kvaccord(command, "nobody", at)
    assert (code, written) == (1, "")
    assert complaint == "kvaccord: no engine default/nobody has joined here\n"


@pytest.mark.parametrize("command", ["status", "watch", "history", "budgets"])
def test_no_coordinator_is_one_sentence_that_says_what_to_do(command: str) -> None:
    words = [command] if command == "budgets" else [command, "llama"]
    code, _, complaint = kvaccord(*words, "--url", "http://127.0.0.1:9")
    assert code == 1
    assert "http://127.0.0.1:9 does not answer" in complaint
    assert "--url or KVACCORD_URL" in complaint
    assert len(complaint.splitlines()) == 1


@pytest.mark.parametrize("url", ["nowhere", "ftp://x", "http://"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    code, _, complaint = kvaccord("status", "llama", "--url", url)
    assert code == 1
    assert "http://HOST:PORT" in complaint


def test_a_proxy_of_the_environment_is_not_asked(patient: Coordinator) -> None:
    engine = an_engine()
    sealed(patient.url, engine)
    proxy = dict.fromkeys(("HTTP_PROXY", "http_proxy", "ALL_PROXY"), "http://127.0.0.1:9")
    code, _, complaint = kvaccord("status", engine, KVACCORD_URL=patient.url, **proxy)
    assert code == 0, complaint


@pytest.mark.parametrize("name", ["a/b/c", "", "/", "llama 70b", "../x"])
def test_a_name_that_is_no_engine_is_refused(name: str, at: str) -> None:
    code, _, complaint = kvaccord("status", name, at)
    assert code == 1
    assert "names no engine" in complaint


def test_the_namespace_comes_from_the_environment(at: str) -> None:
    _, _, complaint = kvaccord("status", "llama", at, KVACCORD_NAMESPACE="team-a")
    assert "team-a/llama" in complaint


# watch


def watching(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, "watch", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=BARE,
    )


def lines_until(process: subprocess.Popen[str], word: str) -> str:
    """What it writes until a line has this word."""
    assert process.stdout is not None
    lines = ""
    while word not in lines:
        line = process.stdout.readline()
        assert line, f"it ended after: {lines}"
        lines += line
    return lines


def test_a_start_is_watched_from_before_it_begins_to_its_seal(
    patient: Coordinator, at: str
) -> None:
    engine = an_engine()
    process = watching(engine, at, "--every-s", "0.05")
    assert "waiting for it" in lines_until(process, "no engine")
    first = Worker(patient.url, engine, 0, tp=2).enter()
    assert "waits for rank 1" in lines_until(process, "waits for rank 1")
    second = Worker(patient.url, engine, 1, tp=2).enter()
    first.report()
    lines_until(process, "rank 0 on host-0 (attempt 1): present, reported")
    digest = second.report(wait_s=5).headers["Kvaccord-Digest"]
    for worker in (first, second):
        worker.applied(digest, kv=90)
    rest, complaint = process.communicate(timeout=10)
    assert (process.returncode, complaint) == (0, "")
    assert "SEALED sealed" in rest


def test_a_failing_start_ends_the_watch_with_2_and_json_is_one_object_a_line(
    patient: Coordinator, at: str
) -> None:
    engine = an_engine()
    worker = Worker(patient.url, engine, 0, tp=2).enter()
    process = watching(engine, at, "--json", "--every-s", "0.05")
    lines_until(process, "GATHERING")
    worker.veto("RuntimeError: no weights")
    rest, _ = process.communicate(timeout=10)
    assert process.returncode == 2
    last = json.loads(rest.splitlines()[-1])
    assert (last["round"], last["state"]) == (1, "FAILED")
    assert "no weights" in last["text"]


def test_a_watch_without_outcome_ends_with_3(patient: Coordinator, at: str) -> None:
    engine = an_engine()
    Worker(patient.url, engine, 0, tp=2).enter()
    code, written, _ = kvaccord("watch", engine, at, "--timeout-s", "0.5")
    assert code == 3
    assert "no outcome within 0.5 s" in written


def test_a_watch_for_the_next_round_passes_over_the_one_that_ended(
    patient: Coordinator, at: str
) -> None:
    engine = an_engine()
    failed(patient.url, engine, "run-1")
    process = watching(engine, at, "--next", "--every-s", "0.05")
    lines_until(process, "round 1 has ended; waiting for the next")
    sealed(patient.url, engine, "run-2")
    rest, _ = process.communicate(timeout=10)
    assert process.returncode == 0
    assert "round 2" in rest


def test_a_coordinator_that_is_away_for_a_moment_does_not_end_a_watch(tmp_path: Path) -> None:
    with serving(store=f"sqlite:///{tmp_path}/kvaccord.db") as running:
        engine = an_engine()
        Worker(running.url, engine, 0, tp=2).enter()
        process = watching(engine, f"--url={running.url}", "--every-s", "0.05")
        lines_until(process, "GATHERING")
        running.kill()
        lines_until(process, "does not answer")
        running.start()
        # Nobody comes back to that round: both of its ranks are missing or lost in the end.
        process.kill()
        process.communicate(timeout=10)


def test_on_a_terminal_the_round_is_drawn(patient: Coordinator, at: str) -> None:
    engine = an_engine()
    sealed(patient.url, engine)
    ours, theirs = pty.openpty()
    command = [*COMMAND, "watch", engine, at]
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, env=BARE | {"TERM": "xterm"})
    os.close(theirs)
    drawn = b""
    try:
        while part := os.read(ours, 4096):
            drawn += part
    except OSError:
        pass  # the terminal is closed
    os.close(ours)
    assert process.wait(10) == 0
    assert b"SEALED sealed" in drawn
    assert b"presence" in drawn


# budgets and history


def test_the_agreed_budgets_are_a_table_or_the_coordinators_json(
    patient: Coordinator, at: str
) -> None:
    engine = an_engine()
    sealed(patient.url, engine)
    code, written, _ = kvaccord("budgets", engine, at)
    assert code == 0
    [line] = [line for line in written.splitlines() if engine in line]
    assert "SEALED" in line
    assert "90 kv" in line
    params = {"engine": engine}
    answer = httpx.get(f"{patient.url}/v1/budgets", params=params).json()
    assert as_json("budgets", engine, at) == (0, answer)


def test_budgets_are_filtered_by_state(patient: Coordinator, at: str) -> None:
    engine = an_engine()
    failed(patient.url, engine)
    assert as_json("budgets", engine, "--state", "sealed", at)[1] == {"budgets": []}
    [row] = as_json("budgets", engine, "--state", "failed", "--ns", "def*", at)[1]["budgets"]
    assert row["code"] == "rank_vetoed"


def test_history_is_newest_first_with_code_and_counts(patient: Coordinator, at: str) -> None:
    engine = an_engine()
    failed(patient.url, engine, "run-1")
    sealed(patient.url, engine, "run-2")
    code, answer = as_json("history", engine, at)
    assert code == 0
    rows = [(row["round"], row["state"], row["code"]) for row in answer["rounds"]]
    assert rows == [(2, "SEALED", "sealed"), (1, "FAILED", "rank_vetoed")]
    assert answer["rounds"][0]["entries"] == [{"kv": 90}]
    assert len(as_json("history", engine, "--limit", "1", at)[1]["rounds"]) == 1
    _, written, _ = kvaccord("history", engine, at)
    assert written.index("run-2") < written.index("run-1")


# doctor


def checked(*words: str, **env: str) -> tuple[int, dict[str, tuple[str, str]]]:
    code, answer = as_json("doctor", *words, **env)
    assert answer["ok"] == (code == 0)
    return code, {row["check"]: (row["result"], row["said"]) for row in answer["checks"]}


def test_a_well_prepared_rank_has_nothing_to_mend(patient: Coordinator) -> None:
    env = {"KVACCORD_URL": patient.url, "KVACCORD_ENGINE": "llama", "KVACCORD_LAUNCH": "run-7#2"}
    code, found = checked(**env)
    assert code == 0
    assert found["coordinator"][0] == found["ready"][0] == found["version"][0] == "ok"
    assert found["latency"][0] == "ok"
    assert found["store"][0] == "ok"
    assert found["launch"] == ("ok", "run-7 (restart 2) from env")
    assert found["KVACCORD_ENGINE"] == ("ok", "llama")


def test_what_would_stop_a_rank_is_found_before_it_starts(patient: Coordinator, at: str) -> None:
    env = {
        "KVACCORD_ENGINE": "llama-{POD_NAME}",
        "KVACCORD_PATIENCE_S": "ten",
        "KVACCORD_ENGIN": "llama",
        "HTTPS_PROXY": "http://proxy:3128",
    }
    code, found = checked(at, **env)
    assert code == 1
    assert found["launch"][0] == "fail"
    assert "KVACCORD_LAUNCH" in found["launch"][1]
    assert found["KVACCORD_ENGINE"] == ("fail", "'llama-{POD_NAME}': set POD_NAME")
    assert found["KVACCORD_PATIENCE_S"][0] == "fail"
    assert found["KVACCORD_ENGIN"][0] == "warn"
    assert found["proxy"][0] == "ok"


def test_a_world_of_one_needs_no_launch(at: str) -> None:
    code, found = checked(at, "--world-size", "1", KVACCORD_ENGINE="llama")
    assert (code, found["launch"][0]) == (0, "ok")


def test_a_coordinator_that_does_not_answer_fails_the_check() -> None:
    code, found = checked("--url", "http://127.0.0.1:9", KVACCORD_LAUNCH="run-1")
    assert code == 1
    assert found["coordinator"][0] == "fail"
    assert "latency" not in found
    code, written, _ = kvaccord("doctor", "--url", "http://127.0.0.1:9")
    assert code == 1
    assert "does not answer" in written


def test_a_policy_file_that_is_wrong_is_named(at: str, tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("nonsense: [")
    code, found = checked(at, "--policy", str(file), KVACCORD_LAUNCH="run-1")
    assert (code, found["policy"][0]) == (1, "fail")


# the table


@pytest.mark.parametrize(
    "command",
    ["serve", "rehearse", "plan", "status", "watch", "budgets", "history", "doctor"],
)
def test_every_command_has_help(command: str) -> None:
    code, written, _ = kvaccord(command, "--help")
    assert code == 0
    assert command in written


def test_a_usage_error_exits_with_1() -> None:
    for words in (["status"], ["watch", "x", "--round", "0"], ["no-such-command"]):
        code, written, complaint = kvaccord(*words)
        assert (code, written) == (1, "")
        assert complaint.startswith("kvaccord: ")
