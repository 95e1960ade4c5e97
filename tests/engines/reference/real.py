"""The reference engine, started for real: on CPU, by torchrun, beside a coordinator of its own.

Needs a Python with torch: the one that runs the tests, or the one that TORCH_PYTHON names. Found by
name alone:
.ci/vllm runs it, in an environment that has torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.wire import serving

ROOT = Path(__file__).parents[3]
PYTHON = os.environ.get("TORCH_PYTHON", sys.executable)
SEQUENCE_BLOCKS = 16  # of the longest sequence, and so the fewest that an engine starts with


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving("--gather-s", "60", "--report-s", "60", "--apply-s", "60") as running:
        yield running.url


def started(url: str, ranks: int, *options: str) -> tuple[int, list[dict[str, Any]], str]:
    """Exit code, what the ranks said, and stderr."""
    torchrun = [PYTHON, "-m", "torch.distributed.run", "--standalone"]
    engine = ["--nproc-per-node", str(ranks), str(ROOT / "examples/engine/engine.py")]
    done = subprocess.run(
        [*torchrun, *engine, *options],
        env=os.environ
        | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        | {"KVACCORD_URL": url, "KVACCORD_ENGINE": "reference"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return done.returncode, said, done.stderr


def of_all(said: list[dict[str, Any]], what: str) -> list[Any]:
    return [each[what] for each in said if what in each]


def test_ranks_that_differ_build_one_count_and_generate_what_one_rank_does(url):
    _, alone, _ = started(url, 1, "--prompts", "3")
    code, said, stderr = started(
        url, 2, "--prompts", "3", "--short-rank", "1", "--hold-bytes", "30000000"
    )
    assert code == 0, stderr
    own, built = of_all(said, "own_blocks"), of_all(said, "blocks")
    assert own[0] != own[1]
    assert built == [min(own)] * 2
    assert len(set(of_all(said, "digest"))) == 1
    (tokens,) = of_all(alone, "tokens")
    assert of_all(said, "tokens") == [tokens] * 2


def test_a_pool_of_one_sequence_generates_the_same_one_after_the_other(url):
    # 64 MiB less so much leaves room for 16 blocks of 64 KiB, and so for one long sequence.
    hold = 64 * 2**20 - SEQUENCE_BLOCKS * 2**16
    _, roomy, _ = started(url, 1, "--prompts", "4", "--new-tokens", "100")
    code, tight, stderr = started(
        url,
        *(1, "--prompts", "4", "--new-tokens", "100", "--short-rank", "0"),
        *("--hold-bytes", str(hold)),
    )
    assert code == 0, stderr
    assert of_all(tight, "blocks") == [SEQUENCE_BLOCKS]
    assert of_all(tight, "tokens") == of_all(roomy, "tokens")


def test_a_rank_without_room_for_a_sequence_stops_all_of_them_by_name(url):
    code, said, stderr = started(url, 2, "--short-rank", "1", "--hold-bytes", str(64 * 2**20))
    assert code != 0
    assert of_all(said, "blocks") == [], "nobody builds"
    sentences = {
        line.partition("kvaccord.errors.Failed: ")[2]
        for line in stderr.splitlines()
        if "kvaccord.errors.Failed: " in line
    }
    assert len(sentences) == 1
    assert "does_not_fit: rank 1 on" in sentences.pop()
