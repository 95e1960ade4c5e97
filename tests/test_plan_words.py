"""What a plan says, whole: each sentence and the document, to the letter.

A person acts on these words, and mutmut found most of them unread by any other test
(docs/mutants.md).
"""

import pytest

from kvaccord import Layout, Report, page, state
from kvaccord.layout import Groups
from kvaccord.peers import LOW_USE_BELOW, TEXT_BYTES
from kvaccord.plan import agreed_sentence, page_count, plan, plan_document
from tests.builders import a_report

GIB = 2**30
SAME = "start every rank with the same settings and version"


def found(layout, *reports, groups=None, **more):
    """Every finding, as (code, ranks, text)."""
    result = plan(layout, dict(enumerate(reports)), groups, **more)
    assert result.schedulers == ()
    return [(f.code, f.ranks, f.text) for f in result.findings]


def the_text(layout, *reports, **more):
    ((_, _, text),) = found(layout, *reports, **more)
    return text


def warned(*reports):
    result = plan(Layout(tp=len(reports)), dict(enumerate(reports)))
    return [(w.code, w.ranks, w.text) for w in result.warnings]


# --- the plan as a document and as a sentence ---------------------------------------------------


def test_the_whole_document_of_two_schedulers():
    both = [page("kv", 1000), state("s", 10, entries_per_req=1)]
    reports = {0: a_report(90, classes=both, max_num_seqs=4), 1: a_report(70, max_num_seqs=4)}
    planned = plan(Layout(dp=2), reports)
    assert plan_document(planned, {0: "a", 1: "b"}) == {
        "schedulers": [
            {
                "dp": 0,
                "ranks": [0],
                "entries": {"s": 4, "kv": 89},
                "binding": {"kv": {"ranks": [0], "hosts": ["a"]}},
                "budget_groups": [
                    {
                        "pp": 0,
                        "ranks": [0],
                        "free_bytes": 90_077,
                        "budget_bytes": 90_000,
                        "available_bytes": 90_000,
                        "binding_rank": 0,
                        "bound_by": "budget",
                    }
                ],
                "by_rank": [{"rank": 0, "stranded_bytes": 90_000 - 89_000 - 40}],
            },
            {
                "dp": 1,
                "ranks": [1],
                "entries": {"kv": 70},
                "binding": {"kv": {"ranks": [1], "hosts": ["b"]}},
                "budget_groups": [
                    {
                        "pp": 0,
                        "ranks": [1],
                        "free_bytes": 70_077,
                        "budget_bytes": 70_000,
                        "available_bytes": 70_000,
                        "binding_rank": 1,
                        "bound_by": "budget",
                    }
                ],
                "by_rank": [{"rank": 1, "stranded_bytes": 0}],
            },
        ],
        "shapes": [
            {"ranks": [0], "entry_bytes": {"kv": 1000, "s": 10}},
            {"ranks": [1], "entry_bytes": {"kv": 1000}},
        ],
        "capacities": {},
    }


def test_a_document_of_named_groups_says_their_names():
    groups = {r: Groups(budget="b", scheduler="s") for r in range(2)}
    planned = plan(Layout(tp=2), dict.fromkeys(range(2), a_report(9)), groups)
    (row,) = plan_document(planned, {})["schedulers"]
    assert row["group"] == "s"
    assert row["budget_groups"][0]["group"] == "b"


def test_where_budget_and_free_memory_are_equal_the_budget_bound_it():
    planned = plan(Layout(), {0: a_report(90, free_bytes=90_000)})
    (row,) = planned.schedulers
    assert row.budget_groups[0].bound_by == "budget"


@pytest.mark.parametrize(
    ("layout", "sentence"),
    [
        (Layout(), "every rank builds 90 kv entries, kv bound by rank 0"),
        (
            Layout(dp=2),
            "every rank builds dp 0: 90 kv entries, kv bound by rank 0"
            " | dp 1: 90 kv entries, kv bound by rank 1",
        ),
        (
            Layout(dp=4),
            "every rank builds "
            + " | ".join(f"dp {n}: 90 kv entries, kv bound by rank {n}" for n in range(4)),
        ),
        (
            Layout(dp=5),
            "every rank builds "
            + " | ".join(f"dp {n}: 90 kv entries, kv bound by rank {n}" for n in range(4))
            + " | 1 more",
        ),
        (
            Layout(dp=6),
            "every rank builds "
            + " | ".join(f"dp {n}: 90 kv entries, kv bound by rank {n}" for n in range(4))
            + " | 2 more",
        ),
    ],
    ids=["one", "two", "four", "five", "six"],
)
def test_what_was_agreed_in_one_sentence(layout, sentence):
    reports = dict.fromkeys(range(layout.world_size), a_report(90))
    assert agreed_sentence(plan(layout, reports)) == sentence


