"""The rules of a round, told as stories over the log of one engine."""

from dataclasses import replace

import pytest

from coordinator.commands import Clear, Lose, Reserve, Submit, Suspect, Veto
from coordinator.engine import KEPT_RESERVATIONS
from coordinator.events import Claimed, Decided, Ended, Objected, Opened, Reported
from coordinator.rules.joining import find_attempt
from kvaccord import Layout, messages, page, state
from kvaccord.canonical import digest
from kvaccord.errors import (
    Conflict,
    DuplicateRank,
    EngineNameInUse,
    Invalid,
    NotFound,
    ProtocolTooOld,
    Superseded,
)
from kvaccord.layout import Groups
from tests.builders import Log, a_join, a_launch, a_report, blamed, is_canonical


@pytest.fixture
def log():
    return Log()


# --- a start that goes well ---------------------------------------------------------------------


def test_a_healthy_start_is_sealed(log):
    a, b = log.start(2)
    assert log.round.state == "REPORTING"
    a.reports(90)
    assert log.round.waiting_for == [1]
    b.reports(70)
    assert log.round.state == "PASSED"
    assert (log.decision.code, log.decision.passed) == ("agreed", True)
    assert log.decision.entries(0) == log.decision.entries(1) == {"kv": 70}
    a.applies()
    assert log.round.state == "PASSED"
    b.applies()
    assert log.round.state == "SEALED"
    assert (log.outcome.result, log.outcome.code) == ("SEALED", "sealed")
    assert log.outcome.document["decision_digest"] == log.decision.digest
    assert log.engine.in_force == log.round


def test_joining_opens_nothing(log):
    log.joined(a_join(0, layout=Layout(tp=2)))
    assert log.engine.last is None


def test_the_first_claim_opens_the_round_and_binds_its_terms(log):
    layout = Layout(dp=1, pcp=2)
    a = log.joined(a_join(1, layout=layout, launch=a_launch("run-7", 3)))
    opened, claimed = a.claims()
    assert isinstance(opened, Opened)
    assert isinstance(claimed, Claimed)
    assert (opened.round, opened.launch.run, opened.layout) == (1, "run-7", layout)
    assert log.round.state == "GATHERING"


def test_a_rank_may_report_before_the_others_claimed(log):
    a = log.claimed(0, layout=Layout(tp=2))
    a.reports(90)
    b = log.claimed(1, layout=Layout(tp=2))
    b.reports(70)
    assert log.round.state == "PASSED"


def test_one_process_may_hold_several_ranks(log):
    layout = Layout(tp=4)
    a, b = log.claimed(0, 1, layout=layout), log.claimed(3, 2, layout=layout)
    a.reports(90)
    b.reports(70)
    a.applies()
    b.applies()
    assert log.round.state == "SEALED"


def test_a_process_whose_ranks_hold_different_classes_can_seal(log):
    # A rank builds its row; a process with two ranks says once what it built for both.
    a = log.claimed(0, 1, layout=Layout(pp=2))
    kv, slot = page("kv", 1000), state("slot", 10, entries_per_req=1)
    log.do(
        Submit(
            1,
            a.attempt,
            {
                0: a_report(90, classes=[kv], max_num_seqs=4),
                1: a_report(70, classes=[kv, slot], max_num_seqs=4),
            },
            {},
        )
    )
    assert log.round.state == "PASSED"
    a.applies({**log.decision.entries(0), **log.decision.entries(1)})
    assert log.round.causes == ()
    assert log.round.state == "SEALED"


def test_a_world_of_one_passes_alone(log):
    (a,) = log.passed(90)
    a.applies()
    assert log.round.state == "SEALED"


def test_a_start_that_does_not_fit_fails_at_its_last_report(log):
    a, b = log.start(2)
    a.reports(90)
    b.reports(0)
    assert log.round.state == "FAILED"
    assert (log.decision.code, log.decision.ranks) == ("does_not_fit", [1])
    assert blamed(log.decision) == [("does_not_fit", 1, "host-1")]
    assert log.decision.retryable is False
    assert "plan" not in log.decision.document
    assert log.decision.entries(0) == {}


def test_the_entry_that_settles_a_round_holds_the_decision(log):
    a, b = log.start(2)
    a.reports(90)
    events = b.reports(70)
    assert [type(e) for e in events] == [Reported, Decided]


# --- frozen documents ---------------------------------------------------------------------------


