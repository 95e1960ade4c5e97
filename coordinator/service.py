"""The shell round the rules: decide, append, then tell. Time and presence enter here."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from coordinator.cell import TICK_S, Cell
from coordinator.check import check_rooms
from coordinator.commands import (
    Apply,
    Cancel,
    Claim,
    Clear,
    Command,
    Finding,
    Leave,
    Mark,
    Reserve,
    Retire,
    Serve,
    Sign,
    Spend,
    Submit,
    Veto,
)
from coordinator.compaction import compaction
from coordinator.engine import Engine, Round
from coordinator.events import (
    Cleared,
    Decided,
    Ended,
    EngineName,
    Entry,
    Opened,
    Serving,
    Touch,
    entry_of,
)
from coordinator.logs import Elapsed, EngineLog, LogConflict, LogUnavailable, StoreUnreadable
from coordinator.policies import Policies
from coordinator.presence import Connection, Presence, Seat
from coordinator.round import decide
from coordinator.rules.calls import check_reports
from coordinator.rules.joining import find_attempt
from coordinator.rules.members import is_followed, member_of, refuse_if_taken_over
from kvaccord import messages
from kvaccord.errors import NotFound, Refused, StoreReplaced, Superseded, Unauthorized, Unavailable
from kvaccord.messages import PROTOCOL, Join, Report

log = logging.getLogger(__name__)

RETRY_S = 0.5
SAVE_EVERY_S = 2.0


@dataclass(frozen=True)
class Settings:
    """Durations in seconds; docs/timeouts.md lists them with what must exceed which."""

    policies: Policies = field(default_factory=Policies)
    reattach_s: float = 1.0
    lost_after_s: float = 30.0
    silent_after_s: float = 25.0  # a proxied session without a beat, which is due every 10 s
    proxied_lost_after_s: float = 120.0

    def __post_init__(self) -> None:
        if self.lost_after_s < self.reattach_s:
            raise ValueError(
                f"lost_after_s {self.lost_after_s:g} is below reattach_s {self.reattach_s:g}: after"
                " the verdict a process may stay away for at least as long as before; raise it"
            )
        if self.proxied_lost_after_s < max(self.lost_after_s, 2 * self.silent_after_s):
            raise ValueError(
                f"proxied_lost_after_s {self.proxied_lost_after_s:g} is below lost_after_s"
                f" {self.lost_after_s:g} or twice the {self.silent_after_s:g} s that make a session"
                " without beats suspect: behind a proxy less is known, not sooner; raise it"
            )


class Service:
    """Everything the coordinator does, without HTTP.

    Every method that changes something returns after the entry is durable. Raises the Refused of
    the rules, and Unavailable when the store does not answer.
    """

    def __init__(self, log_: EngineLog, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self.presence = Presence(
            self._find,
            self._patience_s,
            self.settings.lost_after_s,
            silent_after_s=self.settings.silent_after_s,
            lost_after_s=self.settings.proxied_lost_after_s,
        )
        self.policies = self.settings.policies  # replaced as a whole when the file is read again
        self.stopping = False
        self.append_seconds: Callable[[float], None] = lambda _: None
        self._log = log_
        self._cells: dict[EngineName, Cell] = {}
        self._watchers: dict[EngineName, asyncio.Task[None]] = {}
        self._chores: set[asyncio.Task[None]] = set()
        self._spent: dict[EngineName, Elapsed] = {}  # of budgets, not saved yet
        self._saving: asyncio.Task[None] | None = None
        self._store_answers = True

    # --- life -----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Read every log and take up every open round, before anyone is answered."""
        for name in await self._log.names():
            cell = self._cells[name] = Cell(name, self._log.store_id)
            cell.load(await self._log.read(name), await self._log.first(name))
            cell.stale = False
            await self._resume_clock(cell)
            self._watch(cell)
            self._expect_members(cell)

    def stop(self) -> None:
        """Answer the long polls and end the streams; take nothing more."""
        self.stopping = True
        for cell in self._cells.values():
            cell.wake()

    async def close(self) -> None:
        self.stop()
        self.presence.close()
        running = [*self._watchers.values(), *self._chores]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._log.close()

    async def check_store(self) -> None:
        """Raises Unavailable when the store cannot be read, or written after it could not be."""
        nobody = EngineName("", "")  # no engine has this name
        try:
            await self._log.read(nobody)
            if not self._store_answers:
                # A full disk still reads: only a write shows that it can write again.
                await self._log.save_elapsed(nobody, 0, "gather", 0.0)
        except (LogUnavailable, StoreUnreadable) as error:
            self._store_answers = False
            raise _unavailable(error) from error
        self._store_answers = True

    # --- questions ------------------------------------------------------------------------------

    @property
    def store_id(self) -> str:
        return self._log.store_id

    @property
    def engines(self) -> list[Engine]:
        return [cell.engine for _, cell in sorted(self._cells.items(), key=lambda i: str(i[0]))]

    def engine(self, name: EngineName) -> Engine:
        return self._cell(name).engine

    def round(self, name: EngineName, number: int | None) -> Round:
        """A round, the last one for None. Raises NotFound."""
        engine = self.engine(name)
        round_ = engine.last if number is None else engine.rounds.get(number)
        if round_ is None:
            raise NotFound(
                f"{name} has no round {number or 'yet'}", field="round", value=str(number)
            )
        return round_

    def remaining_s(self, name: EngineName, round_: Round) -> float:
        """Seconds left of the budget that runs in the last round."""
        return round(self._cell(name).clock.left_s(round_), 3)

    # --- calls ----------------------------------------------------------------------------------

    async def join(
        self, name: EngineName, join: Join, touched: tuple[Touch, ...] = ()
    ) -> dict[str, Any]:
        cell = self._cells.get(name)
        if cell is None:
            cell = self._cells[name] = Cell(name, self._log.store_id)
            cell.stale = False  # an append that finds more in the log reads it
        cell.joining += 1
        try:
            engine = await self._carry_out(cell, Reserve(join, touched))
        finally:
            cell.joining -= 1
            if not cell.engine.entries and not cell.joining:
                self._cells.pop(name, None)  # refused, or not kept: nobody has joined
        attempt = find_attempt(engine, join)
        assert attempt is not None, "it has just been reserved"
        return {
            "attempt": attempt,
            "token": self._token(name, join, attempt),
            "protocol": PROTOCOL,
            "features": [],
            "store_id": self._log.store_id,
            "patience_s": self.policies.of(name).gather_s + 60,
        }

    async def claim(
        self, name: EngineName, attempt: int, touched: tuple[Touch, ...] = ()
    ) -> dict[str, Any]:
        cell = self._cell(name)
        repeated = cell.engine.round_of(attempt) is not None
        watched = self.presence.watched(name)
        engine = await self._carry_out(
            cell, Claim(attempt, self.policies.of(name), watched, touched)
        )
        round_ = engine.round_of(attempt)
        assert round_ is not None, "it has just been claimed"
        if round_.open and not repeated:
            seat = Seat(name, round_.number, attempt)
            self.presence.expect(seat, within_s=self.settings.lost_after_s)
        policy = round_.policy
        return {
            "round": round_.number,
            "outcome": round_.ended or "open",
            "layout": round_.layout.model_dump(mode="json"),
            "mode": round_.mode,
            "budgets": {
                "gather_s": policy.gather_s,
                "report_s": policy.report_s.model_dump(),
                "apply_s": policy.apply_s.model_dump(),
            },
            "remaining_s": self.remaining_s(name, round_),
        }

    def check_reports(
        self, name: EngineName, number: int, attempt: int, reports: Mapping[int, Report]
    ) -> None:
        """Raises Invalid unless these are exactly the process's own ranks."""
        check_reports(self.engine(name), number, attempt, reports)

    async def report(
        self,
        name: EngineName,
        number: int,
        attempt: int,
        reports: Mapping[int, Report],
        *,
        planned: Mapping[int, Report],
        wait_s: float,
        touched: tuple[Touch, ...] = (),
    ) -> Round:
        """The round after the report was kept, once it is decided or `wait_s` is over."""
        cell = self._cell(name)
        spent_s = cell.clock.report_spent_s(cell.engine.rounds.get(number))
        command = Submit(number, attempt, reports, planned, touched, spent_s)
        return await self._call(name, command, lambda r: r.verdict is not None, wait_s)

    async def applied(
        self,
        name: EngineName,
        number: int,
        attempt: int,
        applied: messages.Applied,
        *,
        wait_s: float,
        touched: tuple[Touch, ...] = (),
    ) -> Round:
        """The round after it was kept, once it has ended or `wait_s` is over."""
        command = Apply(number, attempt, applied, touched)
        return await self._call(name, command, lambda r: r.ended is not None, wait_s)

    async def veto(
        self,
        name: EngineName,
        number: int,
        attempt: int,
        veto: messages.Veto,
        touched: tuple[Touch, ...] = (),
    ) -> Round:
        return await self._call(name, Veto(number, attempt, veto, touched))

    async def leave(
        self,
        name: EngineName,
        number: int,
        attempt: int,
        leave: messages.Leave,
        touched: tuple[Touch, ...] = (),
    ) -> Round:
        return await self._call(name, Leave(number, attempt, leave, touched))

    async def phase(
        self, name: EngineName, number: int, attempt: int, phase: messages.Phase
    ) -> None:
        """A sign of progress: never stored; what it says stands in a verdict that needs it."""
        await self.seen(name, number, attempt)
        refuse_if_taken_over(self.engine(name), self.round(name, number))
        self._cell(name).note(attempt, phase)

    async def serve(
        self, name: EngineName, number: int, attempt: int, touched: tuple[Touch, ...] = ()
    ) -> Round:
        return await self._call(name, Serve(number, attempt, touched))

    async def cancel(self, name: EngineName, number: int, reason: str) -> Round:
        """An operator ends an open round; one that has ended stays as it is."""
        engine = await self._carry_out(self._cell(name), Cancel(number, reason))
        return engine.rounds[number]

    async def retire(self, name: EngineName, number: int, reason: str) -> Round:
        """An operator takes a sealed round out of force."""
        engine = await self._carry_out(self._cell(name), Retire(number, reason))
        return engine.rounds[number]

    async def check(
        self, name: EngineName, number: int, attempt: int, reports: Mapping[int, Report]
    ) -> dict[str, Any]:
        """Whether the plan in force still has room on these ranks. Raises Superseded, Invalid."""
        await self.seen(name, number, attempt)
        engine = self.engine(name)
        if engine.in_force is None or engine.in_force.number != number:
            raise Superseded(
                f"{name} round {number} is not in force; size for the round that is, or exit",
                field="round",
                value=str(number),
            )
        return check_rooms(engine.in_force, reports)

    async def touch(self, name: EngineName, attempt: int, touched: tuple[Touch, ...]) -> None:
        """Keep that fault rules touched a call before anything comes of it."""
        await self._carry_out(self._cell(name), Mark(attempt, touched))

    # --- sessions -------------------------------------------------------------------------------

    async def attach(
        self, name: EngineName, number: int, attempt: int, *, proxied: bool = False
    ) -> Connection:
        """Open a session. A suspect's return is durable before it is answered."""
        cell = self._cell(name)
        _, member = member_of(cell.engine, number, attempt)
        await self._carry_out(cell, Clear(number, attempt))
        return self.presence.attach(Seat(name, number, attempt), member.join.host, proxied=proxied)

    async def seen(self, name: EngineName, number: int, attempt: int) -> None:
        """Before any answer: whoever is answered is not suspect, and that is durable first."""
        cell = self._cell(name)
        round_, member = member_of(cell.engine, number, attempt)
        seat = Seat(name, number, attempt)
        # Also where it is followed: its suspicion may be on its way to the log, and comes first.
        if (member.suspect or self.presence.follows(seat)) and is_followed(round_, member):
            await self._carry_out(cell, Clear(number, attempt))
        self.presence.heard(seat)

    async def refused(self, name: EngineName, token: str) -> None:
        """Before a call is refused, whatever the reason: that is an answer too."""
        with suppress(Refused):
            attempt, _ = self.attempt_of(name, token)
            if round_ := self.engine(name).round_of(attempt):
                await self.seen(name, round_.number, attempt)

    def cell(self, name: EngineName) -> Cell:
        """For streams, which follow an engine's facts. Raises NotFound."""
        return self._cell(name)

    # --- tokens ---------------------------------------------------------------------------------

    def attempt_of(
        self, name: EngineName, token: str | None, number: int | None = None
    ) -> tuple[int, Join]:
        """Who calls, and in which round if it says so.

        Raises Unauthorized, StoreReplaced or Superseded.
        """
        parts = (token or "").split(".")
        if len(parts) != 3 or not (parts[1].isascii() and parts[1].isdigit()):
            raise Unauthorized(
                "header Kvaccord-Attempt must carry the token that join answered",
                field="Kvaccord-Attempt",
                value="absent" if token is None else "malformed",
            )
        if parts[0] != self._log.store_id:
            raise StoreReplaced(
                f"the token is of store {parts[0][:32]!r}, this is store {self._log.store_id}:"
                " the coordinator's store was replaced; this process must exit and start anew",
                field="Kvaccord-Attempt",
                value=parts[0][:32],
            )
        engine, attempt = self._cell(name).engine, int(parts[1][:18])
        join = _join_of(engine, attempt)
        if join is None:
            last = engine.last.number if engine.last else 0
            raise Superseded(
                f"round {number} of {name} was dropped: of rounds that have ended the log keeps"
                f" the latest {self.policies.of(name).keep_rounds} and the one in force; this"
                " process must exit, and be started anew to join"
                if number is not None and number < last and number not in engine.rounds
                else f"attempt {attempt} of {name} has lapsed: a newer process holds its ranks;"
                " this one must exit",
                field="Kvaccord-Attempt",
                value=str(attempt),
            )
        expected = self._token(name, join, attempt)
        if not hmac.compare_digest(expected.encode(), (token or "").encode()):
            raise Unauthorized(
                f"the token for attempt {attempt} of {name} is not the one that join answered",
                rank=join.ranks[0],
                field="Kvaccord-Attempt",
                value="another token",
            )
        return attempt, join

    def _token(self, name: EngineName, join: Join, attempt: int) -> str:
        # Derived, not stored: a repeated join gets the same answer after any crash.
        said = "\n".join(
            [name.namespace, name.engine, str(list(join.ranks)), join.nonce, str(attempt)]
        )
        mac = hmac.new(self._log.key, said.encode(), hashlib.sha256).hexdigest()
        return f"{self._log.store_id}.{attempt}.{mac}"

    # --- carrying out ---------------------------------------------------------------------------

    def _cell(self, name: EngineName) -> Cell:
        if name not in self._cells:
            raise NotFound(f"no engine {name} has joined here", field="engine", value=str(name))
        return self._cells[name]

    async def _call(
        self,
        name: EngineName,
        command: Submit | Veto | Leave | Apply | Serve,
        done: Callable[[Round], bool] = lambda _: True,
        wait_s: float = 0.0,
    ) -> Round:
        cell = self._cell(name)
        try:
            await self._carry_out(cell, command)
        except Refused:
            with suppress(Refused):
                await self.seen(name, command.round, command.attempt)
            raise
        loop = asyncio.get_running_loop()
        until = loop.time() + wait_s
        while not done(cell.engine.rounds[command.round]) and not self.stopping:
            if (left_s := until - loop.time()) <= 0:
                break
            await cell.change(left_s)
        await self.seen(name, command.round, command.attempt)
        return cell.engine.rounds[command.round]

    async def _carry_out(self, cell: Cell, command: Command) -> Engine:
        """Decide, append, and only then believe it and tell. Returns the engine afterwards."""
        loop = asyncio.get_running_loop()
        async with cell.lock:
            while True:
                await self._refresh(cell)
                events = decide(cell.engine, command)
                if not events:
                    return cell.engine
                entry, began_s = entry_of(events), loop.time()
                cell.stale = True  # until the append is known to have been kept, or not
                try:
                    await self._log.append(cell.name, entry, n=cell.engine.entries)
                except LogConflict:
                    continue
                except LogUnavailable as error:
                    self._store_answers = False
                    self._do_later(self._read_again(cell))
                    raise _unavailable(error) from error
                except asyncio.CancelledError:
                    self._do_later(self._read_again(cell))
                    raise
                self._store_answers = True
                self.append_seconds(loop.time() - began_s)
                cell.stale = False
                cell.add(events)
                break
        for event in events:
            if isinstance(event, Decided | Ended) and cell.engine.rounds[event.round].ended:
                members = cell.engine.rounds[event.round].members
                self.presence.forget(Seat(cell.name, event.round, m) for m in members)
                self._compact_if_due(cell)
            if isinstance(event, Cleared | Serving):
                # It must have a session again as soon as if it had not called; and who serves
                # says that it keeps one.
                seat = Seat(cell.name, event.round, event.attempt)
                self.presence.heard(seat)
                if (within_s := self._patience_s(seat)) is not None:
                    self.presence.expect(seat, within_s=within_s)
        # A round that was opened may have taken over from another.
        cell.wake(at_once=any(isinstance(e, Decided | Ended | Opened) for e in events))
        self._watch(cell)
        return cell.engine

    def _expect_members(self, cell: Cell) -> None:
        """Wait for whoever the log says is here and nobody follows yet.

        They were here before this coordinator, or an entry was kept whose answer was lost: judged
        only after this coordinator has served for as long as a process may take to find it.
        """
        for round_ in cell.engine.rounds.values():
            for member in round_.members.values():
                seat = Seat(cell.name, round_.number, member.attempt)
                # A suspicion that is in the log is being followed, unless it is another's.
                followed = member.suspect is not None and self.presence.follows(seat)
                if is_followed(round_, member) and not followed:
                    self.presence.expect(seat, within_s=self.settings.lost_after_s)

    async def _refresh(self, cell: Cell) -> None:
        if cell.stale:
            try:
                first = await self._log.first(cell.name)
                cell.load(await self._log.read(cell.name), first)
            except (LogUnavailable, StoreUnreadable) as error:
                raise _unavailable(error) from error
            cell.stale = False
            self._expect_members(cell)

    def _compact_if_due(self, cell: Cell) -> None:
        keep = self.policies.of(cell.name).keep_rounds
        if len(cell.engine.rounds) > 2 * keep:
            self._do_later(self._compact(cell, keep))

    def _do_later(self, chore: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(chore)
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)
        return task

    async def _read_again(self, cell: Cell) -> None:
        """After an append without an answer: find out what the log holds, whoever calls or not."""
        while cell.stale and not self.stopping:
            await asyncio.sleep(RETRY_S)
            async with cell.lock:
                with suppress(Unavailable):
                    await self._refresh(cell)
        cell.wake()
        self._watch(cell)

    async def _compact(self, cell: Cell, keep_rounds: int) -> None:
        """Snapshot what stays of a log and drop what is before it."""
        async with cell.lock:
            try:
                await self._refresh(cell)
                if cell.engine.last and cell.engine.last.open:
                    return  # its facts are still being told; the next end comes by here again
                first = cell.engine.entries
                for event in compaction(cell.engine, keep_rounds):
                    cell.stale = True
                    entry = Entry(events=(event,))
                    await self._log.append(cell.name, entry, n=cell.engine.entries)
                    cell.stale = False
                    cell.add(entry.events)
                if cell.engine.entries > first:
                    await self._log.drop(cell.name, first)
            except (LogConflict, LogUnavailable, Unavailable) as error:
                log.warning("%s: old rounds are kept for now: %s", cell.name, error)

    async def _find(self, name: EngineName, finding: Finding) -> bool:
        """Take a finding to the log, for as long as the store needs; whether it still mattered."""
        while not self.stopping:
            try:
                cell = self._cell(name)
                before = cell.engine.entries
                return (await self._carry_out(cell, finding)).entries > before
            except Unavailable as error:
                log.warning("%s: %s; trying again", name, error)
                await asyncio.sleep(RETRY_S)
        return False

    def _patience_s(self, seat: Seat) -> float | None:
        """How long it may stay away; None where the end of its session means nothing."""
        round_ = self._cell(seat.name).engine.rounds.get(seat.round)
        member = round_.members.get(seat.attempt) if round_ else None
        if round_ is None or member is None or not is_followed(round_, member):
            return None
        before_verdict = round_.verdict is None
        return self.settings.reattach_s if before_verdict else self.settings.lost_after_s

    # --- time -----------------------------------------------------------------------------------

    def _watch(self, cell: Cell) -> None:
        last = cell.engine.last
        if last and last.open and cell.name not in self._watchers:
            task = asyncio.create_task(self._spend_budgets(cell))
            self._watchers[cell.name] = task
            task.add_done_callback(lambda _: self._watched(cell))
            if self._saving is None or self._saving.done():
                self._saving = self._do_later(self._save_spent())

    def _watched(self, cell: Cell) -> None:
        self._watchers.pop(cell.name, None)
        if not self.stopping:
            self._watch(cell)  # the next round may have opened meanwhile

    async def _spend_budgets(self, cell: Cell) -> None:
        """Follow an engine for as long as its last round is open, and say when time has run out."""
        loop = asyncio.get_running_loop()
        while (round_ := cell.engine.last) and round_.open and not self.stopping:
            left_s, finding = self._next_end(cell, round_)
            if left_s <= 0 and await self._find(cell.name, finding):
                continue
            began_s = loop.time()
            # A timer may fire a little early; a budget may not.
            await cell.change(min(TICK_S, left_s + 0.001) if left_s > 0 else TICK_S, "fact")
            if not self._store_answers:
                # No budget is spent while nobody could be answered.
                with suppress(Unavailable):
                    await self.check_store()
                continue
            cell.clock.advance(round_, loop.time() - began_s)
            phase, spent_s = cell.clock.spent(round_)
            if phase:
                self._spent[cell.name] = (round_.number, phase, spent_s)

    async def _save_spent(self) -> None:
        """Keep how far the budgets are, those of all engines at once, while any runs."""
        while self._watchers and not self.stopping:
            await asyncio.sleep(SAVE_EVERY_S)
            spent, self._spent = self._spent, {}
            saves = [self._log.save_elapsed(name, *elapsed) for name, elapsed in spent.items()]
            try:
                await asyncio.gather(*saves)
            except LogUnavailable:
                self._store_answers = False  # found out while nobody calls

    async def _resume_clock(self, cell: Cell) -> None:
        last, elapsed = cell.engine.last, await self._log.elapsed(cell.name)
        if last and elapsed and last.number == elapsed[0]:
            cell.clock.resume(last, elapsed[1], elapsed[2])

    def _next_end(self, cell: Cell, round_: Round) -> tuple[float, Spend]:
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
        signs = self._signs(cell, round_) if min(soft_s, hard_s) <= 0 else {}
        if soft_s <= 0 < hard_s and any(s.stuck for s in signs.values()):
            return 0.0, Spend(number, what, soft=True, signs=signs)
        return soft_s or hard_s, Spend(number, what, signs=signs)

    def _signs(self, cell: Cell, round_: Round) -> dict[int, Sign]:
        signs = {}
        for rank in round_.waiting_for:
            if holder := round_.holder(rank):
                phase, age_s = cell.progress(holder.attempt)
                signs[rank] = Sign(phase, age_s, age_s >= round_.policy.stall_s)
        return signs


def _join_of(engine: Engine, attempt: int) -> Join | None:
    if attempt in engine.reservations:
        return engine.reservations[attempt].join
    round_ = engine.round_of(attempt)
    return round_.members[attempt].join if round_ else None


def _unavailable(error: Exception) -> Unavailable:
    return Unavailable(
        f"the store does not answer ({error}); nothing was acknowledged, repeat the call",
        retry_after_s=1.0,
    )
