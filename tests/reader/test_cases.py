"""Reported failures with a log: our answer to each, beside what the case expects."""

import pytest

from reader.document import document_of
from reader.judge import judge
from reader.show import exit_code_of
from tests.reader.reading import CASES, a_case, log_of, scanned

# The cases were written before the protocol had codes of its own.
OUR_CODE = {
    "POOLS_DIFFER_AFTER_ALLOCATION": "applied_differently",
    "LOG_INCONCLUSIVE": "inconclusive",
    "HANG_AFTER_KV_PLAN": "rank_stuck",
    "FREE_BELOW_REQUEST": "request_exceeds_free",
    "MAX_LEN_DOES_NOT_FIT": "does_not_fit",
    "STATE_SLOTS_TOO_FEW": "state_floor_exceeds_budget",
    "NO_KV_MEMORY": "does_not_fit",
    "RANK_DIED": "rank_lost",
    "RANK_RAISED": "rank_vetoed",
    "MISSING_RANKS": "ranks_missing",
    "ROOT_CAUSE_NOT_IN_LOG": "rank_lost",
}
EXIT = {"pass": 0, "fail": 2, "inconclusive": 3}

# Where a case expects another verdict than ours, and why.
DISAGREE = {
    "013": "the ranks pass, as tests/test_cases.py has it; as a log the engine refused, and that is"
    " what a reader of logs reports (the case's own note says so)",
    "060": "the ranks pass with a warning; as a log the engine refused (the case's own note)",
}
OUR_CODE_INSTEAD = {"013": "does_not_fit", "060": "spread_too_wide"}

ALL = [path.name[:3] for path in CASES]


def answer(number, ranks=None, **layout):
    scan = scanned(log_of(a_case(number)))
    judged = judge(scan.last(), scan.earlier(), scan.restarts(), ranks, layout or None)
    assert exit_code_of(judged) == document_of(judged)["exit_code"]
    return document_of(judged)


def test_every_case_with_a_log_is_here():
    assert len(ALL) == 19
    assert DISAGREE.keys() == OUR_CODE_INSTEAD.keys() <= set(ALL)


@pytest.mark.parametrize("number", ALL)
def test_the_verdict_and_its_code_are_the_expected_ones(number):
    expected, said = a_case(number)["expected"], answer(number)
    code = OUR_CODE_INSTEAD.get(number) or OUR_CODE[expected["reason_code"]]
    assert said["code"] == code
    assert said["exit_code"] == (2 if number in DISAGREE else EXIT[expected["verdict"]])


@pytest.mark.parametrize("number", ALL)
def test_the_agreement_is_the_expected_one(number):
    expected = a_case(number)["expected"].get("log_reader")
    if expected is None:
        assert answer(number)["agreed"]["answer"] == "inconclusive"  # the start failed before
        return
    wanted = {True: "yes", False: "no", None: "inconclusive"}[expected["agreed"]]
    assert answer(number)["agreed"]["answer"] == wanted


# --- what some cases say beyond that ------------------------------------------------------------


def test_003_every_rank_s_number_the_spread_and_the_number_that_all_must_use():
    expected, said = a_case("003")["expected"], answer("003")
    assert {str(r["rank"]): r["count"] for r in said["ranks"]} == expected["log_reader"]["per_rank"]
    assert said["spread"] == expected["log_reader"]["spread_blocks"]
    assert (said["value"], said["binding"]) == (111488, [1, 2, 3, 4])
    assert said["next"].endswith("--num-gpu-blocks-override 111488")
    assert said["ranks"][0]["stranded_count"] == 192


def test_006_stages_are_named_as_the_log_names_them():
    said = answer("006")
    assert {r["label"]: r["count"] for r in said["ranks"]} == {"PP0": 432512, "PP1": 401000}
    assert (said["binding"], said["spread"]) == ([1], 31512)
    assert said["next"].endswith("--max-total-tokens 401000")


def test_008_one_line_of_an_unknown_rank_is_inconclusive_and_no_count_is_computed_from_it():
    said = answer("008")
    assert said["ranks"][0]["count"] == 6832
    assert "which rank wrote the one line" in said["agreed"]["missing"][0]
    assert any("7.11 GiB" in note and "cannot be computed" in note for note in said["notes"])
    assert any("30.21 of 287.98 GiB (10.5%)" in note for note in said["notes"])


