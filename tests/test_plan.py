"""The planner: the engines' own numbers, one rule each, and what must always hold."""

import asyncio
import json
from math import ceil, floor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.api.plan import PlanQuestion
from coordinator.api.plan import plan as plan_route
from coordinator.verdict import inputs_digest, judge_reports
from kvaccord import Layout, Report, page, state
from kvaccord.canonical import canonical
from kvaccord.decision import Decision
from kvaccord.errors import Invalid
from kvaccord.layout import Groups
from kvaccord.plan import disagreeing_groups, plan, plan_document
from kvaccord.room import available_bytes, needs, page_count
from tests.builders import a_report

HERE = Path(__file__).parent
GIB = 2**30


def vectors(engine, key):
    document = json.loads((HERE / "vectors" / f"{engine}.json").read_text())
    return {vector["name"]: vector for vector in document[key]}


def planned(layout, reports):
    """The plan of a start that has one."""
    result = plan(layout, dict(enumerate(reports)))
    assert result.findings == ()
    return result.schedulers


def the_row(layout, reports):
    """The plan of the only scheduler."""
    (row,) = planned(layout, reports)
    return row


def codes(layout, reports):
    """The findings of a start that has no plan, as (code, ranks)."""
    result = plan(layout, dict(enumerate(reports)))
    assert result.schedulers == ()
    return [(finding.code, finding.ranks) for finding in result.findings]


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


# --- one rule each ------------------------------------------------------------------------------


def test_a_group_gets_what_its_tightest_rank_can_hold():
    row = the_row(Layout(tp=2), [a_report(90), a_report(70)])
    assert (row.entries, row.binding) == ({"kv": 70}, {"kv": (1,)})


def test_what_ranks_are_equal_in_binds_all_of_them():
    assert the_row(Layout(tp=3), [a_report(70), a_report(90), a_report(70)]).binding["kv"] == (0, 2)


def test_counts_are_compared_not_bytes():
    # The stage with more bytes has fewer entries, for its entries are larger.
    reports = [a_report(70, page_bytes=3000), a_report(90, page_bytes=1000)]
    row = the_row(Layout(pp=2), reports)
    assert (row.entries, row.binding) == ({"kv": 70}, {"kv": (0,)})
    assert [g.available_bytes for g in row.budget_groups] == [210_000, 90_000]


def test_free_memory_binds_where_it_is_below_the_budget():
    report = Report(free_bytes=50_000, kv_budget_bytes=90_000, classes=[page("kv", 1000)])
    row = the_row(Layout(), [report])
    assert row.entries == {"kv": 50}
    assert row.budget_groups[0].bound_by == "free"


def test_the_reserve_comes_off_both():
    report = a_report(90, reserve_bytes=20_500)
    assert the_row(Layout(), [report]).entries == {"kv": 69}


def test_counts_are_whole_multiples():
    assert the_row(
        Layout(), [a_report(90, classes=[page("kv", 1000, multiple_of=16)])]
    ).entries == {"kv": 80}


def test_the_smallest_cap_holds_for_all():
    capped = a_report(90, classes=[page("kv", 1000, max_entries=40)])
    row = the_row(Layout(tp=2), [a_report(90), capped])
    assert (row.entries, row.binding) == ({"kv": 40}, {"kv": (1,)})


def test_the_greatest_floor_holds_for_all():
    demanding = a_report(90, classes=[page("kv", 1000, min_entries=80)])
    assert codes(Layout(tp=2), [a_report(70), demanding]) == [("does_not_fit", (0,))]
    assert the_row(Layout(tp=2), [a_report(80), demanding]).entries == {"kv": 80}


def test_a_cap_below_another_ranks_floor_is_named_as_such():
    capped = a_report(90, classes=[page("kv", 1000, max_entries=40)])
    demanding = a_report(90, classes=[page("kv", 1000, min_entries=80)])
    (finding,) = plan(Layout(tp=2), {0: capped, 1: demanding}).findings
    assert finding.ranks == (0,)
    assert "raise max_entries 40" in finding.text


def test_a_draft_model_rides_the_targets_blocks():
    report = a_report(90, classes=[page("kv", 800), page("kv", 200, min_entries=5)])
    row = the_row(Layout(), [report])
    assert (row.entries, row.by_rank[0].entry_bytes) == ({"kv": 90}, {"kv": 1000})


