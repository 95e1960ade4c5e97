"""The client's flows, driven by hand: an effect out, an answer in."""

import json

import pytest

from kvaccord.canonical import digest
from kvaccord.errors import (
    Aborted,
    Conflict,
    Failed,
    Invalid,
    NoVerdict,
    Refused,
    Superseded,
    Unavailable,
)
from kvaccord.layout import Layout
from kvaccord.messages import Join, Launch, Report, page
from tests.fake_coordinator import CLAIMED, REPORT, WAITING, a_decision, an_outcome
from worker_client import flow
from worker_client.flow import Answer, Call, Hear, Seat, Sleep
from worker_client.reading import problem_in

SEAT = Seat(
    address="http://c:1",
    namespace="default",
    engine="e",
    round=7,
    token="t0k3n",
    ranks=(0,),
    round_s=100.0,
    apply_s=50.0,
    claimed_s=0.0,
)
JOIN = Join(ranks=(0,), nonce="n" * 8, launch=Launch(run="r"), host="h", pid=1, layout=Layout())
REFUSED_CONNECTION = "ConnectError [Errno 111] Connection refused"


class Steps:
    """A flow, and a clock that only answers move."""

    def __init__(self, steps):
        self.steps, self.now_s = steps, 0.0
        self.effect = next(steps)

    def answer(self, *, after_s=0.0, **fields):
        """Send an answer; return the next effect."""
        self.now_s += after_s
        self.effect = self.steps.send(Answer(self.now_s, **fields))
        return self.effect

    def say(self, document, status=200, *, after_s=0.0, headers=None):
        body = document if isinstance(document, bytes) else json.dumps(document).encode()
        return self.answer(after_s=after_s, status=status, body=body, headers=headers or {})

    def freeze(self, frozen, **headers):
        headers = {"kvaccord-digest": frozen.digest} | headers
        return self.say(frozen.body, headers=headers)


def returned(act, *args, **fields):
    with pytest.raises(StopIteration) as end:
        act(*args, **fields)
    return end.value.value


def entering(**fields):
    return Steps(flow.enter("http://c:1", "default", "e", JOIN, now_s=0.0, **fields))


def agreeing(*, attached=True, report=REPORT, **fields):
    """A flow of agree() that has just put its report."""
    steps = Steps(flow.agree(SEAT, {0: report}, now_s=0.0, **fields))
    assert steps.effect == Hear("decision", 0.0)
    steps.answer(attached=attached)
    return steps


# Entering


def test_a_process_joins_then_claims_with_its_token():
    steps = entering()
    assert (steps.effect.method, steps.effect.path) == ("POST", "/v1/engines/default/e/join")
    claim = steps.say({"attempt": 3, "token": "t0k3n", "patience_s": 90})
    assert (claim.path, claim.body) == ("/v1/engines/default/e/claim", None)
    assert claim.headers == {"Kvaccord-Attempt": "t0k3n"}
    seat = returned(steps.say, CLAIMED)
    assert seat == SEAT


@pytest.mark.parametrize(
    "trouble",
    [
        {"error": REFUSED_CONNECTION},
        {"status": 503, "body": b'{"code": "unavailable", "detail": "no store"}'},
        {"status": 429, "body": b'{"code": "slow_down", "detail": "later"}'},
        {"status": 409, "body": b'{"code": "engine_name_in_use", "detail": "run a is alive"}'},
        {"status": 500, "body": b"Internal Server Error"},
        {"status": 404, "body": b"<html>default backend"},
        {"status": 302},
        {"status": 200, "body": b"<html>"},
        {"status": 200, "body": b'{"token": 5, "patience_s": 1}'},
        {"status": 200, "body": b"[]"},
    ],
)
def test_what_may_go_away_is_repeated(trouble):
    steps = entering()
    first = steps.effect
    assert steps.answer(**trouble) == Sleep(0.2)
    assert steps.answer() == first


def test_the_pauses_double_up_to_five_seconds():
    steps = entering()
    pauses = []
    for _ in range(7):
        pauses.append(steps.answer(error=REFUSED_CONNECTION).at_most_s)
        steps.answer()
    assert pauses == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