def test_what_was_agreed_of_several_classes_and_named_groups():
    classes = [
        page("kv", 1000),
        state("b", 10, entries_per_req=1),
        state("a", 10, entries_per_req=2),
    ]
    reports = dict.fromkeys(range(2), a_report(90, classes=classes, max_num_seqs=4))
    groups = {r: Groups(budget=f"b{r}", scheduler=f"s{r}") for r in range(2)}
    assert agreed_sentence(plan(Layout(tp=2), reports, groups)) == (
        "every rank builds group s0: 8 a + 4 b + 89 kv entries, kv bound by rank 0"
        " | group s1: 8 a + 4 b + 89 kv entries, kv bound by rank 1"
    )


def test_nobody_binds_state_alone():
    only = a_report(90, classes=[state("s", 10, entries_per_req=1)], max_num_seqs=4)
    assert agreed_sentence(plan(Layout(), {0: only})) == "every rank builds 4 s entries"


# --- what differs -------------------------------------------------------------------------------


def test_a_stage_is_all_that_shares_a_pp_coordinate():
    for layout in (Layout(pcp=2), Layout(tp=2), Layout(dp=2)):
        reports = [a_report(inputs_stage={"layers": n}) for n in (9, 8)]
        assert found(layout, *reports) == [
            (
                "inputs_disagree",
                (1,),
                f"inputs_stage.layers differs: 9 on rank 0, 8 on rank 1; {SAME}",
            )
        ]
    plan(Layout(pp=2), dict(enumerate(reports)))


def test_classes_that_differ_are_named_with_all_that_must_be_equal():
    one = a_report(classes=[page("kv", 1000, multiple_of=2)])
    assert the_text(Layout(tp=2), one, a_report()) == (
        "classes.kv differs: page, entries_per_req 0, extra_entries 0, multiple_of 2 on rank 0,"
        f" page, entries_per_req 0, extra_entries 0, multiple_of 1 on rank 1; {SAME}"
    )


def test_two_names_of_the_page_class_are_named():
    assert the_text(Layout(tp=2), a_report(), a_report(classes=[page("pages", 1000)])) == (
        f"classes, the page class differs: kv on rank 0, pages on rank 1; {SAME}"
    )


@pytest.mark.parametrize("values", [8, 9, 12])
def test_eight_values_are_shown_and_the_others_counted(values):
    reports = [a_report(block_tokens=n + 1) for n in range(values)]
    shown = ", ".join(f"{n + 1} on rank {n}" for n in range(8))
    more = f", {values - 8} more values" if values > 8 else ""
    text = the_text(Layout(tp=values), *reports)
    assert text == f"block_tokens differs: {shown}{more}; {SAME}"


def test_a_long_value_is_shown_by_its_beginning():
    reports = [a_report(inputs={"flags": "x" * 121}), a_report(inputs={"flags": "y"})]
    assert f"inputs.flags differs: {'x' * 120} on rank 0," in the_text(Layout(tp=2), *reports)


def test_keys_beyond_the_first_32_are_counted_in_one_finding():
    many = {f"key-{n:02}": 1 for n in range(35)}
    last = found(
        Layout(tp=3),
        a_report(inputs=many),
        a_report(inputs=many),
        a_report(inputs=dict.fromkeys(many, 2)),
    )[-1]
    assert last == ("inputs_disagree", (2,), f"3 more keys differ; {SAME}")
    everyone = found(
        Layout(tp=2), a_report(inputs=many), a_report(inputs=dict(list(many.items())[:2]))
    )
    assert len(everyone) == 33


# --- what one rank says that cannot be ----------------------------------------------------------