def test_a_class_may_be_absent_on_a_rank():
    kv, slot = page("kv", 1000), state("slot", 100, entries_per_req=2)
    reports = [
        a_report(90, classes=[kv, slot], max_num_seqs=4),
        a_report(90, classes=[slot], max_num_seqs=4),
        a_report(70, classes=[kv], max_num_seqs=4),
    ]
    row = the_row(Layout(pp=3), reports)
    assert row.entries == {"kv": 70, "slot": 8}
    assert row.binding == {"kv": (2,)}
    assert [sorted(s.entry_bytes) for s in row.by_rank] == [["kv", "slot"], ["slot"], ["kv"]]


def test_a_replica_without_a_page_class_has_its_state_alone():
    slot = state("slot", 100, entries_per_req=2)
    reports = [a_report(90, max_num_seqs=4), a_report(90, classes=[slot], max_num_seqs=4)]
    rows = planned(Layout(dp=2, equal_over=("dp",)), reports)
    assert [row.entries for row in rows] == [{"kv": 90}, {"slot": 8}]


def test_replicas_do_not_bind_each_other():
    rows = planned(Layout(dp=2, tp=2), [a_report(n) for n in (90, 80, 70, 60)])
    assert [(row.entries["kv"], row.binding["kv"]) for row in rows] == [(80, (1,)), (60, (3,))]


def test_under_equal_over_a_rank_of_another_row_may_bind():
    rows = planned(Layout(dp=2, tp=2, equal_over=("dp",)), [a_report(n) for n in (90, 80, 70, 60)])
    assert [(row.entries["kv"], row.binding["kv"]) for row in rows] == [(60, (3,)), (60, (3,))]


def test_one_replica_that_does_not_fit_fails_the_engine():
    assert codes(Layout(dp=2), [a_report(90), a_report(0)]) == [("does_not_fit", (1,))]


# --- findings and their precedence --------------------------------------------------------------

SLOT = state("slot", 100, entries_per_req=1)


def test_nothing_free_is_said_as_it_is():
    bare = Report(free_bytes=0, kv_budget_bytes=1, classes=[page("kv", 1)])
    assert codes(Layout(), [bare]) == [("no_free_memory", (0,))]
    assert codes(Layout(), [a_report(9, reserve_bytes=9077)]) == [("reserve_exceeds_free", (0,))]
    # A reserve that leaves one free byte, and a budget that is spent, is a matter of the count.
    assert codes(Layout(), [a_report(9, reserve_bytes=9076)]) == [("does_not_fit", (0,))]


def test_a_state_floor_leaves_something_or_fails():
    def reports(n):
        return [a_report(n, page_bytes=1, classes=[page("kv", 1), SLOT], max_num_seqs=5)]

    assert codes(Layout(), reports(499)) == [("state_floor_exceeds_budget", (0,))]
    assert codes(Layout(), reports(500)) == [("state_floor_exceeds_budget", (0,))]
    assert the_row(Layout(), reports(501)).entries == {"kv": 1, "slot": 5}


def test_a_negative_budget_without_state_is_zero_entries():
    assert codes(Layout(), [a_report(-5)]) == [("does_not_fit", (0,))]


BROKEN = {
    "inputs_disagree": a_report(90, block_tokens=32, max_num_seqs=5),
    "implausible_report": a_report(90, free_bytes=0, total_bytes=10**6, max_num_seqs=5),
    "reserve_exceeds_free": a_report(90, reserve_bytes=10**6, max_num_seqs=5),
    "request_exceeds_free": a_report(90, initial_free_bytes=5, requested_bytes=6, max_num_seqs=5),
    "state_floor_exceeds_budget": a_report(
        0, free_bytes=10**5, classes=[page("kv", 1000), SLOT], max_num_seqs=5
    ),
}


def test_every_broken_rule_is_found_and_the_earliest_step_comes_first():
    layout = Layout(tp=len(BROKEN))
    backwards = list(reversed(BROKEN.values()))
    blocks = [r if r.block_tokens else r.model_copy(update={"block_tokens": 16}) for r in backwards]
    found = [code for code, _ in codes(layout, blocks)]
    first_step = {"reserve_exceeds_free", "request_exceeds_free"}  # one step, lowest rank first
    assert set(found) == set(BROKEN)
    steps = ["step 1" if code in first_step else code for code in dict.fromkeys(found)]
    assert list(dict.fromkeys(steps)) == [
        "inputs_disagree",
        "implausible_report",
        "step 1",
        "state_floor_exceeds_budget",
    ]