def test_a_decision_holds_what_every_rank_must_know(log):
    log.passed(90, 70)
    document = log.decision.document
    assert is_canonical(log.round.decision)
    assert document["engine"] == "default/llama"
    assert (document["round"], document["store_id"], document["mode"]) == (1, "store-1", "enforce")
    assert document["launch"] == {"run": "run-1", "restart": 0, "source": "env"}
    assert document["layout"] == {"dp": 1, "pp": 1, "pcp": 1, "tp": 2, "equal_over": []}
    assert document["faults"] == []
    assert document["inputs_digest"].startswith("sha256:")
    (row,) = document["plan"]["schedulers"]
    assert row["binding"] == {"kv": {"ranks": [1], "hosts": ["host-1"]}}
    assert set(document["verdict"]) == {
        *("outcome", "code", "message", "ranks", "causes", "also", "not_heard"),
        *("more_causes", "retryable", "warnings"),
    }


def test_the_order_of_the_reports_leaves_the_decision_as_it_is():
    bodies = []
    for order in ([0, 1, 2], [2, 0, 1]):
        log = Log()
        ranks = log.start(3)
        for rank in order:
            ranks[rank].reports(90 + rank)
        bodies.append(log.round.decision)
    assert bodies[0] == bodies[1]


def test_outcomes_are_canonical_and_leave_the_decision_alone(log):
    a, b = log.passed(90, 70)
    before = log.round.decision
    a.applies()
    b.vetoes("hipMalloc failed")
    log.spends("grace")
    assert log.round.state == "ABORTED"
    assert log.round.decision == before
    assert is_canonical(log.round.outcome)
    assert log.decision.passed


def test_replaying_the_log_gives_the_same_bytes(log):
    log.sealed(90, 70)
    log.start(2, launch=a_launch("run-1", 1))
    assert log.replayed() == log.engine


# --- a no, in every phase -----------------------------------------------------------------------


def test_a_veto_while_others_are_awaited_fails_the_round_after_its_grace(log):
    a = log.claimed(0, layout=Layout(tp=2))
    a.vetoes("CUDA out of memory")
    assert log.round.state == "GATHERING"
    log.spends("grace")
    assert log.round.state == "FAILED"
    assert (log.decision.code, log.decision.ranks) == ("rank_vetoed", [0])
    assert log.decision.document["verdict"]["not_heard"] == [1]
    assert log.decision.retryable is True


def test_a_veto_stops_a_round_that_would_have_passed(log):
    a, b = log.start(2)
    a.reports(90)
    a.vetoes()
    b.reports(90)
    assert log.round.state == "REPORTING"
    log.spends("grace")
    assert log.round.state == "FAILED"
    assert log.decision.document["verdict"]["not_heard"] == []


@pytest.mark.parametrize("no", ["vetoes", "leaves", "fails_to_build"])
@pytest.mark.parametrize("built_first", [False, True])
def test_a_no_after_the_verdict_aborts_even_after_its_own_applied(log, no, built_first):
    a, _ = log.passed(90, 70)
    if built_first:
        a.applies()
    getattr(a, no)()
    log.spends("grace")
    assert log.round.state == "ABORTED"
    code = "rank_left" if no == "leaves" else "apply_failed"
    assert (log.outcome.code, log.outcome.ranks) == (code, [0])
    assert log.outcome.document["not_heard"] == [1]


@pytest.mark.parametrize("no", ["vetoes", "fails_to_build", "is_suspected"])
def test_a_sealed_round_stands(log, no):
    a, _ = log.sealed(90, 70)
    assert getattr(a, no)() == ()
    assert log.round.state == "SEALED"


def test_a_veto_says_whether_the_start_may_be_repeated(log):
    a, b = log.start(2)
    a.vetoes("no such model", retryable=False)
    b.vetoes("peer gone")
    log.spends("grace")
    assert log.decision.retryable is False


def test_a_leave_is_a_no_with_its_reason(log):
    a, _ = log.start(2)
    a.leaves("preempted")
    log.spends("grace")
    (cause,) = log.decision.causes
    assert (cause["code"], cause["rank"]) == ("rank_left", 0)
    assert "preempted" in cause["text"]


def test_a_loss_is_a_no_said_by_the_kernel(log):
    a, _ = log.start(2)
    a.is_suspected("s1")
    a.is_lost("s1")
    log.spends("grace")
    assert (log.decision.code, log.decision.ranks) == ("rank_lost", [0])


def test_a_loss_after_the_verdict_aborts(log):
    a, b = log.passed(90, 70)
    a.applies()
    a.is_suspected("s1")
    b.applies()
    assert log.round.state == "PASSED"
    a.is_lost("s1", after_s=30.0)
    log.spends("grace")
    assert (log.outcome.code, log.outcome.ranks) == ("rank_lost", [0])


def test_causes_stand_in_order_of_receipt(log):
    a, b, c = log.start(3)
    b.vetoes("first")
    c.leaves()
    a.is_suspected("s")
    a.is_lost("s")
    log.spends("grace")
    assert [code for code, _, _ in blamed(log.decision)] == [
        *("rank_vetoed", "rank_left", "rank_lost")
    ]
    assert log.decision.ranks == [1]
    assert log.decision.document["verdict"]["also"] == ["rank_left", "rank_lost"]
    assert "(and 2 more causes)" in log.decision.message


