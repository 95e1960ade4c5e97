"""Modes off and observe, and what is said beside the steps: phases, serving, check."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import worker_client.driver  # noqa: F401  loaded once, before anything is timed
from kvaccord.errors import Aborted, Failed, Invalid, Superseded
from kvaccord.layout import Layout
from kvaccord.messages import Phase, Report, page
from tests.builders import WRONG
from tests.fake_coordinator import REPORT, WAITING, a_decision, an_outcome, fake_coordinator
from tests.wire import an_engine
from worker_client import Rendezvous, Room, Standing

PAIR = Layout(tp=2)
OWN = {"kv": 5, "s": 2}
SUPERSEDED = {"code": "superseded", "status": 410, "detail": "restart 2 runs"}


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    for name in os.environ:
        if name.startswith(("KVACCORD_", "TORCHELASTIC_", "SLURM_", "MASTER_")):
            monkeypatch.delenv(name)


@pytest.fixture
def server():
    with fake_coordinator() as server:
        yield server


def joined(server, **fields):
    return Rendezvous.join(**{"url": server.url, "engine": "e", "ranks": [0]} | fields)


def eventually(check, within_s=5.0):
    until_s = time.monotonic() + within_s
    while not check():
        assert time.monotonic() < until_s, "not within its time"
        time.sleep(0.01)


def threads():
    """Ours, of this test alone."""
    return [t.name for t in set(threading.enumerate()) - BEFORE if t.name.startswith("kvaccord-")]


BEFORE: set[threading.Thread] = set()
OBSERVED: list[Rendezvous] = []


@pytest.fixture(autouse=True)
def _threads_before():
    BEFORE.clear()
    BEFORE.update(threading.enumerate())
    yield
    while OBSERVED:  # they would go on in the background for as long as nobody answers
        line = OBSERVED.pop()._line
        if line is not None:
            line.abandoned.set()
            line.detach(1.0)


# Off


def test_off_gives_back_what_the_engine_has_of_its_own(server, monkeypatch):
    monkeypatch.setenv("KVACCORD_MODE", "off")
    with joined(server, layout=PAIR, ranks=[0, 1]) as rdzv:
        rdzv.phase("load", 1)
        agreed = rdzv.report({0: REPORT, 1: REPORT}, own=OWN)
        assert agreed.entries == OWN
        assert agreed.by_rank == {0: OWN, 1: OWN}
        rdzv.applied(built=agreed.entries)
        assert rdzv.serving() == Standing(True)
        assert rdzv.check({0: REPORT, 1: REPORT}).fits
        rdzv.veto("no")
        rdzv.leave()
    assert (rdzv.mode, rdzv.round, server.told) == ("off", 0, [])


def test_off_without_own_counts_has_none_and_no_decision():
    agreed = Rendezvous.join(ranks=[0], layout=PAIR).report(REPORT)  # no URL: off by default
    assert agreed.entries is None
    with pytest.raises(ValueError, match="nothing was agreed"):
        _ = agreed.decision


def test_own_counts_may_differ_between_the_ranks_of_a_process():
    rdzv = Rendezvous.join(ranks=[0, 1], layout=PAIR)
    agreed = rdzv.report({0: REPORT, 1: REPORT}, own={0: {"kv": 1}, 1: {"kv": 2}})
    assert agreed.by_rank == {0: {"kv": 1}, 1: {"kv": 2}}


def test_off_loads_no_http_client_and_starts_no_thread():
    code = """
import sys, threading
from kvaccord import Layout
from worker_client import Rendezvous
with Rendezvous.join(ranks=[0], layout=Layout(tp=2)) as rdzv:
    rdzv.phase("load", 1)
print([m for m in ("httpx", "asyncio", "ssl") if m in sys.modules], threading.active_count())
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20)
    assert (ended.stdout, ended.stderr) == ("[] 1\n", "")


def test_a_mode_that_does_not_exist_is_refused(server, monkeypatch):
    monkeypatch.setenv("KVACCORD_MODE", "maybe")
    with pytest.raises(Invalid, match="off, observe or enforce"):
        joined(server)