def test_the_lowest_rank_comes_first_within_a_step():
    reports = [
        a_report(90, initial_free_bytes=5, requested_bytes=6),
        a_report(90, reserve_bytes=10**6),
    ]
    assert codes(Layout(tp=2), reports) == [
        ("request_exceeds_free", (0,)),
        ("reserve_exceeds_free", (1,)),
    ]


def test_a_start_that_disagrees_is_not_told_that_it_does_not_fit():
    found = codes(Layout(tp=2), [a_report(90, max_num_seqs=4), a_report(0, max_num_seqs=5)])
    assert found == [("inputs_disagree", (1,))]


@pytest.mark.parametrize("field", ["max_num_seqs", "max_model_len", "block_tokens"])
def test_what_must_be_equal_over_the_engine_names_the_odd_rank(field):
    reports = [a_report(90, **{field: n}) for n in (4, 4, 5, 4)]
    (finding,) = plan(Layout(dp=2, tp=2), dict(enumerate(reports))).findings
    assert (finding.code, finding.ranks) == ("inputs_disagree", (2,))
    assert f"{field} differs: 4 on ranks 0-1, 3, 5 on rank 2" in finding.text


def test_what_one_rank_has_and_another_has_not_differs_too():
    reports = [a_report(90, inputs={"a": 1}), a_report(90, inputs={"a": 1, "b": 2})]
    (finding,) = plan(Layout(tp=2), dict(enumerate(reports))).findings
    assert "inputs.b differs: absent on rank 0, 2 on rank 1" in finding.text
    assert codes(Layout(tp=2), [a_report(90), a_report(90, max_model_len=1)]) == [
        ("inputs_disagree", (1,))
    ]


def test_true_is_not_1():
    reports = [a_report(90, inputs={"a": True}), a_report(90, inputs={"a": 1})]
    assert codes(Layout(tp=2), reports) == [("inputs_disagree", (1,))]


def test_of_two_halves_the_one_without_the_lowest_rank_is_blamed():
    reports = [a_report(90, inputs={"a": n}) for n in (2, 1, 2, 1, 3)]
    (finding,) = plan(Layout(tp=5), dict(enumerate(reports))).findings
    assert finding.ranks == (1, 3, 4)
    assert "2 on ranks 0, 2, 1 on ranks 1, 3, 3 on rank 4" in finding.text


def test_inputs_of_a_stage_may_differ_between_stages_only():
    reports = [a_report(90, inputs_stage={"layers": n}) for n in (17, 17, 15, 15)]
    planned(Layout(pp=2, tp=2), reports)
    assert codes(Layout(pp=1, tp=4), reports) == [("inputs_disagree", (2, 3))]
    assert codes(Layout(dp=2, pp=2), reports) == [
        ("inputs_disagree", (2,)),
        ("inputs_disagree", (3,)),
    ]


@pytest.mark.parametrize(
    "theirs",
    [
        [page("other", 1000)],
        [page("kv", 1000, multiple_of=2)],
        [state("kv", 1000, entries_per_req=1)],
        [page("kv", 1000), state("slot", 9, entries_per_req=2)],
        [page("kv", 1000), state("slot", 9, entries_per_req=1, extra_entries=1)],
    ],
)
def test_a_class_that_two_ranks_declare_is_one_thing(theirs):
    ours = [page("kv", 1000), state("slot", 9, entries_per_req=1)]
    reports = [a_report(90, classes=c, max_num_seqs=4) for c in (ours, theirs)]
    found = codes(Layout(pp=2), reports)
    assert {code for code, _ in found} == {"inputs_disagree"}


def test_bytes_and_bounds_of_a_class_need_not_be_equal():
    planned(
        Layout(pp=2),
        [
            a_report(90, classes=[page("kv", 1000, min_entries=5, max_entries=80)]),
            a_report(90, classes=[page("kv", 10, min_entries=7)]),
        ],
    )


def test_one_sign_of_a_wrong_reading_may_be_true():
    small, large = 10**6, 10**7
    other_card = [
        a_report(90, total_bytes=small),
        a_report(90, total_bytes=large),
    ]
    planned(Layout(tp=2), other_card)
    over_free = a_report(900, free_bytes=90_000, total_bytes=small)
    planned(Layout(tp=2), [over_free, a_report(90, total_bytes=small)])
    alone = a_report(900, free_bytes=90_000, total_bytes=large)
    planned(Layout(), [alone])


