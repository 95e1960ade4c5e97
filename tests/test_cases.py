"""Reported failures, played to the shipped coordinator: our answer beside what the case expects."""

import copy
import re
from pathlib import Path

import pytest

from kvaccord.messages import Report
from kvaccord.room import page_count
from tests.answers import (
    ALL,
    DISAGREE,
    OUR_CODE,
    check_readiness,
    check_verdicts_told,
    played,
    played_case,
    table,
)
from tests.convert import a_case
from tests.story import Comes, Dies, Reports

PAGE = Path(__file__).parents[1] / "docs/cases.md"

OF_RANKS = [n for n in ALL if "ranks" in a_case(n)["input"]["form"]]
FAILING = [n for n in ALL if a_case(n)["expected"]["verdict"] == "fail"]
PASSING = sorted(set(ALL) - set(FAILING))


def changed(number, **group):
    """The case again, with other settings of its group."""
    case = copy.deepcopy(a_case(number))
    case["input"]["group"] |= group
    return played(case)


# --- every case ---------------------------------------------------------------------------------


def test_every_case_that_can_be_played_is_here():
    forms = [a_case(number)["input"]["form"] for number in ALL]
    assert len(OF_RANKS) == 24
    assert (forms.count("events"), forms.count("two-groups"), len(ALL)) == (4, 1, 29)


@pytest.mark.parametrize("number", ALL)
def test_the_verdict_is_the_expected_one(number):
    one = played_case(number)
    outcomes = {"pass": {"PASSED"}, "fail": {"FAILED", "ABORTED"}}[one.expected["verdict"]]
    assert one.document.result in outcomes
    assert one.document.code == OUR_CODE[one.expected["reason_code"]]
    assert one.verdict["also"] == [OUR_CODE[code] for code in one.expected.get("also", ())]


@pytest.mark.parametrize("number", ALL)
def test_the_expected_warning_is_given(number):
    if wanted := a_case(number)["expected"].get("warning_code"):
        assert wanted.lower() in {w["code"] for w in played_case(number).verdict["warnings"]}


@pytest.mark.parametrize("number", FAILING)
def test_the_first_cause_blames_the_expected_rank(number):
    one = played_case(number)
    assert one.document.causes[0]["rank"] == one.expected["binding_rank"]
    wanted = one.expected.get("missing") or one.expected.get("tie")
    assert wanted is None or one.document.ranks == wanted


@pytest.mark.parametrize("number", FAILING)
def test_the_message_names_the_rank_and_its_host(number):
    one = played_case(number)
    cause = one.document.causes[0]
    found = re.match(r"ranks? (?P<ranks>\d[\d, -]*?)( on (?P<hosts>.+?))?: ", one.document.message)
    assert found, one.document.message
    assert str(cause["rank"]) in re.split(r"\D+", found["ranks"])
    if cause["code"] == "ranks_missing" and "host" not in cause:
        return  # nobody has claimed it in this round
    assert cause["host"] in found["hosts"]


@pytest.mark.parametrize("number", FAILING)
def test_whoever_had_not_been_heard_is_said_and_not_blamed(number):
    one = played_case(number)
    blamed = {rank for cause in one.document.causes for rank in [cause["rank"]]}
    blamed |= set(one.document.ranks)
    if one.document.result == "FAILED":  # once it is passed, everyone has been heard
        assert one.verdict["not_heard"] == [r for r in one.unheard if r not in blamed]


@pytest.mark.parametrize("number", FAILING)
def test_the_answer_comes_as_soon_as_it_can_and_no_budget_ends_early(number):
    one = played_case(number)
    (decided_s, document), since_s = one.answer, one.known_since_s
    assert decided_s <= since_s + one.expected.get("decide_within_s", float("inf"))
    if document.code == "ranks_missing":
        timeout_s = one.story.engines[one.engine].get("gather_s", 1800)
        assert timeout_s <= decided_s
    else:
        # The grace, what a lost session may take to come back, and the shortfall's grace.
        assert since_s <= decided_s <= since_s + 2.5


@pytest.mark.parametrize("number", ALL)
def test_everyone_who_is_alive_hears_the_answer_at_once_and_late_ones_when_they_come(number):
    one = played_case(number)
    decided_s, document = one.answer
    dead = {act.who: act.at_s for act in one.story.acts if isinstance(act, Dies)}
    heard = {h.who: h.at_s for h in reversed(one.history.heard) if h.document == document}
    came = {act.who: act.at_s for act in reversed(one.story.acts) if isinstance(act, Comes)}
    listening = [
        who
        for who, number in one.history.rounds.items()
        if who.engine == one.engine
        and number == document.round
        and dead.get(who, float("inf")) > decided_s
    ]
    assert listening or document.code in ("rank_lost", "rank_replaced")
    for who in listening:
        assert heard[who] <= max(decided_s, came[who]) + 0.1