def test_of_two_noes_of_one_process_the_first_stands(log):
    a, _ = log.start(2)
    a.vetoes("first")
    assert a.vetoes("second") == ()
    assert a.leaves() == ()
    log.spends("grace")
    assert [c["text"] for c in log.decision.causes] == ["first"]


def test_a_trace_is_kept_in_the_log_and_never_in_the_decision(log):
    a, _ = log.start(2)
    (objected,) = a.vetoes("no", trace="Traceback: SECRET-LINE")
    assert objected.trace == "Traceback: SECRET-LINE"
    log.spends("grace")
    assert b"SECRET-LINE" not in log.round.decision


def test_a_process_vetoes_for_its_own_ranks(log):
    a, _ = log.start(2)
    with pytest.raises(Invalid, match="rank 1: not among"):
        a.vetoes(rank=1)
    assert log.round.causes == ()


def test_a_no_before_the_claim_is_refused(log):
    log.start(2)
    late = log.joined(a_join(0, layout=Layout(tp=2)))
    with pytest.raises(Superseded, match="it has not claimed"):
        log.do(Veto(1, late.attempt, messages.Veto(rank=0, text="no")))


# --- time ---------------------------------------------------------------------------------------


def test_ranks_that_never_joined_are_missing_by_name(log):
    log.claimed(1, layout=Layout(tp=4))
    log.claimed(3, layout=Layout(tp=4))
    log.spends("gather")
    assert log.round.state == "FAILED"
    assert (log.decision.code, log.decision.ranks) == ("ranks_missing", [0, 2])
    assert blamed(log.decision) == [("ranks_missing", 0, None), ("ranks_missing", 2, None)]
    assert log.decision.document["verdict"]["not_heard"] == [1, 3]
    assert log.decision.retryable is True


def test_a_rank_that_did_not_report_is_missing_with_its_host(log):
    a, _, c = log.start(3)
    a.reports(90)
    c.reports(90)
    log.spends("report")
    assert blamed(log.decision) == [("ranks_missing", 1, "host-1")]
    assert log.decision.document["verdict"]["not_heard"] == []


def test_a_rank_that_did_not_build_is_missing_with_its_host(log):
    a, _, c = log.passed(90, 90, 90)
    a.applies()
    c.applies()
    log.spends("apply")
    assert log.round.state == "ABORTED"
    assert blamed(log.outcome) == [("ranks_missing", 1, "host-1")]


@pytest.mark.parametrize(
    ("reach", "other"),
    [
        (lambda log: log.claimed(0, layout=Layout(tp=2)), ["report", "apply", "grace"]),
        (lambda log: log.start(2), ["gather", "apply", "grace"]),
        (lambda log: log.passed(90, 70), ["gather", "report", "grace"]),
        (lambda log: log.sealed(90, 70), ["gather", "report", "apply", "grace"]),
    ],
)
def test_only_the_budget_that_runs_can_be_spent(log, reach, other):
    reach(log)
    before = log.engine
    for what in other:
        assert log.spends(what) == ()
    assert log.engine == before


def test_a_budget_of_another_round_is_nothing(log):
    log.start(2)
    assert log.spends("report", round_=7) == ()
    log.spends("report")
    log.start(2)
    assert log.spends("report", round_=1) == ()
    assert log.round.state == "REPORTING"


def test_time_blames_nobody_while_a_cause_waits_for_its_grace(log):
    a, _ = log.start(2)
    a.vetoes()
    assert log.spends("report") == ()
    log.spends("grace")
    assert blamed(log.decision) == [("rank_vetoed", 0, "host-0")]


# --- presence -----------------------------------------------------------------------------------


def test_a_suspect_holds_the_verdict_back_until_it_is_back(log):
    a, b = log.start(2)
    a.reports(90)
    a.is_suspected("s1")
    b.reports(70)
    assert log.round.state == "REPORTING"
    a.is_back()
    assert log.round.state == "PASSED"


def test_a_suspect_holds_the_seal_back_until_it_is_back(log):
    a, b = log.passed(90, 70)
    a.applies()
    a.is_suspected("s1")
    b.applies()
    assert log.round.state == "PASSED"
    a.is_back()
    assert log.round.state == "SEALED"


def test_a_suspect_that_is_neither_back_nor_lost_ends_with_the_budget(log):
    a, b = log.start(2)
    a.reports(90)
    b.reports(90)
    assert log.round.state == "PASSED"
    b.applies()
    b.is_suspected("s1")
    a.applies()
    log.spends("apply")
    assert log.round.state == "ABORTED"
    assert blamed(log.outcome) == [("rank_lost", 1, "host-1")]