def test_a_plan_or_reasons_never_both_and_never_neither():
    assert plan(Layout(), {0: a_report(0)}).schedulers == ()
    assert plan(Layout(), {0: a_report(1)}).findings == ()


# --- what must always hold ----------------------------------------------------------------------

CLASSES = st.lists(
    st.one_of(
        st.builds(
            page,
            st.just("kv"),
            st.integers(1, 400),
            multiple_of=st.just(4),
            min_entries=st.none() | st.integers(0, 5),
            max_entries=st.none() | st.integers(8, 60),
        ),
        st.builds(state, st.just("slot"), st.integers(1, 90), entries_per_req=st.just(2)),
        st.builds(state, st.just("none"), st.integers(1, 90)),
    ),
    min_size=1,
    max_size=4,
)
ROOMY = st.builds(
    Report,
    free_bytes=st.integers(15_000, 60_000),
    kv_budget_bytes=st.integers(15_000, 60_000),
    reserve_bytes=st.integers(0, 900),
    max_num_seqs=st.just(3),
    classes=CLASSES,
)
REPORTS = st.builds(
    Report,
    free_bytes=st.integers(0, 60_000),
    kv_budget_bytes=st.integers(-500, 60_000),
    reserve_bytes=st.integers(0, 900),
    max_num_seqs=st.just(3),
    classes=CLASSES,
)
LAYOUTS = st.builds(
    Layout,
    **dict.fromkeys(("dp", "pp", "pcp", "tp"), st.integers(1, 2)),
    equal_over=st.sampled_from([(), ("dp",)]),
)


@st.composite
def starts(draw):
    layout = draw(LAYOUTS)
    reports = draw(st.sampled_from([ROOMY, ROOMY, REPORTS]))
    return layout, {rank: draw(reports) for rank in range(layout.world_size)}


def counted(layout, ranks, reports):
    """The page count by hand: per rank, one page at a time would come to the same."""
    counts = {}
    for rank in ranks:
        pages = [c for c in reports[rank].classes if c.kind == "page"]
        if not pages:
            continue
        r = reports[rank]
        states = sum(
            c.entry_bytes * (r.max_num_seqs * c.entries_per_req + c.extra_entries)
            for c in r.classes
            if c.kind == "state"
        )
        rest = min(r.free_bytes, r.kv_budget_bytes) - r.reserve_bytes - states
        fit = rest // sum(c.entry_bytes for c in pages)
        fit = min([fit] + [c.max_entries for c in pages if c.max_entries is not None])
        counts[rank] = fit - fit % pages[0].multiple_of
    return counts


@given(starts())
def test_counts_are_the_minima_over_exactly_these_reports(start):
    layout, reports = start
    for row in plan(layout, reports).schedulers:
        ranks = range(layout.world_size) if layout.equal_over else row.group.ranks
        counts = counted(layout, ranks, reports)
        if any(rank in counts for rank in row.group.ranks):
            assert row.entries["kv"] == min(counts.values())
            tight = tuple(r for r in counts if counts[r] == min(counts.values()))
            here = tuple(r for r in tight if r in row.group.ranks)
            assert row.binding["kv"] == (here or tight[:1])
        else:
            assert "kv" not in row.entries


@given(starts())
def test_no_rank_is_asked_for_more_than_it_offered(start):
    layout, reports = start
    for row in plan(layout, reports).schedulers:
        for share in row.by_rank:
            report = reports[share.rank]
            offered = min(report.free_bytes, report.kv_budget_bytes) - report.reserve_bytes
            assert sum(share.reserved_bytes.values()) + share.stranded_bytes == offered
            assert share.stranded_bytes >= 0
            assert share.reserved_bytes == {
                name: row.entries[name] * size for name, size in share.entry_bytes.items()
            }
            assert share.entry_bytes.keys() == {c.name for c in report.classes}


@given(starts())
def test_no_floor_is_broken_by_a_plan(start):
    layout, reports = start
    for row in plan(layout, reports).schedulers:
        for rank in row.group.ranks:
            if reports[rank].has_page:
                assert row.entries["kv"] >= max(1, needs(reports[rank]).page_min)


@given(starts(), st.randoms(use_true_random=False))
def test_the_order_of_the_reports_does_not_matter(start, random):
    layout, reports = start
    shuffled = list(reports.items())
    random.shuffle(shuffled)
    assert plan(layout, dict(shuffled)) == plan(layout, reports)


