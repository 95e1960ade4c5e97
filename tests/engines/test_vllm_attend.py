"""A worker of vLLM that takes part, against a real coordinator; vLLM itself is a few names here.

tests/engines/vllm/real.py has the same with the real vLLM.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvaccord.errors import Aborted, Failed, Invalid
from tests.engines.test_vllm_numbers import a_config
from worker_client.engines.vllm import register
from worker_client.engines.vllm.attend import attend
from worker_client.stopping import Stopper, disarm_all

BLOCK_BYTES = 1000


class WorkerBase:
    """What vLLM's workers have, as far as it is attended. own_bytes: what it will measure."""

    device = SimpleNamespace(type="cpu")

    def __init__(self, vllm_config: Any, local_rank: int, rank: int) -> None:
        self.vllm_config, self.rank = vllm_config, rank
        self.own_bytes = 90 * BLOCK_BYTES

    def init_device(self) -> None: ...

    def load_model(self) -> None: ...

    def get_kv_cache_spec(self) -> dict[str, str]:
        return {"layers.0": "full"}

    def determine_available_memory(self) -> int:
        return self.own_bytes

    def initialize_from_config(self, kv_cache_config: Any) -> None: ...

    def compile_or_warm_up_model(self) -> float:
        return 1.5

    def shutdown(self) -> None: ...


def module(name: str, **names: Any) -> ModuleType:
    made = ModuleType(name)
    made.__dict__.update(names)
    return made


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> type[WorkerBase]:
    """A vLLM whose workers are made from now on as attend() has it; the base of them."""
    base = type("WorkerBase", (WorkerBase,), {})
    modules = [
        module("vllm", __version__="0.32.0"),
        module("vllm.v1"),
        module("vllm.v1.worker"),
        module("vllm.v1.worker.worker_base", WorkerBase=base),
        module("vllm.v1.core"),
        module(
            "vllm.v1.core.kv_cache_utils",
            get_kv_cache_groups=lambda config, specs: [specs],
            _pool_bytes_per_block=lambda config, groups: BLOCK_BYTES,
            _max_memory_usage_bytes_from_groups=lambda config, groups: 4 * BLOCK_BYTES,
        ),
        module("vllm.utils"),
        module(
            "vllm.utils.cpu_resource_utils",
            get_allowed_cpu_list=lambda: [SimpleNamespace(numa_node=0)],
            get_memory_node_info=lambda node: SimpleNamespace(
                available_memory=10**9, total_memory=10**10
            ),
        ),
    ]
    for each in modules:
        monkeypatch.setitem(sys.modules, each.__name__, each)
        parent, _, child = each.__name__.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, each)
    return base


@pytest.fixture(autouse=True)
def environment(url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("KVACCORD_MODE", raising=False)
    monkeypatch.setenv("KVACCORD_URL", url)
    monkeypatch.setenv("KVACCORD_ENGINE", f"vllm-{uuid.uuid4().hex[:8]}")
    monkeypatch.setenv("KVACCORD_LAUNCH", uuid.uuid4().hex)
    monkeypatch.setenv("KVACCORD_PATIENCE_S", "20")
    yield
    # A worker's process would end 20 s after a failure; the tests' own must not.
    disarm_all(but=Stopper("raise"))


def on_both(base: Any, act: Callable[[Any], Any]) -> list[Any]:
    """What two workers return or raise, each in a thread of its own."""

    def run(rank: int) -> Any:
        try:
            return act(base(a_config(), rank, rank))
        except Exception as fault:
            return fault

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))


