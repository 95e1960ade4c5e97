"""A worker of vLLM that takes part: what it measures is agreed on, what it raises is told to all.

The one thing that is changed in vLLM is how a worker comes into being: `WorkerBase.__new__` makes
one of a subclass of the worker's own class, whose six methods say what they do. So it holds for
every platform's worker and every executor, also in processes where vLLM loads its plugins last.
"""

from __future__ import annotations

import functools
import json
import logging
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from kvaccord.errors import Invalid
from kvaccord.messages import Report
from worker_client import process
from worker_client.client import Rendezvous
from worker_client.engines.vllm.numbers import (
    BLOCK,
    PROGRESS,
    Blocks,
    Memory,
    Step,
    bytes_for,
    inputs_of,
    own_blocks,
    place_of,
    report_of,
    why_not,
)
from worker_client.stopping import Exit

KNOWN = "0.32"  # the generation whose sources this was written against, and is tested with

# Below vLLM's own logger, so that its handler and level count here.
log = logging.getLogger("vllm.kvaccord")


def attend() -> None:
    """Have every worker that vLLM makes from now on take part. Safe to call twice.

    Raises Invalid where this vLLM lacks what that needs; in mode observe that is only logged.
    """
    try:
        with _known():
            from vllm.v1.worker.worker_base import WorkerBase

            WorkerBase.__new__ = _new
    except Invalid as fault:
        if not _observes():
            raise
        log.warning("kvaccord observes nothing: %s", fault)


@contextmanager
def _known() -> Iterator[None]:
    """What vLLM lacks in here is the fault of a generation that this was not written for."""
    try:
        yield
    except (ImportError, AttributeError, TypeError) as fault:
        raise Invalid(
            f"{type(fault).__name__}: {fault}; kvaccord was written for vLLM {KNOWN}: install that,"
            " or set KVACCORD_MODE to off or observe",
            field="KVACCORD_MODE",
        ) from fault


def _observes() -> bool:
    return os.environ.get("KVACCORD_MODE", "").strip() == "observe"


def _new(kind: type, *args: Any, **kwargs: Any) -> Any:
    return object.__new__(attended(kind))


@functools.cache
def attended(kind: Any) -> type:
    """The same class of worker, taking part."""

    class Attended(kind):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, local_rank: int, rank: int, *args: Any, **kw: Any):
            self._kvaccord = Part.taken(vllm_config, rank)
            with self._kvaccord.doing("init"):
                super().__init__(vllm_config, local_rank, rank, *args, **kw)

        def init_device(self) -> None:
            with self._kvaccord.doing("device"):
                super().init_device()

        def load_model(self, *args: Any, **kw: Any) -> Any:
            with self._kvaccord.doing("load"):
                return super().load_model(*args, **kw)

        def get_kv_cache_spec(self) -> Any:
            specs = super().get_kv_cache_spec()
            self._kvaccord.specs = specs
            return specs

        def determine_available_memory(self) -> int:
            with self._kvaccord.doing("profile"):
                own: int = super().determine_available_memory()
                return self._kvaccord.agreed_bytes(self, own)

        def initialize_from_config(self, kv_cache_config: Any) -> Any:
            with self._kvaccord.doing("build"):
                done = super().initialize_from_config(kv_cache_config)
                self._kvaccord.built = kv_cache_config.num_blocks
                return done

        def compile_or_warm_up_model(self) -> Any:
            # What captures graphs can still run out of memory: only now has this worker built.
            with self._kvaccord.doing("warm up"):
                done = super().compile_or_warm_up_model()
                self._kvaccord.applied()
                return done

        def shutdown(self) -> None:
            self._kvaccord.ended("shut down")
            super().shutdown()

    Attended.__name__, Attended.__qualname__ = kind.__name__, kind.__qualname__
    Attended.__module__ = kind.__module__
    return Attended