@given(starts(), st.data())
def test_more_memory_on_one_rank_never_lowers_a_count(start, data):
    layout, reports = start
    rank = data.draw(st.sampled_from(sorted(reports)))
    more = data.draw(st.integers(0, 10_000))
    roomier = reports[rank].model_copy(
        update={
            "free_bytes": reports[rank].free_bytes + more,
            "kv_budget_bytes": reports[rank].kv_budget_bytes + more,
        }
    )
    before, after = plan(layout, reports), plan(layout, {**reports, rank: roomier})
    if before.schedulers:
        assert after.findings == ()
        for old, new in zip(before.schedulers, after.schedulers, strict=True):
            assert all(new.entries[name] >= n for name, n in old.entries.items())


@given(starts())
def test_published_minima_are_those_of_the_group(start):
    layout, reports = start
    for row in plan(layout, reports).schedulers:
        ranks = [r for g in row.budget_groups for r in g.group.ranks]
        assert ranks == list(row.group.ranks)
        for group in row.budget_groups:
            members = [reports[r] for r in group.group.ranks]
            assert group.free_bytes == min(r.free_bytes for r in members)
            assert group.budget_bytes == min(r.kv_budget_bytes for r in members)
            assert group.available_bytes == min(map(available_bytes, members))
            assert available_bytes(reports[group.binding_rank]) == group.available_bytes


HUGE = st.integers(1, 2**53 - 1)
ANY_REPORTS = st.builds(
    Report,
    free_bytes=HUGE,
    kv_budget_bytes=st.integers(-(2**53) + 1, 2**53 - 1),
    reserve_bytes=HUGE | st.just(0),
    total_bytes=st.just(2**53 - 1) | st.none(),
    max_num_seqs=st.just(3) | HUGE,
    classes=st.lists(
        st.builds(page, st.just("kv"), HUGE | st.integers(1, 9))
        | st.builds(
            state,
            st.just("slot"),
            HUGE | st.integers(1, 9),
            entries_per_req=HUGE | st.integers(0, 1),
            extra_entries=HUGE | st.just(0),
        ),
        min_size=1,
        max_size=1,
    ),
)


@given(st.lists(ANY_REPORTS, min_size=2, max_size=2))
def test_every_plan_and_every_finding_has_a_canonical_form(reports):
    layout, by_rank = Layout(tp=2), dict(enumerate(reports))
    canonical(plan_document(plan(layout, by_rank), {0: "a", 1: "b"}))
    canonical(judge_reports(layout, by_rank, {0: "a", 1: "b"}).document())


# --- two limits at once -------------------------------------------------------------------------


def test_a_minimum_that_does_not_even_fit_without_state_is_named_beside_the_floor():
    def report(wanted):
        kv = page("kv", 10, min_entries=wanted)
        return a_report(9, classes=[kv, SLOT], max_num_seqs=100)

    assert codes(Layout(), [report(900)]) == [("state_floor_exceeds_budget", (0,))]
    assert codes(Layout(), [report(901)]) == [
        ("state_floor_exceeds_budget", (0,)),
        ("does_not_fit", (0,)),
    ]


def test_what_follows_from_nothing_free_is_no_second_cause():
    slot = state("slot", 100, entries_per_req=1)
    empty = a_report(9, reserve_bytes=10**6, classes=[page("kv", 1), slot], max_num_seqs=5)
    assert codes(Layout(), [empty]) == [("reserve_exceeds_free", (0,))]
    unread = Report(
        free_bytes=0,
        total_bytes=10**6,
        kv_budget_bytes=0,
        initial_free_bytes=0,
        requested_bytes=10**5,
        max_num_seqs=5,
        classes=[page("kv", 1), slot],
    )
    assert codes(Layout(), [unread]) == [("implausible_report", (0,))]


# --- groups by name -----------------------------------------------------------------------------


def grouped(*names):
    """Groups by rank from "scheduler/budget"."""
    pairs = [name.split("/") for name in names]
    return {r: Groups(scheduler=s, budget=b) for r, (s, b) in enumerate(pairs)}


