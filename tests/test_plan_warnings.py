"""What is worth a look, though there is a plan."""

import pytest

from coordinator.verdict import judge_reports
from kvaccord import Layout
from kvaccord.plan import plan
from tests.builders import a_report


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