class Part:
    """One worker's part in one start. Without a rendezvous every call does nothing."""

    def __init__(self, rdzv: Rendezvous | None) -> None:
        self._rdzv = rdzv
        self.specs: Any = None
        self.built = 0
        self._calls: list[tuple[str, float, float]] = []

    @classmethod
    def taken(cls, config: Any, rank: int) -> Part:
        """Join, before anything is loaded. In mode observe whatever goes wrong is only logged."""
        import httpx

        import worker_client.driver  # noqa: F401

        # Loads what httpx itself loads late, so that what is timed is calls alone.
        httpx.HTTPTransport(verify=False, trust_env=False).close()
        part = cls(None)
        try:
            with _known():
                if reason := why_not(config):
                    log.info("kvaccord takes no part: %s", reason)
                else:
                    part._rdzv = part._timed("join", lambda: _joined(config, rank))
        except Exception as fault:
            if not _observes():
                raise
            log.info("kvaccord observes nothing: %s", fault)
        return part

    @contextmanager
    def doing(self, step: Step) -> Iterator[None]:
        """Say what this worker does, and to all what it raises."""
        try:
            if self._rdzv is not None:
                self._rdzv.phase(step, PROGRESS[step])
            yield
        except Exception as fault:
            if self._rdzv is not None:
                # The end of the with-block that this object stands for.
                self._rdzv.__exit__(type(fault), fault, fault.__traceback__)
                self._rdzv = None
            raise
        except BaseException as fault:  # SIGTERM, which vLLM turns into SystemExit
            self.ended(type(fault).__name__)
            raise

    def agreed_bytes(self, worker: Any, own_bytes: int) -> int:
        """What vLLM may spend on KV cache, so that it comes to the agreed count by itself."""
        rdzv = self._rdzv
        if rdzv is None:
            return own_bytes
        config = worker.vllm_config

        def agree() -> int:
            with _known():
                blocks, report = self._timed("measure", lambda: self._measured(worker, own_bytes))
            own = own_blocks(config, own_bytes, blocks)
            agreed = self._timed("report", lambda: rdzv.report(report, own={BLOCK: own}))
            if agreed.decided is None:
                return own_bytes
            count = agreed.decided.entries(rdzv.ranks[0])[BLOCK]
            log.info(
                "kvaccord: rank %d builds %d of the %d blocks that it has room for; %s",
                rdzv.ranks[0],
                count,
                own,
                agreed.decided.sentence,
            )
            return bytes_for(count, blocks)

        if rdzv.mode != "observe":
            return agree()
        try:
            return agree()
        except Exception as fault:  # whatever it is, vLLM goes its own way
            log.info("kvaccord observes no more: %s", fault)
            self._rdzv = None
            rdzv.leave("the adapter failed")
            return own_bytes

    def _measured(self, worker: Any, own_bytes: int) -> tuple[Blocks, Report]:
        blocks = _blocks(worker.vllm_config, self.specs)
        return blocks, report_of(worker.vllm_config, own_bytes, blocks, _memory(worker))

    def applied(self) -> None:
        """Say what was built, and wait for the others; then nothing of ours is left."""
        if (rdzv := self._rdzv) is None:
            return
        self._timed("applied", lambda: rdzv.applied(built={BLOCK: self.built}))
        self._rdzv = None
        log.debug("kvaccord: %s", json.dumps({"rank": rdzv.ranks[0], "calls": self._calls}))

    def ended(self, how: str) -> None:
        """Somebody ends this worker, mostly since another has gone: that one is the cause.

        A word of ours would come before the other's death is certain, and be blamed. So nothing is
        said: the kernel tells who went first.
        """
        rdzv, self._rdzv = self._rdzv, None
        if rdzv is None:
            return
        if multiprocessing.parent_process() is not None:
            process.let_go(rdzv)
            return
        with suppress(Exception):  # this process may live on, and must not look present
            rdzv.leave(f"vLLM ended this worker: {how}")

    def _timed(self, name: str, call: Callable[[], Any]) -> Any:
        began_s = time.monotonic()
        try:
            return call()
        finally:
            self._calls.append((name, began_s, time.monotonic()))


def _joined(config: Any, rank: int) -> Rendezvous:
    import vllm

    place = place_of(config, rank, equal_over=os.environ.get("KVACCORD_EQUAL_OVER", "").strip())
    engine = os.environ.get("KVACCORD_ENGINE", "").strip()
    if engine and place.replica:
        engine = f"{engine}-dp{place.replica}"
    return Rendezvous.join(
        ranks=[place.rank],
        layout=place.layout,
        engine=engine or None,
        launch=os.environ.get("KVACCORD_LAUNCH", "").strip() or place.launch,
        inputs=inputs_of(config, vllm.__version__),
        engine_version=f"vllm {vllm.__version__}",
        # A lone worker stands in no collective and may live in the caller's own process.
        on_stop="raise" if place.layout.world_size == 1 else Exit(),
    )


def _blocks(config: Any, specs: Any) -> Blocks:
    """By vLLM's own functions: the divisor with which its core turns bytes into blocks."""
    from vllm.v1.core import kv_cache_utils as utils

    groups = utils.get_kv_cache_groups(config, dict(specs))
    bytes_each = utils._pool_bytes_per_block(config, groups)
    needed = None
    if config.model_config.original_max_model_len != -1:
        # One more: the pool holds a block back. Source: get_kv_cache_configs, check_memory.
        longest_bytes = utils._max_memory_usage_bytes_from_groups(config, groups)
        needed = -(-longest_bytes // bytes_each) + 1
    return Blocks(bytes_each, needed, len(groups))


def _memory(worker: Any) -> Memory:
    """Of the worker's device, now, by the platform's own number."""
    if worker.device.type == "cpu":
        from vllm.utils.cpu_resource_utils import get_allowed_cpu_list, get_memory_node_info

        node = get_memory_node_info(get_allowed_cpu_list()[0].numa_node)
        return Memory(node.available_memory, node.total_memory)
    from vllm.utils.mem_utils import MemorySnapshot

    now, first = MemorySnapshot(device=worker.device), worker.init_snapshot
    return Memory(now.free_memory, now.total_memory, first.free_memory)
