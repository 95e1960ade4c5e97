"""The converter, and cases of our own: the same kinds of failure, told otherwise."""

import copy
import json

import pytest

from tests.answers import check_readiness, check_verdicts_told, played
from tests.convert import CASES, OWN, Unknown, a_case, report_of, story_of
from tests.story import Act

GIB = 2**30
OWN_ONES = sorted(path.name[:3] for path in OWN.glob("*.json"))

# --- cases of our own: the same kinds, otherwise --------------------------------------------------


@pytest.fixture(scope="module", params=OWN_ONES)
def own(request):
    return played(a_case(request.param, OWN))


def test_a_case_of_our_own_ends_as_it_says(own):
    documents = own.expected["documents"]
    if isinstance(documents, list):
        documents = dict.fromkeys(own.story.engines, documents)
    assert {engine: own.told(engine) for engine in own.story.engines} == documents
    check_verdicts_told(own)
    if "readiness" in own.expected:
        check_readiness(own)


def test_a_case_of_our_own_refuses_whom_it_says_and_nobody_else(own):
    refused = {
        f"{refusal.who.ranks[0]}: {refusal.status} {refusal.problem['code']}"
        for refusal in own.history.refusals
    }
    assert refused == set(own.expected.get("refused", ()))


def test_a_case_of_our_own_is_answered_in_time_and_in_its_words(own):
    at_s, last = own.history.documents(own.engine)[-1]
    if "text" in own.expected:
        assert own.expected["text"] in last.message
    if "decide_within_s" in own.expected:
        blamed = [
            act.at_s
            for act in own.story.acts
            if isinstance(act, Act) and act.at_s <= at_s
            if not {*act.who.ranks}.isdisjoint(last.ranks)
        ]
        assert at_s <= max(blamed) + own.expected["decide_within_s"]
    plans = [d for _, d in own.history.decisions.values() if d.passed]
    if "capacities" in own.expected:
        agreed = plans[-1].document["plan"]["capacities"]
        assert {name: c["bytes"] for name, c in agreed.items()} == own.expected["capacities"]
    if "entries" in own.expected:
        agreed = [row["entries"]["kv"] for row in plans[-1].document["plan"]["schedulers"]]
        wanted = own.expected["entries"]
        assert agreed == (wanted if isinstance(wanted, list) else [wanted] * len(agreed))


def test_102_the_rank_that_is_too_many_is_named_once():
    (refusal,) = played(a_case("102", OWN)).history.refusals
    assert refusal.problem["detail"].startswith("rank 8 is outside the layout")


def test_113_a_fault_is_counted_once_however_many_places_hold_it():
    first, second = played(a_case("113", OWN)).history.refusals
    assert "more" not in first.problem["detail"]
    assert "(1 more fault in this body)" in second.problem["detail"]


def test_there_are_cases_of_our_own_of_every_form():
    forms = {a_case(number, OWN)["input"]["form"] for number in OWN_ONES}
    assert forms == {"ranks", "events", "two-groups"}


# --- the converter ------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", [CASES, OWN])
def test_the_cases_are_whole(folder):
    assert all(json.loads(path.read_text())["id"] == path.stem for path in folder.glob("*.json"))


def test_a_row_without_free_memory_has_what_is_available():
    report = report_of({"available_kv_bytes": 5 * GIB, "block_bytes": 1000}, {})
    assert (report["free_bytes"], report["kv_budget_bytes"]) == (5 * GIB, 5 * GIB)


def test_a_negative_budget_without_free_memory_is_turned_round():
    row = {"available_kv_bytes": -3, "total_bytes": 100, "utilization": 0.2, "block_bytes": 1}
    assert report_of(row, {})["free_bytes"] == 100 - (20 + 3)


@pytest.mark.parametrize(
    ("number", "change"),
    [
        ("001", lambda case: case["input"].update(form="poem")),
        ("001", lambda case: case["input"].update(weather="rain")),
        ("001", lambda case: case["input"]["group"].update(ep_size=2)),
        ("001", lambda case: case["input"]["group"].update(world_size=3)),
        ("001", lambda case: case["input"]["ranks"][1].update(mood="good")),
        ("001", lambda case: case["input"]["ranks"][1].update(tp=0)),
        ("005", lambda case: case["input"]["group"].update(min_scope="rack")),
        ("055", lambda case: case["input"]["events"][-1].update(event="sings")),
        ("055", lambda case: case["input"]["events"][0].update(mood="good")),
        ("055", lambda case: case["input"]["events"][0]["report"].update(mood="good")),
        ("048", lambda case: case["input"]["events"][3].update(mood="good")),
        ("050", lambda case: case["input"]["groups"][0].update(mood="good")),
    ],
)
def test_what_the_converter_does_not_know_is_never_dropped(number, change):
    case = copy.deepcopy(a_case(number))
    change(case)
    with pytest.raises(Unknown):
        story_of(case)
