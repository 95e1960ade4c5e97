"""A plan as it leaves the planner: over the wire, and as a document."""

import asyncio
import json

import pytest
from hypothesis import given

from coordinator.api.plan import PlanQuestion
from coordinator.api.plan import plan as plan_route
from coordinator.verdict import judge_reports
from kvaccord import Layout, Report, page, state
from kvaccord.canonical import canonical
from kvaccord.decision import Decision
from kvaccord.plan import plan, plan_document
from tests.builders import a_report
from tests.planning import SLOT, starts

GIB = 2**30


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
