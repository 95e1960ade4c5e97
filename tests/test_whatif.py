"""What-if: changes to a question, the best that passes, the picture of memory; and `verify`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cli.picture import COLUMNS, bar, picture, segments
from cli.whatif import Question, changed, differences, fitted, setting
from kvaccord import Layout, Report, page, state
from kvaccord.layout import Groups
from kvaccord.plan import plan, plan_document
from kvaccord.room import page_count
from tests.builders import a_report
from tests.test_cli import as_json, kvaccord
from tests.test_hints import failing, shared
from tests.wire import Coordinator, Worker, an_engine

GIB = 2**30
SLOT = state("slot", 1000, entries_per_req=1)


def question(*reports: Report, **more: Any) -> Question:
    return Question(Layout(tp=len(reports)), dict(enumerate(reports)), {}, **more)


def roomy(**changes: Any) -> Report:
    return Report(
        **{
            "free_bytes": 100 * GIB,
            "total_bytes": 200 * GIB,
            "kv_budget_bytes": 50 * GIB,
            "classes": (page("kv", GIB, min_entries=4, max_entries=900),),
            "parts": shared(500_000),
        }
        | changes
    )


def after(report: Report, *said: str) -> Report:
    return changed(question(report), list(said)).reports[0]


# --- --set --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "field", "value"),
    [
        ("kv_budget_bytes=7GiB", "kv_budget_bytes", 7 * GIB),
        ("kv_budget_bytes=-2GiB", "kv_budget_bytes", 48 * GIB),
        ("kv_budget_bytes=+1.5GiB", "kv_budget_bytes", 51 * GIB + GIB // 2),
        ("kv_budget_bytes=5GB", "kv_budget_bytes", 5 * 10**9),
        ("kv_budget_bytes=12", "kv_budget_bytes", 12),
        ("reserve_bytes=1MiB", "reserve_bytes", 2**20),
        ("max_num_seqs=+8", "max_num_seqs", 8),
        ("max_model_len=4096", "max_model_len", 4096),
        ("total_bytes=+1GiB", "total_bytes", 201 * GIB),
    ],
)
def test_a_field_is_set_or_moved_in_its_unit(said: str, field: str, value: int) -> None:
    assert getattr(after(roomy(), said), field) == value


def test_a_fraction_moves_the_budget_and_says_so() -> None:
    lowered = after(roomy(), "utilization=0.45")
    assert lowered.kv_budget_bytes == 40 * GIB
    assert lowered.parts is not None
    assert lowered.parts["utilization_ppm"] == 450_000
    assert after(roomy(), "utilization=+0.05").kv_budget_bytes == 60 * GIB


def test_free_memory_moves_the_budget_where_the_engine_would() -> None:
    short = after(roomy(), "free_bytes=-2GiB")
    assert (short.free_bytes, short.kv_budget_bytes) == (98 * GIB, 48 * GIB)
    alone = after(roomy(parts=None), "free_bytes=-2GiB")
    assert (alone.free_bytes, alone.kv_budget_bytes) == (98 * GIB, 50 * GIB)


def test_one_rank_may_be_meant() -> None:
    found = changed(question(roomy(), roomy()), ["rank1.min_entries=9"])
    assert [r.classes[0].min_entries for r in found.reports.values()] == [4, 9]


def test_settings_follow_one_another() -> None:
    assert after(roomy(), "kv_budget_bytes=1GiB", "kv_budget_bytes=+1GiB").kv_budget_bytes == (
        2 * GIB
    )


@pytest.mark.parametrize(
    ("said", "word"),
    [
        ("weights=7", "fields: "),
        ("free_bytes", "FIELD=VALUE"),
        ("free_bytes=2XiB", "a unit"),
        ("max_num_seqs=2GiB", "max_num_seqs has no unit"),
        ("rank7.free_bytes=1", "ranks are 0 to 0"),
        ("initial_free_bytes=-1GiB", "not computable"),
        ("total_bytes=1GiB", "above total_bytes"),
        ("max_entries=3", "leaves no count"),
        ("entry_bytes=0", "greater than or equal to 1"),
    ],
)
def test_what_cannot_be_set_is_refused_in_a_sentence(said: str, word: str) -> None:
    with pytest.raises(ValueError, match="--set") as fault:
        changed(question(roomy()), [said])
    assert word in str(fault.value)


def test_a_fraction_of_nobody_knows_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"parts\.utilization_of"):
        changed(question(roomy(parts=None)), ["utilization=0.8"])


def test_what_changed_is_told_with_its_ranks() -> None:
    before = question(roomy(), roomy(), roomy())
    now = changed(before, ["rank1.min_entries=9", "utilization=0.45"])
    assert differences(before, before) == []
    assert differences(before, now) == [
        f"ranks 0-2: kv_budget_bytes {50 * GIB} → {40 * GIB}",
        "ranks 0-2: parts.utilization_ppm 500000 → 450000",
        "rank 1: kv[0].min_entries 4 → 9",
    ]


def test_a_setting_knows_its_sign() -> None:
    assert setting("rank3.free_bytes=-2GiB") == (3, "free_bytes", "-", 2 * GIB)


# --- --fit --------------------------------------------------------------------------------------


def test_the_greatest_number_of_sequences_leaves_one_page() -> None:
    report = a_report(90, classes=[page("kv", 1000), SLOT], max_num_seqs=3)
    found = fitted(question(report), "max_num_seqs")
    assert found is not None
    assert found[0] == 89
    assert plan(Layout(), found[1].reports).schedulers[0].entries == {"slot": 89, "kv": 1}


def test_the_greatest_min_entries_is_what_the_tightest_rank_holds() -> None:
    found = fitted(question(a_report(90), a_report(70)), "min_entries")
    assert found is not None
    assert found[0] == 70


def test_the_longest_request_takes_all_pages() -> None:
    kv = [page("kv", 1000, min_entries=11)]
    found = fitted(
        question(a_report(90, classes=kv, max_model_len=160, block_tokens=16)), "max_model_len"
    )
    assert found is not None
    assert found[0] == 89 * 16  # one block of each request does not depend on its length


def test_the_least_fraction_is_exact() -> None:
    found = fitted(question(roomy()), "utilization")
    assert found is not None
    assert found[0] == 270_000  # 46 GiB of 200 less than 0.5


def test_where_nothing_passes_there_is_no_best() -> None:
    assert fitted(question(a_report(0)), "min_entries") is None


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("max_num_seqs", "bounds nothing"),
        ("max_model_len", "not computable"),
        ("utilization", "not computable"),
        ("tp", "give one of"),
    ],
)
def test_what_cannot_be_fitted_is_refused_in_a_sentence(name: str, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        fitted(question(a_report(9)), name)


def test_a_rank_without_pages_bounds_no_pages() -> None:
    with pytest.raises(ValueError, match="no rank has a page class"):
        fitted(question(a_report(9, classes=[SLOT], max_num_seqs=1)), "min_entries")


@settings(deadline=None, max_examples=50)
@given(failing(), st.sampled_from(["max_num_seqs", "min_entries"]))
def test_the_best_passes_and_one_more_does_not(start: Any, name: str) -> None:
    layout, reports = start
    asked = Question(layout, reports, {})
    if name == "max_num_seqs" and all(len(r.classes) == 1 for r in reports.values()):
        return
    found = fitted(asked, name)
    if found is None:
        return
    value, best = found
    assert best.passes(best.reports)
    field = "min_entries" if name == "min_entries" else "max_num_seqs"
    assert not best.passes(changed(best, [f"{field}={value + 1}"]).reports)


# --- the picture --------------------------------------------------------------------------------


def words(report: Report, entries: dict[str, int] | None) -> dict[str, int]:
    return {each.kind.word.partition(":")[0]: each.bytes for each in segments(report, entries)}


def test_a_bar_is_the_whole_device_as_far_as_the_parts_explain_it() -> None:
    parts = shared(
        500_000,
        peak_torch_bytes=40 * GIB,
        weights_bytes=30 * GIB,
        non_torch_bytes=6 * GIB,
        graph_bytes=2 * GIB,
        safety_bytes=GIB,
    )
    slot = state("slot", GIB, entries_per_req=1)
    report = roomy(parts=parts, classes=(page("kv", GIB), slot), max_num_seqs=3, reserve_bytes=GIB)
    found = words(report, {"kv": 40, "slot": 3})
    assert found == {
        "weights": 30 * GIB,
        "activations": 10 * GIB,
        "others": 6 * GIB,
        "graphs": 2 * GIB,
        "margin": GIB,
        "reserve": GIB,
        "state floor": 3 * GIB,
        "pages": 40 * GIB,
        "stranded": 6 * GIB,
        "outside the engine's share, or unexplained": 101 * GIB,
    }
    assert sum(found.values()) == 200 * GIB
    assert len(bar(segments(report, {"kv": 40, "slot": 3}), 200 * GIB).plain) == COLUMNS


def test_without_a_plan_what_is_available_is_shown_as_such() -> None:
    assert words(roomy(total_bytes=None), None) == {"available, not planned": 50 * GIB}
    negative = roomy(kv_budget_bytes=-GIB)
    assert words(negative, None).keys() == {"outside the engine's share, or unexplained"}


def test_ranks_whose_bars_are_alike_share_one() -> None:
    reports = {0: a_report(90), 1: a_report(45), 2: a_report(90)}
    planned = plan_document(plan(Layout(tp=3), reports), {})
    lines = [line.plain for line in picture(reports, planned)]
    assert lines[0].startswith("ranks 0, 2  " + "#" * 30 + "!" * 30)
    assert lines[1].startswith("rank 1      " + "#" * 30 + "  ")
    assert lines[2].strip().startswith("# pages, 0.00 GiB")


@settings(deadline=None)
@given(failing())
def test_a_picture_can_be_drawn_of_any_start(start: Any) -> None:
    layout, reports = start
    planned = plan(layout, reports)
    document = plan_document(planned, {}) if planned.schedulers else None
    for report_rank, row in reports.items():
        entries = None
        if document:
            (scheduler,) = [s for s in document["schedulers"] if report_rank in s["ranks"]]
            entries = scheduler["entries"]
            assert entries["kv"] <= page_count(row)
        drawn = segments(row, entries)
        assert all(each.bytes > 0 for each in drawn)
    assert list(picture(reports, document))


# --- the command --------------------------------------------------------------------------------


def test_a_start_that_fails_says_what_passes() -> None:
    code, written, _ = kvaccord("plan", "short")
    assert code == 2
    assert "passes       min_entries 4096 (now 8192): every rank builds 4096 kv" in written


def test_a_what_if_says_what_changed_and_what_comes_of_it() -> None:
    code, written, _ = kvaccord(
        *("plan", "short", "--set", "rank2.kv_budget_bytes=+4GiB"),
        *("--set", "rank2.free_bytes=8GiB"),
    )
    assert code == 0
    assert "what if      rank 2: kv_budget_bytes 4294967296 → 8589934592" in written
    assert "PASSED agreed: every rank builds 8192 kv entries" in written


def test_the_best_that_fits_is_told_and_planned() -> None:
    code, answer = as_json("plan", "short", "--fit", "min_entries")
    assert (code, answer["fit"]) == (0, {"name": "min_entries", "value": 4096})
    assert answer["verdict"]["outcome"] == "PASSED"
    code, answer = as_json("plan", "short", "--set", "rank1.kv_budget_bytes=0", "--fit=min_entries")
    assert (code, answer["fit"]) == (2, {"name": "min_entries"})


@pytest.mark.parametrize(
    ("words_", "said"),
    [
        (["plan"], "give a FILE or --from"),
        (["plan", "short", "--from", "llama@1"], "one of the two"),
        (["plan", "short", "--set", "tp=8"], "fields: "),
        (["plan", "short", "--fit", "max_num_seqs"], "bounds nothing"),
        (["plan", "--from", "llama@last", "--url", "http://127.0.0.1:1"], "is no round"),
        (["plan", "--from", "llama", "--url", "http://127.0.0.1:1"], "does not answer"),
    ],
)
def test_what_cannot_be_asked_is_a_usage_error(words_: list[str], said: str) -> None:
    code, written, complaint = kvaccord(*words_)
    assert (code, written) == (1, "")
    assert said in complaint
    assert "Traceback" not in complaint


def told(url: str, engine: str, *rows: tuple[int, dict[str, Any]]) -> str:
    """A round that these reports decide. Returns its address."""
    workers = [Worker(url, engine, rank, tp=len(rows)).enter() for rank, _ in rows]
    for worker, (_, report) in zip(workers, rows, strict=True):
        worker.put("reports", {str(worker.ranks[0]): report})
    return workers[0].at


def test_a_round_is_planned_again_from_what_its_ranks_sent(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    engine = an_engine()
    kv = {"kind": "page", "name": "kv", "entry_bytes": 1000, "min_entries": 100}
    report = {"free_bytes": 10**6, "kv_budget_bytes": 90_000, "classes": [kv]}
    path = told(coordinator.url, engine, (0, report), (1, report | {"kv_budget_bytes": 150_000}))
    url = f"{coordinator.url}{path}"
    live = httpx.get(f"{url}/status").json()
    (hint,) = live["hints"]
    assert hint["changes"] == [{"name": "min_entries", "value": 90, "was": 100}]
    where = f"--url={coordinator.url}"
    code, answer = as_json("plan", f"--from={engine}@1", where)
    assert (code, answer["hints"]) == (2, live["hints"])
    code, answer = as_json("plan", f"--from={engine}", where, "--set", "min_entries=90")
    assert (code, answer["verdict"]["outcome"]) == (0, "PASSED")
    code, written, _ = kvaccord("status", engine, where)
    assert code == 2
    assert "passes       min_entries 90 (now 100): every rank builds 90 kv entries" in written
    # The same round to the second opinion.
    decision, reports = tmp_path / "decision.json", tmp_path / "reports.json"
    decision.write_bytes(httpx.get(f"{url}/decision").content)
    reports.write_bytes(httpx.get(f"{url}/reports").content)
    digest = httpx.get(f"{url}/decision").headers["Kvaccord-Digest"]
    code, found = as_json("verify", str(decision), str(reports), f"--digest={digest}")
    assert (code, found) == (0, {"true": True, "digest": digest, "lies": [], "open": []})


def test_the_groups_that_ranks_name_come_with_the_reports(coordinator: Coordinator) -> None:
    groups = {r: Groups(budget=f"b{r}", scheduler=f"s{r}").model_dump() for r in range(2)}
    engine = an_engine()
    workers = [Worker(coordinator.url, engine, rank, tp=2) for rank in groups]
    for rank, worker in enumerate(workers):
        worker.document["groups"] = {str(rank): groups[rank]}
        worker.enter()
    for pages, worker in enumerate(workers, start=8):
        report = a_report(pages).model_dump(mode="json", exclude_none=True)
        worker.put("reports", {str(worker.ranks[0]): report})
    code, answer = as_json("plan", f"--from={engine}@current", f"--url={coordinator.url}")
    assert code == 0
    assert [row["entries"]["kv"] for row in answer["plan"]["schedulers"]] == [8, 9]


def test_a_lie_exits_with_2_and_a_decision_alone_with_3(tmp_path: Path) -> None:
    truth = Path(__file__).parents[1] / "examples/decisions/passed_agreed.json"
    code, written, _ = kvaccord("verify", str(truth))
    assert code == 3
    assert written.startswith("inconclusive sha256:")
    assert "open: no reports" in written
    false = tmp_path / "false.json"
    document = json.loads(truth.read_bytes())
    document["verdict"]["ranks"] = [1]
    false.write_text(json.dumps(document, sort_keys=True, separators=(",", ":")))
    code, written, _ = kvaccord("verify", str(false))
    assert code == 2
    assert "verdict.ranks: the document says [1], it is []" in written


def test_an_outcome_is_held_against_its_decision() -> None:
    folder = Path(__file__).parents[1] / "examples/decisions"
    words_ = [str(folder / "sealed.json"), str(folder / "passed_agreed.json")]
    assert kvaccord("verify", *words_)[0] == 0
    assert kvaccord("verify", words_[0])[0] == 3


@pytest.mark.parametrize("content", ["", "[]", "no json"])
def test_reports_that_cannot_be_read_are_a_usage_error(tmp_path: Path, content: str) -> None:
    file = tmp_path / "reports.json"
    file.write_text(content)
    decision = Path(__file__).parents[1] / "examples/decisions/passed_agreed.json"
    code, written, complaint = kvaccord("verify", str(decision), str(file))
    assert (code, written) == (1, "")
    assert "second file" in complaint
    assert kvaccord("verify", str(tmp_path / "nowhere.json"))[0] == 1