# Observe


def observing(url, **fields):
    """A whole start in mode observe, and how long it kept the engine."""
    began_s = time.monotonic()
    with Rendezvous.join(url=url, engine="e", ranks=[0], mode="observe", **fields) as rdzv:
        OBSERVED.append(rdzv)
        rdzv.phase("load", 1)
        agreed = rdzv.report(REPORT, own=OWN)
        rdzv.applied(built=agreed.entries)
        assert rdzv.serving().whole
        assert rdzv.check(REPORT).fits
    return agreed, time.monotonic() - began_s


def test_observe_says_everything_beside_the_engine_and_changes_no_number(server):
    agreed, took_s = observing(server.url)
    assert agreed.entries == OWN
    assert took_s < 0.5
    eventually(lambda: "check" in server.words())
    assert [w for w in server.words() if w != "phase"][:4] == [
        "join",
        "claim",
        "reports",
        "applied",
    ]
    assert server.said("join")["mode"] == "observe"
    assert server.said("applied")["built"] == OWN


@pytest.fixture
def black_hole():
    with socket.create_server(("127.0.0.1", 0)) as hole:
        yield f"http://127.0.0.1:{hole.getsockname()[1]}"


def closed_port():
    with socket.create_server(("127.0.0.1", 0)) as gone:
        return f"http://127.0.0.1:{gone.getsockname()[1]}"


@pytest.mark.parametrize(
    "trouble", ["dead", "black hole", "garbage", "failed", "refused", "no url"]
)
def test_observe_never_waits_raises_or_stops_whatever_answers(
    server, black_hole, trouble, monkeypatch, capfd
):
    url = {"dead": closed_port(), "black hole": black_hole, "no url": "nowhere"}.get(
        trouble, server.url
    )
    if trouble == "garbage":
        server.answers = dict.fromkeys(server.answers, (200, b"<html>"))
    if trouble == "refused":
        server.answers["join"] = (422, {"code": "invalid", "detail": "no"})
    if trouble == "failed":
        server.answers["reports"] = (200, a_decision("FAILED"))
    before = random.getstate()
    agreed, took_s = observing(url, on_stop=lambda _: os._exit(9))
    assert agreed.entries == OWN
    assert took_s < 0.5
    time.sleep(0.2)
    assert capfd.readouterr() == ("", "")
    assert random.getstate() == before


ALL_WRONG = WRONG | {"patience_s": "soon"}


@pytest.mark.parametrize("mode", ["off", "observe"])
@pytest.mark.parametrize("field", ALL_WRONG)
def test_no_argument_of_whatever_type_fails_a_start_that_is_not_enforced(server, mode, field):
    rdzv = joined(server, mode=mode, **{field: ALL_WRONG[field]})
    OBSERVED.append(rdzv)
    with rdzv:
        assert rdzv.report(REPORT, own=5).entries is None
        rdzv.applied(built=5)
        assert rdzv.serving() == Standing(True)


@pytest.mark.parametrize("mode", ["off", "observe"])
def test_no_call_raises_where_nothing_is_enforced(server, mode):
    rdzv = joined(server, mode=mode)
    OBSERVED.append(rdzv)
    rdzv.phase(None, "x", done="y")
    assert rdzv.report("x", own={0: 5, 1: {}}).entries is None
    assert rdzv.report([REPORT], own=OWN).entries == OWN
    rdzv.applied(built="kv")
    assert rdzv.check({0: {}}).fits
    rdzv.veto(None, rank="x", code=5, trace=[5])
    rdzv.leave(5)
    rdzv.close()


def test_observe_without_a_coordinator_goes_on():
    with Rendezvous.join(engine="e", ranks=[0], layout=PAIR, mode="observe") as rdzv:
        assert rdzv.report(REPORT, own=OWN).entries == OWN


def test_observe_does_not_fail_a_start_for_arguments_that_are_wrong(server):
    with joined(server, mode="observe", engine="a/b", ranks=[7]) as rdzv:
        assert rdzv.report(REPORT, own=OWN).entries == OWN
    assert server.told == []


