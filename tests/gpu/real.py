"""Measuring a real NVIDIA device. Found by name alone: without a device it fails.

python -m pytest tests/gpu/real.py        # torch, nvidia-ml-py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from kvaccord.errors import Invalid
from kvaccord.messages import page
from worker_client.measure import Reading, cuda_device, cuda_reading, cuda_report

ROOT = Path(__file__).parents[2]
GIB = 2**30
KV = page("kv", 2**21)
NEIGHBOUR = """
import sys, torch
held = torch.ones(int(sys.argv[1]), dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("holds", flush=True)
sys.stdin.readline()
"""


@contextmanager
def a_neighbour(size: int) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds so many bytes of the device."""
    with subprocess.Popen(
        [sys.executable, "-c", NEIGHBOUR, str(size)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "holds\n"
        try:
            yield process
        finally:
            process.kill()


def in_a_process(code: str, **environ: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", f"import json\n{code}"],
        cwd=ROOT,
        env=os.environ | environ,
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def held() -> Iterator[Any]:
    """2 GiB of our own, as weights are."""
    yield torch.ones(2 * GIB, dtype=torch.uint8, device="cuda")
    torch.cuda.empty_cache()


def test_the_parts_add_up_to_the_total_within_one_per_cent(held):
    with a_neighbour(3 * GIB) as neighbour:
        report = cuda_report(classes=[KV])
    parts = report.parts or {}
    names = ("torch_bytes", "context_bytes", "others_bytes", "driver_bytes")
    told = report.free_bytes + sum(int(parts[name]) for name in names)
    assert abs(told - report.total_bytes) <= report.total_bytes / 100, parts
    assert abs(int(parts["unexplained_bytes"])) <= report.total_bytes / 100
    assert f"pid {neighbour.pid} " in str(parts["others"])
    assert 3 * GIB <= int(parts["others_bytes"]) <= 5 * GIB, "what it holds, and its context"
    assert int(parts["torch_bytes"]) >= 2 * GIB


def test_the_budget_can_be_allocated_whole(held):
    report = cuda_report(classes=[KV], utilization=0.95)
    pool = torch.zeros(report.kv_budget_bytes, dtype=torch.uint8, device="cuda")
    assert pool.nbytes == report.kv_budget_bytes > 0


def test_memory_that_a_neighbour_releases_is_told_and_ends_nothing(held):
    with a_neighbour(8 * GIB):
        before = cuda_reading()
    report = cuda_report(classes=[KV], initial=before)
    assert int((report.parts or {})["free_moved_bytes"]) >= 8 * GIB


def test_a_rank_that_shares_the_device_answers_for_itself_alone(held):
    with a_neighbour(8 * GIB):
        shared = cuda_report(classes=[KV], utilization=0.2, local_count=2)
        charged = cuda_report(classes=[KV], utilization=0.2)
    assert shared.kv_budget_bytes >= charged.kv_budget_bytes + 8 * GIB


def test_a_device_is_known_by_its_uuid_whatever_is_visible():
    device = cuda_device()
    assert device.uuid is not None
    assert device.uuid.startswith(("GPU-", "MIG-"))
    say = "from worker_client import cuda_device\nprint(cuda_device().model_dump_json())"
    for visible in (device.uuid, device.uuid[:12], "0"):
        assert in_a_process(say, CUDA_VISIBLE_DEVICES=visible)["uuid"] == device.uuid


@pytest.mark.parametrize("visible", ["", "-1"])
def test_a_variable_that_hides_the_device_is_named(visible):
    say = (
        "from worker_client import cuda_reading\n"
        "try: cuda_reading()\nexcept Exception as fault: print(json.dumps(str(fault)))"
    )
    text = in_a_process(say, CUDA_VISIBLE_DEVICES=visible)
    assert f"CUDA_VISIBLE_DEVICES is {visible!r}, which hides every device" in text


def test_nvml_and_cuda_speak_of_one_device():
    found = cuda_reading()
    assert isinstance(found, Reading)
    assert found.second is not None, found.no_second
    assert found.second.total_bytes is not None
    assert abs(found.second.total_bytes - found.total_bytes) < found.total_bytes / 50


def test_a_share_without_nvml_is_refused(held, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(Invalid, match="kvaccord\\[nvml\\]"):
        cuda_report(classes=[KV], local_count=2)