SLICE = (
    "; most likely the parent of a MIG slice was read; measure with the CUDA runtime on every rank"
).removeprefix("; ")


def read_wrong(total, *, pages=90, free=50_000):
    return a_report(pages, free_bytes=free, total_bytes=total)


def test_a_total_above_its_peers_with_a_budget_above_its_own_free_memory():
    whole = a_report(90, total_bytes=100_000)
    assert found(Layout(tp=3), whole, whole, read_wrong(200_000)) == [
        (
            "implausible_report",
            (2,),
            "total_bytes 200000 is unlike its peers' 100000 and kv_budget_bytes 90000 is above"
            f" its own free_bytes 50000: {SLICE}",
        )
    ]


def test_where_most_read_the_greater_total_the_lesser_one_is_quoted():
    text = the_text(
        Layout(tp=3),
        read_wrong(200_000),
        a_report(90, total_bytes=200_000),
        a_report(90, total_bytes=100_000),
    )
    assert "is unlike its peers' 100000 and" in text
    usual, small = a_report(90, total_bytes=100_000), a_report(40, total_bytes=50_000)
    text = the_text(Layout(tp=4), small, usual, usual, read_wrong(200_000))
    assert "is unlike its peers' 100000 and" in text, "not the least: the usual one"


@pytest.mark.parametrize(
    "reports",
    [
        (a_report(90, total_bytes=200_000), read_wrong(100_000)),
        (a_report(90, total_bytes=100_000), read_wrong(200_000, free=90_000)),
        (a_report(90), read_wrong(200_000)),
        (a_report(90, total_bytes=200_000), read_wrong(200_000)),
    ],
    ids=["the lesser total", "a budget of all that is free", "no total to compare", "equal totals"],
)
def test_one_sign_of_a_wrong_reading_alone_may_be_true(reports):
    assert plan(Layout(tp=2), dict(enumerate(reports))).findings == ()


def test_a_reading_of_nothing_is_the_drivers_silence():
    assert the_text(Layout(), a_report(0, free_bytes=0, total_bytes=1000)) == (
        "free_bytes is exactly 0 of total_bytes 1000; a running process never sees that: the"
        " device driver does not answer, check it on this host"
    )


def test_a_reserve_that_takes_all_is_said_in_full():
    assert the_text(Layout(), a_report(90, free_bytes=GIB, reserve_bytes=GIB)) == (
        "free_bytes 1073741824 bytes (1.00 GiB) minus reserve_bytes 1073741824 bytes (1.00 GiB)"
        " leaves nothing; free memory on this device or lower the reserve"
    )


def test_a_request_above_what_was_free_is_said_in_full():
    assert the_text(Layout(), a_report(initial_free_bytes=3 * GIB, requested_bytes=4 * GIB)) == (
        "4294967296 bytes (4.00 GiB) are requested and 3221225472 bytes (3.00 GiB) were free when"
        " the process began; stop what else holds memory on this device or request a smaller"
        " share"
    )


def test_a_request_of_all_that_was_free_is_no_excess():
    one = a_report(free_bytes=GIB, initial_free_bytes=GIB, requested_bytes=GIB)
    assert plan(Layout(), {0: one}).findings == ()


# --- what does not fit --------------------------------------------------------------------------


def test_a_floor_names_every_state_class():
    classes = [
        page("kv", 1000),
        state("b", 10, entries_per_req=1),
        state("a", 20, extra_entries=3),
    ]
    assert the_text(Layout(), a_report(0, classes=classes, max_num_seqs=4)) == (
        "the state classes need 100 bytes (0.00 GiB) (3 x 20 bytes of 'a', 4 x 10 bytes of 'b') of"
        " 0 bytes (0.00 GiB) available and leave nothing; lower max_num_seqs 4 or free memory"
    )


def test_what_is_missing_is_counted_in_whole_multiples_beside_the_state():
    classes = [
        page("kv", 1000, multiple_of=4, min_entries=10),
        state("s", 10, entries_per_req=1),
    ]
    one = Report(free_bytes=9_000, kv_budget_bytes=9_000, classes=classes, max_num_seqs=5)
    assert the_text(Layout(), one) == (
        "room for 8 entries of 'kv' (1000 bytes each) in 9000 bytes (0.00 GiB) available less 50"
        " bytes (0.00 GiB) of state, and at least 10 are needed; give this rank 3050 bytes"
        " (0.00 GiB) more or ask for less"
    )