def test_ranks_that_name_their_groups_are_planned_by_them():
    # SGLang, PP 2 and attention DP 2: PP varies slower than DP, which is no grid of ours.
    groups = grouped("dp0/dp0.pp0", "dp1/dp1.pp0", "dp0/dp0.pp1", "dp1/dp1.pp1")
    reports = dict(enumerate(a_report(n) for n in (90, 80, 70, 60)))
    rows = plan(Layout(tp=4), reports, groups).schedulers
    assert [(r.group.at, list(r.group.ranks), r.entries["kv"]) for r in rows] == [
        ("dp0", [0, 2], 70),
        ("dp1", [1, 3], 60),
    ]
    assert [(g.group.at, g.binding_rank) for g in rows[1].budget_groups] == [
        ("dp1.pp0", 1),
        ("dp1.pp1", 3),
    ]
    document = plan_document(plan(Layout(tp=4), reports, groups), {})
    assert document["schedulers"][0]["group"] == "dp0"
    assert document["schedulers"][0]["budget_groups"][1]["group"] == "dp0.pp1"
    assert "dp" not in document["schedulers"][0]


def test_named_groups_are_equal_over_the_engine_where_it_says_so():
    layout = Layout(tp=2, equal_over=("dp",))
    reports = {0: a_report(90), 1: a_report(70)}
    rows = plan(layout, reports, grouped("a/a", "b/b")).schedulers
    assert [(row.entries["kv"], row.binding["kv"]) for row in rows] == [(70, (1,)), (70, (1,))]


def test_all_ranks_name_their_groups_or_none_does():
    groups = grouped("a/a", "a/a", "a/a")
    found = plan(Layout(tp=4), {r: a_report(90) for r in range(4)}, groups).findings
    assert [(f.code, f.ranks) for f in found] == [("inputs_disagree", (3,))]
    assert "groups differs: named on ranks 0-2, absent on rank 3" in found[0].text


def test_a_budget_group_lies_within_one_scheduler_group():
    groups = grouped("a/x", "a/x", "b/x", "b/y")
    found = plan(Layout(tp=4), {r: a_report(90) for r in range(4)}, groups).findings
    assert [(f.code, f.ranks) for f in found] == [("inputs_disagree", (2,))]
    assert "budget group x differs: a on ranks 0-1, b on rank 2" in found[0].text
    assert disagreeing_groups({0: None, 5: None}) == []
    assert [f.ranks for f in disagreeing_groups({0: groups[0], 5: None})] == [(5,)]


def test_the_groups_are_part_of_what_was_decided_on():
    reports = {0: a_report(90), 1: a_report(70)}
    digests = [
        inputs_digest(Layout(tp=2), reports, groups)
        for groups in (None, {}, grouped("a/a", "a/a"), grouped("a/a", "b/b"))
    ]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_the_inputs_of_a_stage_are_those_of_a_named_budget_group():
    reports = {r: a_report(90, inputs_stage={"layers": n}) for r, n in enumerate((9, 9, 7, 8))}
    found = plan(Layout(tp=4), reports, grouped("a/x", "a/x", "a/y", "a/y")).findings
    assert [f.ranks for f in found] == [(3,)]


# --- capacities ---------------------------------------------------------------------------------


def test_every_capacity_has_its_own_minimum_and_binding_ranks():
    tiers = [{"host": 50, "disk": 9}, {"host": 40, "disk": 9}, {"host": 40, "disk": 10}]
    reports = {r: a_report(90, capacities=t) for r, t in enumerate(tiers)}
    planned = plan(Layout(tp=3), reports)
    document = plan_document(planned, {0: "a", 1: "b", 2: "b"})
    assert document["capacities"] == {
        "disk": {"bytes": 9, "ranks": [0, 1], "hosts": ["a", "b"]},
        "host": {"bytes": 40, "ranks": [1, 2], "hosts": ["b"]},
    }
    assert planned.schedulers[0].entries == {"kv": 90}


def test_a_rank_without_a_capacity_says_0():
    reports = [a_report(90, capacities={"disk": 9}), a_report(90)]
    (finding,) = plan(Layout(pp=2), dict(enumerate(reports))).findings
    assert (finding.code, finding.ranks) == ("inputs_disagree", (1,))
    assert "capacities.disk differs: present on rank 0, absent on rank 1" in finding.text
    reports[1] = a_report(90, capacities={"disk": 0})
    assert plan(Layout(pp=2), dict(enumerate(reports))).capacities["disk"].bytes == 0


# --- warnings -----------------------------------------------------------------------------------


def warned(layout, *reports, **options):
    planned = plan(layout, dict(enumerate(reports)), **options)
    assert planned.findings == ()
    return [(w.code, w.ranks) for w in planned.warnings]


def test_ranks_that_are_alike_get_no_warning():
    assert warned(Layout(tp=2), a_report(100), a_report(95)) == []