def test_what_one_session_ended_another_sessions_end_does_not_judge(log):
    a, _ = log.start(2)
    a.is_suspected("s1")
    a.is_back()
    assert a.is_lost("s1") == ()
    a.is_suspected("s2")
    assert a.is_lost("s1") == ()
    assert log.round.causes == ()
    assert a.is_lost("s2") != ()


def test_the_same_end_is_noted_once(log):
    a, _ = log.start(2)
    assert a.is_suspected("s1") != ()
    assert a.is_suspected("s1") == ()
    assert a.is_back() != ()
    assert a.is_back() == ()


def test_findings_about_nobody_are_nothing(log):
    log.start(2)
    for number, attempt in ((9, 1), (1, 9)):
        assert log.do(Suspect(number, attempt, "s")) == ()
        assert log.do(Clear(number, attempt)) == ()
        assert log.do(Lose(number, attempt, "s", 1.0)) == ()


# --- differences --------------------------------------------------------------------------------


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


# --- taken slots --------------------------------------------------------------------------------


def test_two_living_processes_of_one_slot_fail_the_round(log):
    log.start(2)
    log.claimed(1, layout=Layout(tp=2), host="host-9", pid=99)
    log.spends("grace")
    assert (log.decision.code, log.decision.ranks) == ("duplicate_rank", [1])
    (cause,) = log.decision.causes
    for said in ("host-1", "1001", "host-9", "99"):
        assert said in cause["text"]


def test_two_living_processes_of_one_slot_abort_what_was_agreed(log):
    a, b = log.passed(90, 70)
    log.claimed(1, layout=Layout(tp=2), host="host-9")
    a.applies()
    b.applies()
    log.spends("grace")
    assert (log.round.state, log.outcome.code) == ("ABORTED", "duplicate_rank")


def test_a_newcomer_to_a_sealed_round_is_refused_alone(log):
    _, b = log.sealed(90, 70)
    newcomer = log.joined(a_join(1, layout=Layout(tp=2), host="host-9"))
    with pytest.raises(DuplicateRank, match="host-9"):
        newcomer.claims(watched=[b])
    assert log.round.state == "SEALED"


def test_the_unwatched_slot_of_a_sealed_round_opens_the_next(log):
    a, _ = log.sealed(90, 70)
    newcomer = log.joined(a_join(1, layout=Layout(tp=2)))
    newcomer.claims(watched=[a])
    assert (log.round.number, log.round.state) == (2, "GATHERING")
    assert log.engine.in_force.number == 1


@pytest.mark.parametrize("phase", ["start", "passed"])
def test_a_new_process_in_a_suspects_slot_ends_the_round_and_opens_the_next(log, phase):
    _, b = log.start(2) if phase == "start" else log.passed(90, 70)
    b.is_suspected("s1")
    new = log.claimed(1, layout=Layout(tp=2), host="host-9")
    old, current = log.engine.rounds[1], log.engine.rounds[2]
    assert old.ended == ("FAILED" if phase == "start" else "ABORTED")
    assert current.state == "GATHERING"
    assert new.round == current
    body = old.outcome or old.decision
    assert b'"code":"rank_replaced"' in body
    assert b'"ranks":[1]' in body
    assert b.reports(70) == ()


@pytest.mark.parametrize("no", ["vetoes", "leaves"])
def test_a_new_process_in_the_slot_of_one_that_said_no_opens_the_next(log, no):
    _, b = log.start(2)
    getattr(b, no)()
    log.claimed(1, layout=Layout(tp=2))
    assert log.engine.rounds[1].ended == "FAILED"
    assert log.round.number == 2


def test_a_duplicate_names_the_living_holder_not_the_one_that_is_gone(log):
    a, _ = log.start(2)
    a.is_suspected("s1")
    log.claimed(0, 1, layout=Layout(tp=2), host="host-9")
    log.spends("grace")
    assert log.decision.code == "duplicate_rank"
    assert log.decision.ranks == [1]
    assert "host-1" in log.decision.causes[0]["text"]


# --- other starts -------------------------------------------------------------------------------


def test_another_launch_is_refused_while_one_is_alive(log):
    log.start(2)
    other = log.joined(a_join(0, layout=Layout(tp=2), launch=a_launch("run-2"), host="host-9"))
    with pytest.raises(EngineNameInUse) as refused:
        other.claims()
    assert refused.value.retry_after_s
    for said in ("run-1", "run-2", "host-0", "host-9"):
        assert said in str(refused.value)
    assert log.round.launch.run == "run-1"
    assert log.round.causes == ()


