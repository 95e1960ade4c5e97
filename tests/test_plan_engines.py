"""The planner against the engines' own numbers."""

import json
from math import ceil, floor
from pathlib import Path

import pytest

from kvaccord import Layout, Report, page, state
from kvaccord.errors import Invalid
from kvaccord.plan import plan
from kvaccord.room import available_bytes, page_count
from tests.builders import a_report
from tests.planning import codes, the_row

HERE = Path(__file__).parent
GIB = 2**30


def vectors(engine, key):
    document = json.loads((HERE / "vectors" / f"{engine}.json").read_text())
    return {vector["name"]: vector for vector in document[key]}


def offering(n, *classes, **changes):
    """A rank that offers `n` bytes."""
    return Report(free_bytes=max(n, 1), kv_budget_bytes=n, classes=classes, **changes)


# --- ATOM: plan_pools ---------------------------------------------------------------------------

ATOM = vectors("atom", "plan_vectors")


def atom_report(vector):
    given = vector["input"]
    classes = [
        page(spec["name"], spec["entry_bytes"])
        if spec["pool"] == "page"
        else state(
            spec["name"],
            spec["entry_bytes"],
            entries_per_req=spec["entries_per_req"],
            extra_entries=spec["extra_entries"],
        )
        for spec in given["specs"]
    ]
    return offering(given["available_bytes"], *classes, max_num_seqs=given["max_num_seqs"])


@pytest.mark.parametrize(
    "name",
    [name for name, v in ATOM.items() if v["expected"]["verdict"] == "pass"] + ["page_less_model"],
)
def test_atoms_pools_come_out_as_in_atom(name):
    # ATOM's planner passes a model without a page class too; what fails there is its runner.
    expected = ATOM[name]["expected"]
    row = the_row(Layout(), [atom_report(ATOM[name])])
    assert row.entries == expected["entries"]
    assert row.by_rank[0].entry_bytes == expected["entry_bytes"]
    assert row.by_rank[0].reserved_bytes == expected["reserved_bytes"]


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("state_floor_exactly_equals_budget", "state_floor_exceeds_budget"),
        ("stateless_tiny_budget_zero_blocks", "does_not_fit"),
    ],
)
def test_what_atom_refuses_is_refused(name, code):
    assert codes(Layout(), [atom_report(ATOM[name])]) == [(code, (0,))]


def test_two_page_classes_are_refused_as_in_atom():
    with pytest.raises(Invalid, match="more than one page class"):
        atom_report(ATOM["clash_two_page_classes"])


def test_every_plan_vector_of_atom_is_used():
    assert len(ATOM) == 8


@pytest.mark.parametrize(
    "vector", vectors("atom", "budget_vectors").values(), ids=lambda v: v["name"]
)
def test_what_atom_may_spend_is_what_it_plans_with(vector):
    given, expected = vector["input"], vector["expected"]
    report = a_report(
        free_bytes=given["free"],
        total_bytes=given["total"],
        kv_budget_bytes=expected["available_for_kv_budget"],
    )
    assert available_bytes(report) == expected["available_for_kv"]


def test_the_recorded_start_of_deepseek_v4_pro_on_eight_mi355x():
    budgets = [
        134131828654,
        133756019016,
        133949292544,
        134099616399,
        133884868035,
        133777493852,
        133906342871,
        133756019016,
    ]
    reports = [
        Report(
            free_bytes=budget + 30 * GIB,
            kv_budget_bytes=budget,
            total_bytes=309220868096,
            max_num_seqs=512,
            classes=[page("kv", 1399040), state("slot", 25399296, entries_per_req=1)],
        )
        for budget in budgets
    ]
    row = the_row(Layout(tp=4, pcp=2), reports)
    assert row.entries == {"kv": 86310, "slot": 512}
    assert row.binding == {"kv": (1, 7)}
    (group,) = row.budget_groups
    assert (group.binding_rank, group.bound_by) == (1, "budget")
    assert group.budget_bytes == group.available_bytes == 133756019016
    assert row.by_rank[1].stranded_bytes == 133756019016 - 512 * 25399296 - 86310 * 1399040
    assert 0 <= row.by_rank[1].stranded_bytes < 1399040