def test_the_pauses_double_against_garbage_too():
    steps = agreeing(attached=False)
    pauses = []
    for _ in range(6):
        pauses.append(steps.say(b"{}", 202).at_most_s)
        steps.answer()
    assert pauses == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0]


def test_a_call_that_timed_out_is_given_longer_so_that_a_long_queue_drains():
    steps = entering(patience_s=60.0)
    limits = []
    for _ in range(2):
        limits.append(steps.effect.timeout_s)
        steps.answer(error="ReadTimeout", after_s=steps.effect.timeout_s)
        steps.answer()
    limits.append(steps.effect.timeout_s)
    assert limits == [10.0, 20.0, 30.0]  # the last is what patience leaves


def test_a_call_that_broke_off_early_is_given_no_longer():
    steps = entering()
    steps.answer(error="ReadError [Errno 104] Connection reset by peer", after_s=3.0)
    assert steps.answer().timeout_s == 10.0


def test_the_limit_of_a_call_that_waits_is_lengthened_beside_its_wait():
    steps = agreeing(attached=False)
    assert steps.effect.timeout_s == 35.0  # the wait of 25 s, and 10 s to answer
    steps.answer(error="ReadTimeout", after_s=35.0)
    assert steps.answer(attached=False).timeout_s == 45.0
    steps.answer(error="ReadTimeout", after_s=45.0)
    assert steps.answer(attached=True).timeout_s == 40.0


def test_a_pause_that_the_server_asks_for_comes_first():
    steps = entering()
    body = {"code": "slow_down", "detail": "later", "retry_after_s": 3.5}
    assert steps.say(body, 429) == Sleep(0.2, after_s=3.5)


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (410, b'{"code": "superseded", "detail": "restart 2 runs"}', Superseded),
        (409, b'{"code": "conflict", "detail": "another join"}', Conflict),
        (418, b'{"code": "new_in_2030", "detail": "no"}', Refused),
        (401, b"<html>who are you", Refused),
        (400, b"Invalid HTTP request received.", Refused),
    ],
)
def test_a_refusal_is_final(status, body, kind):
    steps = entering()
    with pytest.raises(kind):
        steps.answer(status=status, body=body)


def test_when_patience_ends_the_error_says_where_how_often_and_what_last():
    steps = entering(patience_s=10.0)
    steps.answer(error=REFUSED_CONNECTION)
    steps.answer(after_s=9.0)
    assert steps.effect.timeout_s == 1.0
    with pytest.raises(NoVerdict, match=r"http://c:1.* 10\.0 s and 2 tries.* refused; do not"):
        steps.answer(error=REFUSED_CONNECTION, after_s=1.0)


def test_after_the_join_the_server_says_how_long_to_be_patient():
    steps = entering()
    steps.say({"token": "t", "patience_s": 90}, after_s=1000.0)
    steps.say({"code": "engine_name_in_use", "detail": "run a is alive"}, 409)
    steps.answer(after_s=89.0)
    with pytest.raises(NoVerdict, match="run a is alive"):
        steps.say({"code": "engine_name_in_use", "detail": "run a is alive"}, 409, after_s=1.5)


# Agreeing


def test_with_the_session_up_the_report_does_not_wait_and_the_decision_comes_there():
    steps = agreeing()
    assert steps.effect.path == "/v1/engines/default/e/rounds/7/reports?wait_s=0.000"
    assert steps.effect.headers["Kvaccord-Attempt"] == "t0k3n"
    assert json.loads(steps.effect.body)["0"]["free_bytes"] == 1000
    assert steps.say(WAITING, 202) == Hear("decision", 25.0)
    assert returned(steps.answer, document=a_decision()) == a_decision()


def test_without_the_session_the_report_itself_waits():
    steps = agreeing(attached=False)
    assert steps.effect.path.endswith("wait_s=25.000")
    assert steps.effect.timeout_s > 25.0
    assert returned(steps.freeze, a_decision()).passed


