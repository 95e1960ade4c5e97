"""`kvaccord read` as a command: what comes out where, and with which exit code."""

import gzip
import json
import os
import pty
import subprocess
import sys

import pytest

from tests.reader.reading import HERE

COMMAND = [sys.executable, "-m", "cli", "read"]
AGREED = HERE / "logs" / "atom-llama-3-8b-tp2-first-run.log"
DIFFER = HERE / "logs" / "atom-tp4-unequal-but-serving.log"
RESTARTS = HERE / "logs" / "vllm-0.10-restart-loop.log"


def run(*words, stdin=None):
    done = subprocess.run(
        [*COMMAND, *map(str, words)], input=stdin, capture_output=True, timeout=60, check=False
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.mark.parametrize(("log", "code"), [(AGREED, 0), (DIFFER, 2), (RESTARTS, 2)])
def test_the_exit_code_is_the_answer(log, code):
    assert run(log)[0] == code


def test_what_cannot_be_told_exits_with_3():
    first = AGREED.read_bytes().splitlines(keepends=True)[0]
    code, said, _ = run("-", stdin=first)
    assert code == 3
    assert said.startswith("inconclusive: the one count cannot speak for all ranks\n")


def test_the_cause_comes_first_and_a_command_second():
    said = run(RESTARTS)[1].splitlines()
    assert said[0].startswith("To serve at least one request with the models's max seq len (40960)")
    assert said[1] == "next       vllm serve … --max-model-len 25132"
    assert any("2 starts in this log, which ended alike" in line for line in said)


def test_standard_input_may_be_packed():
    code, said, complaint = run("-", "--json", stdin=gzip.compress(AGREED.read_bytes()))
    assert (code, json.loads(said)["value"], complaint) == (0, 107703, "")


def test_several_files_are_one_start(tmp_path):
    for n, line in enumerate(AGREED.read_bytes().splitlines(keepends=True)):
        (tmp_path / f"rank{n}.log").write_bytes(line)
    code, said, _ = run("--json", *sorted(tmp_path.iterdir()))
    document = json.loads(said)
    assert (code, document["world"], document["agreed"]["answer"]) == (0, 2, "yes")


def test_markdown_has_a_table_of_the_ranks():
    said = run("--markdown", DIFFER)[1]
    assert said.startswith("**the ranks did not agree: counts of blocks differ")
    assert "| 2 | 84008 | 157.04 |" in said
    assert "| did they agree | no |" in said


def test_github_is_told_where_the_log_says_it():
    said = run("--github", RESTARTS)[1].splitlines()
    assert said[0].startswith("::error file=")
    assert ",line=14,title=kvaccord read::To serve at least one request" in said[0]
    assert "%0Anext: vllm serve" in said[0]
    assert run("--github", AGREED)[1].startswith("::notice ")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("no-such.log",), "no-such.log: No such file or directory; name a log file, or -"),
        (("--layout", "tp=x", AGREED), "'tp=x' is no AXIS=SIZE; axes are dp, pp, pcp, tp"),
        (("--json", "--github", AGREED), "--json, --markdown and --github: name one"),
        (("--ranks", "0", AGREED), "--ranks"),
        ((), "LOG"),
    ],
)
def test_a_wrong_use_exits_with_1_and_one_sentence(words, sentence):
    code, said, complaint = run(*words)
    assert (code, said) == (1, "")
    assert sentence in complaint


def test_a_bar_is_shown_on_a_terminal_alone(tmp_path):
    log = tmp_path / "engine.log"
    log.write_bytes(AGREED.read_bytes() + b"a line that says nothing\n" * 200_000)
    assert run(log)[2] == ""
    front, back = pty.openpty()
    with subprocess.Popen(
        [*COMMAND, log], stdout=subprocess.DEVNULL, stderr=back, env=os.environ | {"TERM": "xterm"}
    ) as process:
        os.close(back)
        seen = b""
        try:
            while more := os.read(front, 4096):
                seen += more
        except OSError:
            pass  # the other end is closed
    os.close(front)
    assert process.returncode == 0
    assert b"reading" in seen
