"""The rendezvous as an engine uses it, against a coordinator of a few lines on a real socket."""

import os
import random
import subprocess
import sys
import threading
import time

import pytest

from kvaccord.decision import Decision
from kvaccord.errors import (
    Aborted,
    Conflict,
    DuplicateRank,
    Failed,
    Invalid,
    LaunchMissing,
    NoVerdict,
)
from kvaccord.layout import Layout
from kvaccord.messages import Report, Veto, page
from tests.builders import WRONG
from tests.fake_coordinator import (
    CLAIMED,
    REPORT,
    VERDICT,
    WAITING,
    a_decision,
    an_outcome,
    fake_coordinator,
)
from worker_client import Agreed, Exit, Rendezvous
from worker_client.causes import cause_text, first_cause

PAIR = Layout(tp=2)
BUILT = {"kv": 8, "s": 2}


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    for name in os.environ:
        if name.startswith(("KVACCORD_", "TORCHELASTIC_", "SLURM_", "MASTER_")):
            monkeypatch.delenv(name)


def sessions():
    return {t for t in threading.enumerate() if t.name == "kvaccord-session"}


@pytest.fixture(autouse=True)
def no_thread_stays():
    before = sessions()  # one that only observes may still be at it, from a test of elsewhere
    yield
    assert sessions() <= before


@pytest.fixture
def server():
    with fake_coordinator() as server:
        yield server


def joined(server, **fields):
    fields = {"url": server.url, "engine": "e", "ranks": [0]} | fields
    return Rendezvous.join(**fields)


# A start that goes well


def test_a_rank_joins_reports_builds_and_is_done(server):
    before = sessions()
    with joined(server, inputs={"dtype": "fp8"}) as rdzv:
        agreed = rdzv.report(REPORT)
        assert agreed.entries == BUILT
        rdzv.applied(built=agreed.entries)
        assert sessions() <= before
    assert server.words() == ["join", "claim", "reports", "applied"]
    assert server.said("join")["inputs"] == {"dtype": "fp8"}
    assert server.said("applied") == {"digest": a_decision().digest, "built": BUILT}
    assert server.ended.acquire(timeout=1.0)


def test_every_step_is_a_plain_call_on_a_held_object(server):
    rdzv = joined(server)
    rdzv.applied(built=rdzv.report(REPORT).entries)
    rdzv.close()
    rdzv.close()
    assert server.words() == ["join", "claim", "reports", "applied"]


def test_the_environment_names_what_is_not_given(server, monkeypatch):
    monkeypatch.setenv("KVACCORD_URL", server.url + "/")
    monkeypatch.setenv("KVACCORD_NAMESPACE", "default")
    monkeypatch.setenv("KVACCORD_ENGINE", "{POD_NAME}")
    monkeypatch.setenv("KVACCORD_LAUNCH", "job-1#2")
    monkeypatch.setenv("POD_NAME", "e")
    with Rendezvous.join(ranks=[1], layout=PAIR) as rdzv:
        rdzv.leave()
    assert server.said("join")["launch"] == {"run": "job-1", "restart": 2, "source": "env"}


def test_a_rank_that_goes_after_the_seal_may_say_so(server):
    rdzv = joined(server)
    rdzv.applied(built=rdzv.report(REPORT).entries)
    rdzv.leave("scaled down")
    assert server.said("leave") == {"reason": "scaled down"}


def test_ranks_of_one_process_with_different_plans_have_no_common_entries():
    rows = {0: {"kv": 8}, 4: {"kv": 9}}
    with pytest.raises(ValueError, match="ranks 0, 4 hold different entries: use by_rank"):
        _ = Agreed(a_decision(), rows).entries
    assert Agreed(a_decision(), {0: {"kv": 8}, 1: {"kv": 8}}).entries == {"kv": 8}


# A start that ends early


def raising(server, fault, **fields):
    with joined(server, **fields):
        raise fault


def test_an_exception_is_a_veto_with_its_first_cause_and_is_not_masked(server):
    def load():
        try:
            try:
                raise MemoryError("2.00 GiB do not fit")
            except MemoryError as first:
                raise RuntimeError("loading failed") from first
        except RuntimeError:
            raise OSError("cleaning up failed too")  # noqa: B904

    with pytest.raises(OSError, match="cleaning up"), joined(server):
        load()
    veto = server.said("veto")
    shown = "OSError: cleaning up failed too (while handling MemoryError: 2.00 GiB do not fit)"
    assert veto["text"] == shown
    assert veto["rank"] == 0
    assert veto["retryable"] is True
    assert veto["trace"].endswith("OSError: cleaning up failed too\n")
    assert server.ended.acquire(timeout=1.0)


