"""The rehearsal: eight real processes, each with its own numbers, over real sockets."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cli.plan import answered, question_in
from cli.rank import report_of
from cli.starts import LIBRARY, RECORDED, find_start, library, read_start
from kvaccord.layout import Layout
from kvaccord.plan import plan
from tests.wire import serving

STARTED = json.loads(RECORDED.read_text())


@pytest.fixture(scope="module")
def url():
    """With the usual budgets: eight interpreters may take seconds to start on a busy machine."""
    with serving() as running:
        yield running.url


def rehearsal(*options, cwd=None):
    environ = {k: v for k, v in os.environ.items() if not k.startswith("KVACCORD_")}
    return subprocess.Popen(
        [sys.executable, "-m", "cli", "rehearse", *options],
        cwd=cwd,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def rehearsed(*options, cwd=None):
    """The rehearsal's exit code and report."""
    process = rehearsal("--json", *options, cwd=cwd)
    written, complaint = process.communicate(timeout=60)
    assert written, complaint
    return process.returncode, json.loads(written)


def left_behind(word):
    """Processes whose command line has this word."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it ended meanwhile
        if word in command:
            found.append(command)
    return found


def test_the_recorded_start_plans_to_the_recorded_count():
    layout = Layout(**STARTED["layout"])
    reports = {rank: report_of(STARTED, rank) for rank in range(layout.world_size)}
    [row] = plan(layout, reports).schedulers
    assert row.entries["kv"] == 86310
    assert row.binding["kv"] == (1, 7)


def test_eight_processes_seal_the_recorded_start(url):
    code, report = rehearsed("--url", url)
    assert (code, report["verdict"], len(report["digests"])) == (0, "SEALED", 1)
    assert "86310 kv" in report["text"]
    assert [row["exit_code"] for row in report["ranks"]] == [0] * 8


def test_every_survivor_hears_which_rank_raised_and_what(url):
    code, report = rehearsed("--url", url, "--raise-rank", "3")
    assert (code, report["verdict"], len(report["digests"])) == (2, "FAILED", 1)
    survivors = [row for row in report["ranks"] if row["rank"] != 3]
    assert {row["exit_code"] for row in survivors} == {2}
    assert len({row["text"] for row in survivors}) == 1
    assert "rank_vetoed: rank 3" in report["text"]
    assert "out of memory while profiling" in report["text"]


def test_every_survivor_hears_which_rank_was_killed(url):
    code, report = rehearsed("--url", url, "--kill-rank", "5")
    assert (code, report["verdict"], len(report["digests"])) == (2, "FAILED", 1)
    assert "rank_lost: rank 5" in report["text"]
    assert report["ranks"][5]["exit_code"] == -signal.SIGKILL


def test_every_rank_hears_which_rank_never_came():
    code, report = rehearsed("--absent-rank", "2", "--gather-s", "4")
    assert (code, report["verdict"], len(report["digests"])) == (2, "FAILED", 1)
    assert "ranks_missing: rank 2" in report["text"]
    assert report["ranks"][2]["exit_code"] is None


def test_the_same_name_can_be_rehearsed_again_on_the_same_store(tmp_path):
    for round_ in ("1", "2"):
        options = ("--serve", "--once", "--port", "0")
        code, report = rehearsed(*options, cwd=tmp_path)
        assert (code, report["verdict"]) == (0, "SEALED")
        assert f"round {round_} " in report["text"]


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_whatever_ends_the_rehearsal_no_process_is_left_behind(ending):
    engine = f"left-{ending.name.lower()}-{os.getpid()}"
    process = rehearsal("--absent-rank", "0", "--gather-s", "60", "--engine", engine)
    while len(left_behind(f"--engine={engine}")) < 7:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(ending)
    process.communicate(timeout=20)
    deadline_s = time.monotonic() + 5
    while left_behind(f"--engine={engine}") and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert left_behind(f"--engine={engine}") == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--raise-rank", "8"], "--raise-rank 8"),
        (["--once"], "--once"),
        (["--url", "nowhere"], "http://HOST:PORT"),
        (["--url", "http://127.0.0.1:1", "--serve"], "one coordinator"),
        (["--start", "pyproject.toml"], "--start"),
    ],
)
def test_a_misuse_is_explained(options, said):
    process = rehearsal(*options)
    _, complaint = process.communicate(timeout=20)
    assert process.returncode == 1
    assert said in complaint


# the library


def plain(name):
    """A start of the library in which no rank is told to do anything."""
    return not read_start(find_start(name)).fates


NAMES = [path.stem for path in library()]


def test_the_library_has_what_its_page_says():
    page = (LIBRARY / "README.md").read_text().partition("## A start file")[0]
    told = re.findall(r"^\| `([a-z0-9-]+)` \|", page, flags=re.M)
    assert sorted(told) == NAMES
    assert {"atom-deepseek-v4-pro-agreed", "atom-llama-3-8b-first-run", "stuck"} <= set(NAMES)
    for name in NAMES:
        start = read_start(find_start(name))
        assert start.expect is not None, name
        assert re.match(r"(Recorded|Chosen|Eight ranks)", start.about), name


@pytest.mark.parametrize("name", [name for name in NAMES if plain(name)])
def test_a_start_of_the_library_plans_to_what_it_expects(name):
    start = read_start(find_start(name))
    answer = answered(question_in(find_start(name)))
    if start.expect.verdict == "SEALED":
        rows = answer["plan"]["schedulers"]
        assert all(row["entries"] == start.expect.entries for row in rows)
    else:
        assert answer["verdict"]["code"] == start.expect.code
        assert answer["verdict"]["ranks"] == list(start.expect.ranks)


@pytest.mark.parametrize("name", [*(n for n in NAMES if not plain(n)), "hybrid-with-state"])
def test_a_fate_has_the_ending_that_the_start_expects(name):
    code, report = rehearsed(name)
    assert [check for check in report["checks"] if not check["kept"]] == []
    assert report["kept"] is True
    assert code == (0 if report["verdict"] == "SEALED" else 2)


def a_start(folder, name, **fields):
    report = {"free_bytes": 10**6, "kv_budget_bytes": 900_000}
    document = {
        "about": "Chosen throughout.",
        "engine": name,
        "layout": {"tp": 2},
        "classes": [{"kind": "page", "name": "kv", "entry_bytes": 1000}],
        "ranks": [report, report],
        "expect": {"verdict": "SEALED", "entries": {"kv": 900}},
    }
    path = folder / f"{name}.json"
    path.write_text(json.dumps(document | fields))
    return path


def test_a_start_that_does_not_come_as_expected_is_broken(tmp_path):
    a_start(tmp_path, "as-expected")
    path = a_start(tmp_path, "broken", expect={"verdict": "SEALED", "entries": {"kv": 901}})
    code, report = rehearsed(str(path))
    assert (code, report["kept"]) == (1, False)
    [broken] = [check for check in report["checks"] if not check["kept"]]
    assert (broken["what"], broken["got"]) == ("entries", {"kv": 900})

    process = rehearsal("--all", "--library", str(tmp_path))
    written, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert 'broken.json: BROKEN       entries: expected {"kv": 901}, got {"kv": 900}' in written
    assert "2 starts, 1 as expected" in written


def test_the_whole_library_as_json_exits_with_0_when_all_is_kept(tmp_path):
    a_start(tmp_path, "as-expected")
    code, answer = rehearsed("--all", "--library", str(tmp_path))
    assert (code, answer["broken"]) == (0, 0)
    assert [report["verdict"] for report in answer["starts"]] == ["SEALED"]


def test_a_fate_of_the_command_line_takes_the_expectation_away(tmp_path):
    path = a_start(tmp_path, "raising")
    code, report = rehearsed(str(path), "--raise-rank", "1")
    assert (code, report["verdict"]) == (2, "FAILED")
    assert "kept" not in report


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"ranks": [{}]}, "the layout has ranks 0-1"),
        ({"fates": {"2": "raise"}}, "fates of rank 2"),
        ({"fates": {"0": "explode"}}, "fates.0.kind"),
        ({"budgets": {"gather_s": 0}}, "budgets.gather_s"),
        ({"expects": {}}, "expects"),
        ({"total_bytes": 10}, "total_bytes"),
    ],
)
def test_a_fault_in_a_start_file_is_named(tmp_path, fields, said):
    process = rehearsal(str(a_start(tmp_path, "faulty", **fields)))
    _, complaint = process.communicate(timeout=20)
    assert process.returncode == 1
    assert said in complaint
    assert "Traceback" not in complaint


def test_the_list_names_every_start():
    process = rehearsal("--list")
    written, _ = process.communicate(timeout=20)
    assert process.returncode == 0
    assert all(f"\n{name} " in written for name in NAMES)
