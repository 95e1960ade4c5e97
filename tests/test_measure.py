"""Measuring a device: the arithmetic against ATOM's, the calls against a stand-in torch and NVML.

What only a device can show is in tests/gpu/real.py.
"""

import json
import logging
import os
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvaccord.errors import Invalid
from kvaccord.messages import page
from worker_client.measure import (
    LOOKS,
    Reading,
    cuda_device,
    cuda_reading,
    cuda_report,
    kv_budget,
    mem_available_bytes,
    settled,
    visible,
)
from worker_client.nvml import NoOpinion, opinion, page_cache_bytes

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


# --- one device, as torch and NVML show it ------------------------------------------------------

KV = page("kv", 100)
US = os.getpid()
CARD, SLICE = "GPU-8932f937", "MIG-41b3"


class FakeCuda:
    """A device of 80 GiB on which torch holds 30 GiB, 10 of them only cached, and others 5."""

    integrated, uuid = False, "8932f937"

    def __init__(self):
        self.calls = []
        self.cached = 10 * GIB
        self.drift = []  # what others take between two looks
        self.total, self.others = 80 * GIB, 5 * GIB

    def is_available(self):
        return True

    def current_device(self):
        return 0

    def synchronize(self, device):
        self.calls.append(("synchronize", device))

    def empty_cache(self):
        self.calls.append(("empty_cache",))
        self.cached = 0

    def mem_get_info(self, device):
        self.others += self.drift.pop(0) if self.drift else 0
        return self.total - 20 * GIB - self.cached - self.others, self.total

    def memory_reserved(self, device):
        return 20 * GIB + self.cached

    def memory_stats(self, device):
        return {"allocated_bytes.all.peak": 28 * GIB, "allocated_bytes.all.current": 20 * GIB}

    def get_device_properties(self, device):
        return SimpleNamespace(name="H200", uuid=self.uuid, is_integrated=self.integrated)


@dataclass
class Card:
    """What NVML shows of one device or slice. used: bytes by pid, None where it does not tell."""

    uuid: str
    total: int | None = 80 * GIB
    free: int = 0
    reserved: int = 0
    used: dict = field(default_factory=dict)
    slices: list = field(default_factory=list)
    numa_node: int | None = None


class FakeNvml:
    """As much of nvidia-ml-py as is asked, over cards that a test lays out."""

    nvmlMemory_v2 = 2
    NVML_DEVICE_MIG_ENABLE = 1

    class NVMLError(Exception):
        pass

    def __init__(self, *cards, starts=True):
        self.cards, self.starts, self.opened = cards, starts, 0

    def nvmlInit(self):
        if not self.starts:
            raise self.NVMLError("Driver Not Loaded")
        self.opened += 1

    def nvmlShutdown(self):
        self.opened -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid):
        for card in self.cards:
            for each in (card, *card.slices):
                if each.uuid == uuid:
                    return each
        raise self.NVMLError("Not Found")

    def nvmlDeviceGetUUID(self, card):
        return card.uuid

    def nvmlDeviceGetMemoryInfo(self, card, version):
        if card.total is None:
            raise self.NVMLError("Not Supported")
        return SimpleNamespace(total=card.total, free=card.free, reserved=card.reserved)

    def nvmlDeviceIsMigDeviceHandle(self, card):
        return card.uuid.startswith("MIG-")

    def nvmlDeviceGetMigMode(self, card):
        return (1, 1) if card.slices else (0, 0)

    def nvmlDeviceGetMaxMigDeviceCount(self, card):
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, card, at):
        if at >= len(card.slices):
            raise self.NVMLError("Not Found")
        return card.slices[at]

    def nvmlDeviceGetNumaNodeId(self, card):
        if card.numa_node is not None:
            return card.numa_node
        raise self.NVMLError("Not Supported")

    def nvmlDeviceGetComputeRunningProcesses(self, card):
        return [SimpleNamespace(pid=pid, usedGpuMemory=n) for pid, n in card.used.items()]

    def nvmlDeviceGetGraphicsRunningProcesses(self, card):
        raise self.NVMLError("Not Supported")


@pytest.fixture
def cuda(monkeypatch):
    cuda = FakeCuda()
    torch = SimpleNamespace(cuda=cuda, __version__="2.9", version=SimpleNamespace(hip=None))
    torch.device = lambda device: SimpleNamespace(index=device)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "pynvml", None)  # as if it were not installed
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return cuda


@pytest.fixture
def nvml(monkeypatch, cuda):
    def install(*cards, **options):
        library = FakeNvml(*cards, **options)
        monkeypatch.setitem(sys.modules, "pynvml", library)
        return library

    return install


