"""Processes that stand still (SIGSTOP): a pause is a pause, of nobody's doing."""

from __future__ import annotations

import asyncio
import os
import random
import time
from pathlib import Path

import pytest

from tests.crash.checks import check
from tests.crash.crowd import Crowd
from tests.crash.ranks import a_start, status
from tests.crash.server import serving

PAUSES_S = [5.0, 60.0] if os.environ.get("KVACCORD_NIGHT") else [5.0]
# Budgets and patience that a pause would end at once if it counted.
TIGHT = ("--gather-s", "4", "--report-s", "4", "--apply-s", "4", "--lost-after-s", "2")


@pytest.mark.parametrize("pause_s", PAUSES_S)
def test_a_coordinator_that_stood_still_has_lost_nobody_and_spent_no_budget(
    tmp_path: Path, pause_s: float
) -> None:
    with serving(tmp_path, *TIGHT) as server:
        crowd = Crowd(server.port, 5, 3, 0.4, random.Random(2))

        async def play() -> None:
            playing = asyncio.create_task(crowd.play())
            await asyncio.sleep(1.5)
            server.pause()
            await asyncio.sleep(pause_s)
            server.go_on()
            await asyncio.sleep(1.0)
            crowd.over = True
            await asyncio.wait_for(playing, 60)

        asyncio.run(play())
        assert crowd.wrong == []
        assert crowd.sealed > 5
        check(crowd.history, server.url)


@pytest.mark.parametrize("pause_s", PAUSES_S)
def test_a_real_rank_that_is_stopped_stays_present_and_outwaits_a_stopped_coordinator(
    tmp_path: Path, pause_s: float
) -> None:
    budgets = ("--gather-s", "4", "--report-s", "90", "--apply-s", "4", "--lost-after-s", "2")
    with serving(tmp_path, *budgets) as server, a_start(server.url) as (first, second):
        second.pause()
        time.sleep(pause_s)
        members = status(server.url, [first])["members"]
        assert [m["presence"] for m in members] == ["present", "present"]
        second.go_on()
        first.go()  # its long poll waits while the coordinator stands still
        time.sleep(0.3)
        server.pause()
        time.sleep(pause_s)
        server.go_on()
        second.go()
        assert len({each.says("reported")["digest"] for each in (first, second)}) == 1
        for each in (first, second):
            each.go()
        for each in (first, second):
            each.says("sealed")
