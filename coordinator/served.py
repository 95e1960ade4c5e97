"""Waiting in seconds that this process really served."""

from __future__ import annotations

import asyncio

LEAST_TICK_S = 0.25


async def served_sleep(seconds: float) -> None:
    """Sleep until this process has run for so long: of a pause only one tick counts.

    After a pause (stopped, swapped, starved) whoever waits for us must first be heard, so the
    time in which nobody could be heard does not count against them.
    """
    loop = asyncio.get_running_loop()
    tick_s = max(LEAST_TICK_S, seconds / 20)
    while seconds > 0:
        began_s, step_s = loop.time(), min(tick_s, seconds)
        await asyncio.sleep(step_s)
        seconds -= min(loop.time() - began_s, step_s)