def test_a_report_says_what_is_free_and_how_the_budget_came_about(cuda):
    report = cuda_report(
        classes=[KV], graph_bytes=GIB, safety_bytes=2 * GIB, device=1, block_tokens=16
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
        "free_moved_bytes": 0,
        "free_source": "cuda",
        "torch_bytes": 20 * GIB,
        "nvml": "nvidia-ml-py is not installed: kvaccord[nvml]",
    }
    assert cuda.calls == [("synchronize", 1), ("empty_cache",)]


def test_a_device_that_torch_has_not_used_yet_has_no_peak(cuda, monkeypatch):
    monkeypatch.setattr(cuda, "memory_stats", lambda device: {})
    report = cuda_report(classes=[KV])
    assert report.parts["peak_torch_bytes"] == 0


@pytest.mark.parametrize("utilization", [0, 1.01, -1, float("nan")])
def test_a_utilization_is_a_share(cuda, utilization):
    with pytest.raises(Invalid, match="utilization"):
        cuda_report(classes=[KV], utilization=utilization)


def test_a_misspelt_field_is_refused(cuda):
    with pytest.raises(Invalid, match="Report: block_token 16: no such field"):
        cuda_report(classes=[KV], block_token=16)


def test_on_rocm_nobody_is_asked_twice(cuda, nvml):
    nvml(Card(CARD))
    sys.modules["torch"].version.hip = "6.4"
    assert cuda_report(classes=[KV]).parts["nvml"] == "none on ROCm"


# --- which device it is -------------------------------------------------------------------------


def test_without_a_device_the_error_says_what_to_do(cuda, monkeypatch):
    monkeypatch.setattr(cuda, "is_available", lambda: False)
    with pytest.raises(Invalid, match=r"nothing to measure; install .* CUDA_VISIBLE_DEVICES"):
        cuda_report(classes=[KV])


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"])
def test_a_variable_that_hides_every_device_is_named(cuda, monkeypatch, name):
    monkeypatch.setattr(cuda, "is_available", lambda: False)
    monkeypatch.setenv(name, "-1")
    with pytest.raises(Invalid, match=f"{name} is '-1', which hides every device"):
        cuda_report(classes=[KV])


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        (None, None),
        ("", ()),
        ("-1", ()),
        ("0", ("0",)),
        ("2, 0", ("2", "0")),
        ("1,-1,0", ("1",)),
        ("0,,1", ("0",)),
        ("GPU-8932f937,GPU-1a", ("GPU-8932f937", "GPU-1a")),
        ("MIG-41b3", ("MIG-41b3",)),
        ("MIG-GPU-8932f937/1/0", ("MIG-GPU-8932f937/1/0",)),
    ],
)
def test_what_stands_behind_an_entry_that_is_none_is_hidden(text, entries):
    assert visible(text) == entries


def test_a_device_says_who_it_is(cuda, nvml):
    nvml(Card(CARD))
    device = cuda_device()
    assert (device.uuid, device.name, device.total_bytes) == (CARD, "H200", 80 * GIB)


def test_without_nvml_a_device_is_known_by_the_uuid_that_torch_says(cuda):
    assert cuda_device().uuid == "8932f937"


# --- who else is on it --------------------------------------------------------------------------


def test_the_parts_of_a_device_add_up_to_its_total(cuda, nvml):
    library = nvml(
        Card(CARD, free=55 * GIB, reserved=GIB, used={US: 21 * GIB, 4711: 3 * GIB, 12: 5})
    )
    report = cuda_report(classes=[KV])
    parts = report.parts
    assert parts["others"] == f"pid 4711 {3 * GIB}, pid 12 5"
    assert parts["others_bytes"] == 3 * GIB + 5
    assert (parts["context_bytes"], parts["driver_bytes"]) == (GIB, GIB)
    names = ("torch_bytes", "context_bytes", "others_bytes", "driver_bytes", "unexplained_bytes")
    assert report.free_bytes + sum(parts[name] for name in names) == report.total_bytes
    assert parts["unexplained_bytes"] == -5
    assert "nvml_free_bytes" not in parts
    assert library.opened == 0, "what was opened is closed"


def test_a_process_whose_bytes_the_driver_does_not_tell_is_named_all_the_same(cuda, nvml):
    nvml(Card(CARD, used={4711: None}))
    parts = cuda_report(classes=[KV]).parts
    assert (parts["others"], parts["others_bytes"]) == ("pid 4711 unknown", 0)
    assert "unexplained_bytes" not in parts, "it does not say what this process holds either"