def test_a_silent_session_is_checked_by_reporting_again():
    steps = agreeing()
    steps.say(WAITING, 202)
    assert steps.answer(after_s=25.0, attached=True).path.endswith("wait_s=0.000")


def test_a_cut_session_is_made_up_for_by_waiting_on_the_report():
    steps = agreeing()
    steps.say(WAITING, 202)
    assert steps.answer(after_s=1.0, attached=False).path.endswith("wait_s=25.000")


def test_a_server_that_does_not_wait_is_not_asked_in_a_tight_loop():
    steps = agreeing(attached=False)
    assert steps.say(WAITING, 202) == Sleep(1.0, unless="decision")


def test_a_pause_between_tries_ends_when_the_session_brings_the_decision():
    steps = agreeing()
    assert steps.answer(error=REFUSED_CONNECTION) == Sleep(0.2, unless="decision")
    assert returned(steps.answer, document=a_decision()).passed


def test_a_round_that_failed_before_the_report_is_heard_without_a_call():
    steps = Steps(flow.agree(SEAT, {0: REPORT}, now_s=0.0))
    with pytest.raises(Failed, match="rank_vetoed: as it came"):
        steps.answer(document=a_decision("FAILED"))


def test_a_second_report_is_judged_by_the_server_not_by_what_was_heard():
    steps = Steps(flow.agree(SEAT, {0: REPORT}, now_s=0.0))
    assert isinstance(steps.answer(document=a_decision(), attached=True), Call)


def test_a_refused_session_is_raised_by_the_next_call():
    steps = Steps(flow.agree(SEAT, {0: REPORT}, now_s=0.0))
    with pytest.raises(Superseded):
        steps.answer(problem=Superseded("restart 2 runs"))


def test_a_failed_verdict_is_raised_with_the_decision():
    steps = agreeing()
    with pytest.raises(Failed) as failed:
        steps.freeze(a_decision("FAILED"))
    assert failed.value.decision == a_decision("FAILED")


GOOD = a_decision()


@pytest.mark.parametrize(
    ("body", "header"),
    [
        (b"", digest(b"")),
        (b"<html>", digest(b"<html>")),
        (GOOD.body[:-1], digest(GOOD.body[:-1])),
        (GOOD.body, digest(b"something else")),
        (GOOD.body, None),
        (GOOD.body + b"\n", digest(GOOD.body + b"\n")),
        *(
            (document.body, document.digest)
            for document in (
                a_decision(round=8),
                a_decision(engine="default/f"),
                a_decision(plan={"schedulers": []}),
                a_decision(verdict={"outcome": "PASSED"}),
                a_decision(verdict={}),
                an_outcome(),
            )
        ),
    ],
)
def test_garbage_is_asked_for_again(body, header):
    steps = agreeing()
    headers = {} if header is None else {"kvaccord-digest": header}
    assert isinstance(steps.say(body, headers=headers), Sleep)
    assert isinstance(steps.answer(), Call)


def test_the_error_at_the_end_says_that_garbage_came():
    steps = agreeing(patience_s=5.0)
    steps.say(b"<html>")
    with pytest.raises(NoVerdict, match=r"answered garbage.*do not allocate"):
        steps.answer(after_s=5.0)


def test_patience_is_the_hard_ends_and_a_minute_and_grows_when_the_server_lost_time():
    steps = agreeing()
    steps.say(WAITING, 202, after_s=159.0)
    assert steps.answer(after_s=25.0, attached=True)
    steps.say(WAITING, 202)
    steps.answer(error=REFUSED_CONNECTION, attached=True)
    with pytest.raises(NoVerdict):
        steps.answer(after_s=80.5)


def test_an_own_patience_does_not_grow():
    steps = agreeing(patience_s=5.0)
    assert steps.say(WAITING, 202, after_s=1.0) == Hear("decision", 4.0)
    with pytest.raises(NoVerdict, match=r"5\.0 s and 1 tries"):
        steps.answer(after_s=4.0, attached=True)


