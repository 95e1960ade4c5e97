"""The awaited rendezvous: the same flow, on an event loop that stays free."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from itertools import pairwise

import pytest

from kvaccord.errors import Aborted, Failed, Invalid, NoVerdict
from kvaccord.layout import Layout
from kvaccord.messages import Report, page
from tests.fake_coordinator import (
    CLAIMED,
    REPORT,
    WAITING,
    a_decision,
    an_outcome,
    fake_coordinator,
)
from tests.wire import an_engine
from worker_client import AsyncRendezvous

BUILT = {"kv": 8, "s": 2}


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    for name in os.environ:
        if name.startswith(("KVACCORD_", "TORCHELASTIC_", "SLURM_", "MASTER_")):
            monkeypatch.delenv(name)


@pytest.fixture
def server():
    with fake_coordinator() as server:
        yield server


def joining(server, **fields):
    return AsyncRendezvous.join(**{"url": server.url, "engine": "e", "ranks": [0]} | fields)


async def a_whole_start(server):
    async with await joining(server) as rdzv:
        await rdzv.phase("load", 1)
        agreed = await rdzv.report(REPORT)
        assert agreed.entries == BUILT
        await rdzv.applied(built=agreed.entries)
        assert (await rdzv.check(REPORT)).fits
        assert (await rdzv.serving()).whole


def in_a_loop(steps):
    return asyncio.run(steps)


def test_a_rank_joins_reports_builds_serves_and_is_done(server):
    before = set(threading.enumerate())
    in_a_loop(a_whole_start(server))
    words = [word for word in server.words() if word != "phase"]
    assert words == ["join", "claim", "reports", "applied", "check", "serving", "leave"]
    assert "kvaccord-session" not in [t.name for t in set(threading.enumerate()) - before]


def test_asyncio_is_loaded_only_for_those_who_use_it():
    code = "import sys, worker_client; print('asyncio' in sys.modules);"
    code += "worker_client.AsyncRendezvous; print('asyncio' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\nTrue\n"


def test_the_loop_stays_free_while_a_verdict_is_waited_for(server):
    server.answers["reports"] = (202, WAITING)
    ticks = []

    async def ticking():
        while True:
            ticks.append(time.monotonic())
            await asyncio.sleep(0.01)

    async def start():
        other = asyncio.create_task(ticking())
        async with await joining(server) as rdzv:
            asyncio.get_running_loop().call_later(
                0.5, server.push, "decision", a_decision("FAILED").body
            )
            await rdzv.report(REPORT)
        other.cancel()

    with pytest.raises(Failed):
        in_a_loop(start())
    assert max(b - a for a, b in pairwise(ticks)) < 0.4
    assert server.words()[-1] == "leave"


def test_an_exception_is_a_veto_with_its_first_cause(server):
    async def start():
        async with await joining(server):
            raise MemoryError("2.00 GiB do not fit")

    with pytest.raises(MemoryError):
        in_a_loop(start())
    assert server.said("veto")["text"] == "MemoryError: 2.00 GiB do not fit"


def test_a_cancelled_task_is_a_veto_and_ends_at_once(server):
    server.answers["reports"] = (202, WAITING)

    async def start():
        async with await joining(server) as rdzv:
            await rdzv.report(REPORT)

    async def cancelled():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(start(), 1.0)

    began_s = time.monotonic()
    in_a_loop(cancelled())
    assert time.monotonic() - began_s < 3.0
    assert server.said("veto")["text"] == "CancelledError"


def test_an_abort_is_raised_with_both_documents(server):
    server.answers["applied"] = (200, an_outcome("ABORTED"))

    async def start():
        async with await joining(server) as rdzv:
            await rdzv.applied(built=(await rdzv.report(REPORT)).entries)

    with pytest.raises(Aborted):
        in_a_loop(start())


def test_two_tasks_do_not_use_one_object_at_once(server):
    server.answers["reports"] = (202, WAITING)

    async def start():
        rdzv = await joining(server)
        first = asyncio.create_task(rdzv.report(REPORT))
        await asyncio.sleep(0.1)
        with pytest.raises(Invalid, match=r"while report\(\) runs"):
            await rdzv.report(REPORT)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await rdzv.leave("given up")

    in_a_loop(start())
    assert server.said("leave") == {"reason": "given up"}


def test_a_join_that_is_cancelled_in_its_claim_leaves_no_seat_behind(server):
    claims = []

    def claim():
        claims.append(time.monotonic())
        if len(claims) == 1:
            time.sleep(0.5)
        return 200, CLAIMED

    server.answers["claim"] = claim

    async def start():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(joining(server), 0.2)

    in_a_loop(start())
    assert server.words() == ["join", "claim", "claim", "veto"]
    assert server.said("veto")["text"] == "CancelledError"


def test_a_task_may_leave_while_another_waits_and_nothing_stays_locked(server):
    server.answers["reports"] = (202, WAITING)

    async def start():
        rdzv = await joining(server)
        first = asyncio.create_task(rdzv.report(REPORT))
        await asyncio.sleep(0.1)
        await rdzv.veto("the real cause")
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        with pytest.raises(Invalid, match="not joined twice"):
            await rdzv.report(REPORT)

    in_a_loop(start())
    assert server.said("veto")["text"] == "the real cause"


def test_a_black_hole_is_no_verdict_within_its_patience():
    with socket.create_server(("127.0.0.1", 0)) as hole:
        url = f"http://127.0.0.1:{hole.getsockname()[1]}"
        began_s = time.monotonic()
        with pytest.raises(NoVerdict, match=url):
            in_a_loop(AsyncRendezvous.join(url=url, engine="e", ranks=[0], patience_s=0.5))
        assert time.monotonic() - began_s < 1.5


def test_a_loop_that_ends_without_leaving_is_said_at_exit(server):
    code = f"""
