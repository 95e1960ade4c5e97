"""Carries commands out: decide, append, and only then believe it and tell.

Commands that wait at one engine are decided together, in the order they came, into one entry: in a
start of n ranks n of them wait, and an append for each would be most of what the start costs.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from itertools import chain, groupby, islice
from typing import Any

from coordinator.cell import Cell, Waiting
from coordinator.commands import Command, Finding, Lose, Spend, Suspect
from coordinator.compaction import compaction
from coordinator.engine import Engine
from coordinator.events import Decided, Ended, EngineName, Entry, Event
from coordinator.logs import EngineLog, LogConflict, LogUnavailable, StoreUnreadable
from coordinator.round import Step, decide_together
from kvaccord.errors import NotFound, Unavailable

log = logging.getLogger(__name__)

RETRY_S = 0.5
MOST_TOGETHER = 64  # each of them is answered after the last was decided
AGAINST = Suspect | Lose | Spend  # findings that may speak against whoever is being answered


class Writer:
    """The cells of all engines, and the one hand that writes to their logs.

    keep_rounds: how many rounds an engine's log keeps.
    on_kept: told the events of an entry that is durable.
    on_found: told that the log may hold what nobody here has waited for.
    """

    def __init__(
        self,
        log_: EngineLog,
        *,
        keep_rounds: Callable[[EngineName], int],
        on_kept: Callable[[Cell, tuple[Event, ...]], None],
        on_found: Callable[[Cell], None],
        stopping: Callable[[], bool],
        append_seconds: Callable[[float], None],
    ) -> None:
        self.cells: dict[EngineName, Cell] = {}
        self.store_answers = True
        self._log = log_
        self._keep_rounds = keep_rounds
        self._on_kept = on_kept
        self._on_found = on_found
        self._stopping = stopping
        self._append_seconds = append_seconds
        self._chores: set[asyncio.Task[None]] = set()
        self._workers: set[asyncio.Task[None]] = set()

    def cell(self, name: EngineName) -> Cell:
        """Raises NotFound."""
        if name not in self.cells:
            raise NotFound(f"no engine {name} has joined here", field="engine", value=str(name))
        return self.cells[name]

    def cell_to_join(self, name: EngineName) -> Cell:
        """A new one for an engine that nobody knows; it goes again if nothing is kept of it."""
        cell = self.cells.get(name)
        if cell is None:
            cell = self.cells[name] = Cell(name, self._log.store_id)
            cell.stale = False  # an append that finds more in the log reads it
        return cell

    async def load(self) -> list[Cell]:
        """Read every log."""
        for name in await self._log.names():
            cell = self.cells[name] = Cell(name, self._log.store_id)
            cell.load(await self._log.read(name), await self._log.first(name))
            cell.stale = False
        return list(self.cells.values())

    async def close(self) -> None:
        """Whoever still waits hears that the store is closed."""
        for chore in self._chores:
            chore.cancel()
        await asyncio.gather(*self._chores, return_exceptions=True)
        await self._log.close()
        await asyncio.gather(*self._workers, return_exceptions=True)

    # --- carrying out ---------------------------------------------------------------------------

    async def carry_out(self, cell: Cell, command: Command) -> Step:
        """Returns once what comes of it is durable. Raises what refuses it, and Unavailable.

        A caller that goes away takes its command along, unless that is being appended.
        """
        heard = asyncio.get_running_loop().create_future()
        cell.waiting.append(Waiting(command, heard))
        if cell.worker is None:
            cell.worker = asyncio.create_task(self._drain(cell))
            self._workers.add(cell.worker)
            cell.worker.add_done_callback(self._workers.discard)
        step: Step = await heard
        return step

    async def find(self, name: EngineName, finding: Finding) -> bool:
        """Take a finding to the log, for as long as the store needs; whether it still mattered."""
        while not self._stopping():
            try:
                return bool((await self.carry_out(self.cell(name), finding)).events)
            except Unavailable as error:
                log.warning("%s: %s; trying again", name, error)
                await asyncio.sleep(RETRY_S)
        return False

    async def _drain(self, cell: Cell) -> None:
        """Carry out what waits, until nothing does."""
        try:
            while cell.waiting:
                async with cell.lock:
                    batch = _together(cell)
                    steps = await self._carry_out(cell, batch)
                for waiting, step in zip(batch, steps, strict=False):
                    cell.waiting.popleft()
                    _answer(waiting, step)
                # Whoever is answered goes on first: what is found after it was answered comes after
                # what it does now.
                await asyncio.sleep(0)
        finally:
            # Something is left only where the process ends.
            for waiting in cell.waiting:
                waiting.heard.cancel()
            cell.waiting.clear()
            cell.worker = None
            self._forget_if_empty(cell)

    async def _carry_out(self, cell: Cell, batch: list[Waiting]) -> list[Step | Exception]:
        """What came of these, or of as many of them as one entry holds."""
        try:
            while True:
                await self._refresh(cell)
                steps = decide_together(cell.engine, (w.command for w in batch))
                kept = [step for step in steps if isinstance(step, Step)]
                events = tuple(chain.from_iterable(step.events for step in kept))
                if not events:
                    return steps
                if await self._append(cell, events, kept[-1].after):
                    break
        except Exception as fault:  # whatever it is, all of them wait to hear of it
            return [fault for _ in batch]
        self._tell(cell, events)
        if any(waiting.heard.cancelled() for waiting in batch):
            self._on_found(cell)
        return steps

    async def _append(self, cell: Cell, events: tuple[Event, ...], after: Engine) -> bool:
        """Whether it was kept: not where the log holds more than is known here.

        Raises Unavailable where that remains unknown.
        """
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        cell.stale = True  # until the append is known to have been kept, or not
        try:
            await self._log.append(cell.name, Entry(events=events), n=cell.engine.entries)
        except LogConflict:
            return False
        except LogUnavailable as error:
            self.store_answers = False
            self._do_later(self._read_again(cell))
            raise unavailable(error) from error
        self.store_answers = True
        self._append_seconds(loop.time() - began_s)
        cell.stale = False
        cell.add(events, after)
        return True

    def _tell(self, cell: Cell, events: tuple[Event, ...]) -> None:
        try:
            self._on_kept(cell, events)
        except Exception:  # what is kept is kept, and nobody may go on waiting for it
            log.exception("%s: what was kept has been told late", cell.name)
            cell.wake()
        ended = any(isinstance(e, Decided | Ended) for e in events)
        if ended and len(cell.engine.rounds) > 2 * self._keep_rounds(cell.name):
            self._do_later(self._compact(cell))

    def _forget_if_empty(self, cell: Cell) -> None:
        """Refused, or not kept: nobody has joined."""
        idle = cell.worker is None and not cell.stale
        if idle and not cell.engine.entries and self.cells.get(cell.name) is cell:
            del self.cells[cell.name]

    # --- the store ------------------------------------------------------------------------------

    async def check_store(self) -> None:
        """Raises Unavailable when the store cannot be read, or written after it could not be."""
        nobody = EngineName("", "")  # no engine has this name
        try:
            await self._log.read(nobody)
            if not self.store_answers:
                # A full disk still reads: only a write shows that it can write again.
                await self._log.save_elapsed(nobody, 0, "gather", 0.0)
        except (LogUnavailable, StoreUnreadable) as error:
            self.store_answers = False
            raise unavailable(error) from error
        self.store_answers = True

    async def _refresh(self, cell: Cell) -> None:
        if cell.stale:
            try:
                first = await self._log.first(cell.name)
                cell.load(await self._log.read(cell.name), first)
            except (LogUnavailable, StoreUnreadable) as error:
                raise unavailable(error) from error
            cell.stale = False
            self._on_found(cell)

    async def _read_again(self, cell: Cell) -> None:
        """After an append without an answer: find out what the log holds, whoever calls or not."""
        while cell.stale and not self._stopping():
            await asyncio.sleep(RETRY_S)
            async with cell.lock:
                with suppress(Unavailable):
                    await self._refresh(cell)
        self._on_kept(cell, ())
        self._forget_if_empty(cell)

    async def _compact(self, cell: Cell) -> None:
        """Snapshot what stays of a log and drop what is before it."""
        async with cell.lock:
            try:
                await self._refresh(cell)
                if cell.engine.last and cell.engine.last.open:
                    return  # its facts are still being told; the next end comes by here again
                first = cell.engine.entries
                for event in compaction(cell.engine, self._keep_rounds(cell.name)):
                    cell.stale = True
                    entry = Entry(events=(event,))
                    await self._log.append(cell.name, entry, n=cell.engine.entries)
                    cell.stale = False
                    cell.add(entry.events)
                if cell.engine.entries > first:
                    await self._log.drop(cell.name, first)
            except (LogConflict, LogUnavailable, Unavailable) as error:
                log.warning("%s: old rounds are kept for now: %s", cell.name, error)

    def _do_later(self, chore: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(chore)
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)


def _together(cell: Cell) -> list[Waiting]:
    """The next commands that go into one entry.

    What speaks against a process never shares the entry of a call before it, which may be its own:
    whoever is answered is not suspect.
    """
    cell.waiting = deque(w for w in cell.waiting if not w.heard.cancelled())
    kinds = groupby(cell.waiting, lambda w: isinstance(w.command, AGAINST))
    _, alike = next(kinds, (False, iter(())))
    return list(islice(alike, MOST_TOGETHER))


def _answer(waiting: Waiting, step: Step | Exception) -> None:
    if waiting.heard.done():
        return  # its caller has gone
    if isinstance(step, Step):
        waiting.heard.set_result(step)
    else:
        waiting.heard.set_exception(step)


def unavailable(error: Exception) -> Unavailable:
    return Unavailable(
        f"the store does not answer ({error}); nothing was acknowledged, repeat the call",
        retry_after_s=1.0,
    )