@pytest.mark.parametrize("number", PASSING)
def test_the_expected_rank_binds(number):
    one = played_case(number)
    agreed, rank, plan = one.expected["agreed"], one.expected["binding_rank"], one.plan
    known = {"num_blocks", "available_kv_bytes", "host_kv_bytes", "max_model_len_fits"}
    assert agreed.keys() <= known
    if agreed.get("max_model_len_fits"):
        assert plan["schedulers"][0]["entries"]["kv"] >= one.case["input"]["group"]["max_model_len"]
        assert plan["schedulers"][0]["binding"]["kv"]["ranks"][0] == rank
    if "num_blocks" in agreed:
        assert {row["entries"]["kv"] for row in plan["schedulers"]} == {agreed["num_blocks"]}
        assert plan["schedulers"][0]["binding"]["kv"]["ranks"][0] == rank
    if "available_kv_bytes" in agreed:
        (group,) = plan["schedulers"][0]["budget_groups"]
        assert (group["available_bytes"], group["binding_rank"]) == (
            agreed["available_kv_bytes"],
            rank,
        )
    if "host_kv_bytes" in agreed:
        tier = plan["capacities"]["host_kv_bytes"]
        assert (tier["bytes"], tier["ranks"][0]) == (agreed["host_kv_bytes"], rank)


@pytest.mark.parametrize("number", ALL)
def test_a_verdict_that_the_story_tells_of_is_ours_at_that_time(number):
    check_verdicts_told(played_case(number))


# --- what some cases say beyond that ------------------------------------------------------------


def test_001_the_lost_blocks_are_those_of_the_roomier_rank():
    plan = played_case("001").plan
    (row,), (shape,) = plan["schedulers"], plan["shapes"]
    lost = {
        str(s["rank"]): s["stranded_bytes"] // shape["entry_bytes"]["kv"] for s in row["by_rank"]
    }
    assert lost == a_case("001")["expected"]["lost_blocks"]


def test_005_replicas_keep_their_own_numbers_unless_they_must_be_equal():
    one = changed("005", min_scope="tp_group")
    own = [page_count(Report(**a.report)) for a in one.story.acts if isinstance(a, Reports)]
    assert [row["entries"]["kv"] for row in one.plan["schedulers"]] == own


def test_010_the_device_tier_is_untouched_by_the_host_tier():
    plan = played_case("010").plan
    assert plan["schedulers"][0]["entries"] == {"kv": 40960}
    assert plan["capacities"]["host_kv_bytes"]["ranks"] == list(range(8, 16))


def test_011_three_gib_on_one_card_cost_21():
    warning = played_case("011").verdict["warnings"][0]
    assert warning["code"] == "imbalanced"
    assert warning["ranks"] == [0]
    assert "(21.00 GiB) stay unused on the others" in warning["text"]


def test_013_a_stage_is_compared_with_what_a_stage_needs():
    (row,) = played_case("013").plan["schedulers"]
    assert row["entries"]["kv"] >= 202752
    assert row["binding"]["kv"]["ranks"] == [0]


def test_023_both_limits_are_named_at_once():
    texts = {c["code"]: c["text"] for c in played_case("023").document.causes}
    assert "lower max_num_seqs 256" in texts["state_floor_exceeds_budget"]
    assert "132000 entries of 'kv'" in texts["does_not_fit"]
    assert "without any state" in texts["does_not_fit"]


def test_025_a_negative_budget_says_how_much_is_missing():
    message = played_case("025").document.message
    assert f"give this rank {1628749824 + 3178334613} bytes" in message


def test_029_an_entry_of_all_heads_uses_a_quarter_of_the_budget():
    (warning,) = played_case("029").verdict["warnings"]
    assert (warning["code"], warning["ranks"]) == ("low_use_of_budget", [0, 1, 2, 3])
    assert "use 25% of the budget" in warning["text"]


def test_032_a_process_that_was_killed_is_lost_within_two_seconds():
    decided_s, document = played_case("032").answer
    assert 41.0 <= decided_s <= 42.0
    assert "out-of-memory killer" in document.message


def test_034_the_exception_says_what_a_sub_code_would():
    assert "EADDRINUSE" in played_case("034").document.causes[0]["text"]


def test_036_the_ranks_that_are_late_are_missing_and_said_to_be_loading():
    verdict = played_case("036").verdict
    assert verdict["ranks"] == list(range(24, 32))
    assert verdict["not_heard"] == []
    assert "last seen at 'load weights'" in verdict["message"]


def test_036_where_progress_extends_the_limit_the_late_ranks_are_in_time():
    case = copy.deepcopy(a_case("036"))
    case["input"]["group"] |= {"extend_on_progress": True}
    for row in case["input"]["ranks"]:
        row["arrives_after_s"] = min(row["arrives_after_s"], 479) + 100
    assert played(case).told()[0] == "1 PASSED agreed []"


def test_043_two_living_processes_of_one_rank_end_the_start_in_a_second():
    one = played_case("043")
    assert one.told() == ["1 FAILED duplicate_rank [0]"]
    assert "(pid 1000)" in one.document.message
    assert "(pid 2000)" in one.document.message


