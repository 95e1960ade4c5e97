"""The second opinion on a decision: true ones are true, and a lie in any number is found."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.verdict import inputs_digest, judge_reports, report_document
from kvaccord import Layout, Report, page, state
from kvaccord.canonical import canonical, digest
from kvaccord.layout import Groups
from tests.builders import Log, a_report
from tests.planning import ANY_REPORTS, starts
from verifier import Checked, verify

EXAMPLES = sorted((Path(__file__).parents[1] / "examples/decisions").glob("*.json"))


def decided(
    layout: Layout,
    reports: dict[int, Report],
    groups: dict[int, Groups] | None = None,
    **options: Any,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The decision of the planner, and what `GET …/reports` answers."""
    hosts = {rank: f"host-{rank // 2}" for rank in reports}
    verdict = judge_reports(layout, reports, hosts, groups, **options)
    document: dict[str, Any] = {
        "engine": "default/llama",
        "round": 7,
        "store_id": "store-1",
        "mode": "enforce",
        "launch": {"run": "run-1", "restart": 0, "source": "env"},
        "layout": layout.model_dump(mode="json"),
        "inputs_digest": inputs_digest(layout, reports, groups),
        "faults": [],
        "verdict": verdict.document(),
    }
    if verdict.plan is not None:
        document["plan"] = verdict.plan
    rows = {str(rank): {"sent": report_document(r)} for rank, r in reports.items()}
    beside: dict[str, Any] = {"engine": "default/llama", "round": 7, "reports": rows}
    if groups:
        beside["groups"] = {str(rank): g.model_dump() for rank, g in groups.items()}
    return document, beside


def checked(document: dict[str, Any], beside: dict[str, Any] | None) -> Checked:
    return verify(canonical(document), beside)


def lies(document: dict[str, Any], beside: dict[str, Any] | None) -> list[str]:
    return [lie.path for lie in checked(document, beside).lies]


# --- what is true -------------------------------------------------------------------------------


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_alone_has_no_lie_and_lacks_what_it_was_decided_on(path: Path) -> None:
    found = verify(path.read_bytes())
    assert found.lies == []
    assert found.true is None
    assert found.digest == digest(path.read_bytes())


@settings(deadline=None)
@given(starts())
def test_what_the_planner_decides_is_true(start: tuple[Layout, dict[int, Report]]) -> None:
    assert checked(*decided(*start)).true


@settings(deadline=None)
@given(st.lists(ANY_REPORTS, min_size=2, max_size=2))
def test_numbers_of_any_size_are_true(reports: list[Report]) -> None:
    assert checked(*decided(Layout(tp=2), dict(enumerate(reports)))).true


ODD = st.fixed_dictionaries(
    {},
    optional={
        "max_model_len": st.integers(1, 2),
        "block_tokens": st.integers(1, 2),
        "inputs": st.dictionaries(st.sampled_from("ab"), st.sampled_from([1, True, "1"])),
        "inputs_stage": st.dictionaries(st.sampled_from("ab"), st.integers(0, 1)),
        "capacities": st.dictionaries(st.sampled_from("xy"), st.integers(0, 2)),
        "total_bytes": st.sampled_from([60_000, 70_000]),
        "initial_free_bytes": st.integers(30_000, 60_000),
        "requested_bytes": st.integers(30_000, 60_000),
    },
)


@settings(deadline=None)
@given(starts(), st.data())
def test_what_the_planner_refuses_is_refused_for_the_same_ranks(start: Any, data: Any) -> None:
    layout, reports = start
    odd = {rank: report.model_copy(update=data.draw(ODD)) for rank, report in reports.items()}
    limit = data.draw(st.sampled_from([None, 0.01, 0.3]))
    found = checked(*decided(layout, odd, spread_limit=limit))
    assert found.lies == []