def test_without_state_none_is_mentioned():
    one = a_report(8, classes=[page("kv", 1000, min_entries=10)])
    assert the_text(Layout(), one) == (
        "room for 8 entries of 'kv' (1000 bytes each) in 8000 bytes (0.00 GiB) available, and at"
        " least 10 are needed; give this rank 2000 bytes (0.00 GiB) more or ask for less"
    )


@pytest.mark.parametrize(
    ("cap", "remedy"),
    [(9, "raise max_entries 9"), (12, "give this rank 2000 bytes (0.00 GiB) more or ask for less")],
)
def test_a_cap_is_the_remedy_only_where_it_is_what_binds(cap, remedy):
    # 8 entries in pairs fit; the next pair would be 10.
    short = a_report(8, classes=[page("kv", 1000, multiple_of=2, max_entries=cap)])
    other = a_report(90, classes=[page("kv", 1000, multiple_of=2, min_entries=10)])
    assert the_text(Layout(tp=2), short, other).endswith(f"at least 10 are needed; {remedy}")


def test_a_cap_that_the_next_entries_would_just_meet_does_not_bind():
    short = a_report(8, classes=[page("kv", 1000, multiple_of=2, max_entries=10)])
    other = a_report(90, classes=[page("kv", 1000, multiple_of=2, min_entries=10)])
    assert "give this rank" in the_text(Layout(tp=2), short, other)


def test_groups_that_disagree_still_warn():
    groups = {0: Groups(budget="b", scheduler="s"), 1: Groups(budget="b", scheduler="t")}
    result = plan(Layout(tp=2), {0: a_report(local_count=2), 1: a_report(local_count=2)}, groups)
    assert [w.code for w in result.warnings] == ["device_shared"]


# --- warnings -----------------------------------------------------------------------------------


def test_a_device_that_is_shared():
    assert warned(a_report(local_count=2), a_report(local_count=2)) == [
        (
            "device_shared",
            (0, 1),
            "rank 0: 2 processes of this engine share one device; the budget of each must leave"
            " the others their part; likewise rank 1",
        )
    ]


def test_a_local_count_that_differs_is_told_beside_the_usual_one():
    counts = (1, 1, 2)
    assert warned(*(a_report(local_count=n) for n in counts))[-1] == (
        "local_count_differs",
        (2,),
        "rank 2: not as many processes share the device as elsewhere (2 on rank 2, 1 on most)",
    )


def moved(free, *, initial=100_000, **parts):
    one = a_report(
        free_bytes=free, kv_budget_bytes=free, initial_free_bytes=initial, parts=parts or None
    )
    return [text for code, _, text in warned(one) if code == "memory_moved"]


def test_memory_that_came_back_meanwhile():
    assert moved(101_000) == [], "1 % is nothing"
    assert moved(101_001) == [
        "rank 0: 101001 bytes (0.00 GiB) are free and 100000 bytes (0.00 GiB) were when the process"
        " began: another process released memory meanwhile, so that the budget was measured"
        " against a moving amount"
    ]


def test_memory_that_went_beyond_what_the_parts_explain():
    parts = {"peak_torch_bytes": 20_000, "non_torch_bytes": 9_000}
    assert moved(70_000, **parts) == [], "1 % is nothing"
    assert moved(69_999, **parts) == [
        "rank 0: 30001 bytes (0.00 GiB) went since the process began and its own parts explain"
        " 29000 bytes (0.00 GiB): another process took memory meanwhile"
    ]
    assert moved(10_000, peak_torch_bytes=20_000) == [], "half of the parts explains nothing"


def test_memory_that_others_moved_while_it_was_measured():
    assert moved(100_000, initial=None, free_moved_bytes=1_000) == [], "1 % is nothing"
    assert moved(100_000, initial=None, free_moved_bytes=-1_001) == [
        "rank 0: other processes took 1001 bytes (0.00 GiB) of the device while it was measured, so"
        " that the budget was measured against a moving amount"
    ]
    (released,) = moved(100_000, initial=None, free_moved_bytes=1_001)
    assert "released 1001 bytes" in released