def test_an_engine_that_raises_while_observed_is_not_delayed_and_its_cause_is_told(server):
    server.answers["reports"] = (202, WAITING)
    rdzv = joined(server, mode="observe")
    eventually(lambda: rdzv.round == 7)
    rdzv.report(REPORT)
    began_s = time.monotonic()
    with pytest.raises(MemoryError), rdzv:
        raise MemoryError("2.00 GiB do not fit")
    assert time.monotonic() - began_s < 0.2
    eventually(lambda: "veto" in server.words())
    assert server.said("veto")["text"] == "MemoryError: 2.00 GiB do not fit"
    eventually(lambda: threads() == [])


def test_an_observed_process_ends_at_once_though_nobody_answers(black_hole):
    code = f"""
from tests.fake_coordinator import REPORT
from worker_client import Rendezvous
rdzv = Rendezvous.join(url={black_hole!r}, engine="e", ranks=[0], mode="observe")
rdzv.report(REPORT)
"""
    began_s = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    assert time.monotonic() - began_s < 4.0


# Phases


def test_a_phase_is_told_in_the_background_and_of_many_the_last_one(server):
    with joined(server) as rdzv:
        began_s = time.monotonic()
        for done in range(200):
            rdzv.phase("load", done, done=done, total=200)
        assert time.monotonic() - began_s < 0.5
        eventually(lambda: "phase" in server.words() and server.said("phase")["done"] == 199)
    assert server.said("phase") == {"phase": "load", "progress": 199, "done": 199, "total": 200}
    assert server.words().count("phase") < 10


def test_progress_that_counts_anew_in_every_phase_still_only_grows(server):
    with joined(server) as rdzv:
        heard = []
        for name, progress in [("load", 5), ("load", 7), ("graphs", 0), ("graphs", 3), ("warm", 0)]:
            rdzv.phase(name, progress)
            eventually(lambda: "phase" in server.words() and server.said("phase")["phase"] == name)  # noqa: B023
            eventually(lambda: server.said("phase") not in heard)
            heard.append(server.said("phase"))
    assert [said["progress"] for said in heard] == [5, 7, 8, 11, 12]


@pytest.mark.parametrize("answer", [None, (404, b"<html>"), (500, b"oops"), (422, b'{"code":"x"}')])
def test_a_phase_raises_nothing_of_the_network(server, answer):
    server.answers["phase"] = answer
    with joined(server) as rdzv:
        rdzv.phase("load", 1)
        eventually(lambda: "phase" in server.words())
        rdzv.phase("load", 2)
        assert rdzv.report(REPORT).decision.passed


@pytest.mark.parametrize(
    ("event", "body", "kind"),
    [
        ("decision", a_decision("FAILED").body, Failed),
        ("outcome", an_outcome("ABORTED").body, Aborted),
        ("problem", b'{"code":"superseded","status":410,"detail":"restart 2 runs"}', Superseded),
    ],
)
def test_a_phase_raises_what_the_session_has_heard(server, event, body, kind):
    rdzv = joined(server)
    rdzv.phase("load", 1)
    server.push(event, body)
    eventually(lambda: rdzv._line.session.end() is not None)
    with pytest.raises(kind):
        rdzv.phase("load", 2)
    rdzv.close()


def test_a_superseded_process_hears_it_from_its_phase_too(server):
    server.answers["phase"] = (410, SUPERSEDED)
    rdzv = joined(server)
    rdzv.phase("load", 1)
    eventually(lambda: rdzv._line.session.end() is not None)
    with pytest.raises(Superseded):
        rdzv.report(REPORT)
    rdzv.close()