def test_another_launch_is_refused_while_a_sealed_round_is_watched(log):
    a, _ = log.sealed(90, 70)
    other = log.joined(a_join(0, layout=Layout(tp=2), launch=a_launch("run-2")))
    with pytest.raises(EngineNameInUse):
        other.claims(watched=[a])
    other.claims()
    assert (log.round.number, log.round.launch.run) == (2, "run-2")


def test_another_launch_takes_over_when_nobody_is_alive(log):
    a, b = log.start(2)
    a.is_suspected("s1")
    b.is_suspected("s2")
    log.claimed(0, layout=Layout(tp=2), launch=a_launch("run-2"))
    first = log.engine.rounds[1]
    assert first.ended == "FAILED"
    assert b'"code":"superseded"' in first.decision
    assert log.round.launch.run == "run-2"


def test_another_launch_follows_a_failed_round_at_once(log):
    log.start(2)
    log.spends("report")
    log.claimed(0, layout=Layout(tp=2), launch=a_launch("run-2"))
    assert (log.round.number, log.round.launch.run) == (2, "run-2")


@pytest.mark.parametrize("phase", ["start", "passed"])
def test_a_greater_restart_takes_over_whoever_is_alive(log, phase):
    log.start(2) if phase == "start" else log.passed(90, 70)
    log.claimed(1, layout=Layout(pp=2), launch=a_launch("run-1", 1))
    first = log.engine.rounds[1]
    assert first.ended == ("FAILED" if phase == "start" else "ABORTED")
    assert b'"code":"superseded"' in (first.outcome or first.decision)
    assert (log.round.number, log.round.launch.restart) == (2, 1)


def test_a_greater_restart_follows_a_sealed_round_though_it_is_watched(log):
    a, b = log.sealed(90, 70)
    new = log.joined(a_join(0, layout=Layout(tp=2), launch=a_launch("run-1", 1)))
    new.claims(watched=[a, b])
    assert log.round.number == 2
    assert log.engine.in_force.number == 1


def test_a_lower_restart_is_over(log):
    old = log.joined(a_join(0, layout=Layout(tp=2), launch=a_launch("run-1", 1)))
    log.start(2, launch=a_launch("run-1", 2))
    with pytest.raises(Superseded, match=r"run-1 \(restart 1\) is older"):
        log.claimed(1, layout=Layout(tp=2), launch=a_launch("run-1", 1))
    with pytest.raises(Superseded):
        old.claims()


def test_an_earlier_run_is_over_whatever_its_restart(log):
    log.start(2)
    log.spends("report")
    log.start(2, launch=a_launch("run-2"))
    log.spends("report")
    with pytest.raises(Superseded, match="older than launch run-2"):
        log.claimed(0, layout=Layout(tp=2), launch=a_launch("run-1", 9))


def test_the_last_64_earlier_runs_are_over(log):
    for n in range(65):
        log.claimed(0, layout=Layout(tp=2), launch=a_launch(f"run-{n}"))
        log.spends("gather")
    for n in (63, 1, 0):
        with pytest.raises(Superseded):
            log.claimed(0, layout=Layout(tp=2), launch=a_launch(f"run-{n}"))


@pytest.mark.parametrize("source", ["master", "lws", "ray", "mpi"])
def test_a_run_named_by_an_address_or_a_counter_may_come_back(log, source):
    def master(run):
        return a_launch(run, source=source)

    early = log.joined(a_join(0, layout=Layout(tp=2), launch=master("10.0.0.1:29500")))
    log.claimed(1, layout=Layout(tp=2), launch=master("10.0.0.1:29500"))
    log.spends("gather")
    log.claimed(1, layout=Layout(tp=2), launch=master("10.0.0.2:29500"))
    log.spends("gather")
    with pytest.raises(Superseded):
        early.claims()
    log.claimed(1, layout=Layout(tp=2), launch=master("10.0.0.1:29500"))
    assert log.round.number == 3


def test_an_attempt_of_a_run_that_was_left_is_over_when_its_name_comes_back(log):
    # S5: no decision ever holds ranks of two starts.
    def master(run):
        return a_launch(run, source="master")

    early = log.joined(a_join(0, layout=Layout(tp=2), launch=master("10.0.0.1:29500")))
    log.claimed(1, layout=Layout(tp=2), launch=master("10.0.0.1:29500"))
    log.spends("gather")
    log.claimed(1, layout=Layout(tp=2), launch=master("10.0.0.2:29500"))
    log.spends("gather")
    log.claimed(1, layout=Layout(tp=2), launch=master("10.0.0.1:29500"))
    with pytest.raises(Superseded):
        early.claims()