def test_more_than_5_percent_apart_is_imbalanced_and_names_the_short_ranks():
    reports = [a_report(100), a_report(94), a_report(94)]
    assert warned(Layout(tp=3), *reports) == [("imbalanced", (1, 2))]
    (warning,) = plan(Layout(tp=3), dict(enumerate(reports))).warnings
    assert "page entries: 94 on ranks 1-2, 100 on rank 0, 6.0% apart" in warning.text
    assert "6000 bytes (0.00 GiB) stay unused" in warning.text


def test_stages_are_compared_by_counts_and_not_by_bytes():
    assert warned(Layout(pp=2), a_report(90, page_bytes=2000), a_report(90)) == []
    assert warned(Layout(pp=2), a_report(90), a_report(50)) == [("imbalanced", (1,))]


def test_replicas_are_compared_only_where_they_must_be_equal():
    assert warned(Layout(dp=2), a_report(90), a_report(50)) == []
    layout = Layout(dp=2, equal_over=("dp",))
    assert warned(layout, a_report(90), a_report(50)) == [("imbalanced", (1,))]


def test_a_spread_over_the_policys_limit_is_no_plan():
    reports = {0: a_report(100), 1: a_report(90)}
    planned = plan(Layout(tp=2), reports, spread_limit=0.09)
    assert [(f.code, f.ranks, f.retryable) for f in planned.findings] == [
        ("spread_too_wide", (1,), False)
    ]
    assert "the policy's spread_limit is 9.0%" in planned.findings[0].text
    assert plan(Layout(tp=2), reports, spread_limit=0.1).findings == ()
    short = {0: a_report(100), 1: a_report(0)}
    found = [f.code for f in plan(Layout(tp=2), short, spread_limit=0.1).findings]
    assert found == ["does_not_fit", "spread_too_wide"]


def test_many_imbalanced_groups_are_told_widest_first_and_counted():
    reports = {r: a_report(100 if r % 2 == 0 else 90 - r) for r in range(40)}
    found = plan(Layout(dp=20, tp=2), reports).warnings
    assert len(found) == 9
    assert [w.ranks for w in found[:2]] == [(39,), (37,)]
    assert found[-1].ranks == tuple(range(1, 24, 2))
    assert found[-1].text.startswith("12 more groups")


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"local_count": 2}, "device_shared"),
        ({"local_count": 1}, None),
        ({"initial_free_bytes": 89_000}, "memory_moved"),  # more is free now than at the start
        ({"initial_free_bytes": 90_000}, None),
        (
            {
                "initial_free_bytes": 200_000,
                "parts": {"peak_torch_bytes": 90_000, "non_torch_bytes": 10_000},
            },
            "memory_moved",
        ),
        (
            {
                "initial_free_bytes": 200_000,
                "parts": {"peak_torch_bytes": 99_000, "non_torch_bytes": 10_000},
            },
            None,
        ),
        ({"initial_free_bytes": 200_000, "parts": {"peak_torch_bytes": True}}, None),
        ({"free_bytes": 180_001}, "low_use_of_budget"),
        ({"free_bytes": 180_000}, None),
        ({"free_bytes": 190_000, "reserve_bytes": 10_000}, None),
        ({"parts": {"physical_entry_bytes": 499}}, "low_use_of_budget"),
        ({"parts": {"physical_entry_bytes": 500}}, None),
        ({"parts": {"physical_entry_bytes": "499"}}, None),
    ],
    ids=str,
)
def test_one_report_alone_may_be_worth_a_look(changes, code):
    assert warned(Layout(), a_report(90, **changes)) == ([(code, (0,))] if code else [])


def test_one_warning_stands_for_all_ranks_that_share_it():
    shared = a_report(90, local_count=2)
    reports = dict.fromkeys(range(3), shared) | {3: a_report(90)}
    (warning,) = plan(Layout(tp=4), reports).warnings
    assert (warning.code, warning.ranks) == ("device_shared", (0, 1, 2))
    assert warning.text.startswith("rank 0: 2 processes")
    assert warning.text.endswith("likewise ranks 1-2")


def test_counts_of_neighbours_that_differ_are_noticed():
    reports = [a_report(90, local_count=n) for n in (1, 2, 1)]
    assert warned(Layout(tp=3), *reports) == [
        ("device_shared", (1,)),
        ("local_count_differs", (1,)),
    ]


def test_a_start_without_a_plan_has_its_warnings_too():
    verdict = judge_reports(Layout(tp=2), {0: a_report(90), 1: a_report(0)}, {}).document()
    assert verdict["outcome"] == "FAILED"
    assert [w["code"] for w in verdict["warnings"]] == ["imbalanced"]


