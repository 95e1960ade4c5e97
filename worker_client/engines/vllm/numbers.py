"""What vLLM's configuration and measurements say in our words. Pure; vLLM's objects are arguments.

Source of every field: vLLM 0.32.0, the file named beside it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from kvaccord.errors import Invalid
from kvaccord.layout import Layout
from kvaccord.messages import Report, page

BLOCK = "kv"  # the page class: one block of vLLM's pool, all cache groups together


@dataclass(frozen=True)
class Place:
    """Where one worker stands.

    launch: None where nothing of vLLM's own is common to all workers of a start and to no other;
    then the launcher must say it. replica: above 0 for the second and further ones of replicas
    that know nothing of each other.
    """

    rank: int
    layout: Layout
    launch: str | None
    replica: int


def place_of(config: Any, rank: int, *, equal_over: str = "") -> Place:
    """Of a worker that vLLM calls `rank` within its replica.

    equal_over: "dp" asks for equal counts over data-parallel replicas.
    Source: config/parallel.py; distributed/parallel_state.py, initialize_model_parallel, which
    reshapes to (DP, PP, PCP, TP).
    """
    parallel = config.parallel_config
    if equal_over not in ("", "dp"):
        raise Invalid(
            f"KVACCORD_EQUAL_OVER is {equal_over!r}; it must be dp, or unset",
            field="KVACCORD_EQUAL_OVER",
            value=equal_over,
        )
    layout = Layout(
        dp=parallel.data_parallel_size,
        pp=parallel.pipeline_parallel_size,
        pcp=parallel.prefill_context_parallel_size,
        tp=parallel.tensor_parallel_size,
        equal_over=("dp",) if equal_over else (),
    )
    # A model without experts has replicas that vLLM makes strangers to each other: size 1, rank 0,
    # and only the index left. Source: parallel.py, reconfigure_for_independent_dp_rank.
    stranger = parallel.data_parallel_index if layout.dp == 1 else 0
    if equal_over and stranger:
        raise Invalid(
            f"KVACCORD_EQUAL_OVER is dp, and replica {stranger} plans alone: without experts vLLM's"
            " data-parallel replicas need no equal counts; unset it",
            field="KVACCORD_EQUAL_OVER",
            value=equal_over,
        )
    # Under torchrun the rank is the global one already. Source: parallel.py, __post_init__.
    if parallel.distributed_executor_backend != "external_launcher":
        rank += parallel.data_parallel_rank * layout.pp * layout.pcp * layout.tp
    return Place(rank, layout, launch_of(config), stranger)


def launch_of(config: Any) -> str | None:
    """vLLM's name for this start, where one process made the configuration of all workers.

    `instance_id` is the time in nanoseconds at which that process made it; replicas of one start
    add `_dp` and their number. Source: config/vllm.py; v1/engine/utils.py.
    """
    parallel = config.parallel_config
    apart = (
        parallel.distributed_executor_backend == "external_launcher"
        or parallel.nnodes > 1
        or (
            parallel.data_parallel_size_local != parallel.data_parallel_size
            and parallel.data_parallel_backend != "ray"
        )
    )
    return None if apart else f"vllm.{re.sub(r'_dp[0-9]+$', '', config.instance_id)}"


def why_not(config: Any) -> str | None:
    """Why this start is none that can be agreed on, in words; None where it is one."""
    if config.model_config.is_attention_free:
        return "the model has no KV cache"
    if config.parallel_config.enable_elastic_ep:
        return "with elastic expert parallelism the number of workers changes while it serves"
    if getattr(config.attention_config, "hisparse_config", None) is not None:
        return "with HiSparse the number of blocks does not follow from bytes on the device alone"
    return None


def inputs_of(config: Any, version: str) -> dict[str, int | bool | str]:
    """Settings that must be equal on all workers, and are told before weights are loaded."""
    model = config.model_config
    return {
        "vllm": version,
        "dtype": str(model.dtype),
        "kv_cache_dtype": str(config.cache_config.cache_dtype),
        "max_model_len": model.max_model_len,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
    }


@dataclass(frozen=True)
class Blocks:
    """What a block costs on this worker, and how many one request of the full length needs.

    groups: of layers, each of which takes blocks from the one pool. needed: None where vLLM is
    asked to lower the length until it fits.
    """

    bytes_each: int
    needed: int | None
    groups: int


@dataclass(frozen=True)
class Memory:
    """Of the device, in bytes. initial_free: before the weights; None where vLLM keeps none."""

    free: int
    total: int
    initial_free: int | None = None


def report_of(config: Any, own_bytes: int, blocks: Blocks, memory: Memory) -> Report:
    """What one worker measured.

    own_bytes: what its determine_available_memory returned; may be negative.
    """
    cache, layout = config.cache_config, config.parallel_config
    if blocks.groups > 1 and layout.pipeline_parallel_size > 1:
        raise Invalid(
            f"{blocks.groups} cache groups over {layout.pipeline_parallel_size} pipeline stages:"
            " vLLM groups the layers of all stages together, and a worker knows only its own, so it"
            " cannot say what a block costs; set KVACCORD_MODE to off or observe for this model",
            field="classes",
        )
    # With an override vLLM builds just that many, whatever it has measured. Source:
    # v1/core/kv_cache_utils.py, get_kv_cache_configs, adjusted_memory.
    override = cache.num_gpu_blocks_override
    budget, least, most = own_bytes, blocks.needed, None
    if override is not None:
        budget, least = override * blocks.bytes_each, max(override, blocks.needed or 0)
        most = least
    # What was requested of the device is left out: vLLM itself has checked it, with exceptions for
    # weights that others hold (worker/utils.py, request_memory) which a coordinator cannot know.
    return Report(
        free_bytes=memory.free,
        total_bytes=memory.total,
        kv_budget_bytes=min(budget, memory.total),
        initial_free_bytes=memory.initial_free,
        max_num_seqs=config.scheduler_config.max_num_seqs,
        classes=(page(BLOCK, blocks.bytes_each, min_entries=least, max_entries=most),),
        parts={
            "engine": "vllm",
            "utilization_ppm": round(cache.gpu_memory_utilization * 1_000_000),
            "utilization_of": "total",
            "block_tokens": cache.block_size,
            "cache_groups": blocks.groups,
            "own_bytes": own_bytes,
            "own_blocks": own_blocks(config, own_bytes, blocks),
        },
    )


def own_blocks(config: Any, own_bytes: int, blocks: Blocks) -> int:
    """What vLLM would build on this worker if it were alone."""
    override = config.cache_config.num_gpu_blocks_override
    return max(0, own_bytes // blocks.bytes_each) if override is None else int(override)


def bytes_for(count: int, blocks: Blocks) -> int:
    """What a worker must return so that vLLM's own division comes to this count."""
    return count * blocks.bytes_each


Step = Literal["init", "device", "load", "profile", "build", "warm up"]
PROGRESS: dict[Step, int] = {
    "init": 1,
    "device": 2,
    "load": 3,
    "profile": 4,
    "build": 5,
    "warm up": 6,
}
