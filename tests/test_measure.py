"""Measuring a device: the arithmetic against ATOM's, the calls against a stand-in for torch."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvaccord.errors import Invalid
from kvaccord.messages import page
from worker_client.measure import cuda_report, kv_budget

VECTORS = json.loads((Path(__file__).parent / "vectors/atom.json").read_text())["budget_vectors"]
GIB = 2**30


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: v["name"])
def test_the_budget_is_what_atom_computes(vector):
    given, expected = vector["input"], vector["expected"]
    budget, non_torch = kv_budget(
        total_bytes=given["total"],
        free_bytes=given["free"],
        reserved_bytes=given["reserved"],
        peak_torch_bytes=max(given["peak"], given["current"]),
        utilization_ppm=round(given["util"] * 1_000_000),
        graph_bytes=given["cg"],
        # A second process of the engine ("extra") is a margin too.
        safety_bytes=expected["safety_margin"] + given.get("extra", 0),
    )
    assert budget == expected["available_for_kv_budget"]
    assert non_torch == expected["non_torch"]
    assert min(budget, given["free"]) == expected["available_for_kv"]


def test_a_shortage_is_a_negative_budget():
    budget, _ = kv_budget(
        total_bytes=10 * GIB,
        free_bytes=1 * GIB,
        reserved_bytes=9 * GIB,
        peak_torch_bytes=11 * GIB,
        utilization_ppm=900_000,
    )
    assert budget == -2 * GIB


def test_what_other_processes_free_meanwhile_is_no_negative_use():
    _, non_torch = kv_budget(
        total_bytes=10 * GIB,
        free_bytes=9 * GIB,
        reserved_bytes=2 * GIB,
        peak_torch_bytes=0,
        utilization_ppm=900_000,
    )
    assert non_torch == 0


class FakeCuda:
    """A device of 80 GiB on which torch holds 30 GiB, 10 of them only cached, and others 5."""

    def __init__(self):
        self.calls = []
        self.cached = 10 * GIB

    def is_available(self):
        return True

    def synchronize(self, device):
        self.calls.append(("synchronize", device))

    def empty_cache(self):
        self.calls.append(("empty_cache",))
        self.cached = 0

    def mem_get_info(self, device):
        return 80 * GIB - 25 * GIB - self.cached, 80 * GIB

    def memory_reserved(self, device):
        return 20 * GIB + self.cached

    def memory_stats(self, device):
        return {"allocated_bytes.all.peak": 28 * GIB, "allocated_bytes.all.current": 20 * GIB}


@pytest.fixture
def cuda(monkeypatch):
    cuda = FakeCuda()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda, __version__="2.9"))
    return cuda


def test_a_report_says_what_is_free_and_how_the_budget_came_about(cuda):
    report = cuda_report(
        classes=[page("kv", 100)], graph_bytes=GIB, safety_bytes=2 * GIB, device=1, block_tokens=16
    )
    assert (report.free_bytes, report.total_bytes) == (55 * GIB, 80 * GIB)
    assert report.kv_budget_bytes == (72 - 28 - 5 - 1 - 2) * GIB
    assert report.block_tokens == 16
    assert report.parts == {
        "utilization_ppm": 900_000,
        "utilization_of": "total",
        "peak_torch_bytes": 28 * GIB,
        "non_torch_bytes": 5 * GIB,
        "graph_bytes": GIB,
        "safety_bytes": 2 * GIB,
    }
    assert cuda.calls == [("synchronize", 1), ("empty_cache",)]


def test_a_device_that_torch_has_not_used_yet_has_no_peak(cuda, monkeypatch):
    monkeypatch.setattr(cuda, "memory_stats", lambda device: {})
    report = cuda_report(classes=[page("kv", 100)])
    assert report.parts["peak_torch_bytes"] == 0


def test_without_a_device_the_error_says_what_to_do(cuda, monkeypatch):
    monkeypatch.setattr(cuda, "is_available", lambda: False)
    with pytest.raises(Invalid, match="CUDA_VISIBLE_DEVICES"):
        cuda_report(classes=[page("kv", 100)])


@pytest.mark.parametrize("utilization", [0, 1.01, -1, float("nan")])
def test_a_utilization_is_a_share(cuda, utilization):
    with pytest.raises(Invalid, match="utilization"):
        cuda_report(classes=[page("kv", 100)], utilization=utilization)


def test_a_misspelt_field_is_refused(cuda):
    with pytest.raises(Invalid, match="Report: block_token 16: no such field"):
        cuda_report(classes=[page("kv", 100)], block_token=16)