@pytest.mark.parametrize(("first", "noted"), [(1, True), (0, False)])
def test_a_rank_that_raises_because_another_has_gone_learns_the_first_cause(server, first, noted):
    causes = [{"rank": rank, "code": "rank_vetoed", "text": "no"} for rank in (first, 1 - first)]
    verdict = VERDICT | {"outcome": "FAILED", "code": "rank_vetoed", "causes": causes}
    failed = a_decision(verdict=verdict | {"message": "rank 1 on h: out of memory"})

    def heard():
        server.push("decision", failed.body)  # once the round has waited for other causes
        return 202, WAITING

    server.answers["veto"] = heard
    with pytest.raises(RuntimeError) as broken:
        raising(server, RuntimeError("Connection closed by peer"), layout=PAIR, launch="job-1")
    note = "kvaccord: default/e round 7 FAILED rank_vetoed: rank 1 on h: out of memory"
    assert getattr(broken.value, "__notes__", []) == [note] * noted


@pytest.mark.parametrize("fault", [KeyboardInterrupt(), SystemExit(1), GeneratorExit()])
def test_an_interrupt_is_a_veto_too(server, fault):
    with pytest.raises(type(fault)):
        raising(server, fault)
    assert server.said("veto")["text"].startswith(type(fault).__name__)


def test_a_long_veto_is_cut_and_secrets_are_masked(server):
    with pytest.raises(RuntimeError):
        raising(server, RuntimeError("token=abc123 " + "x" * 5000))
    veto = server.said("veto")
    assert veto["text"].startswith("RuntimeError: token=*** xxx")
    assert len(veto["text"]) == 2048
    assert len(veto["trace"]) <= 6144
    assert "abc123" not in str(veto)


def test_going_without_a_word_is_a_leave(server):
    with joined(server) as rdzv:
        rdzv.report(REPORT)
    assert server.words()[-1] == "leave"


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_verdict_is_followed_by_leave_never_by_a_veto(server, wrapped):
    server.answers["reports"] = (200, a_decision("FAILED"))

    def start(rdzv):
        try:
            rdzv.report(REPORT)
        except Failed as failed:
            if wrapped:
                raise RuntimeError("engine core failed to start") from failed
            raise

    with pytest.raises((Failed, RuntimeError)), joined(server) as rdzv:
        start(rdzv)
    assert server.words() == ["join", "claim", "reports", "leave"]
    assert server.said("leave") == {"reason": "Failed"}


def test_an_abort_is_raised_with_both_documents(server):
    server.answers["applied"] = (200, an_outcome("ABORTED"))
    with pytest.raises(Aborted), joined(server) as rdzv:
        rdzv.applied(built=rdzv.report(REPORT).entries)
    assert server.words()[-1] == "leave"


def test_a_refusal_after_the_claim_is_a_veto_with_its_sentence(server):
    problem = {"code": "conflict", "detail": "another report of rank 0 stands"}
    server.answers["reports"] = (409, problem)
    with pytest.raises(Conflict), joined(server) as rdzv:
        rdzv.report(REPORT)
    assert server.said("veto")["text"] == "Conflict: another report of rank 0 stands"


def test_silence_is_no_verdict_and_a_leave(server):
    server.answers["reports"] = (202, WAITING)
    with pytest.raises(NoVerdict, match="do not allocate"), joined(server, patience_s=0.3) as rdzv:
        rdzv.report(REPORT)
    assert server.words()[-1] == "leave"


def test_the_engines_own_random_numbers_are_left_alone(server):
    server.answers["reports"] = (503, {"code": "unavailable", "detail": "no store"})
    before = random.getstate()
    with pytest.raises(NoVerdict, match="503 no store"), joined(server, patience_s=0.3) as rdzv:
        rdzv.report(REPORT)
    assert random.getstate() == before