def test_nothing_is_waited_for_there_that_would_come_after_patience_has_ended_here():
    steps = agreeing(attached=False, patience_s=5.0)
    assert steps.effect.path.endswith("wait_s=4.000")
    assert steps.effect.timeout_s == 5.0
    assert steps.say(WAITING, 202, after_s=4.5) == Hear("decision", 0.5)
    last = steps.answer()
    assert (last.path[-12:], last.timeout_s) == ("wait_s=0.000", 0.5)
    assert steps.say(WAITING, 202) == Sleep(0.2, unless="decision")


def test_a_try_that_has_no_time_left_is_not_made():
    steps = entering(patience_s=1.0)
    steps.answer(error=REFUSED_CONNECTION)
    with pytest.raises(NoVerdict, match=r"after 0\.9 s and 1 tries, the last: ConnectError"):
        steps.answer(after_s=0.95)


def test_a_plan_for_more_than_was_offered_is_refused():
    generous = Report(**REPORT.model_dump() | {"kv_budget_bytes": 1000})
    steps = agreeing()
    with pytest.raises(Invalid, match="asks rank 0 for 1000 bytes and it offered 900"):
        steps.freeze(a_decision(report=generous))


def test_a_plan_for_less_than_was_offered_is_taken():
    modest = Report(**REPORT.model_dump() | {"kv_budget_bytes": 500})
    steps = agreeing()
    assert returned(steps.freeze, a_decision(report=modest)).entries(0) == {"kv": 4, "s": 2}


def test_a_plan_for_other_classes_is_refused():
    steps = agreeing(report=Report(**REPORT.model_dump() | {"classes": (page("kv", 100),)}))
    with pytest.raises(Invalid, match="has the classes"):
        steps.freeze(a_decision())


# Building


def building(**fields):
    steps = Steps(flow.build(SEAT, a_decision(), b"{}", now_s=0.0, **fields))
    assert steps.effect == Hear("outcome", 0.0)
    return steps


def test_a_sealed_round_ends_the_building():
    steps = building()
    assert steps.answer(attached=True).path.endswith("/applied?wait_s=0.000")
    steps.say(WAITING, 202)
    assert returned(steps.answer, document=an_outcome()).sealed


def test_an_abort_is_raised_with_both_documents():
    steps = building()
    steps.answer(attached=True)
    with pytest.raises(Aborted) as aborted:
        steps.freeze(an_outcome("ABORTED"))
    assert aborted.value.decision == a_decision()
    assert aborted.value.outcome == an_outcome("ABORTED")


def test_a_round_that_was_aborted_while_building_is_heard_without_a_call():
    steps = building()
    with pytest.raises(Aborted):
        steps.answer(document=an_outcome("ABORTED"))


def test_building_has_its_own_patience():
    steps = building()
    steps.answer(attached=True)
    steps.answer(error=REFUSED_CONNECTION)
    with pytest.raises(NoVerdict, match="no outcome"):
        steps.answer(after_s=110.5)


# Saying goodbye


def test_a_goodbye_is_said_once_when_it_is_heard():
    steps = Steps(flow.say(SEAT, "veto", b"{}", now_s=0.0))
    assert steps.effect.path.endswith("/rounds/7/veto")
    assert returned(steps.answer, status=202).status == 202


def test_a_goodbye_is_never_an_error_of_its_own():
    steps = Steps(flow.say(SEAT, "leave", b"{}", now_s=0.0))
    assert returned(steps.answer, status=410).status == 410


def test_a_goodbye_to_nobody_ends_within_two_seconds():
    steps = Steps(flow.say(SEAT, "veto", b"{}", now_s=0.0))
    assert steps.effect.timeout_s < 2.0
    steps.answer(error=REFUSED_CONNECTION)
    assert steps.answer(after_s=0.2).timeout_s < 1.8
    steps.answer(status=503, after_s=0.1)
    assert returned(steps.answer, after_s=1.6) is None


def test_an_unknown_problem_of_a_server_fault_may_go_away():
    problem = problem_in(503, b'{"code": "moving", "detail": "soon"}')
    assert isinstance(problem, Unavailable)
