"""vLLM's configuration in our words, from the fields that vLLM 0.32.0 has. No vLLM is needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvaccord import Layout
from kvaccord.errors import Invalid
from kvaccord.plan import plan
from worker_client.engines.vllm.numbers import (
    BLOCK,
    Blocks,
    Memory,
    bytes_for,
    inputs_of,
    launch_of,
    own_blocks,
    place_of,
    report_of,
    why_not,
)

GIB = 2**30
MEMORY = Memory(free=70 * GIB, total=80 * GIB, initial_free=79 * GIB)


def a_config(**changes: Any) -> SimpleNamespace:
    """What a worker of a start on one machine holds. Recorded from vLLM 0.32.0, tp 2."""
    parallel = {
        "data_parallel_size": 1,
        "data_parallel_size_local": 1,
        "data_parallel_rank": 0,
        "data_parallel_index": 0,
        "data_parallel_backend": "mp",
        "pipeline_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "mp",
        "enable_elastic_ep": False,
        "nnodes": 1,
    }
    cache = {
        "block_size": 128,
        "cache_dtype": "auto",
        "gpu_memory_utilization": 0.9,
        "kv_cache_memory_bytes": None,
        "num_gpu_blocks_override": None,
    }
    model = {
        "dtype": "torch.bfloat16",
        "is_attention_free": False,
        "max_model_len": 4096,
        "original_max_model_len": None,
    }
    for fields in (parallel, cache, model):
        fields |= {name: changes.pop(name) for name in list(changes) if name in fields}
    assert changes.keys() <= {"instance_id", "hisparse_config"}, changes
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel),
        cache_config=SimpleNamespace(**cache),
        model_config=SimpleNamespace(**model),
        scheduler_config=SimpleNamespace(max_num_seqs=256),
        attention_config=SimpleNamespace(hisparse_config=changes.get("hisparse_config")),
        instance_id=changes.get("instance_id", "1796122006123456789"),
    )


# Places


def test_a_worker_of_one_replica_has_the_rank_that_vllm_gave_it():
    place = place_of(a_config(tensor_parallel_size=4, pipeline_parallel_size=2), 5)
    assert (place.rank, place.layout) == (5, Layout(pp=2, tp=4))
    assert place.layout.coordinates(5).pp == 1


def test_replicas_that_know_each_other_are_one_engine():
    config = a_config(
        data_parallel_size=2,
        data_parallel_size_local=2,
        data_parallel_rank=1,
        data_parallel_index=1,
    )
    place = place_of(config, 1, equal_over="dp")
    assert (place.rank, place.replica) == (3, 0)
    assert place.layout == Layout(dp=2, tp=2, equal_over=("dp",))


def test_a_replica_of_a_model_without_experts_is_an_engine_of_its_own():
    # vLLM has set its size to 1 and its rank to 0; only the index tells.
    place = place_of(a_config(data_parallel_index=3), 1)
    assert (place.rank, place.layout, place.replica) == (1, Layout(tp=2), 3)


def test_equal_counts_over_replicas_that_plan_alone_are_refused():
    with pytest.raises(Invalid, match="replica 3 plans alone"):
        place_of(a_config(data_parallel_index=3), 1, equal_over="dp")


def test_an_axis_that_is_none_is_refused():
    with pytest.raises(Invalid, match="must be dp"):
        place_of(a_config(), 0, equal_over="tp")


def test_under_torchrun_the_rank_is_the_global_one():
    config = a_config(
        distributed_executor_backend="external_launcher",
        data_parallel_size=2,
        data_parallel_rank=1,
        data_parallel_index=1,
    )
    assert place_of(config, 3).rank == 3


# Launches


def test_the_launch_is_the_time_at_which_the_configuration_was_made():
    assert launch_of(a_config()) == "vllm.1796122006123456789"


def test_replicas_of_one_start_have_one_launch():
    assert launch_of(a_config(instance_id="17961_dp1")) == launch_of(a_config(instance_id="17961"))


@pytest.mark.parametrize(
    "apart",
    [
        {"nnodes": 2},
        {"distributed_executor_backend": "external_launcher"},
        {"data_parallel_size": 4, "data_parallel_size_local": 2},
    ],
)
def test_where_each_node_makes_its_own_configuration_the_launcher_must_say(apart):
    assert launch_of(a_config(**apart)) is None


def test_under_ray_one_process_makes_the_configuration_of_all_nodes():
    config = a_config(data_parallel_size=4, data_parallel_size_local=2, data_parallel_backend="ray")
    assert launch_of(config) is not None


# What cannot be agreed on


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"is_attention_free": True}, "no KV cache"),
        ({"enable_elastic_ep": True}, "elastic"),
        ({"hisparse_config": object()}, "HiSparse"),
    ],
)
def test_a_start_that_cannot_be_agreed_on_says_why(change, words):
    assert words in why_not(a_config(**change))


def test_any_other_start_takes_part():
    assert why_not(a_config()) is None


def test_the_inputs_are_what_every_worker_must_have_alike():
    assert inputs_of(a_config(), "0.32.0") == {
        "vllm": "0.32.0",
        "dtype": "torch.bfloat16",
        "kv_cache_dtype": "auto",
        "max_model_len": 4096,
        "max_num_seqs": 256,
    }


# Reports


def counted(config: Any, own_bytes: int, blocks: Blocks, memory: Memory = MEMORY) -> int:
    """What a world of this one worker agrees on."""
    planned = plan(Layout(), {0: report_of(config, own_bytes, blocks, memory)})
    assert planned.findings == ()
    return planned.schedulers[0].entries[BLOCK]


def test_a_worker_alone_comes_to_its_own_count():
    blocks = Blocks(bytes_each=131_072, needed=2, groups=1)
    own_bytes = 10 * GIB + 5
    count = counted(a_config(), own_bytes, blocks)
    assert count == own_blocks(a_config(), own_bytes, blocks) == own_bytes // 131_072


def test_the_bytes_returned_come_to_the_agreed_count_by_vllms_own_division():
    blocks = Blocks(bytes_each=131_072, needed=2, groups=1)
    assert bytes_for(700, blocks) // blocks.bytes_each == 700


def test_a_shortage_is_reported_as_it_is():
    report = report_of(a_config(), -5 * GIB, Blocks(131_072, 2, 1), MEMORY)
    assert report.kv_budget_bytes == -5 * GIB
    assert report.parts["own_blocks"] == 0


def test_a_worker_without_room_for_one_request_does_not_fit():
    report = report_of(a_config(), 32 * 131_072, Blocks(131_072, needed=33, groups=1), MEMORY)
    assert [f.code for f in plan(Layout(), {0: report}).findings] == ["does_not_fit"]


def test_with_an_override_vllm_builds_the_override_and_so_do_we():
    blocks = Blocks(131_072, 2, 1)
    config = a_config(num_gpu_blocks_override=500)
    assert counted(config, 10 * GIB, blocks) == 500
    assert counted(config, 100 * 131_072, blocks) == 500


def test_an_override_that_is_larger_than_what_is_free_does_not_fit():
    config = a_config(num_gpu_blocks_override=10**9)
    report = report_of(config, 10 * GIB, Blocks(131_072, 2, 1), MEMORY)
    findings = plan(Layout(), {0: report}).findings
    assert [f.code for f in findings] == ["does_not_fit"]


def test_a_share_that_vllm_has_checked_itself_is_not_checked_again():
    # 60 GiB free at the start under a share of 72: vLLM admits that where others hold the weights.
    memory = Memory(free=20 * GIB, total=80 * GIB, initial_free=60 * GIB)
    assert counted(a_config(), GIB, Blocks(131_072, 2, 1), memory) == 8192


def test_a_hybrid_over_pipeline_stages_is_refused_in_a_sentence():
    with pytest.raises(Invalid, match="2 cache groups over 2 pipeline stages"):
        report_of(a_config(pipeline_parallel_size=2), GIB, Blocks(131_072, 2, groups=2), MEMORY)
    assert report_of(a_config(), GIB, Blocks(131_072, 2, groups=2), MEMORY).classes