@settings(deadline=None)
@given(starts(), st.data())
def test_named_groups_are_read_as_the_planner_reads_them(start: Any, data: Any) -> None:
    layout, reports = start
    names = {
        rank: f"s{data.draw(st.integers(0, 1))}.b{data.draw(st.integers(0, 1))}" for rank in reports
    }
    groups = {r: Groups(budget=name, scheduler=name[:2]) for r, name in names.items()}
    document, beside = decided(layout, reports, groups)
    assert checked(document, beside).true
    plain = {rank: row["sent"] for rank, row in beside["reports"].items()}
    # A plan names the groups itself; without one nobody knows them from the reports alone.
    assert checked(document, plain).true is (True if "plan" in document else None)


def test_a_round_as_the_coordinator_keeps_it_is_true() -> None:
    log = Log()
    log.sealed(90, 70)
    rows = {str(r): {"sent": report_document(s)} for r, s in log.round.sent.items()}
    assert verify(log.decision.body, {"reports": rows}).true
    assert verify(log.outcome.body, {"decision": log.decision.body}).true


def test_a_shortfall_is_true_when_that_rank_alone_falls_short() -> None:
    log = Log()
    log.start(2)[0].reports(a_report(-5))
    log.spends("shortfall")
    rows = {"0": {"sent": report_document(log.round.sent[0])}}
    assert log.decision.code == "does_not_fit"
    assert verify(log.decision.body, {"reports": rows}).true
    document = json.loads(log.decision.body)
    document["verdict"]["causes"][0]["code"] = document["verdict"]["code"] = "no_free_memory"
    document["verdict"]["retryable"] = True
    assert lies(document, {"reports": rows}) == ["verdict.causes[0].code"]


def test_reports_may_leave_out_what_is_usual() -> None:
    reports = {r: a_report(90 - r) for r in range(2)}
    document, _ = decided(Layout(tp=2), reports)
    written = {
        str(r): {
            "free_bytes": s.free_bytes,
            "kv_budget_bytes": s.kv_budget_bytes,
            "classes": [{"kind": "page", "name": "kv", "entry_bytes": 1000}],
        }
        for r, s in reports.items()
    }
    assert checked(document, written).true
    question = {
        "layout": {"tp": 2},
        "reports": [{"rank": int(rank), **row} for rank, row in written.items()],
    }
    assert checked(document, question).true
    assert lies(document, question | {"layout": {"pp": 2}}) == ["layout.pp", "layout.tp"]


# --- what is false --------------------------------------------------------------------------------