def test_a_rank_no_layout_had_does_not_end_a_sealed_start_that_is_alive(log):
    members = log.sealed(90, 70)
    odd = log.joined(a_join(3, layout=Layout(tp=4)))
    with pytest.raises((DuplicateRank, EngineNameInUse, Superseded)):
        odd.claims(watched=members)
    assert log.round.state == "SEALED"


# --- one process, one round ---------------------------------------------------------------------


def test_a_late_member_of_a_failed_start_hears_its_decision(log):
    a = log.claimed(0, layout=Layout(tp=3))
    a.vetoes()
    log.spends("grace")
    body = log.round.decision
    late = log.claimed(2, layout=Layout(tp=3))
    assert late.round.number == 1
    assert late.round.decision == body
    assert late.reports(90) == ()
    assert log.engine.last.number == 1


def test_the_next_process_of_a_late_members_slot_opens_the_next_round(log):
    log.claimed(0, layout=Layout(tp=3)).vetoes()
    log.spends("grace")
    log.claimed(2, layout=Layout(tp=3))
    next_one = log.claimed(2, layout=Layout(tp=3))
    assert next_one.round.number == 2
    assert log.claimed(0, layout=Layout(tp=3)).round.number == 2
    assert log.claimed(1, layout=Layout(tp=3)).round.number == 2


def test_the_next_process_of_a_slot_that_was_claimed_opens_the_next_round(log):
    log.claimed(0, layout=Layout(tp=3)).vetoes()
    log.spends("grace")
    assert log.claimed(0, layout=Layout(tp=3)).round.number == 2


def test_a_process_that_differed_was_here_too(log):
    log.claimed(0, layout=Layout(tp=2))
    log.claimed(1, layout=Layout(pp=2))
    log.spends("grace")
    assert log.claimed(1, layout=Layout(tp=2)).round.number == 2


def test_a_late_member_of_another_start_opens_its_own_round(log):
    log.claimed(0, layout=Layout(tp=3)).vetoes()
    log.spends("grace")
    late = log.claimed(2, layout=Layout(tp=3), launch=a_launch("run-1", 1))
    assert late.round.number == 2


def test_a_process_of_an_aborted_round_has_no_late_members(log):
    a, _ = log.passed(90, 70)
    a.leaves()
    log.spends("grace")
    assert log.claimed(0, layout=Layout(tp=2)).round.number == 2


def test_one_process_takes_part_in_one_round(log):
    a, _ = log.start(2)
    log.spends("report")
    log.start(2)
    with pytest.raises(Superseded, match="does not belong to round 2 but to round 1"):
        a.reports(90, round_=2)
    with pytest.raises(NotFound):
        a.reports(90, round_=3)
    assert a.reports(90) == ()
    assert log.round.sent == {}


def test_what_a_superseded_process_says_has_no_effect(log):
    a, b = log.start(2)
    a.reports(90)
    log.claimed(0, layout=Layout(tp=2), launch=a_launch("run-1", 1))
    before = log.engine
    assert b.reports(70) == b.vetoes() == b.leaves() == b.is_suspected() == ()
    assert b.is_back() == b.is_lost() == ()
    assert log.engine == before


def test_a_reservation_lapses_when_a_newer_one_of_its_ranks_is_claimed(log):
    layout = Layout(tp=2)
    old = log.joined(a_join(0, layout=layout))
    other = log.joined(a_join(1, layout=layout))
    log.claimed(0, layout=layout)
    with pytest.raises(Superseded, match="has lapsed"):
        old.claims()
    other.claims()


# --- the same question again --------------------------------------------------------------------


def test_a_repeated_join_reserves_nothing(log):
    join = a_join(0, layout=Layout(tp=2))
    log.joined(join)
    assert log.do(Reserve(join)) == ()


def test_a_repeated_join_reserves_nothing_after_its_claim(log):
    a, _ = log.start(2)
    assert log.do(Reserve(a.join)) == ()
    log.spends("report")
    assert log.do(Reserve(a.join)) == ()


def test_a_repeated_join_reserves_nothing_after_the_next_round_opened(log):
    a, _ = log.start(2)
    log.spends("report")
    log.start(2)
    assert log.do(Reserve(a.join)) == ()


def test_a_join_with_the_same_nonce_and_another_document_conflicts(log):
    a, _ = log.start(2)
    with pytest.raises(Conflict, match="the first stands"):
        log.do(Reserve(a.join.model_copy(update={"pid": 7})))


def test_the_same_nonce_with_other_ranks_is_another_process(log):
    log.joined(a_join(0, layout=Layout(tp=2), nonce="nonce-one"))
    assert log.joined(a_join(1, layout=Layout(tp=2), nonce="nonce-one")).attempt == 2


def test_another_protocol_is_refused(log):
    with pytest.raises(ProtocolTooOld):
        log.joined(a_join(0, protocol=2))