def test_a_decision_that_came_while_the_engine_was_busy_is_raised_by_the_next_call(server):
    rdzv = joined(server)
    server.push("decision", a_decision("FAILED").body)
    assert rdzv._line.session is not None
    rdzv._line.session._thread.join(5.0)
    with pytest.raises(Failed), rdzv:
        rdzv.report(REPORT)
    assert "reports" not in server.words()


@pytest.mark.parametrize("stopped", [True, False])
def test_a_dead_coordinator_delays_an_exit_by_two_seconds_at_most(stopped):
    with fake_coordinator() as server:
        rdzv = joined(server)
        server.answers["veto"] = None  # it hangs
        if not stopped:
            server.shutdown()
            server.server_close()  # nobody listens
        began_s = time.monotonic()
        with pytest.raises(MemoryError), rdzv:
            raise MemoryError
        assert time.monotonic() - began_s < 2.3


def test_a_process_ends_though_its_rendezvous_is_still_open(server):
    code = f"""
from worker_client import Rendezvous
held = Rendezvous.join(url={server.url!r}, engine="e", ranks=[0])
print("joined")
"""
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=20
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "joined\n", "")


# What cannot be true is said before anything is sent


def test_many_ranks_without_a_coordinator_are_refused_where_a_mode_asks_for_one(monkeypatch):
    monkeypatch.setenv("KVACCORD_MODE", "enforce")
    with pytest.raises(Invalid, match="set KVACCORD_URL"):
        Rendezvous.join(engine="e", ranks=[0], layout=PAIR, launch="job-1")


def test_many_ranks_without_a_launch_are_refused(server):
    with pytest.raises(LaunchMissing):
        joined(server, layout=PAIR)
    assert server.told == []


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"url": "coordinator:8970"}, "KVACCORD_URL"),
        ({"url": "ftp://coordinator"}, "KVACCORD_URL"),
        ({"url": "http://"}, "KVACCORD_URL"),
        ({"url": "http://coordinator:8970/?ns=a"}, "it has a query"),
        ({"engine": "a/b"}, "KVACCORD_ENGINE"),
        ({"engine": ""}, "KVACCORD_ENGINE is not set and join"),
        ({"engine": "llama-{LWS_GROUP_INDEX}"}, "no LWS_GROUP_INDEX"),
        ({"namespace": "a b"}, "KVACCORD_NAMESPACE"),
        ({"ranks": [1]}, "rank 1 is outside the layout"),
        ({"ranks": []}, "ranks"),
        ({"ranks": [0, 0]}, "twice"),
        ({"inputs": {"scale": 0.5}}, "inputs"),
    ],
)
def test_what_cannot_be_true_is_refused_by_name(server, fields, named):
    with pytest.raises(Invalid, match=named):
        joined(server, **fields)
    assert server.told == []


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (
            lambda: Report(**REPORT.model_dump() | {"free_bytes": 1.5}),
            "Report: free_bytes 1.5: expected a whole number, without quotes or decimals",
        ),
        (
            lambda: Report(**REPORT.model_dump() | {"total_bytes": 5}),
            "Report: free_bytes 1000 is above total_bytes 5; measure both on the same device"
            " (under MIG: the slice, never its parent)",
        ),
        (
            lambda: Report(free_bytes=5, kv_budget=4),
            "Report: kv_budget_bytes absent: it is required: add it (2 more faults in it)",
        ),
        (
            lambda: Report(**REPORT.model_dump() | {"inputs": {"scale": 0.5}}),
            "Report: inputs.scale 0.5: expected a string of at most 1024 characters, true or"
            " false, or a whole number below 2^53; send anything else as a string",
        ),
        (
            lambda: page("kv", 0),
            "CacheClass: entry_bytes 0: input should be greater than or equal to 1; correct it",
        ),
        (
            lambda: Layout(tp=64, dp=64),
            "Layout: a world of 4096 ranks is larger than the 1024 that one engine may have;"
            " start independent replicas as engines of their own",
        ),
        (
            lambda: Rendezvous.join(engine="e", ranks=[0, "1"]),
            "Join: ranks.1 1: expected a whole number, without quotes or decimals",
        ),
        (
            lambda: Rendezvous.join(engine="e", ranks=[0], inputs={"scale": 0.5}),
            "Join: inputs.scale 0.5: expected a string of at most 1024 characters, true or"
            " false, or a whole number below 2^53; send anything else as a string",
        ),
    ],
)
def test_what_cannot_be_true_is_one_line_with_the_field_the_value_and_what_to_do(build, sentence):
    with pytest.raises(Invalid) as wrong:
        build()
    assert str(wrong.value) == sentence
    assert wrong.value.field
    assert wrong.value.value