def a_world() -> tuple[Layout, dict[int, Report]]:
    """Two replicas of two stages, unequal in everything that may be, with state and a tier."""
    slot = state("slot", 10, entries_per_req=2, extra_entries=1)
    reports = {
        rank: a_report(
            90 + 3 * rank,
            page_bytes=1000 + rank % 4 // 2,
            classes=[page("kv", 1000 + rank % 4 // 2), slot],
            max_num_seqs=5,
            capacities={"host": 50 + rank % 2},
        )
        for rank in range(8)
    }
    return Layout(dp=2, pp=2, tp=2), reports


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value of a document, and of every list."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
        return
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from leaves(item, (*path, index))
    yield path


# What no report determines: nobody but the coordinator can vouch for it.
TOLD = {"engine", "store_id", "mode", "launch", "faults", "host", "hosts", "warnings"}


def planted(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The document with one lie: a number off by one, a word changed, an entry too many or few."""
    for path in leaves(document):
        if TOLD & {*path}:
            continue
        for step in (1, -1):
            false = copy.deepcopy(document)
            holder: Any = false
            for key in path[:-1]:
                holder = holder[key]
            match holder[path[-1]]:
                case bool(value):
                    holder[path[-1]] = not value
                case int(value):
                    holder[path[-1]] = value + step
                case str(value):
                    holder[path[-1]] = f"{value}x" if step == 1 else value[:-1]
                case list(value):
                    holder[path[-1]] = [*value, 3] if step == 1 else value[:-1]
            if false != document:
                yield ".".join(map(str, path)), false


def test_every_lie_in_a_passed_decision_is_found() -> None:
    document, beside = decided(*a_world())
    assert document["verdict"]["outcome"] == "PASSED"
    assert checked(document, beside).true
    tried = [path for path, _ in planted(document)]
    assert len(tried) > 200
    assert {path for path, false in planted(document) if not lies(false, beside)} == set()


FAILING = {
    "does_not_fit": {"classes": [page("kv", 1000, min_entries=80)]},
    "no_free_memory": {"free_bytes": 0},
    "inputs_disagree": {"inputs": {"dtype": "fp8", "a": 1}},
    "request_exceeds_free": {"requested_bytes": 200_000, "initial_free_bytes": 150_000},
}


@pytest.mark.parametrize("code", FAILING)
def test_every_lie_in_a_failed_decision_but_in_its_sentences_is_found(code: str) -> None:
    reports = {r: a_report(50 + r) for r in range(4)}
    reports |= {r: a_report(60, **FAILING[code]) for r in (1, 3)}
    document, beside = decided(Layout(tp=4), reports)
    assert document["verdict"]["code"] == code
    assert checked(document, beside).true
    missed = {path for path, false in planted(document) if not lies(false, beside)}
    assert {path for path in missed if not path.endswith(("message", "text"))} == set()


@settings(deadline=None, max_examples=40)
@given(starts(), st.data())
def test_a_lie_anywhere_in_any_plan_is_found(start: Any, data: Any) -> None:
    document, beside = decided(*start)
    false = data.draw(st.sampled_from(list(planted(document))))
    if not false[0].endswith(("text", "message")) or "plan" in document:
        assert lies(false[1], beside), false[0]


def test_a_lie_is_told_with_what_was_said_and_what_is() -> None:
    document, beside = decided(*a_world())
    document["plan"]["schedulers"][1]["entries"]["kv"] += 1
    (lie,) = [one for one in checked(document, beside).lies if "entries" in one.path]
    assert lie.path == "plan.schedulers[1].entries.kv"
    assert (lie.said, lie.computed) == (102, 101)
    assert "the document says 102, it is 101" in str(lie)


def test_a_passed_decision_of_a_start_that_does_not_fit_is_false() -> None:
    document, beside = decided(Layout(), {0: a_report(9)})
    beside["reports"]["0"]["sent"]["classes"][0]["min_entries"] = 10
    assert "verdict.code" in lies(document, beside)


def test_what_was_planned_counts_where_a_fault_rule_changed_a_report() -> None:
    reports = {0: a_report(9)}
    document, beside = decided(Layout(), reports)
    row = beside["reports"]["0"]
    beside["reports"]["0"] = {"sent": row["sent"] | {"free_bytes": 1}, "planned": row["sent"]}
    assert checked(document, beside).true


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body + b"\n",
        lambda body: body.replace(b":", b": ", 1),
        lambda body: body.replace(b'"round":7', b'"round":7.0'),
        lambda body: body.replace(b'"round":7', b'"round":null'),
        lambda body: body.replace(b'"round":7', b'"round":7,"round":7'),
        lambda body: body.replace(b'"round":7', b'"round":9007199254740992'),
        lambda body: body.replace(b'"mode"', '"möde"'.encode()),
        lambda body: body[:-1],
        lambda body: b"[" + body + b"]",
        lambda body: b"\xff" + body,
        lambda body: b"",
    ],
)
def test_bytes_that_are_not_the_canonical_ones_are_a_lie(change: Any) -> None:
    document, beside = decided(*a_world())
    found = verify(change(canonical(document)), beside)
    assert found.true is False


def test_another_digest_than_the_one_that_is_known_is_a_lie() -> None:
    body = canonical(decided(*a_world())[0])
    beside = decided(*a_world())[1]
    assert verify(body, beside, digest=digest(body)).true
    assert [lie.path for lie in verify(body, beside, digest="sha256:00").lies] == ["digest"]


@pytest.mark.parametrize("field", ["verdict", "layout", "plan", "inputs_digest", "round"])
def test_a_field_that_is_not_there_is_a_lie_and_no_accident(field: str) -> None:
    document, beside = decided(*a_world())
    del document[field]
    assert checked(document, beside).true is False


def test_an_outcome_of_another_decision_is_false() -> None:
    log, other = Log(), Log()
    log.sealed(90, 70)
    other.sealed(90, 71)
    found = verify(log.outcome.body, {"decision": other.decision.body})
    assert [lie.path for lie in found.lies] == ["decision_digest"]