def test_repeated_calls_add_nothing(log):
    a, b = log.start(2)
    assert a.claims() == ()
    a.reports(90)
    assert a.reports(90) == ()
    b.reports(70)
    assert b.reports(70) == ()
    a.applies()
    assert a.applies() == ()
    b.applies()
    assert b.applies() == a.reports(90) == a.claims() == ()


def test_of_two_reports_the_first_stands(log):
    a, b = log.start(2)
    a.reports(90)
    with pytest.raises(Conflict, match="free_bytes 90077 and now says 95077"):
        a.reports(95)
    b.reports(70)
    assert (
        log.decision.document["plan"]["schedulers"][0]["budget_groups"][0]["budget_bytes"] == 70_000
    )
    with pytest.raises(Conflict):
        a.reports(95)


def test_a_report_holds_all_of_the_ranks_of_its_process(log):
    a = log.claimed(0, 1, layout=Layout(tp=2))
    with pytest.raises(Invalid, match="rank 1: no report"):
        log.do(Submit(1, a.attempt, {0: a_report()}, {}))
    with pytest.raises(Invalid, match="rank 2: not among"):
        log.do(Submit(1, a.attempt, {0: a_report(), 1: a_report(), 2: a_report()}, {}))
    assert log.round.sent == {}


def test_a_claim_of_an_attempt_that_was_never_given_is_refused(log):
    a, _ = log.start(2)
    a.attempt = 77
    with pytest.raises(Superseded):
        a.claims()


def test_a_whole_start_may_join_before_the_first_claim_of_the_next(log):
    # Two starts of the largest world: nobody's place lapses for want of room.
    layout = Layout(tp=1024)
    first = [log.joined(a_join(rank, layout=layout)) for rank in range(1024)]
    for rank in range(1024):
        log.joined(a_join(rank, layout=layout, launch=a_launch("run-1", 1)))
    assert len(log.engine.reservations) == KEPT_RESERVATIONS
    first[0].claims()


def test_a_join_looks_through_the_members_of_an_ended_round_once(log):
    class Counted(dict):
        looks = 0

        def items(self):
            Counted.looks += 1
            return super().items()

        def values(self):
            Counted.looks += 1
            return super().values()

    log.sealed(9, 9)
    ended = replace(log.round, members=Counted(log.round.members))
    log.engine = replace(log.engine, rounds={ended.number: ended})
    for _ in range(5):
        log.joined(a_join(0))
    assert Counted.looks == 1


def test_a_process_of_an_ended_round_that_joins_again_has_its_attempt(log):
    first, _ = log.sealed(9, 9)
    assert find_attempt(log.replayed(), first.join) == first.attempt
    other = first.join.model_copy(update={"pid": 7})
    with pytest.raises(Conflict):
        find_attempt(log.replayed(), other)


def test_reservations_do_not_accumulate(log):
    for _ in range(KEPT_RESERVATIONS + 5):
        log.joined(a_join(0))
    assert len(log.engine.reservations) == KEPT_RESERVATIONS
    assert min(log.engine.reservations) == 6


# --- built --------------------------------------------------------------------------------------


def test_built_before_there_is_a_decision_is_a_conflict(log):
    a, _ = log.start(2)
    with pytest.raises(Conflict, match="before round 1 was decided"):
        a.applies({"kv": 70}, digest=digest(b""))


def test_built_from_another_decision_is_a_conflict_and_changes_nothing(log):
    a, _ = log.passed(90, 70)
    with pytest.raises(Conflict, match="build only what this round decided"):
        a.applies(digest=digest(b"{}"))
    assert log.round.causes == ()


@pytest.mark.parametrize("built", [{"kv": 69}, {"kv": 71}, {}, {"kv": 70, "slot": 1}])
def test_built_differently_aborts(log, built):
    a, b = log.passed(90, 70)
    a.applies(built)
    b.applies()
    log.spends("grace")
    assert (log.round.state, log.outcome.code) == ("ABORTED", "applied_differently")
    assert log.outcome.ranks == [0]
    assert log.outcome.retryable is False


@pytest.mark.parametrize(
    ("built", "agreed"),
    [
        ({0: {"kv": 90}, 1: {"kv": 80}}, True),
        ({1: {"kv": 80}, 0: {"kv": 90}}, True),
        ({0: {"kv": 90}, 1: {"kv": 90}}, False),
        ({0: {"kv": 90}}, False),
        ({0: {"kv": 90}, 1: {}}, False),
        ({0: {"kv": 90}, 1: {"kv": 80, "slot": 1}}, False),
        ({"kv": 90}, False),
        ({"kv": 80}, False),
    ],
    ids=repr,
)
def test_a_process_with_ranks_of_two_rows_says_what_each_built(log, built, agreed):
    a = log.claimed(0, 1, layout=Layout(dp=2))
    log.do(Submit(1, a.attempt, {0: a_report(90), 1: a_report(80)}, {}))
    a.applies(built)
    if agreed:
        assert log.round.state == "SEALED"
    else:
        log.spends("grace")
        assert (log.round.state, log.outcome.code) == ("ABORTED", "applied_differently")