@pytest.mark.parametrize(
    ("name", "progress", "counts", "said"),
    [
        ("load", 2**53, {}, {"phase": "load", "progress": 4}),
        ("load", 10**400, {}, {"phase": "load", "progress": 4}),
        ("load", -1, {}, {"phase": "load", "progress": 3}),
        ("load", "7", {}, {"phase": "load", "progress": 3}),
        ("load", None, {}, {"phase": "load", "progress": 3}),
        ("load", float("nan"), {}, {"phase": "load", "progress": 3}),
        ("load", 7.5, {"total": 9.5}, {"phase": "load", "progress": 7, "total": 9}),
        ("load", 7, {"done": -1, "total": 2**53}, {"phase": "load", "progress": 7}),
        ("", 7, {}, {"phase": "unnamed", "progress": 7}),
        ("x" * 65, 7, {}, {"phase": "x" * 64, "progress": 7}),
        ("\ud800", 7, {}, {"phase": "?", "progress": 7}),
        (None, 7, {}, {"phase": "unnamed", "progress": 7}),
    ],
)
def test_a_phase_is_mended_and_never_ends_a_healthy_start(server, name, progress, counts, said):
    with joined(server) as rdzv:
        rdzv.phase("begin", 3)
        eventually(lambda: "phase" in server.words())
        rdzv.phase(name, progress, **counts)
        eventually(lambda: server.words().count("phase") == 2)
    assert server.said("phase") == said
    Phase.model_validate(said)


def test_nanoseconds_as_progress_grow_by_what_has_passed_and_silence_no_later_phase(server):
    with joined(server) as rdzv:
        body = [rdzv._phase("load", n, None, None) for n in (10**18, 10**18 + 5, 3, 4, 2**53 - 1)]
    assert [json.loads(b)["progress"] for b in body] == [0, 5, 6, 7, 8]


# After the seal


def sealed(server, **fields):
    rdzv = joined(server, **fields)
    rdzv.applied(built=rdzv.report(REPORT).entries)
    return rdzv


def test_the_threads_are_gone_after_applied_unless_serving_keeps_the_session(server):
    rdzv = sealed(server)
    assert threads() == []
    assert rdzv.serving() == Standing(True)
    assert threads() == ["kvaccord-session"]
    rdzv.close()
    assert threads() == []
    assert server.said("leave") == {"reason": "closed while serving"}


def test_a_broken_standing_names_the_ranks_that_are_missing(server):
    server.answers["serving"] = (200, {"standing": "broken", "ranks": [3]})
    with sealed(server) as rdzv:
        assert rdzv.serving() == Standing(False, (3,))


def test_a_round_that_was_retired_stands_no_longer_and_says_why(server):
    retired = {"standing": "retired", "ranks": [], "reason": "resized"}
    server.answers["serving"] = (200, retired)
    with sealed(server) as rdzv:
        assert rdzv.serving() == Standing(False, (), retired=True, reason="resized")


def test_a_process_that_serves_hears_that_it_is_superseded_and_follows_on_stop(server):
    told = threading.Event()
    rdzv = sealed(server, on_stop=lambda problem: problem.code == "superseded" and told.set())
    assert server.ended.acquire(timeout=5.0)  # the session of the start: events go to the next one
    rdzv.serving()
    server.push("problem", b'{"code":"superseded","status":410,"detail":"restart 2 runs"}')
    assert told.wait(5.0)
    with pytest.raises(Superseded):
        rdzv.phase("serving", 1)
    rdzv.close()


def test_check_says_class_by_class_what_no_longer_fits(server):
    rows = [{"rank": 0, "class": "kv", "planned": 8, "room": 6}]
    server.answers["check"] = (200, {"fits": False, "code": "plan_no_longer_fits", "ranks": rows})
    fit = sealed(server).check(REPORT)
    assert not fit.fits
    assert fit.rooms == (Room(0, "kv", 8, 6),)
    assert str(fit) == "plan_no_longer_fits: rank 0: kv planned 8, room for 6"
    assert server.said("check")["0"]["free_bytes"] == 1000


def test_a_round_that_is_no_longer_in_force_cannot_be_checked(server):
    server.answers["check"] = (410, SUPERSEDED)
    with pytest.raises(Superseded):
        sealed(server).check(REPORT)


