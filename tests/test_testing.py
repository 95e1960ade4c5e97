"""The testing kit: a coordinator with troubles on the way, the other ranks, any answer unserved."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvaccord.errors import (
    PROBLEMS,
    Aborted,
    Failed,
    Forbidden,
    KvaccordError,
    NoVerdict,
    Refused,
    Retryable,
    Unavailable,
)
from kvaccord.layout import Layout
from kvaccord.messages import Report, page
from worker_client import testing
from worker_client.testing import (
    ABORTED,
    FAILED,
    Peers,
    Start,
    scripted,
)

coordinator = testing.coordinator  # the fixture of the kit, in place of this suite's own

ROOT = Path(__file__).parents[1]
FOUR = Layout(tp=4)


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    for name in os.environ:
        if name.startswith(("KVACCORD_", "TORCHELASTIC_", "SLURM_", "MASTER_")):
            monkeypatch.delenv(name)


def a_report(pages=9):
    return Report(free_bytes=10_000, kv_budget_bytes=100 * pages, classes=[page("kv", 100)])


def a_start(coordinator, reports=None, **fields):
    return Start(coordinator.url, FOUR, reports or a_report(), **fields)


# The other ranks


def test_peers_play_the_other_ranks_of_a_start(coordinator):
    start = a_start(coordinator, {rank: a_report(pages=9 - rank) for rank in range(4)})
    with Peers(start, without=[3]) as peers, start.join(3) as rdzv:
        agreed = rdzv.report(start.report_of(3))
        assert agreed.entries == {"kv": 6}
        rdzv.applied(built=agreed.entries)
    assert peers.heard == {0: "SEALED", 1: "SEALED", 2: "SEALED"}


def test_a_process_takes_part_by_its_environment(coordinator):
    start = a_start(coordinator)
    code = """
from kvaccord import Layout, Report, page
from worker_client import Rendezvous
with Rendezvous.join(ranks=[3], layout=Layout(tp=4)) as rdzv:
    report = Report(free_bytes=10000, kv_budget_bytes=500, classes=[page("kv", 100)])
    agreed = rdzv.report(report)
    rdzv.applied(built=agreed.entries)
    print(agreed.entries)
