"""Follows the budgets of every open round, and says when one has run out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from coordinator.cell import TICK_S, Cell
from coordinator.commands import Sign, Spend
from coordinator.engine import Round
from coordinator.events import EngineName
from coordinator.logs import Elapsed, EngineLog, LogUnavailable
from coordinator.writer import Writer
from kvaccord.errors import Unavailable

SAVE_EVERY_S = 2.0


class Budgets:
    """One task for each engine whose last round is open, and one that keeps how far they are."""

    def __init__(self, log_: EngineLog, writer: Writer, stopping: Callable[[], bool]) -> None:
        self._log = log_
        self._writer = writer
        self._stopping = stopping
        self._watchers: dict[EngineName, asyncio.Task[None]] = {}
        self._spent: dict[EngineName, Elapsed] = {}  # not saved yet
        self._saving: asyncio.Task[None] | None = None

    async def resume(self, cell: Cell) -> None:
        """Go on from what an earlier coordinator has counted."""
        last, elapsed = cell.engine.last, await self._log.elapsed(cell.name)
        if last and elapsed and last.number == elapsed[0]:
            cell.clock.resume(last, elapsed[1], elapsed[2])

    def watch(self, cell: Cell) -> None:
        last = cell.engine.last
        if last and last.open and cell.name not in self._watchers:
            task = asyncio.create_task(self._spend(cell))
            self._watchers[cell.name] = task
            task.add_done_callback(lambda _: self._watched(cell))
            if self._saving is None or self._saving.done():
                self._saving = asyncio.create_task(self._save())

    async def close(self) -> None:
        running = [*self._watchers.values(), *([self._saving] if self._saving else [])]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _watched(self, cell: Cell) -> None:
        self._watchers.pop(cell.name, None)
        if not self._stopping():
            self.watch(cell)  # the next round may have opened meanwhile

    async def _spend(self, cell: Cell) -> None:
        """Follow an engine for as long as its last round is open, and say when time has run out."""
        loop = asyncio.get_running_loop()
        while (round_ := cell.engine.last) and round_.open and not self._stopping():
            left_s, finding = _next_end(cell, round_)
            if left_s <= 0 and await self._writer.find(cell.name, finding):
                continue
            began_s = loop.time()
            # A timer may fire a little early; a budget may not.
            await cell.change(min(TICK_S, left_s + 0.001) if left_s > 0 else TICK_S, "fact")
            if not self._writer.store_answers:
                # No budget is spent while nobody could be answered.
                with suppress(Unavailable):
                    await self._writer.check_store()
                continue
            cell.clock.advance(round_, loop.time() - began_s)
            phase, spent_s = cell.clock.spent(round_)
            if phase:
                self._spent[cell.name] = (round_.number, phase, spent_s)

    async def _save(self) -> None:
        """Keep how far the budgets are, those of all engines at once, while any runs."""
        while self._watchers and not self._stopping():
            await asyncio.sleep(SAVE_EVERY_S)
            spent, self._spent = self._spent, {}
            saves = [self._log.save_elapsed(name, *elapsed) for name, elapsed in spent.items()]
            try:
                await asyncio.gather(*saves)
            except LogUnavailable:
                self._writer.store_answers = False  # found out while nobody calls


def _next_end(cell: Cell, round_: Round) -> tuple[float, Spend]:
    """What ends next, and in how many seconds."""
    clock, what, number = cell.clock, round_.phase, round_.number
    assert what is not None, "an open round has a phase"
    hard_s = clock.left_s(round_)
    if round_.causes:
        return min(hard_s, clock.grace_left_s(round_)), Spend(number, "grace")
    if round_.short and round_.verdict is None:
        return min(hard_s, clock.short_left_s(round_)), Spend(number, "shortfall")
    # Gathering has no soft end. Only at an end is it asked who shows progress.
    soft_s = hard_s if what == "gather" else clock.soft_left_s(round_)
    signs = _signs(cell, round_) if min(soft_s, hard_s) <= 0 else {}
    if soft_s <= 0 < hard_s and any(s.stuck for s in signs.values()):
        return 0.0, Spend(number, what, soft=True, signs=signs)
    return soft_s or hard_s, Spend(number, what, signs=signs)


def _signs(cell: Cell, round_: Round) -> dict[int, Sign]:
    signs = {}
    for rank in round_.waiting_for:
        if holder := round_.holder(rank):
            phase, age_s = cell.progress(holder.attempt)
            signs[rank] = Sign(phase, age_s, age_s >= round_.policy.stall_s)
    return signs
