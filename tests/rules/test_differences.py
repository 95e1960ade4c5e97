"""Ranks of one start that say different things when they claim."""

from kvaccord import Layout
from kvaccord.layout import Groups
from tests.builders import blamed


def test_another_layout_within_a_launch_fails_the_round_for_all(log):
    a = log.claimed(0, layout=Layout(tp=2))
    odd = log.claimed(1, layout=Layout(pp=2))
    log.spends("grace")
    assert log.round.state == "FAILED"
    assert (log.decision.code, log.decision.ranks) == ("inputs_disagree", [1])
    (cause,) = log.decision.causes
    assert cause["host"] == "host-1"
    for said in ("layout differs", "pp 2", "tp 1", "pp 1", "tp 2"):
        assert said in cause["text"]
    assert odd.round == a.round == log.round
    assert log.decision.retryable is False


def test_a_rank_beyond_the_layout_of_the_others_is_a_difference_too(log):
    log.claimed(0, layout=Layout(tp=2))
    log.claimed(3, layout=Layout(tp=4))
    log.spends("grace")
    assert (log.decision.code, log.decision.ranks) == ("inputs_disagree", [3])


def test_equal_over_is_part_of_the_layout(log):
    log.claimed(0, layout=Layout(dp=2))
    log.claimed(1, layout=Layout(dp=2, equal_over=("dp",)))
    log.spends("grace")
    assert log.decision.code == "inputs_disagree"
    assert "equal_over" in log.decision.causes[0]["text"]


def test_reports_of_one_that_differs_have_no_effect(log):
    log.claimed(0, layout=Layout(tp=2))
    odd = log.claimed(1, layout=Layout(pp=2))
    assert odd.reports(90) == ()
    assert log.round.sent == {}


def test_another_layout_after_the_verdict_ends_with_a_code_of_an_abort(log):
    # Design 5: an outcome is never `inputs_disagree`.
    log.passed(90, 70)
    log.claimed(1, layout=Layout(pp=2))
    log.spends("grace")
    assert log.round.state == "ABORTED"
    assert log.outcome.code == "duplicate_rank"


def test_inputs_that_differ_at_the_claim_fail_before_the_weights_are_loaded(log):
    layout = Layout(tp=3)
    log.claimed(0, layout=layout, inputs={"dtype": "bf16"})
    log.claimed(1, layout=layout, inputs={"dtype": "bf16"})
    log.claimed(2, layout=layout, inputs={"dtype": "fp8"})
    log.spends("grace")
    assert blamed(log.decision) == [("inputs_disagree", 2, "host-2")]
    assert "inputs.dtype differs: bf16 on ranks 0-1, fp8 on rank 2" in log.decision.message


def test_a_difference_names_the_host_of_the_rank_it_names(log):
    layout = Layout(tp=2)
    log.claimed(0, layout=layout, inputs={"dtype": "bf16"})
    log.claimed(1, layout=layout, inputs={"dtype": "fp8"})
    log.spends("grace")
    assert blamed(log.decision) == [("inputs_disagree", 1, "host-1")]


def test_a_rank_that_agrees_with_most_adds_no_cause(log):
    layout = Layout(tp=4)
    for rank, dtype in enumerate(["bf16", "bf16", "fp8", "bf16"]):
        log.claimed(rank, layout=layout, inputs={"dtype": dtype})
    log.spends("grace")
    assert blamed(log.decision) == [("inputs_disagree", 2, "host-2")]


def test_a_difference_names_up_to_32_keys(log):
    layout = Layout(tp=2)
    for rank in range(2):
        log.claimed(rank, layout=layout, inputs={f"key-{n}": rank for n in range(256)})
    log.spends("grace")
    assert len(log.decision.causes) + log.decision.document["verdict"]["more_causes"] <= 33


def test_true_and_1_are_two_inputs_at_the_claim_too(log):
    layout = Layout(tp=2)
    log.claimed(0, layout=layout, inputs={"chunked": True})
    log.claimed(1, layout=layout, inputs={"chunked": 1})
    log.spends("grace")
    assert blamed(log.decision) == [("inputs_disagree", 1, "host-1")]


def test_inputs_differ_in_whatever_order_their_ranks_come(log):
    layout = Layout(tp=2)
    log.claimed(1, layout=layout, inputs={"dtype": "bf16"})
    log.claimed(0, layout=layout, inputs={"dtype": "fp8"})
    log.spends("grace")
    assert blamed(log.decision) == [("inputs_disagree", 1, "host-1")]
    assert "inputs.dtype differs: fp8 on rank 0, bf16 on rank 1" in log.decision.message


def test_who_agrees_with_most_adds_nothing_to_a_difference_between_others(log):
    layout = Layout(tp=3)
    for rank, dtype in ((1, "bf16"), (2, "fp8"), (0, "fp8")):
        log.claimed(rank, layout=layout, inputs={"dtype": dtype})
    log.spends("grace")
    assert [code for code, *_ in blamed(log.decision)] == ["inputs_disagree"]


def test_groups_differ_in_whatever_order_their_ranks_come(log):
    layout = Layout(tp=2)
    log.claimed(1, layout=layout, groups={1: Groups(budget="b", scheduler="x")})
    log.claimed(0, layout=layout, groups={0: Groups(budget="b", scheduler="y")})
    log.spends("grace")
    assert blamed(log.decision) == [("inputs_disagree", 1, "host-1")]


def test_a_join_without_inputs_differs_from_nothing(log):
    layout = Layout(tp=2)
    log.claimed(0, layout=layout, inputs={"dtype": "bf16"})
    log.claimed(1, layout=layout)
    assert log.round.causes == ()
