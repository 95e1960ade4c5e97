"""What a process says: its reports, its no, what it built; and each of them said again."""

import pytest

from coordinator.commands import Submit, Veto
from kvaccord import Layout, messages
from kvaccord.canonical import digest
from kvaccord.errors import Conflict, Invalid, Superseded
from tests.builders import a_join, a_report, blamed

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
