"""Hints hold: whatever is advised passes when it is planned again, and no more than is needed."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.hints import round_hints
from kvaccord import Layout, Report, page, state
from kvaccord.changes import (
    measured_before_load,
    with_freed,
    with_max_entries,
    with_max_model_len,
    with_min_entries,
    with_utilization,
)
from kvaccord.hints import OPTIONS, Hints, engine_named, hints
from kvaccord.layout import Groups
from kvaccord.levers import Change, apply, greatest_utilization
from kvaccord.plan import plan
from kvaccord.room import needs
from tests.builders import Log, a_report
from tests.convert import a_case, layout_of, report_of

GIB = 2**30
# What a case calls utilization is vLLM's and ATOM's share of total; SGLang's is of what was free
# before the load, which those cases do not say.
ENGINES = {"vLLM": ("vllm", "total"), "ATOM": ("atom", "total"), "SGLang": ("sglang", None)}


def shared(ppm: int = 900_000, of: str = "total", **parts: Any) -> dict[str, Any]:
    return {"utilization_ppm": ppm, "utilization_of": of, **parts}


def said(found: Hints) -> list[dict[str, Any]]:
    """Each hint as {name: value}."""
    return [{c.name: c.value for c in hint.changes} for hint in found.hints]


def of_case(number: str) -> Hints:
    """The hints to a reported failure, by the reports that its ranks would have sent."""
    case = a_case(number)
    group, rows = case["input"]["group"], case["input"]["ranks"]
    engine, of = ENGINES.get(case["engine"], (None, None))
    reports = {}
    for row in rows:
        report = report_of(row, group)
        parts = {"engine": engine, **report.get("parts", {})}
        if "utilization_ppm" in parts and "utilization_of" not in parts:
            parts["utilization_of"] = of
        report["parts"] = {name: value for name, value in parts.items() if value is not None}
        if length := group.get("max_model_len"):
            # Where no block size is told an entry is a token.
            report |= {"max_model_len": length, "block_tokens": group.get("block_tokens", 1)}
        reports[row["rank"]] = Report(**report)
    limit = group.get("max_imbalance")
    return hints(layout_of(group, number), reports, spread_limit=limit)


# --- reported failures --------------------------------------------------------------------------


def test_017_the_fraction_is_rounded_down_or_the_missing_bytes_are_freed() -> None:
    found = of_case("017")
    assert said(found) == [{"utilization": 890_000}, {"freed_bytes": 80_530_637}]
    assert found.hints[0].text.startswith("--gpu-memory-utilization 0.89 (now 0.90): every rank")
    assert "that others hold on ranks 0-1" in found.hints[1].text


def test_019_one_fraction_passes_on_both_nodes() -> None:
    assert said(of_case("019"))[0] == {"utilization": 810_000}


def test_021_one_request_is_shortened_to_what_the_pool_holds() -> None:
    found = of_case("021")
    assert said(found) == [{"max_model_len": 81_536}]
    assert found.hints[0].text.startswith("--max-model-len 81536 (now 131072): ")
    # The log's own advice is the fraction first, and even all of the device is not enough.
    (line,) = found.ruled_out
    assert line.startswith("raising --gpu-memory-utilization cannot help: at 1.00")
    assert "(13.97 GiB)" in line


def test_023_both_limits_are_mended_at_once() -> None:
    (changes,) = said(of_case("023"))
    assert changes.keys() == {"max_num_seqs", "max_model_len"}
    # In equal proportion: neither is given up for the other.
    assert abs(changes["max_num_seqs"] / 256 - changes["max_model_len"] / 132_000) < 0.01


def test_024_the_least_fraction_with_any_pool_on_every_rank() -> None:
    found = of_case("024")
    assert said(found) == [{"utilization": 950_000}]
    assert found.ruled_out == ()


def test_025_what_cannot_help_is_said_to_be_no_use() -> None:
    found = of_case("025")
    assert [hint.keys() for hint in said(found)] == [{"freed_bytes"}]
    assert said(found)[0]["freed_bytes"] == -(-(1_628_749_824 + 3_178_334_613) * 10 // 9)
    (line,) = found.ruled_out
    assert "at 1.00" in line
    assert "(-1.94 GiB) and needs 1628749824 bytes (1.52 GiB)" in line


def test_047_the_odd_node_is_given_what_the_others_have() -> None:
    (hint,) = of_case("047").hints
    assert hint.changes == (
        Change("inputs.max_num_batched_tokens", 8192, 4096, tuple(range(8, 16))),
    )


def test_061_the_short_rank_is_freed_and_the_roomy_ones_left_alone() -> None:
    (hint,) = of_case("061").hints
    (change,) = hint.changes
    assert change.ranks == (2,)
    assert change.value == pytest.approx(0.9 * 84_610_855_731 - 44_023_414_784, abs=2)


@pytest.mark.parametrize("number", ["052", "053"])
def test_nobody_tunes_by_a_reading_that_is_wrong(number: str) -> None:
    assert of_case(number) == Hints()


def case_table() -> str:
    """What passes instead, of each case that has hints, as it stands in docs/hints.md."""
    rows = ["| case | passes | no use |", "|---|---|---|"]
    for number in ("017", "019", "021", "023", "024", "025", "047", "061"):
        found = of_case(number)
        told = "; ".join(hint.text.partition(": every rank")[0] for hint in found.hints)
        rows.append(f"| {number} | {told} | {'; '.join(found.ruled_out)} |".replace("|  |", "| |"))
    return "\n".join(rows).replace(" --", " \\--")


def test_the_page_has_the_hints_to_the_reported_failures() -> None:
    page_ = Path(__file__).parents[1] / "docs/hints.md"
    assert case_table() in page_.read_text()


# --- one setting after another ------------------------------------------------------------------


def test_a_plan_that_passes_needs_no_hint() -> None:
    assert hints(Layout(), {0: a_report(1)}) == Hints()


def test_the_least_fraction_that_fits_the_tightest_rank_is_advised() -> None:
    reports = {
        rank: a_report(
            pages,
            classes=[page("kv", 1000, min_entries=100)],
            free_bytes=300_000,
            total_bytes=1_000_000,
            parts=shared(),
        )
        for rank, pages in enumerate([90, 50])
    }
    assert said(hints(Layout(tp=2), reports))[0] == {"utilization": 950_000}


def test_a_fraction_is_never_raised_above_what_was_free_when_the_process_began() -> None:
    report = a_report(
        50,
        classes=[page("kv", 1000, min_entries=100)],
        free_bytes=300_000,
        total_bytes=1_000_000,
        initial_free_bytes=949_999,
        parts=shared(),
    )
    found = hints(Layout(), {0: report})
    assert "utilization" not in {name for changes in said(found) for name in changes}
    assert "at 0.949999, the most there is" in found.ruled_out[0]


def test_thousandths_are_used_where_the_last_hundredth_is_not_enough() -> None:
    report = a_report(
        50,
        classes=[page("kv", 1000, min_entries=100)],
        free_bytes=300_000,
        total_bytes=1_000_000,
        initial_free_bytes=955_000,
        parts=shared(905_000),
    )
    assert said(hints(Layout(), {0: report}))[0] == {"utilization": 955_000}


def test_a_share_of_free_memory_moves_by_free_memory() -> None:
    report = a_report(
        50,
        classes=[page("kv", 1000, min_entries=80)],
        free_bytes=100_000,
        total_bytes=1_000_000,
        parts=shared(500_000, "free"),
    )
    assert said(hints(Layout(), {0: report}))[0] == {"utilization": 800_000}


def test_a_fraction_of_nobody_knows_what_is_left_alone() -> None:
    report = a_report(50, classes=[page("kv", 1000, min_entries=80)], free_bytes=10**6)
    for parts in (None, {"utilization_ppm": 500_000}, shared(500_000, "weights"), shared(True)):
        found = hints(Layout(), {0: report.model_copy(update={"parts": parts})})
        assert said(found) == [{"min_entries": 50}]
        assert found.ruled_out == ()


def test_vllm_may_also_be_given_the_bytes_themselves() -> None:
    report = a_report(
        50,
        classes=[page("kv", 1000, min_entries=100)],
        free_bytes=300_000,
        total_bytes=1_000_000,
        parts=shared(engine="vllm"),
    )
    found = hints(Layout(), {0: report})
    assert {"kv_budget_bytes": 100_000} in said(found)
    assert any(h.text.startswith("--kv-cache-memory-bytes 100000: ") for h in found.hints)
    other = hints(Layout(), {0: report}, engine="atom")
    assert {"kv_budget_bytes": 100_000} not in said(other)


def test_sequences_are_lowered_to_what_their_state_leaves_room_for() -> None:
    slot = state("slot", 1000, entries_per_req=1)
    report = a_report(90, classes=[page("kv", 1000), slot], max_num_seqs=128)
    found = hints(Layout(), {0: report}, engine="sglang")
    assert said(found) == [{"max_num_seqs": 89}]
    assert found.hints[0].text == (
        "--max-running-requests 89 (now 128): every rank builds 1 kv + 89 slot entries, kv bound by"
        " rank 0"
    )


def test_a_reserve_that_leaves_nothing_is_lowered() -> None:
    assert said(hints(Layout(), {0: a_report(9, reserve_bytes=10**5)})) == [
        {"reserve_bytes": 8_000}
    ]


def test_a_cap_below_what_another_rank_needs_is_raised() -> None:
    capped = a_report(90, classes=[page("kv", 1000, max_entries=10)])
    other = a_report(90, classes=[page("kv", 1000, min_entries=50)])
    found = hints(Layout(tp=2), {0: capped, 1: other})
    assert said(found) == [{"min_entries": 10}, {"max_entries": 50}]


def test_memory_is_to_be_freed_only_where_others_are_seen_to_hold_it() -> None:
    kv = [page("kv", 1000, min_entries=80)]
    short = a_report(50, classes=kv, total_bytes=10**6, parts=shared(10**6))
    assert said(hints(Layout(), {0: short})) == [{"min_entries": 50}]
    roomy = a_report(90, classes=kv, total_bytes=10**6, parts=shared(10**6))
    assert said(hints(Layout(tp=2), {0: short, 1: roomy})) == [
        {"min_entries": 50},
        {"freed_bytes": 30_000},
    ]
    began = short.model_copy(update={"initial_free_bytes": 10**6 - 29_999})
    assert said(hints(Layout(), {0: began})) == [{"min_entries": 50}]


def test_what_differs_and_what_does_not_fit_are_mended_together() -> None:
    kv = [page("kv", 1000, min_entries=100)]
    reports = {r: a_report(90, classes=kv, inputs={"dtype": "bf16"}) for r in range(3)}
    reports[2] = a_report(90, classes=kv, inputs={"dtype": "fp8"})
    assert said(hints(Layout(tp=3), reports)) == [{"inputs.dtype": "bf16", "min_entries": 90}]


def test_classes_that_differ_are_nothing_to_tune() -> None:
    reports = {0: a_report(9), 1: a_report(9, classes=[page("kv", 1000, multiple_of=2)])}
    assert hints(Layout(tp=2), reports) == Hints()
    named = {0: Groups(budget="a", scheduler="a")}
    assert hints(Layout(tp=2), {0: a_report(9), 1: a_report(0)}, named) == Hints()


def test_named_groups_have_their_own_needs() -> None:
    reports = {
        0: a_report(50, classes=[page("kv", 1000, min_entries=40)]),
        1: a_report(30, classes=[page("kv", 1000, min_entries=40)]),
    }
    apart = {r: Groups(budget=f"b{r}", scheduler=f"s{r}") for r in reports}
    assert said(hints(Layout(tp=2), reports, apart)) == [{"min_entries": 30}]


# --- words --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "engine"),
    [
        ("vllm 0.11.2", "vllm"),
        ("SGLang/0.5", "sglang"),
        ("TensorRT-LLM", "tensorrt_llm"),
        ("tensorrt-llm 1.1", "tensorrt_llm"),
        ("trtllm", "tensorrt_llm"),
        ("lmdeploy", "lmdeploy"),
        ("ATOM 1", "atom"),
        ("", None),
        (None, None),
    ],
)
def test_an_engine_is_known_by_its_first_word(text: str | None, engine: str | None) -> None:
    assert engine_named(text) == engine


def test_every_engine_has_a_word_for_fraction_sequences_and_length() -> None:
    for words in OPTIONS.values():
        assert {"utilization", "max_num_seqs", "max_model_len"} <= words.keys()


def test_a_hint_as_a_document_has_no_more_than_there_is() -> None:
    assert Hints().document() == {}
    document = hints(Layout(), {0: a_report(9, reserve_bytes=10**5)}).document()
    assert document.keys() == {"hints"}
    (row,) = document["hints"]
    assert row["changes"] == [{"name": "reserve_bytes", "value": 8_000, "was": 10**5}]


# --- a round ------------------------------------------------------------------------------------


def test_a_round_that_failed_for_its_reports_has_hints_in_the_words_of_its_engine() -> None:
    log = Log()
    layout = Layout(tp=2)
    ranks = [log.claimed(rank, layout=layout, engine_version="vllm 0.11") for rank in range(2)]
    slot = state("slot", 1000, entries_per_req=1)
    for process in ranks:
        process.reports(a_report(9, classes=[page("kv", 1000), slot], max_num_seqs=9))
    assert log.decision.code == "state_floor_exceeds_budget"
    (hint,) = round_hints(log.round)["hints"]
    assert hint["text"].startswith("--max-num-seqs 8 (now 9): ")
    assert round_hints(log.round) == round_hints(log.round)


def test_other_rounds_have_no_hints() -> None:
    sealed, vetoed, partly = Log(), Log(), Log()
    sealed.sealed(90, 70)
    vetoed.start(2)[0].vetoes()
    vetoed.spends("grace")
    partly.start(2)[0].reports(a_report(-5))
    partly.spends("shortfall")
    for log in (sealed, vetoed, partly):
        assert round_hints(log.round) == {}
    assert partly.decision.code == "does_not_fit"


# --- what must always hold ----------------------------------------------------------------------

TOTAL = 60_000


@st.composite
def failing(draw: Any) -> tuple[Layout, dict[int, Report]]:
    """Starts whose settings are equal and whose memory is not; most of them fail."""
    layout = draw(
        st.builds(
            Layout,
            **dict.fromkeys(("dp", "pp", "tp"), st.integers(1, 2)),
            equal_over=st.sampled_from([(), ("dp",)]),
        )
    )
    seqs, each = draw(st.integers(1, 12)), draw(st.integers(0, 2000))
    length, tokens = draw(st.integers(1, 900)), draw(st.sampled_from([1, 16]))
    least = draw(st.none() | st.integers(0, 3).map(lambda extra: -(-length // tokens) + extra))
    of = draw(st.sampled_from(["total", "free", "free_before_load", None]))
    ppm = draw(st.integers(300, 999).map(lambda n: n * 1000))
    requests = draw(st.booleans())
    reports = {}
    for rank in range(layout.world_size):
        initial = draw(st.none() | st.integers(40_000, TOTAL))
        kv = page("kv", draw(st.integers(1, 60)), multiple_of=4, min_entries=least)
        classes = [kv, state("slot", each, entries_per_req=1)] if each else [kv]
        reports[rank] = Report(
            total_bytes=TOTAL,
            free_bytes=draw(st.integers(6_000, TOTAL) | st.integers(1, 6_000)),
            kv_budget_bytes=draw(st.integers(2_000, 40_000) | st.integers(-9_000, 2_000)),
            reserve_bytes=draw(st.just(0) | st.integers(0, 9_000)),
            initial_free_bytes=initial,
            requested_bytes=TOTAL * ppm // 1_000_000 if requests else None,
            max_num_seqs=seqs,
            max_model_len=length,
            block_tokens=tokens,
            classes=tuple(classes),
            parts=None if of is None else shared(ppm, of, engine="vllm"),
        )
    return layout, reports


@settings(deadline=None)
@given(failing())
def test_every_hint_passes_when_it_is_planned_again(start: Any) -> None:
    layout, reports = start
    found = hints(layout, reports)
    if not plan(layout, reports).findings:
        assert found == Hints()
    for hint in found.hints:
        assert plan(layout, apply(reports, hint.changes)).findings == ()
        for change in hint.changes:
            assert change.was is None or change.value != change.was


@settings(deadline=None)
@given(failing())
def test_what_is_applied_could_be_reported(start: Any) -> None:
    layout, reports = start
    for hint in hints(layout, reports).hints:
        for report in apply(reports, hint.changes).values():
            Report.model_validate(report.model_dump(exclude_none=True))


@settings(deadline=None)
@given(failing())
def test_a_hint_of_one_setting_asks_for_no_more_than_is_needed(start: Any) -> None:
    layout, reports = start
    step = {"max_num_seqs": 1, "max_model_len": 1, "min_entries": 1, "reserve_bytes": 1}
    step |= {"kv_budget_bytes": -1, "max_entries": -1}
    for hint in hints(layout, reports).hints:
        (change, *others) = hint.changes
        if others or change.name not in step:
            continue
        milder = Change(change.name, change.value + step[change.name])  # type: ignore[operator]
        if milder.value != change.was:
            assert plan(layout, apply(reports, [milder])).findings


@settings(deadline=None, max_examples=50)
@given(failing())
def test_where_there_is_no_hint_no_setting_passes(start: Any) -> None:
    layout, reports = start
    if not plan(layout, reports).findings or hints(layout, reports).hints:
        return
    most = min(map(greatest_utilization, reports.values()))
    fractions: list[tuple[Change, ...]] = [
        (),
        *((Change("utilization", n * 10_000),) for n in range(1, most // 10_000 + 1)),
    ]
    lengths = [(), (Change("max_model_len", 1),)]
    seqs = [(), (Change("max_num_seqs", 1),)]
    reserves = [(), (Change("reserve_bytes", 0),)]
    for several in product(fractions, lengths, seqs, reserves):
        changes = [change for one in several for change in one]
        assert plan(layout, apply(reports, changes)).findings


# --- the changes themselves ---------------------------------------------------------------------


def test_what_is_requested_moves_with_a_share_of_total_and_with_no_other() -> None:
    report = a_report(9, total_bytes=10**6, requested_bytes=900_000, parts=shared())
    lowered = with_utilization(report, 800_000)
    assert lowered is not None
    assert (lowered.requested_bytes, lowered.kv_budget_bytes) == (800_000, 9_000 - 100_000)
    of_free = report.model_copy(update={"parts": shared(of="free")})
    lowered = with_utilization(of_free, 800_000)
    assert lowered is not None
    assert lowered.requested_bytes == 900_000


def test_freed_memory_reaches_the_budget_by_the_engines_own_share() -> None:
    for of, moved in (("total", 1000), ("free", 500), ("free_before_load", 500), (None, 0)):
        parts = {"utilization_ppm": 500_000} | ({} if of is None else {"utilization_of": of})
        report = a_report(9, free_bytes=20_000, initial_free_bytes=30_000, parts=parts)
        freed = with_freed(report, 1000)
        assert (freed.free_bytes, freed.initial_free_bytes) == (21_000, 31_000)
        assert freed.kv_budget_bytes == 9_000 + moved


def test_a_shorter_request_needs_as_many_blocks_less() -> None:
    kv = [page("kv", 1000, min_entries=11)]
    report = a_report(9, classes=kv, max_model_len=160, block_tokens=16)
    shorter = with_max_model_len(report, 144)
    assert shorter is not None
    assert (needs(shorter).page_min, shorter.max_model_len) == (10, 144)
    # A window of the sequence needs less than its length: nobody can say how much.
    window = a_report(9, classes=kv, max_model_len=1600, block_tokens=16)
    assert with_max_model_len(window, 800) is None
    assert with_max_model_len(a_report(9), 800) is None


def test_bounds_move_one_way_only() -> None:
    report = a_report(9, classes=[page("kv", 1000, min_entries=5, max_entries=8)])
    assert needs(with_min_entries(report, 6)).page_min == 5
    assert needs(with_min_entries(report, 3)).page_min == 3
    assert needs(with_max_entries(report, 7)).page_max == 8
    assert needs(with_max_entries(report, 20)).page_max == 20


def test_a_budget_less_the_engines_own_peak_was_measured_before_the_load() -> None:
    parts = shared(900_000, "free", peak_torch_bytes=13 * GIB)
    report = Report(
        free_bytes=10 * GIB, kv_budget_bytes=-4 * GIB, classes=(page("kv", 1),), parts=parts
    )
    assert measured_before_load(report)
    assert not measured_before_load(report.model_copy(update={"kv_budget_bytes": 9 * GIB}))