import asyncio
from worker_client import AsyncRendezvous
async def start():
    global held
    held = await AsyncRendezvous.join(url={server.url!r}, engine="e", ranks=[0])
    raise MemoryError("2.00 GiB do not fit")
asyncio.run(start())
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20)
    assert ended.returncode == 1
    assert server.said("veto")["text"] == "MemoryError: 2.00 GiB do not fit"


@pytest.mark.parametrize("mode", ["off", "observe"])
def test_off_and_observe_give_back_the_engines_own(server, mode):
    async def start():
        async with await joining(server, mode=mode) as rdzv:
            agreed = await rdzv.report(REPORT, own=BUILT)
            await rdzv.applied(built=agreed.entries)
            return agreed.entries

    assert in_a_loop(start()) == BUILT


def test_a_world_of_one_agrees_with_itself_without_a_socket():
    async def start():
        async with await AsyncRendezvous.join(engine="e", ranks=[0]) as rdzv:
            agreed = await rdzv.report(REPORT)
            await rdzv.applied(built=agreed.entries)
            return agreed.entries

    assert in_a_loop(start()) == BUILT


def test_four_ranks_on_one_loop_leave_a_real_coordinator_with_one_decision(url):
    engine = an_engine()

    async def start(rank):
        async with await AsyncRendezvous.join(
            url=url, engine=engine, ranks=[rank], layout=Layout(tp=4), launch="run-1"
        ) as rdzv:
            budget = 900 + 100 * rank
            report = Report(free_bytes=2000, kv_budget_bytes=budget, classes=[page("kv", 100)])
            agreed = await rdzv.report(report)
            await rdzv.applied(built=agreed.entries)
            return agreed.entries, agreed.decision.digest

    async def all_four():
        return await asyncio.gather(*map(start, range(4)))

    heard = in_a_loop(all_four())
    assert len({digest for _, digest in heard}) == 1
    assert [entries for entries, _ in heard] == [{"kv": 9}] * 4