def test_043_a_process_that_came_after_the_old_one_ended_is_no_duplicate():
    case = copy.deepcopy(a_case("043"))
    case["input"]["both_live"] = False
    one = played(case)
    assert one.told()[0] == "1 FAILED rank_replaced [0]"


def test_045_every_restart_of_rank_0_is_a_round_and_the_last_one_waits_for_rank_1():
    one = played_case("045")
    replaced = [f"{number} FAILED rank_replaced [0]" for number in range(1, 29)]
    assert one.told() == [*replaced, "29 FAILED ranks_missing [1]"]
    (seen,) = one.history.seen
    wanted = one.expected["readiness"]
    assert (not seen.ready, wanted["http_status"]) == (True, 503)
    assert seen.missing == [1]
    assert wanted["expected"] - len(seen.missing) == wanted["ready"]


def test_045_the_process_that_was_left_behind_is_named_and_was_told_when_its_round_ended():
    one = played_case("045")
    assert "its last process, on host-1 (pid 1001), is one of round 1" in one.document.message
    (heard,) = [h for h in one.history.heard if h.who.name == "w0"]
    assert 500 < heard.at_s < 501
    assert (heard.document.result, heard.document.code) == ("FAILED", "rank_replaced")


def test_047_the_key_both_values_and_who_said_them_are_named():
    one = played_case("047")
    assert one.document.ranks == list(range(8, 16))
    (key,) = one.expected["differing"]
    said = ", ".join(
        f"{value} on ranks {who}" for who, value in one.expected["differing"][key].items()
    )
    assert f"inputs.{key} differs: {said}" in one.document.message


def test_048_a_worker_that_comes_back_alone_ends_the_round_of_all():
    one = played_case("048")
    assert one.told()[:2] == ["1 PASSED agreed []", "1 ABORTED rank_replaced [2]"]
    decided_s, outcome = one.answer
    assert 2.2 < decided_s < 2.5  # no grace: who is replaced is gone
    told = {h.who.name for h in one.history.heard if h.document == outcome}
    assert told == {"l0", "w1a"}
    # The newcomer waits for them in a round of its own.
    assert one.told()[2:] == ["2 FAILED ranks_missing [0, 1]"]


def test_050_an_engine_that_found_no_room_fails_alone():
    one = played_case("050")
    assert one.told() == ["1 FAILED does_not_fit [0]"]
    assert "(-3.21 GiB) available" in one.document.message
    other = one.expected["other_group"]
    assert other["verdict"] == "pass"
    assert one.told(other["group"]) == ["1 PASSED agreed []", "1 SEALED sealed []"]


def test_055_the_replica_is_ready_once_all_have_built_and_not_when_one_is_silent_for_120_s():
    one = played_case("055")
    assert one.told() == ["1 PASSED agreed []", "1 SEALED sealed []"]
    check_readiness(one)
    waiting, _, broken = one.history.seen
    assert waiting.missing == [3]
    assert broken.status["standing"]["ranks"] == [2]


def test_055_a_process_that_is_stuck_but_lives_stays_whole():
    case = copy.deepcopy(a_case("055"))
    case["input"]["events"] = case["input"]["events"][:-1]
    assert [seen.ready for seen in played(case).history.seen] == [False, True, True]


def test_056_all_49_ranks_that_raise_are_counted_and_the_lowest_ones_hosts_named():
    document = played_case("056").document
    assert document.ranks == list(range(8, 57))
    assert document.message.startswith("ranks 8-56 on host-8, host-9, host-10 and more: KeyError")


def test_060_mixed_cards_pass_with_a_warning_and_fail_where_a_policy_says_so():
    warning = played_case("060").verdict["warnings"][0]
    assert (warning["code"], warning["ranks"]) == ("imbalanced", [0])
    refused = changed("060", max_imbalance=0.10).verdict
    assert (refused["outcome"], refused["code"]) == ("FAILED", "spread_too_wide")
    assert (refused["ranks"], refused["retryable"]) == ([0], False)


def test_061_the_short_rank_is_blamed_against_the_median():
    message = played_case("061").document.message
    assert "free: 44023414784 bytes (41.00 GiB) on rank 2" in message
    assert "the median is 84610855731 bytes (78.80 GiB)" in message


def test_063_the_ranks_that_still_load_hear_of_it_at_once():
    one = played_case("063")
    at_s = {h.who.ranks: h.at_s for h in one.history.heard}
    assert len(at_s) == 16
    assert max(min(h.at_s for h in one.history.heard if h.who.ranks == r) for r in at_s) < 9


# --- the page -----------------------------------------------------------------------------------


def test_the_table_of_the_page_is_what_is_answered():
    assert table() in PAGE.read_text(), "make it anew: .venv/bin/python -m tests.answers"


def test_every_disagreement_is_about_a_case():
    assert DISAGREE.keys() <= set(ALL)


def test_the_page_says_where_we_disagree_and_why():
    said = " ".join(PAGE.read_text().split())
    for number, why in DISAGREE.items():
        assert f"- **{number}**: {why}" in said
