"""A log becomes a start file, and the planner says of it what the log said."""

import json
import subprocess
import sys
from contextlib import suppress

import pytest

from cli.plan import answered, question_in
from cli.starts import read_start
from reader.replay import NotReplayable, start_file_of
from tests.reader.reading import CASES, LOGS, a_case, log_of, read

REPLAYABLE = [
    "atom-deepseek-v4-pro-tp4-pcp2-own-budgets",
    "atom-llama-3-8b-tp2-second-run",
    "atom-tp4-unequal-but-serving",
    "atom-0.1-tp2-negative",
    "sglang-0.4-tp2-ready",
    "trtllm-1.1-pytorch-tp2",
    "vllm-0.8-tp2-offers",
    "vllm-0.10-restart-loop",
    "lmdeploy-0.6-turbomind-tp2",
]


def judged(name):
    (path,) = [path for path in LOGS if path.stem == name]
    return read(path.read_bytes())


@pytest.mark.parametrize("name", REPLAYABLE)
def test_the_planner_decides_of_it_what_is_expected(tmp_path, name):
    path = tmp_path / "start.json"
    path.write_text(json.dumps(start_file_of(judged(name), name)))
    expect = read_start(path).expect
    answer = answered(question_in(path))
    passed = expect.verdict == "SEALED"
    assert answer["verdict"]["outcome"] == ("PASSED" if passed else "FAILED")
    if passed:
        assert answer["plan"]["schedulers"][0]["entries"] == expect.entries
    else:
        assert answer["verdict"]["code"] == expect.code


def test_a_recorded_start_keeps_its_counts_and_bytes():
    start = start_file_of(judged("atom-llama-3-8b-tp2-second-run"), "x")
    assert start["classes"] == [{"kind": "page", "name": "kv", "entry_bytes": 540672}]
    assert start["ranks"][0]["kv_budget_bytes"] == 107631 * 540672
    assert start["expect"]["entries"] == {"kv": 107631}


@pytest.mark.parametrize(
    ("number", "ranks", "code"),
    [
        ("017", 2, "request_exceeds_free"),
        ("021", 2, "does_not_fit"),
        ("023", 2, "state_floor_exceeds_budget"),
        ("013", 8, "does_not_fit"),
        ("028", 8, "does_not_fit"),
    ],
)
def test_a_refusal_of_an_engine_is_refused_by_the_planner_for_the_same_reason(
    tmp_path, number, ranks, code
):
    path = tmp_path / "start.json"
    path.write_text(json.dumps(start_file_of(read(log_of(a_case(number)), ranks=ranks), number)))
    assert answered(question_in(path))["verdict"]["code"] == code
    assert read_start(path).expect.code == code


@pytest.mark.parametrize(("number", "fates"), [("063", {"11": "raise"}), ("038", {"0": "absent"})])
def test_what_befell_a_rank_befalls_it_again(number, fates):
    assert start_file_of(read(log_of(a_case(number))), number)["fates"] == fates


@pytest.mark.parametrize(
    ("number", "why"),
    [
        ("016", "neither a count nor a cause|how many ranks"),
        ("023", "how many ranks"),
        ("032", "how many ranks"),
        ("060", "does not say what the ranks had"),
    ],
)
def test_what_a_log_lacks_is_said(number, why):
    with pytest.raises(NotReplayable, match=why):
        start_file_of(read(log_of(a_case(number))), number)


@pytest.mark.parametrize("log", [*LOGS, *CASES], ids=lambda path: path.stem)
def test_what_is_replayed_at_all_is_a_valid_start_file(tmp_path, log):
    text = log_of(json.loads(log.read_text())) if log.suffix == ".json" else log.read_text()
    path = tmp_path / "start.json"
    with suppress(NotReplayable):
        path.write_text(json.dumps(start_file_of(read(text), log.name)))
        read_start(path)


def test_the_command_writes_the_file_and_rehearses_it(tmp_path):
    (log,) = [path for path in LOGS if path.stem == "atom-tp4-unequal-but-serving"]
    command = [sys.executable, "-m", "cli", "read", str(log), "--replay", tmp_path / "start.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert 'kept         entries: expected {"kv": 84008}' in done.stdout
    assert json.loads((tmp_path / "start.json").read_text())["layout"]["tp"] == 4