def test_nobody_speaks_of_what_others_built(log):
    a, b = log.passed(90, 70)
    b.applies()
    try:
        a.applies({0: {"kv": 70}, 1: {"kv": 70}})
    except Invalid:
        assert log.round.state == "PASSED"
    else:
        log.spends("grace")
        assert (log.round.state, log.outcome.code) == ("ABORTED", "applied_differently")


def test_of_two_accounts_of_what_was_built_the_first_stands(log):
    # Design 3.6: the same identity with another document is 409.
    a, _ = log.passed(90, 70)
    a.applies()
    with pytest.raises(Conflict):
        a.applies({"kv": 69})


def test_what_a_failed_round_decided_cannot_be_built(log):
    a, b = log.start(2)
    a.reports(90)
    b.reports(0)
    assert a.applies({}) == ()
    assert log.round.state == "FAILED"


# --- bounds -------------------------------------------------------------------------------------


def a_failure_of(world, text):
    log = Log()
    processes = log.start(world, host="h" * 255)
    for process in processes:
        process.vetoes(text(process.attempt))
    log.spends("grace")
    return log


def test_the_first_causes_are_long_the_next_short_and_the_rest_counted():
    log = a_failure_of(140, lambda n: f"{n:04}\n" + "x" * 3000)
    causes = log.decision.causes
    assert len(causes) == 16 + 112
    assert [len(c["text"].encode()) for c in causes] == [1024] * 16 + [120] * 112
    assert all("\n" not in c["text"] for c in causes[16:])
    assert log.decision.document["verdict"]["more_causes"] == 12
    assert log.decision.ranks == list(range(140))
    assert len(log.decision.message.encode()) < 1000


@pytest.mark.parametrize("letter", ["x", "😂", "\x01", '"'], ids=ascii)
def test_a_decision_is_bounded_however_many_ranks_fail(letter):
    log = a_failure_of(1024, lambda n: f"{n}" + letter * 4000)
    assert len(log.round.decision) <= 256 * 1024
    assert len(log.decision.ranks) == 1024


@pytest.mark.parametrize("phase", ["gather", "report"])
def test_a_decision_is_bounded_however_many_ranks_are_missing(phase):
    log = Log()
    layout = Layout(tp=1024)
    for rank in range(1024 if phase == "report" else 1):
        log.claimed(rank, layout=layout, host=f"gpu-node-{rank}.cluster.example.com")
    log.spends(phase)
    assert log.decision.code == "ranks_missing"
    assert len(log.decision.ranks) == (1024 if phase == "report" else 1023)
    assert len(log.round.decision) <= 256 * 1024


def test_a_plan_of_the_largest_world_is_bounded():
    log = Log()
    layout = Layout(dp=8, pp=4, pcp=4, tp=8)
    processes = log.start(1024, layout=layout)
    classes = [page("kv", 1_399_040)] + [
        state(f"state-{n}", 25_399_296, entries_per_req=1) for n in range(2)
    ]
    report = a_report(120_000_000, page_bytes=1000, classes=classes, max_num_seqs=512)
    for process in processes:
        process.reports(report)
    assert log.decision.passed
    assert len(log.round.decision) <= 256 * 1024
    assert max(map(len, log.entries)) <= 512 * 1024


def test_a_decision_is_the_same_for_a_text_of_any_letters():
    log = Log()
    a, _ = log.start(2)
    a.vetoes('NUL \x00 quote " back \\ line \n \u2028 face 😂')
    log.spends("grace")
    assert is_canonical(log.round.decision)
    assert log.replayed() == log.engine


# --- what the events are ------------------------------------------------------------------------


def test_a_refusal_keeps_nothing(log):
    log.start(2)
    other = log.joined(a_join(0, launch=a_launch("run-2")))
    before, n = log.engine, len(log.entries)
    with pytest.raises(EngineNameInUse):
        other.claims()
    assert (log.engine, len(log.entries)) == (before, n)


def test_the_end_of_a_round_and_the_opening_of_the_next_are_one_entry(log):
    log.passed(90, 70)
    new = log.joined(a_join(0, layout=Layout(tp=2), launch=a_launch("run-1", 1)))
    assert [type(e) for e in new.claims()] == [Ended, Opened, Claimed]


def test_an_objection_of_a_process_marks_it_gone(log):
    a, _ = log.start(2)
    (objected,) = a.leaves()
    assert isinstance(objected, Objected)
    assert a.member.gone