def test_a_bad_report_inside_the_block_is_heard_by_all_in_that_one_line(server):
    with pytest.raises(Invalid), joined(server):
        Report(**REPORT.model_dump() | {"free_bytes": -1})
    assert server.said("veto")["text"] == (
        "Invalid: Report: free_bytes -1: input should be greater than or equal to 0; correct it"
    )


@pytest.mark.parametrize("text", ["soon", "0", "-1", "inf", "nan"])
def test_a_patience_is_a_number_of_seconds(server, monkeypatch, text):
    monkeypatch.setenv("KVACCORD_PATIENCE_S", text)
    with pytest.raises(Invalid, match="KVACCORD_PATIENCE_S"):
        joined(server)
    monkeypatch.delenv("KVACCORD_PATIENCE_S")
    with pytest.raises(Invalid, match=f"KVACCORD_PATIENCE_S is '{text}'"):
        joined(server, patience_s=text)
    assert server.told == []


def test_reports_must_be_of_this_process_ranks(server):
    rdzv = joined(server, layout=PAIR, ranks=[0, 1], launch="job-1")
    with pytest.raises(Invalid, match="one report of each rank"), rdzv:
        rdzv.report(REPORT)
    assert server.said("veto")["text"].startswith("Invalid: reports for ranks [0]")


def test_nothing_is_applied_before_it_is_agreed(server):
    with pytest.raises(Invalid, match="before report"), joined(server) as rdzv:
        rdzv.applied(built=BUILT)


# A world of one


def test_a_world_of_one_agrees_with_itself_without_a_socket():
    with Rendezvous.join(ranks=[0]) as rdzv:  # nor a name
        agreed = rdzv.report(REPORT)
        assert agreed.entries == BUILT
        assert agreed.decision.sentence.startswith("default/alone round 0 PASSED agreed: ")
        rdzv.applied(built=agreed.entries)


def test_a_world_of_one_fails_by_the_same_rules():
    poor = REPORT.model_copy(update={"classes": (page("kv", 10_000),)})
    with pytest.raises(Failed, match="does_not_fit: rank 0: room for 0 entries") as failed:
        Rendezvous.join(engine="e", ranks=[0]).report(poor)
    assert isinstance(failed.value.decision, Decision)
    assert not failed.value.decision.retryable


# Causes


def test_the_first_cause_of_a_circle_is_found():
    a, b = ValueError("a"), ValueError("b")
    a.__cause__, b.__cause__ = b, a
    assert first_cause(a) is b


def test_a_suppressed_context_is_no_cause():
    fault = ValueError("a")
    fault.__context__ = KeyError("b")
    fault.__suppress_context__ = True
    assert first_cause(fault) is fault


def test_what_was_only_being_handled_is_mentioned_and_no_cause():
    def profile():
        try:
            raise ModuleNotFoundError("No module named 'apex'")
        except ModuleNotFoundError:
            raise RuntimeError("CUDA out of memory")  # noqa: B904

    with pytest.raises(RuntimeError) as raised:
        profile()
    assert first_cause(raised.value) is raised.value
    assert cause_text(raised.value) == (
        "RuntimeError: CUDA out of memory"
        " (while handling ModuleNotFoundError: No module named 'apex')"
    )


class Unsayable:
    def __str__(self):
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("text", "fields", "said"),
    [
        ("OOM in layer 3", {"rank": 7}, {"text": "OOM in layer 3 (said of rank 7)", "rank": 0}),
        ("no", {"rank": "x"}, {"text": "no (said of rank x)", "rank": 0}),
        (MemoryError("2 GiB"), {}, {"text": "MemoryError: 2 GiB", "trace": "MemoryError: 2 GiB\n"}),
        (None, {}, {"text": "no reason given"}),
        (["a\n", "b"], {"trace": ["x\n", "y"]}, {"text": "a\nb", "trace": "x\ny"}),
        ("no", {"code": "out of memory"}, {"code": "out_of_memory"}),
        ("no", {"code": "x" * 65}, {"code": "x" * 64}),
        ("a\ud800b", {"retryable": "yes"}, {"text": "a?b", "retryable": True}),
        (Unsayable(), {"retryable": 0}, {"text": "a Unsayable that cannot be shown"}),
        (b"\xff", {"code": 5, "trace": 5}, {"text": "\ufffd", "code": "5", "trace": "5"}),
    ],
)
def test_a_no_is_never_refused_for_its_form(server, text, fields, said):
    with joined(server) as rdzv:
        rdzv.veto(text, **fields)
    assert server.words() == ["join", "claim", "veto"]
    assert server.said("veto").items() >= said.items()
    Veto.model_validate(server.said("veto"))