def whole_start(worker: Any) -> tuple[int, float]:
    """As the engine core has it. (bytes, what the warm-up returned)"""
    worker.init_device()
    worker.load_model()
    worker.get_kv_cache_spec()
    granted = worker.determine_available_memory()
    worker.initialize_from_config(SimpleNamespace(num_blocks=granted // BLOCK_BYTES))
    return granted, worker.compile_or_warm_up_model()


def nothing_of_ours_runs(within_s: float = 10.0) -> bool:
    until_s = time.monotonic() + within_s
    while any(t.name.startswith("kvaccord") for t in threading.enumerate()):
        if time.monotonic() > until_s:
            return False
        time.sleep(0.05)
    return True


def test_both_workers_return_what_the_shorter_one_has_room_for(vllm):
    attend()

    def start(worker: Any) -> Any:
        worker.own_bytes -= worker.rank * 20 * BLOCK_BYTES
        return whole_start(worker)

    assert on_both(vllm, start) == [(70 * BLOCK_BYTES, 1.5)] * 2
    assert nothing_of_ours_runs()


def test_an_attended_worker_goes_by_its_own_name(vllm, monkeypatch):
    monkeypatch.setenv("KVACCORD_MODE", "off")  # nobody would end its part here

    class CPUWorker(vllm):
        pass

    attend()
    names = on_both(CPUWorker, lambda worker: (type(worker).__name__, type(worker).__module__))
    assert names == [("CPUWorker", __name__)] * 2


def test_what_one_raises_while_it_loads_the_other_hears(vllm):
    class Broken(vllm):
        def load_model(self) -> None:
            if self.rank == 1:
                raise OSError("no such shard")

    attend()
    heard = on_both(Broken, whole_start)
    assert isinstance(heard[0], Failed)
    assert "no such shard" in str(heard[0])
    assert isinstance(heard[1], OSError)


def test_what_one_raises_while_it_warms_up_the_other_hears(vllm):
    class Broken(vllm):
        def compile_or_warm_up_model(self) -> float:
            if self.rank == 1:
                raise MemoryError("no room for graphs")
            return super().compile_or_warm_up_model()

    attend()
    heard = on_both(Broken, whole_start)
    assert isinstance(heard[0], Aborted)
    assert "no room for graphs" in str(heard[0])


def test_a_worker_that_builds_another_number_fails_all(vllm):
    attend()

    def start(worker: Any) -> Any:
        worker.get_kv_cache_spec()
        blocks = worker.determine_available_memory() // BLOCK_BYTES
        worker.initialize_from_config(SimpleNamespace(num_blocks=blocks - worker.rank))
        return worker.compile_or_warm_up_model()

    heard = on_both(vllm, start)
    assert {fault.outcome.code for fault in heard} == {"applied_differently"}


def test_an_observed_worker_returns_its_own_bytes(vllm, monkeypatch):
    monkeypatch.setenv("KVACCORD_MODE", "observe")
    attend()

    def start(worker: Any) -> Any:
        worker.own_bytes -= worker.rank * 20 * BLOCK_BYTES + 7
        return whole_start(worker)

    assert on_both(vllm, start) == [(90 * BLOCK_BYTES - 7, 1.5), (70 * BLOCK_BYTES - 7, 1.5)]


def test_an_observed_worker_outlives_a_planner_that_we_do_not_know(vllm, monkeypatch):
    monkeypatch.setenv("KVACCORD_MODE", "observe")
    monkeypatch.delattr(sys.modules["vllm.v1.core.kv_cache_utils"], "_pool_bytes_per_block")
    attend()
    assert on_both(vllm, whole_start) == [(90 * BLOCK_BYTES, 1.5)] * 2
    assert nothing_of_ours_runs()


def test_an_enforced_worker_says_that_it_does_not_know_this_planner(vllm, monkeypatch):
    monkeypatch.delattr(sys.modules["vllm.v1.core.kv_cache_utils"], "_pool_bytes_per_block")
    attend()
    heard = on_both(vllm, whole_start)
    assert any(isinstance(fault, Invalid) for fault in heard)
    assert all("_pool_bytes_per_block" in str(fault) for fault in heard)
    assert all("written for vLLM 0.32" in str(fault) for fault in heard)


def test_a_model_without_kv_cache_takes_no_part(vllm):
    attend()
    worker = vllm(a_config(is_attention_free=True), 0, 0)
    assert whole_start(worker) == (90 * BLOCK_BYTES, 1.5)


@pytest.mark.parametrize("mode", ["off", ""])
def test_without_a_mode_or_a_coordinator_vllm_is_left_alone(vllm, monkeypatch, mode):
    monkeypatch.setenv("KVACCORD_MODE", mode)
    if not mode:
        monkeypatch.delenv("KVACCORD_URL")
    register()
    assert "__new__" not in vars(vllm)


def test_enforcing_in_another_vllm_is_refused_in_a_sentence(vllm, monkeypatch):
    monkeypatch.delattr(sys.modules["vllm.v1.worker.worker_base"], "WorkerBase")
    with pytest.raises(Invalid, match=r"WorkerBase.*written for vLLM 0\.32.*KVACCORD_MODE"):
        register()


def test_observing_in_another_vllm_is_one_line_in_the_log(vllm, monkeypatch, caplog):
    monkeypatch.setenv("KVACCORD_MODE", "observe")
    monkeypatch.delattr(sys.modules["vllm.v1.worker.worker_base"], "WorkerBase")
    with caplog.at_level(logging.WARNING, "vllm.kvaccord"):
        register()
    assert len(caplog.records) == 1
    assert "observes nothing" in caplog.text


def test_a_worker_that_is_shut_down_before_the_seal_leaves_no_session(vllm, monkeypatch):
    attend()

    def start(worker: Any) -> None:
        worker.load_model()
        if worker.rank == 1:
            worker.shutdown()
        else:
            whole_start(worker)

    heard = on_both(vllm, start)
    assert isinstance(heard[0], Failed)
    assert (heard[0].decision.code, heard[0].decision.ranks) == ("rank_left", [1])