"""
    with Peers(start, without=[3]):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, **start.environ},
            capture_output=True,
            text=True,
            timeout=30,
        )
    assert (done.stdout, done.stderr) == ("{'kv': 5}\n", "")


@pytest.mark.parametrize(
    ("fates", "code"),
    [({"raising": {1: "out of memory"}}, "rank_vetoed"), ({"dying": [1]}, "rank_lost")],
)
def test_a_peer_may_raise_or_die(coordinator, fates, code):
    start = a_start(coordinator)
    with Peers(start, without=[3], **fates), pytest.raises(Failed) as failed, start.join(3) as rdzv:
        rdzv.report(start.report_of(3))
    assert failed.value.decision.code == code
    assert failed.value.decision.ranks == [1]


# Troubles on the way


def test_a_cut_of_all_connections_loses_nobody(coordinator):
    start = a_start(coordinator)
    with Peers(start, without=[3]) as peers, start.join(3) as rdzv:
        time.sleep(0.3)
        coordinator.cut()
        rdzv.applied(built=rdzv.report(start.report_of(3)).entries)
    assert set(peers.heard.values()) == {"SEALED"}


def test_a_slow_way_only_takes_longer(coordinator):
    start = a_start(coordinator)
    with coordinator.late(0.2), Peers(start) as peers:
        peers.join()
    assert peers.heard == dict.fromkeys(range(4), "SEALED")


def test_garbage_in_between_is_no_verdict(coordinator):
    start = a_start(coordinator, patience_s=0.5)
    with coordinator.garbage(), pytest.raises(NoVerdict, match="HTML"):
        start.join(0)
    with Peers(a_start(coordinator)) as peers:
        peers.join()
    assert peers.heard == dict.fromkeys(range(4), "SEALED")


def test_a_coordinator_that_is_killed_is_no_verdict(coordinator):
    start = a_start(coordinator, patience_s=0.5)
    coordinator.kill()
    with pytest.raises(NoVerdict):
        start.join(0)


# Any answer without a server


def play(join):
    with join(ranks=[3], layout=FOUR, engine="llama") as rdzv:
        agreed = rdzv.report(a_report())
        rdzv.applied(built=agreed.entries)
        return agreed


def test_a_scripted_start_that_goes_well_plans_what_was_reported():
    agreed = play(scripted("agreed").join)
    assert agreed.entries == {"kv": 9}
    assert agreed.decision.sentence.startswith("default/llama round 1 PASSED agreed: ")


@pytest.mark.parametrize("code", sorted(FAILED))
def test_every_verdict_can_be_scripted(code):
    with pytest.raises(Failed) as failed:
        play(scripted(code).join)
    assert failed.value.decision.code == code
    assert failed.value.decision.ranks == [3]


@pytest.mark.parametrize("code", sorted(ABORTED))
def test_every_abort_can_be_scripted(code):
    with pytest.raises(Aborted) as aborted:
        play(scripted(code, at="applied").join)
    assert aborted.value.outcome.code == code


@pytest.mark.parametrize("code", sorted(PROBLEMS))
def test_every_refusal_can_be_scripted(code):
    again = issubclass(PROBLEMS[code], Retryable | Unavailable)
    with pytest.raises(NoVerdict if again else PROBLEMS[code], match=f"scripted: {code}"):
        play(scripted(code, at="join").join)


async def play_awaited(join):
    async with await join(ranks=[3], layout=FOUR, engine="llama") as rdzv:
        agreed = await rdzv.report(a_report())
        await rdzv.applied(built=agreed.entries)
        return agreed


def ended(start):
    """What came of a start: entries, or the kind of its end."""
    try:
        return start().entries
    except KvaccordError as fault:
        return type(fault)


@pytest.mark.parametrize(
    ("code", "end"),
    [
        ("agreed", {"kv": 9}),
        ("rank_lost", Failed),
        ("apply_failed", Aborted),
        ("superseded", Failed),
        ("forbidden", Forbidden),
        ("no_verdict", NoVerdict),
    ],
)
def test_an_awaited_start_is_scripted_as_a_blocking_one(code, end):
    assert ended(lambda: asyncio.run(play_awaited(scripted(code).async_join))) == end
    assert ended(lambda: play(scripted(code).join)) == end


def test_silence_and_a_refusal_of_the_report_can_be_scripted():
    with pytest.raises(NoVerdict, match="silent"):
        play(scripted("no_verdict").join)
    with pytest.raises(Forbidden):
        play(scripted("forbidden", at="report").join)
    assert issubclass(Forbidden, Refused)


def test_a_code_that_does_not_exist_is_named():
    with pytest.raises(ValueError, match="no code 'rank_tired'"):
        scripted("rank_tired")


@pytest.mark.parametrize(
    ("code", "at", "told"),
    [
        ("apply_failed", "report", "give at='applied'"),
        ("does_not_fit", "applied", "give at='report'"),
        ("apply_failed", "aplied", "no step 'aplied'"),
        ("agreed", "claim", "no step 'claim'"),
    ],
)
def test_a_code_at_a_step_where_it_is_never_heard_is_refused(code, at, told):
    with pytest.raises(ValueError, match=told):
        scripted(code, at=at)


# The examples


def test_the_example_decisions_are_what_the_rules_make_today():
    from examples import make_decisions

    made = make_decisions.documents()
    folder = ROOT / "examples/decisions"
    assert sorted(made) == sorted(path.name for path in folder.glob("*.json"))
    for name, body in made.items():
        said = "examples/make_decisions.py makes another one: run it again"
        assert (folder / name).read_bytes() == body, f"{name}: {said}"


def test_there_is_an_example_for_every_code_that_the_rules_can_give():
    from examples import make_decisions

    have = {
        ((d := json.loads(body)).get("verdict") or d)["code"]
        for body in make_decisions.documents().values()
    }
    assert have == {"agreed", "sealed"} | FAILED | ABORTED