def test_008_said_to_be_alone_it_agrees_with_itself():
    assert answer("008", ranks=1)["exit_code"] == 0
    assert answer("008", ranks=8)["agreed"]["missing"] == ["the counts of 7 of 8 ranks"]


def test_013_with_its_layout_the_stage_is_set_against_the_need_of_all():
    (note,) = answer("013", pp=8)["notes"]
    assert "of 71.16 GiB one of 8 stages holds about 8.89" in note
    assert answer("013")["next"].endswith("--max-model-len 81392")


def test_015_the_stage_whose_line_is_missing_is_named_once_the_layout_is():
    said = answer("015", pp=4)
    assert said["agreed"]["missing"][0] == "the lines of PP3"
    assert {r["label"]: r["facts"]["available_gib"] for r in said["ranks"]} == {
        "PP0": 18.02,
        "PP1": 18.25,
        "PP2": 18.22,
    }
    assert said["binding"] == []  # stages differ in what a block takes


def test_016_sizes_that_differ_are_no_disagreement_where_the_engine_takes_the_smallest():
    said = answer("016")
    assert (said["value"], said["unit"], said["spread"]) == (520256, "tokens", 19072)
    assert (said["status"], said["stall"]["at"]) == ("stalled", "KV sizes planned")


def test_017_both_ranks_are_short_and_the_share_is_rounded_down():
    said = answer("017")
    assert said["cause"]["ranks"] == [0, 1]
    assert said["next"].endswith("--gpu-memory-utilization 0.89")
    assert said["next_why"].startswith("0.07 GiB are missing")


def test_021_the_worker_that_the_parent_ended_is_a_victim():
    said = answer("021")
    assert "exit code -15" in said["consequences"][0]["text"]
    assert said["next"].endswith("--max-model-len 81536")


def test_023_the_slots_that_there_are_are_named():
    assert answer("023")["next"].endswith("--max-num-seqs 161")


def test_028_to_agree_is_not_to_be_usable():
    said = answer("028")
    assert (said["agreed"]["answer"], said["usable"]["answer"]) == ("yes", "no")
    assert (said["value"], said["binding"]) == (-561981, list(range(8)))
    assert "166.59 GiB" in said["next_why"]
    assert "--mem-fraction-static" in said["next_why"]


def test_032_an_empty_dictionary_is_no_cause():
    said = answer("032")
    assert (said["status"], said["cause"]) == ("failed_no_cause_in_log", None)
    assert "dmesg" in said["next"]


def test_034_the_port_is_named_and_memory_is_not_suspected():
    said = answer("034")
    assert said["cause"]["facts"]["port"] == 29500
    assert ":29500" in said["next"]


def test_038_whoever_complains_came_and_the_other_is_missing():
    said = answer("038")
    assert (said["missing"], said["cause"]["ranks"], said["world"]) == ([0], [0], 2)


def test_039_the_store_s_keys_are_read():
    cause = answer("039")["cause"]
    assert cause["missing"] == [0, 1]
    assert cause["facts"] == {"timeout_s": 900.0, "run_id": "none", "of": "nodes"}


def test_041_repeats_are_counted_and_the_ranks_of_the_layout_are_missing():
    said = answer("041", tp=2)
    assert said["stall"]["at"].startswith("Waiting for 1 local, 0 remote core engine")
    assert (said["stall"]["times"], said["stall"]["span_s"], said["status"]) == (6, 50, "stalled")
    assert said["missing"] == [0, 1]


def test_056_the_ranks_that_ray_folded_away_are_counted():
    cause = answer("056")["cause"]
    assert (cause["times"], cause["during"]) == (49, "initialize_from_config")
    assert cause["text"].startswith("KeyError: 'language_model.model.layers.30.self_attn.attn'")


def test_063_a_text_that_goes_on_in_the_next_line_is_read_whole():
    cause = answer("063")["cause"]
    assert cause["ranks"] == [11]
    assert cause["text"].startswith("FileNotFoundError: No such file or directory: ")
    assert cause["text"].endswith('"<models>/unet/diffusion_pytorch_model.safetensors"')


def test_064_victims_are_told_from_suspects_also_without_a_layout():
    expected = a_case("064")["expected"]["log_reader"]
    for said in (answer("064"), answer("064", ranks=4)):
        assert (said["victims"], said["suspects"]) == (expected["victims"], expected["suspects"])
        assert said["cause"] is None
        assert said["next_why"].endswith("before 04:13:43")