def test_nvml_that_contradicts_cuda_is_told_and_not_believed(cuda, nvml, caplog):
    nvml(Card(CARD, free=40 * GIB, used={US: 21 * GIB}))
    report = cuda_report(classes=[KV])
    assert report.free_bytes == 55 * GIB
    assert report.parts["nvml_free_bytes"] == 40 * GIB
    assert "bytes free and NVML" in caplog.text


@pytest.mark.parametrize(
    ("library", "says"),
    [
        ((Card("GPU-other"),), f"it knows none of {CARD}, MIG-8932f937"),
        ((Card(CARD, total=141 * GIB),), "most likely not the same device"),
    ],
)
def test_an_opinion_on_another_device_is_none(cuda, nvml, library, says):
    nvml(*library)
    assert says in cuda_report(classes=[KV]).parts["nvml"]


def test_a_driver_without_nvml_is_no_fault(cuda, nvml):
    nvml(starts=False)
    assert cuda_report(classes=[KV]).parts["nvml"] == "NVML: Driver Not Loaded"


def test_ranks_that_share_a_device_answer_for_what_they_hold_themselves(cuda, nvml):
    nvml(Card(CARD, free=55 * GIB, used={US: 22 * GIB, 4711: 3 * GIB}))
    report = cuda_report(classes=[KV], utilization=0.5, local_count=2)
    assert report.local_count == 2
    assert report.parts["non_torch_bytes"] == 2 * GIB
    assert report.kv_budget_bytes == (40 - 28 - 2) * GIB


def test_a_share_cannot_be_measured_where_nobody_says_what_a_process_holds(cuda, nvml):
    with pytest.raises(Invalid, match=r"local_count|kvaccord\[nvml\]"):
        cuda_report(classes=[KV], local_count=2)
    nvml(Card(CARD, used={4711: GIB}))
    with pytest.raises(Invalid, match="NVML does not list its pid"):
        cuda_report(classes=[KV], local_count=2)


# --- MIG ----------------------------------------------------------------------------------------


def parent(*slices, total=141 * GIB):
    return Card(CARD, total=total, free=total, slices=list(slices))


def a_slice(uuid=SLICE, total=80 * GIB, **fields):
    return Card(uuid, total=total, free=55 * GIB, **fields)


def test_a_mig_slice_is_known_by_its_entry_in_cuda_visible_devices(cuda, nvml, monkeypatch):
    nvml(parent(a_slice("MIG-first"), a_slice(used={US: 21 * GIB, 7: GIB})))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", SLICE)
    report = cuda_report(classes=[KV])
    assert report.total_bytes == 80 * GIB
    assert report.parts["mig"] is True
    assert report.parts["others"] == f"pid 7 {GIB}"
    assert cuda_device().uuid == SLICE


def test_a_mig_slice_without_an_entry_is_known_by_its_size(cuda, nvml):
    nvml(parent(a_slice("MIG-small", 16 * GIB), a_slice()))
    assert cuda_device().uuid == SLICE


def test_slices_alike_are_not_guessed_between(cuda, nvml):
    nvml(parent(a_slice("MIG-first"), a_slice()))
    parts = cuda_report(classes=[KV]).parts
    assert "the parent of 2 MIG slices, and 2 of them" in parts["nvml"]