def test_a_coordinator_that_is_away_changes_nothing_about_what_was_sealed(server):
    server.answers["check"] = (503, {"code": "unavailable", "detail": "no store"})
    rdzv = sealed(server, patience_s=5.0)
    rdzv._said.__dict__["patience_s"] = 0.3
    with pytest.raises(Exception, match="what was sealed stands"):
        rdzv.check(REPORT)


@pytest.mark.parametrize("call", ["serving", "check"])
def test_serving_and_check_are_about_a_plan_that_was_sealed(server, call):
    with joined(server) as rdzv, pytest.raises(Invalid, match=r"before applied\(\)"):
        rdzv.serving() if call == "serving" else rdzv.check(REPORT)


def test_a_world_of_one_checks_by_itself():
    with Rendezvous.join(engine="e", ranks=[0]) as rdzv:
        rdzv.applied(built=rdzv.report(REPORT).entries)
        assert rdzv.serving().whole
        assert rdzv.check(REPORT).fits
        less = Report(**REPORT.model_dump() | {"free_bytes": 700})
        assert rdzv.check(less).rooms == (Room(0, "kv", 8, 6), Room(0, "s", 2, 2))
        none = Report(**REPORT.model_dump() | {"free_bytes": 90})
        assert not rdzv.check(none).fits


def test_ranks_of_one_process_may_build_different_rows(server):
    small = Report(free_bytes=1000, kv_budget_bytes=900, classes=[page("kv", 100)])
    server.answers["reports"] = (200, a_decision(report=small))
    with joined(server) as rdzv:
        rdzv.report(small)
        rdzv.applied(built={0: {"kv": 9}})
    assert server.said("applied")["built"] == {"0": {"kv": 9}}


# With a real coordinator


def started(url, engine, rank, **fields):
    return Rendezvous.join(
        url=url, engine=engine, ranks=[rank], layout=PAIR, launch="run-1", **fields
    )


def both(url, act, **fields):
    """Act as each rank of a pair, at once; what each returned."""
    engine = an_engine()

    def one(rank):
        with started(url, engine, rank, **fields) as rdzv:
            return act(rdzv)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, range(2)))


SMALL = Report(free_bytes=1000, kv_budget_bytes=900, classes=[page("kv", 100)])


def test_phases_serving_and_check_are_understood_by_the_coordinator(url):
    def act(rdzv):
        rdzv.phase("load", 1, done=1, total=10)
        rdzv.applied(built=rdzv.report(SMALL).entries)
        standing = rdzv.serving()
        rdzv.phase("serving", 1)
        less = SMALL.model_copy(update={"kv_budget_bytes": 500})
        return standing, rdzv.check(SMALL), rdzv.check(less)

    for rank, (standing, fits, short) in enumerate(both(url, act)):
        assert standing.whole
        assert fits.fits
        assert not short.fits
        assert [r for r in short.rooms if not r.fits] == [Room(rank, "kv", 9, 5)]


def test_an_observed_start_is_sealed_beside_engines_that_hear_nothing(url):
    def act(rdzv):
        agreed = rdzv.report(SMALL, own={"kv": 4})
        rdzv.applied(built=agreed.entries)
        eventually(lambda: rdzv._steps.sealed)
        return agreed.entries, rdzv._steps.decision.document["mode"]

    assert both(url, act, mode="observe") == [({"kv": 4}, "observe")] * 2


def test_a_process_that_serves_hears_of_the_greater_restart_that_takes_over(url):
    engine, told = an_engine(), threading.Event()
    old = Rendezvous.join(
        url=url, engine=engine, ranks=[0], launch="run-1", on_stop=lambda _: told.set()
    )
    old.applied(built=old.report(SMALL).entries)
    assert old.serving().whole
    with Rendezvous.join(url=url, engine=engine, ranks=[0], launch="run-1#1") as new:
        new.applied(built=new.report(SMALL).entries)
        assert told.wait(3.0)
        with pytest.raises(Superseded):
            old.phase("serving", 1)
        with pytest.raises(Superseded):
            old.check(SMALL)
    old.close()
