"""The planner: one rule each, what it finds and in which order, groups, capacities."""

import pytest

from coordinator.verdict import inputs_digest
from kvaccord import Layout, Report, page, state
from kvaccord.layout import Groups
from kvaccord.plan import disagreeing_groups, plan, plan_document
from tests.builders import a_report
from tests.planning import SLOT, codes, planned, the_row

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