# --- over the wire ------------------------------------------------------------------------------


def asked(layout, *rows):
    body = PlanQuestion.model_validate({"layout": layout, "reports": rows})
    return json.loads(bytes(asyncio.run(plan_route(body)).body))


def test_a_row_of_the_plan_question_may_name_its_groups():
    kv = {"kind": "page", "name": "kv", "entry_bytes": 1000}
    rows = [
        {"rank": rank, "free_bytes": 90_000, "kv_budget_bytes": budget, "classes": [kv]}
        for rank, budget in enumerate([80_000, 70_000])
    ]
    named = [row | {"groups": {"budget": "b", "scheduler": f"s{row['rank']}"}} for row in rows]
    assert [r["entries"] for r in asked({"tp": 2}, *rows)["plan"]["schedulers"]] == [{"kv": 70}]
    assert asked({"tp": 2}, *named)["verdict"]["code"] == "inputs_disagree"
    named[1]["groups"]["budget"] = "c"
    answer = asked({"tp": 2}, *named)
    assert answer["verdict"]["warnings"] == []
    assert [(r["group"], r["entries"]) for r in answer["plan"]["schedulers"]] == [
        ("s0", {"kv": 80}),
        ("s1", {"kv": 70}),
    ]
    assert asked({"tp": 2}, rows[0], named[1])["verdict"]["ranks"] == [1]


# --- as a document ------------------------------------------------------------------------------


def as_decision(layout, reports):
    document = {"plan": plan_document(plan(layout, reports), {})}
    return Decision(canonical(document))


def test_bytes_of_an_entry_stand_once_for_ranks_that_are_alike():
    reports = {
        r: a_report(90, classes=[page("kv", 1000 if r < 2 else 900), SLOT], max_num_seqs=1)
        for r in range(4)
    }
    decision = as_decision(Layout(pp=2, tp=2), reports)
    assert decision.document["plan"]["shapes"] == [
        {"ranks": [0, 1], "entry_bytes": {"kv": 1000, "slot": 100}},
        {"ranks": [2, 3], "entry_bytes": {"kv": 900, "slot": 100}},
    ]
    assert decision.entries(3) == {"kv": 89, "slot": 1}
    assert decision.entry_bytes(3) == {"kv": 900, "slot": 100}


def test_the_hosts_of_the_lowest_binding_ranks_are_named():
    hosts = {rank: f"host-{20 - rank}" for rank in range(20)}
    planned = plan(Layout(tp=20), dict.fromkeys(range(20), a_report(90)))
    bound = plan_document(planned, hosts)["schedulers"][0]["binding"]["kv"]
    assert bound["ranks"] == list(range(20))
    assert bound["hosts"] == [f"host-{n}" for n in range(20, 12, -1)]


@given(starts())
def test_a_reader_of_the_document_finds_what_was_planned(start):
    layout, reports = start
    planned = plan(layout, reports)
    if planned.findings:
        return
    decision = as_decision(layout, reports)
    for row in planned.schedulers:
        for share in row.by_rank:
            assert decision.entry_bytes(share.rank) == share.entry_bytes
            assert decision.entries(share.rank) == {n: row.entries[n] for n in share.entry_bytes}


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=1024),
        Layout(pp=16, tp=64),
        Layout(dp=256, tp=4),
        Layout(dp=512, tp=2, equal_over=("dp",)),
    ],
    ids=str,
)
def test_a_decision_over_1024_ranks_and_8_classes_stays_within_256_kib(layout):
    reports = {}
    for rank in range(1024):
        stage = layout.coordinates(rank).pp
        states = [state(f"s{n}", 25_399_296 + n, entries_per_req=1) for n in range(7)]
        budget = 133_756_019_016 + rank * 7_919_000
        reports[rank] = Report(
            free_bytes=budget + 30 * GIB,
            kv_budget_bytes=budget,
            max_num_seqs=512,
            classes=[page("kv", 1_399_040 + stage), *states],
            capacities={"host": budget},
        )
    hosts = {rank: f"prefill-worker-{rank // 8:04}.cluster.local" for rank in reports}
    verdict = judge_reports(layout, reports, hosts)
    assert verdict.code == "agreed"
    document = {"verdict": verdict.document(), "plan": verdict.plan}
    assert len(canonical(document)) <= 250 * 1024