@pytest.mark.parametrize(
    "line",
    list(json.loads((HERE / "vectors/atom.json").read_text())["log_line_vectors"]),
    ids=lambda v: v["source"],
)
def test_a_logged_start_of_atom_comes_to_its_blocks(line):
    said, floor_gib = line["parsed"], line["checks"]["gap_to_available_is_state_floor_gib"]
    kv = page("kv", said["block_bytes"])
    slot = state("slot", int(floor_gib * GIB), extra_entries=1)
    report = offering(int(said["available_for_kv_gib"] * GIB), kv, slot, max_num_seqs=1)
    # The line is rounded to 0.01 GiB, which is some blocks.
    rounding = 0.015 * GIB / said["block_bytes"]
    assert page_count(report) == pytest.approx(said["num_kvcache_blocks"], abs=rounding)


# --- other engines' numbers ---------------------------------------------------------------------

VLLM = vectors("vllm", "plan_vectors")
FITTING = [name for name, v in VLLM.items() if v["expected"]["verdict"] == "pass"]


@pytest.mark.parametrize("name", FITTING)
def test_vllms_blocks_come_out_as_in_vllm(name):
    given, expected = VLLM[name]["input"], VLLM[name]["expected"]
    sizes = expected["bytes_per_block_per_worker"]
    offers = given["available_bytes"]
    reports = [offering(n, page("kv", size)) for n, size in zip(offers, sizes, strict=True)]
    row = the_row(Layout(pp=given["pp"], tp=given["tp"]), reports)
    assert row.entries == {"kv": expected["num_blocks"]}
    assert [page_count(r) for r in reports] == expected["per_worker_num_blocks_before_min"]
    assert [s.reserved_bytes["kv"] for s in row.by_rank] == expected["alloc_bytes_per_worker"]