def test_siblings_that_load_beside_a_rank_are_no_surprise():
    one = a_report(free_bytes=1_000, initial_free_bytes=100_000, local_count=2)
    assert [code for code, *_ in warned(one) if code == "memory_moved"] == []


def low_use(**fields):
    return [text for code, _, text in warned(a_report(**fields)) if code == "low_use_of_budget"]


def test_a_budget_far_below_what_is_free():
    free = 400_000
    assert free * LOW_USE_BELOW > 100_000
    assert low_use(pages=100, free_bytes=free) == [
        "rank 0: the budget is 100000 bytes (0.00 GiB) of 400000 bytes (0.00 GiB) free (25%); more"
        " would fit if the share that the engine may use were larger"
    ]


def test_entries_that_take_far_less_than_was_said():
    assert low_use(parts={"physical_entry_bytes": 250}) == [
        "rank 0: a page entry is planned with 1000 bytes and takes 250: the pools use 25% of the"
        " budget; see whether entry_bytes counts all KV heads instead of this rank's"
    ]
    assert low_use(pages=1, page_bytes=1, free_bytes=1000) != [], "a budget of 1 byte is one too"
    assert low_use(parts={"physical_entry_bytes": 0}) == []
    assert low_use(parts={"physical_entry_bytes": 1}) != []


def test_groups_apart_beyond_the_first_eight_are_counted():
    reports = {r: a_report(50 + r % 2 * (20 + r)) for r in range(20)}
    result = plan(Layout(dp=10, tp=2), reports)
    codes = [(w.code, w.text) for w in result.warnings]
    assert [code for code, _ in codes] == ["imbalanced"] * 9
    assert codes[-1][1] == "2 more groups are less than that, and over 5 % apart"


def test_an_imbalance_is_told_with_its_median_and_what_it_strands():
    one = [a_report(n, free_bytes=10**6, kv_budget_bytes=n * 1000) for n in (50, 60, 90)]
    ((_, ranks, text),) = [w for w in warned(*one) if w[0] == "imbalanced"]
    assert ranks == (0,)
    assert text == (
        "page entries: 50 on rank 0, 90 on rank 2, 44.4% apart; the median is 60; 50000 bytes"
        " (0.00 GiB) stay unused on the others; see what else holds memory there: rank 0"
    )


def test_bytes_apart_are_told_as_what_they_are():
    free = [a_report(n, free_bytes=f) for n, f in ((90, 100_000), (90, 200_000))]
    ((_, _, text),) = [w for w in warned(*free) if w[0] == "imbalanced"]
    assert text == (
        "free: 100000 bytes (0.00 GiB) on rank 0, 200000 bytes (0.00 GiB) on rank 1, 50.0% apart;"
        " the median is 200000 bytes (0.00 GiB); see what else holds memory there: rank 0"
    )
    odd = a_report(90, kv_budget_bytes=90_999), a_report(90, kv_budget_bytes=80_000)
    stateful = [state("s", 1, entries_per_req=1)]
    only = [one.model_copy(update={"classes": tuple(stateful), "max_num_seqs": 1}) for one in odd]
    ((_, _, text),) = [w for w in warned(*only) if w[0] == "imbalanced"]
    assert text.startswith("available: 80000 bytes (0.00 GiB) on rank 1, 90077 bytes (0.00 GiB)")


def test_a_rank_with_room_for_none_beside_one_with_room_for_one_is_apart_in_entries():
    ((_, ranks, text),) = [w for w in warned(a_report(1), a_report(0)) if w[0] == "imbalanced"]
    assert ranks == (1,)
    assert text.startswith("page entries: 0 on rank 1, 1 on rank 0, 100.0% apart;")


def test_a_warning_about_very_many_ranks_stays_readable():
    counts = [1 + rank % 2 for rank in range(600)]
    texts = [text for _, _, text in warned(*(a_report(local_count=n) for n in counts))]
    assert max(len(text.encode()) for text in texts) == TEXT_BYTES


def test_a_rank_without_a_page_class_has_room_for_no_page():
    only = a_report(90, classes=[state("s", 10, entries_per_req=1)], max_num_seqs=4)
    assert page_count(only) == 0