@pytest.mark.parametrize(
    ("reason", "said"), [(5, "5"), ("a\ud800", "a?"), ("x" * 2000, "x" * 1024)]
)
def test_a_goodbye_is_never_refused_for_its_form(server, reason, said):
    joined(server).leave(reason)
    assert server.said("leave") == {"reason": said}


def test_a_veto_that_is_refused_for_its_form_is_said_again_in_its_smallest_one(server):
    answers = iter([(422, {"code": "invalid", "detail": "trace"}), (202, WAITING)])
    server.answers["veto"] = lambda: next(answers)
    joined(server).veto("out of \u2028memory", code="oom", trace="a trace", retryable=False)
    assert server.words() == ["join", "claim", "veto", "veto"]
    assert server.said("veto") == {"rank": 0, "text": "out of ?memory", "retryable": False}


@pytest.mark.parametrize("field", WRONG)
def test_a_value_of_a_wrong_type_is_refused_by_field_value_and_remedy(server, field):
    with pytest.raises(Invalid) as wrong:
        joined(server, **{field: WRONG[field]})
    assert wrong.value.field == field
    assert str(WRONG[field]) in str(wrong.value)
    assert server.told == []


@pytest.mark.parametrize("wrong", ["x", [REPORT], {0: {}}, {"a": REPORT}, None])
def test_what_is_no_report_is_refused_and_heard_by_all(server, wrong):
    with pytest.raises(Invalid) as refused, joined(server) as rdzv:
        rdzv.report(wrong)
    assert refused.value.field == "reports"
    assert server.said("veto")["text"].startswith("Invalid: ")


@pytest.mark.parametrize("wrong", ["kv", [8], 5, None])
def test_what_is_no_account_of_what_was_built_is_refused(server, wrong):
    with joined(server) as rdzv:
        rdzv.report(REPORT)
        with pytest.raises(Invalid) as refused:
            rdzv.applied(built=wrong)
    assert refused.value.field == "built"


@pytest.mark.parametrize(
    "exit", [Exit("x"), Exit(None), Exit(1e12), Exit(-1), Exit(float("nan")), Exit(1, code="x")]
)
def test_an_exit_that_could_not_be_carried_out_is_refused_when_it_is_given(server, exit):
    with pytest.raises(Invalid, match=r"Exit\((grace_s|code)="):
        joined(server, on_stop=exit)
    assert server.told == []


def test_a_join_that_is_given_up_in_its_claim_leaves_no_seat_behind(server):
    answers = iter([(503, b""), (503, b"")])
    server.answers["claim"] = lambda: next(answers, (200, CLAIMED))
    with pytest.raises(NoVerdict):
        joined(server, patience_s=0.15)
    assert server.words()[-2:] == ["claim", "leave"]
    assert server.said("leave") == {"reason": "NoVerdict"}


def test_a_claim_that_was_refused_is_not_made_again(server):
    server.answers["claim"] = (409, {"code": "duplicate_rank", "detail": "rank 0 is alive"})
    with pytest.raises(DuplicateRank):
        joined(server)
    assert server.words() == ["join", "claim"]


def test_a_huge_text_does_not_hold_up_the_veto(server):
    began = time.monotonic()
    with pytest.raises(RuntimeError), joined(server):
        raise RuntimeError("token=abc " * 5_000_000)
    assert time.monotonic() - began < 5
    assert server.said("veto")["text"].startswith("RuntimeError: token=***")


def test_an_exception_that_cannot_be_shown_has_a_text():
    class Broken(Exception):
        def __str__(self):
            raise ValueError

    assert cause_text(Broken()) == "Broken: its message cannot be shown"