def vllm_minimum(given):
    """One request of full length, and vLLM's null block."""
    return -(-given["max_model_len"] // given["block_size"]) + 1


def test_a_rank_that_cannot_hold_one_request_of_vllm_fails_the_start():
    given = VLLM["fail_one_rank_cannot_hold_max_model_len"]["input"]
    kv = page("kv", 2 * 2 * 8 * 128 * 32 * 16, min_entries=vllm_minimum(given))
    reports = [offering(n, kv) for n in given["available_bytes"]]
    assert codes(Layout(tp=2), reports) == [("does_not_fit", (1,))]


def test_one_request_of_vllm_that_fits_exactly_fits():
    vector = VLLM["boundary_exact_fit_pass"]
    (offer,) = vector["input"]["available_bytes"]
    kv = page("kv", 2097152, min_entries=vllm_minimum(vector["input"]))
    assert the_row(Layout(), [offering(offer, kv)]).entries == {"kv": 129}
    assert codes(Layout(), [offering(offer - 1, kv)]) == [("does_not_fit", (0,))]


@pytest.mark.parametrize(
    "vector", vectors("vllm", "memory_vectors").values(), ids=lambda v: v["name"]
)
def test_vllms_insistence_on_its_share_is_checked_as_in_vllm(vector):
    given, expected = vector["input"], vector["expected"]
    report = a_report(
        free_bytes=given["after_free"],
        total_bytes=given["total"],
        kv_budget_bytes=expected.get("available_kv_cache_memory_bytes", 10 * GIB),
        initial_free_bytes=given["init_free"],
        requested_bytes=expected["requested_memory"],
    )
    if expected["verdict"] == "pass":
        row = the_row(Layout(), [report])
        available = row.budget_groups[0].available_bytes
        assert available == expected["available_kv_cache_memory_bytes"]
    else:
        assert codes(Layout(), [report]) == [("request_exceeds_free", (0,))]


SGLANG = vectors("sglang", "vectors")


@pytest.mark.parametrize("name", ["dense_tp4_page1", "dense_tp4_page64", "mla_tp8_page64"])
def test_sglangs_tokens_come_out_as_in_sglang(name):
    given, expected = SGLANG[name]["input"], SGLANG[name]["expected"]
    kv = page("kv", given["cell_size_bytes_per_token"], multiple_of=given["page_size"])
    # SGLang takes the minimum of the bytes itself; ours of the counts is the same.
    reports = [
        offering(expected["available_bytes"] + n * GIB, kv) for n in range(given["world_size"])
    ]
    row = the_row(Layout(tp=given["world_size"]), reports)
    assert row.entries == {"kv": expected["max_total_num_tokens"]}
    assert row.binding == {"kv": (0,)}


def test_sglangs_stages_of_unequal_layers_agree_on_tokens():
    given, expected = SGLANG["pp2_31_layers"]["input"], SGLANG["pp2_31_layers"]["expected"]
    reports = [
        offering(expected["available_bytes"], page("kv", cell))
        for cell in given["cell_size_bytes_per_token_per_stage"]
    ]
    assert [page_count(r) for r in reports] == expected["tokens_per_stage_before_min"]
    row = the_row(Layout(pp=2), reports)
    assert row.entries == {"kv": expected["max_total_num_tokens"]}
    assert row.binding == {"kv": (1,)}


def test_sglangs_state_pool_is_reserved_first():
    vector = SGLANG["mamba_hybrid_no_spec"]
    given, expected = vector["input"], vector["expected"]
    report = offering(
        int(given["rest_memory_gib"] * GIB),
        page("kv", given["cell_size_bytes_per_token"]),
        state(
            "mamba",
            given["mamba_state_bytes_per_req_this_stage"],
            entries_per_req=1,
            extra_entries=1,  # SGLang's padding slot
        ),
        max_num_seqs=expected["max_mamba_cache_size"],
    )
    row = the_row(Layout(), [report])
    assert row.entries["kv"] == expected["max_total_num_tokens"]
    assert (
        available_bytes(report) - row.by_rank[0].reserved_bytes["mamba"]
        == (expected["available_bytes_for_kv"])
    )


def test_weights_that_leave_nothing_fail_the_start_and_name_the_short_rank_only():
    given = SGLANG["fail_weights_leave_no_memory"]["input"]
    kept = 1 - given["mem_fraction_static"]
    reports = [
        Report(free_bytes=now, kv_budget_bytes=floor(now - before * kept), classes=[page("kv", 1)])
        for before, now in zip(
            given["pre_model_load_free_bytes"], given["current_free_bytes"], strict=True
        )
    ]
    # SGLang takes the minimum first, so that both ranks raise.
    assert codes(Layout(tp=2), reports) == [("does_not_fit", (0,))]


def test_a_window_pool_of_sglang_that_cannot_hold_one_request_fails():
    given = SGLANG["hybrid_swa_pool_too_small_fails"]["input"]
    # One entry is a token of the full layers and, at the ratio, its part of the window layers.
    ratio = given["swa_full_tokens_ratio"]
    window = given["swa_layers"] * given["swa_per_token_bytes"] * ratio
    cell = given["full_layers"] * given["full_per_token_bytes"] + window
    assert cell == SGLANG["hybrid_swa_pool_too_small_fails"]["expected"]["cell_size"]
    wanted = ceil((given["sliding_window"] + given["page_size"]) / ratio)
    kv = page("kv", ceil(cell), min_entries=wanted)
    report = offering(given["available_bytes"], kv)
    assert floor(page_count(report) * ratio) == 94  # as SGLang's message says
    assert codes(Layout(), [report]) == [("does_not_fit", (0,))]


@pytest.mark.parametrize("name", [name for name in SGLANG if name.startswith("imbalance")])
def test_a_spread_over_the_limit_is_refused_where_sglang_refuses_it(name):
    given, expected = SGLANG[name]["input"], SGLANG[name]["expected"]
    reports = {
        rank: a_report(90, free_bytes=int(given[gib] * GIB), kv_budget_bytes=90_000)
        for rank, gib in enumerate(["group_min_gib", "local_gib"])
    }
    found = plan(Layout(tp=2), reports, spread_limit=0.1).findings
    # SGLang raises on the roomy rank; the short one is what should be looked at.
    assert [(f.code, f.ranks) for f in found] == (
        [("spread_too_wide", (0,))] if expected["result"] == "raise" else []
    )


def test_every_vector_of_sglang_is_used():
    assert len(SGLANG) == 9


TRT = vectors("tensorrt_llm", "vectors")


def test_tensorrt_llms_blocks_of_one_rank():
    given, expected = TRT["v1_single_rank"]["input"], TRT["v1_single_rank"]["expected"]
    kv = page("kv", given["slope"] * given["tokens_per_block"])
    report = offering(expected["kv_cache_max_memory"], kv)
    assert page_count(report) == expected["blocks_in_primary_pool"]


def test_tensorrt_llms_minimum_over_three_ranks():
    vector = TRT["v1_three_ranks_new"]
    reports = [
        offering(blocks["8192"] * 4096 + 5, page("8192", 4096))
        for blocks in vector["input"]["per_rank_blocks"]
    ]
    row = the_row(Layout(tp=3), reports)
    assert row.entries == vector["expected"]["blocks_per_window"]
    assert row.binding == {"8192": (1, 2)}


def test_tensorrt_llms_tokens_come_in_whole_blocks():
    given = TRT["v1_log_crosscheck"]["input"]
    kv = page("kv", 7, multiple_of=given["tokens_per_block"])
    tokens = page_count(offering(given["max_tokens"] * 7, kv))
    assert tokens // given["tokens_per_block"] == 1299


def test_stages_with_other_attention_windows_disagree():
    sets = TRT["v1_window_sets_differ_fails"]["input"]["rank_window_sets"]
    reports = [a_report(inputs={"windows": str(windows)}) for windows in sets]
    assert codes(Layout(pp=2), reports) == [("inputs_disagree", (1,))]


def test_tensorrt_llms_stages_agree_on_tokens():
    given = TRT["v2_pp2_different_layers"]["input"]
    reports = [
        offering(floor(quota * given["max_util_for_resume"]), page("kv", cost))
        for quota, cost in zip(
            given["quota_bytes"], given["full_attn_bytes_per_token"], strict=True
        )
    ]
    expected = TRT["v2_pp2_different_layers"]["expected"]
    assert [page_count(r) for r in reports] == list(map(floor, expected["tokens_per_rank"]))
    assert the_row(Layout(pp=2), reports).entries == {"kv": floor(expected["min_tokens"])}


@pytest.mark.parametrize("vector", vectors("lmdeploy", "vectors").values(), ids=lambda v: v["name"])
def test_lmdeploys_blocks_come_out_as_in_lmdeploy(vector):
    expected, asked = vector["expected"], vector["input"].get("user_blocks")
    reports = [
        offering(floor(free * 0.8), page("kv", size, min_entries=asked, max_entries=asked))
        for free, size in zip(
            expected["free_after_runtime"], expected["rank_block_bytes"], strict=True
        )
    ]
    row = the_row(Layout(tp=len(reports)), reports)
    assert row.entries == {"kv": expected["num_gpu_blocks"]}


def test_turbominds_bytes_are_the_groups_least():
    (vector,) = vectors("lmdeploy", "turbomind_vectors").values()
    ratio = vector["input"]["cache_max_entry_count_ratio"]
    reports = [
        Report(free_bytes=free, kv_budget_bytes=int(free * ratio), classes=[page("kv", 1)])
        for free in vector["input"]["free_bytes"]
    ]
    (group,) = the_row(Layout(tp=2), reports).budget_groups
    assert group.budget_bytes == vector["expected"]["cache_bytes"]
    assert group.binding_rank == 1