def test_the_parent_of_a_slice_is_never_reported(cuda, nvml, monkeypatch):
    # Case 053: 141 GB on a slice of 16.
    cuda.total = 141 * GIB
    nvml(parent(a_slice(total=16 * GIB)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", SLICE)
    with pytest.raises(Invalid, match=f"MIG slice {SLICE} of {16 * GIB} bytes, and torch"):
        cuda_report(classes=[KV])


# --- memory that is the machine's ---------------------------------------------------------------


def test_cached_files_are_not_charged_to_an_engine_on_unified_memory(cuda, nvml, monkeypatch):
    # GB10: NVML has no memory to tell of, and CUDA takes the page cache for used.
    monkeypatch.setattr(FakeCuda, "integrated", True)
    monkeypatch.setattr("worker_client.measure.mem_available_bytes", lambda: 58 * GIB)
    nvml(Card(CARD, total=None, used={US: 21 * GIB}))
    report = cuda_report(classes=[KV])
    assert (report.free_bytes, report.parts["free_source"]) == (58 * GIB, "MemAvailable")
    assert report.parts["non_torch_bytes"] == 2 * GIB
    assert report.kv_budget_bytes == (72 - 28 - 2) * GIB


def test_free_memory_is_at_most_all_there_is(cuda, monkeypatch):
    monkeypatch.setattr(FakeCuda, "integrated", True)
    monkeypatch.setattr("worker_client.measure.mem_available_bytes", lambda: 128 * GIB)
    assert cuda_reading().free_bytes == 80 * GIB


def test_a_kernel_that_has_less_to_give_than_cuda_says_changes_nothing(cuda, monkeypatch):
    monkeypatch.setattr(FakeCuda, "integrated", True)
    monkeypatch.setattr("worker_client.measure.mem_available_bytes", lambda: GIB)
    assert cuda_reading().free_source == "cuda"


def test_the_kernel_says_what_it_could_give(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  131072 kB\nMemFree:   1024 kB\nMemAvailable:   98304 kB\n")
    assert mem_available_bytes(meminfo) == 96 * 2**20
    assert mem_available_bytes(tmp_path / "none") == 0


def test_cached_files_in_the_memory_of_a_device_that_is_a_numa_node(tmp_path):
    (tmp_path / "node1").mkdir()
    (tmp_path / "node1/meminfo").write_text(
        "Node 1 MemTotal:       100663296 kB\nNode 1 FilePages:        2048 kB\n"
        "Node 1 Shmem:            1024 kB\n"
    )
    assert page_cache_bytes(1, tmp_path) == 2**20
    assert page_cache_bytes(None, tmp_path) == 0


def test_cached_files_on_a_grace_hopper_are_shown_and_not_charged(cuda, nvml, monkeypatch):
    monkeypatch.setattr("worker_client.nvml.page_cache_bytes", {1: 4 * GIB}.__getitem__)
    nvml(Card(CARD, free=55 * GIB, used={US: 21 * GIB}, numa_node=1))
    report = cuda_report(classes=[KV])
    assert report.parts["page_cache_bytes"] == 4 * GIB
    assert report.parts["non_torch_bytes"] == GIB
    assert report.free_bytes == 55 * GIB, "whether an allocation drives them out is not known"


# --- memory that moves --------------------------------------------------------------------------


def looks(*free):
    readings = iter([Reading(free_bytes=n, total_bytes=100_000) for n in free])
    return lambda: next(readings)


def pauses():
    slept = []
    return slept, slept.append


def test_two_looks_that_agree_are_enough():
    slept, pause = pauses()
    found, moved = settled(looks(50_000, 50_100), pause)
    assert (found.free_bytes, moved, slept) == (50_100, 100, [0.01])


def test_a_co_tenant_that_grows_is_waited_for():
    slept, pause = pauses()
    found, moved = settled(looks(50_000, 40_000, 30_000, 30_000), pause)
    assert (found.free_bytes, moved, slept) == (30_000, -20_000, [0.01, 0.02, 0.04])


def test_of_memory_that_does_not_settle_the_least_counts():
    slept, pause = pauses()
    found, moved = settled(looks(50_000, 40_000, 60_000, 20_000, 90_000), pause)
    assert (found.free_bytes, moved, len(slept)) == (20_000, 40_000, LOOKS - 1)


def test_what_this_process_takes_itself_moves_nothing():
    def taken(free, reserved):
        return Reading(free_bytes=free, total_bytes=100_000, reserved_bytes=reserved)

    readings = iter([taken(50_000, 0), taken(40_000, 10_000), taken(40_000, 10_000)])
    _, moved = settled(lambda: next(readings), lambda _: None)
    assert moved == 0


def test_a_co_tenant_that_shrinks_meanwhile_is_a_warning(cuda, caplog):
    cuda.drift = [0, -2 * GIB]
    report = cuda_report(classes=[KV])
    assert report.parts["free_moved_bytes"] == 2 * GIB
    assert [r.levelno for r in caplog.records] == [logging.WARNING]


def test_what_others_took_since_the_process_began_is_told_where_nvml_knows(cuda, nvml):
    card = Card(CARD, free=55 * GIB, used={US: GIB})
    nvml(card)
    before = replace(cuda_reading(), free_bytes=75 * GIB)
    card.used = {US: 15 * GIB}
    report = cuda_report(classes=[KV], initial=before)
    assert report.initial_free_bytes == 75 * GIB
    assert report.parts["free_moved_bytes"] == -20 * GIB + 14 * GIB


def test_an_opinion_says_why_it_is_none(nvml):
    nvml(Card(CARD))
    with pytest.raises(NoOpinion, match="no uuid"):
        opinion("", 80 * GIB)
