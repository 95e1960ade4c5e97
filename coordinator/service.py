"""The shell round the rules: what the coordinator does for those who call, and for sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from coordinator.budgets import Budgets
from coordinator.cell import Cell
from coordinator.check import check_rooms
from coordinator.commands import (
    Apply,
    Cancel,
    Claim,
    Clear,
    Leave,
    Mark,
    Reserve,
    Retire,
    Serve,
    Submit,
    Veto,
)
from coordinator.engine import Engine, Round
from coordinator.events import Cleared, Decided, Ended, EngineName, Event, Opened, Serving, Touch
from coordinator.logs import EngineLog
from coordinator.presence import Connection, Presence, Seat
from coordinator.rules.calls import check_reports
from coordinator.rules.joining import find_attempt
from coordinator.rules.members import is_followed, member_of, refuse_if_taken_over
from coordinator.settings import Settings
from coordinator.tokens import Tokens, join_of
from coordinator.writer import Writer
from kvaccord import messages
from kvaccord.errors import NotFound, Refused, Superseded
from kvaccord.messages import PROTOCOL, Join, Report


class Service:
    """Everything the coordinator does, without HTTP.

    Every method that changes something returns after the entry is durable. Raises the Refused of
    the rules, and Unavailable when the store does not answer.
    """

    def __init__(self, log_: EngineLog, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self.policies = self.settings.policies  # replaced as a whole when the file is read again
        self.stopping = False
        self.append_seconds: Callable[[float], None] = lambda _: None
        self._log = log_
        self._tokens = Tokens(log_.store_id, log_.key)
        self._writer = Writer(
            log_,
            keep_rounds=self._keep_rounds,
            on_kept=self._kept,
            on_found=self._expect_members,
            stopping=lambda: self.stopping,
            append_seconds=lambda seconds: self.append_seconds(seconds),
        )
        self._budgets = Budgets(log_, self._writer, lambda: self.stopping)
        self.presence = Presence(
            self._writer.find,
            self._patience_s,
            self.settings.lost_after_s,
            silent_after_s=self.settings.silent_after_s,
            lost_after_s=self.settings.proxied_lost_after_s,
        )

    # --- life -----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Read every log and take up every open round, before anyone is answered."""
        cells = await self._writer.load()
        for cell in cells:
            await self._budgets.resume(cell)
        # No clock runs before the last is read: nobody is heard until then.
        for cell in cells:
            self._budgets.watch(cell)
            self._expect_members(cell)

    def stop(self) -> None:
        """Answer the long polls and end the streams; take nothing more."""
        self.stopping = True
        for cell in self._writer.cells.values():
            cell.wake()

    async def close(self) -> None:
        self.stop()
        self.presence.close()
        await self._budgets.close()
        await self._writer.close()

    async def check_store(self) -> None:
        """Raises Unavailable when the store cannot be read, or written after it could not be."""
        await self._writer.check_store()

    # --- questions ------------------------------------------------------------------------------

    @property
    def store_id(self) -> str:
        return self._log.store_id

    @property
    def engines(self) -> list[Engine]:
        cells = sorted(self._writer.cells.items(), key=lambda item: str(item[0]))
        return [cell.engine for _, cell in cells]

    def engine(self, name: EngineName) -> Engine:
        return self._writer.cell(name).engine

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
        return round(self._writer.cell(name).clock.left_s(round_), 3)

    # --- calls ----------------------------------------------------------------------------------

    async def join(
        self, name: EngineName, join: Join, touched: tuple[Touch, ...] = ()
    ) -> dict[str, Any]:
        cell = self._writer.cell_to_join(name)
        step = await self._writer.carry_out(cell, Reserve(join, touched))
        attempt = find_attempt(step.after, join)
        assert attempt is not None, "it has just been reserved"
        return {
            "attempt": attempt,
            "token": self._tokens.of(name, join, attempt),
            "protocol": PROTOCOL,
            "features": [],
            "store_id": self._log.store_id,
            "patience_s": self.policies.of(name).gather_s + 60,
        }

    async def claim(
        self, name: EngineName, attempt: int, touched: tuple[Touch, ...] = ()
    ) -> dict[str, Any]:
        cell = self._writer.cell(name)
        repeated = cell.engine.round_of(attempt) is not None
        watched = self.presence.watched(name)
        claim = Claim(attempt, self.policies.of(name), watched, touched)
        round_ = (await self._writer.carry_out(cell, claim)).after.round_of(attempt)
        assert round_ is not None, "it has just been claimed"
        seat = Seat(name, round_.number, attempt)
        if not repeated and self._patience_s(seat) is not None:
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
        cell = self._writer.cell(name)
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
        self._writer.cell(name).note(attempt, phase)

    async def serve(
        self, name: EngineName, number: int, attempt: int, touched: tuple[Touch, ...] = ()
    ) -> Round:
        return await self._call(name, Serve(number, attempt, touched))

    async def cancel(self, name: EngineName, number: int, reason: str) -> Round:
        """An operator ends an open round; one that has ended stays as it is."""
        step = await self._writer.carry_out(self._writer.cell(name), Cancel(number, reason))
        return step.after.rounds[number]

    async def retire(self, name: EngineName, number: int, reason: str) -> Round:
        """An operator takes a sealed round out of force."""
        step = await self._writer.carry_out(self._writer.cell(name), Retire(number, reason))
        return step.after.rounds[number]

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
        await self._writer.carry_out(self._writer.cell(name), Mark(attempt, touched))

    # --- sessions -------------------------------------------------------------------------------

    async def attach(
        self,
        name: EngineName,
        number: int,
        attempt: int,
        *,
        proxied: bool = False,
        opening: int | None = None,
    ) -> Connection:
        """Open a session. A suspect's return is durable before it is answered.

        Raises Unavailable for a request that a later one of this process has overtaken.
        """
        cell = self._writer.cell(name)
        _, member = member_of(cell.engine, number, attempt)
        seat, host = Seat(name, number, attempt), member.join.host
        self.presence.refuse_if_late(seat, opening)  # its process may be dead: it clears nobody
        await self._writer.carry_out(cell, Clear(number, attempt))
        return self.presence.attach(seat, host, proxied=proxied, opening=opening)

    async def seen(self, name: EngineName, number: int, attempt: int) -> None:
        """Before any answer: whoever is answered is not suspect, and that is durable first."""
        cell = self._writer.cell(name)
        round_, member = member_of(cell.engine, number, attempt)
        seat = Seat(name, number, attempt)
        # Also where it is followed: its suspicion may be on its way to the log, and comes first.
        if (member.suspect or self.presence.follows(seat)) and is_followed(round_, member):
            await self._writer.carry_out(cell, Clear(number, attempt))
        self.presence.heard(seat)

    async def refused(self, name: EngineName, token: str) -> None:
        """Before a call is refused, whatever the reason: that is an answer too."""
        with suppress(Refused):
            attempt, _ = self.attempt_of(name, token)
            if round_ := self.engine(name).round_of(attempt):
                await self.seen(name, round_.number, attempt)

    def cell(self, name: EngineName) -> Cell:
        """For streams, which follow an engine's facts. Raises NotFound."""
        return self._writer.cell(name)

    # --- tokens ---------------------------------------------------------------------------------

    def attempt_of(
        self, name: EngineName, token: str | None, number: int | None = None
    ) -> tuple[int, Join]:
        """Who calls, and in which round if it says so.

        Raises Unauthorized, StoreReplaced or Superseded.
        """
        attempt = self._tokens.attempt(token)
        join = join_of(self.engine(name), attempt, number, self._keep_rounds(name))
        self._tokens.check(name, join, attempt, token)
        return attempt, join

    # --- carrying out ---------------------------------------------------------------------------

    async def _call(
        self,
        name: EngineName,
        command: Submit | Veto | Leave | Apply | Serve,
        done: Callable[[Round], bool] = lambda _: True,
        wait_s: float = 0.0,
    ) -> Round:
        cell = self._writer.cell(name)
        await self._writer.carry_out(cell, command)
        loop = asyncio.get_running_loop()
        until = loop.time() + wait_s
        while not done(cell.engine.rounds[command.round]) and not self.stopping:
            if (left_s := until - loop.time()) <= 0:
                break
            await cell.change(left_s)
        await self.seen(name, command.round, command.attempt)
        return cell.engine.rounds[command.round]

    def _kept(self, cell: Cell, events: tuple[Event, ...]) -> None:
        """An entry is durable; none where it was found out what the log holds."""
        for event in events:
            if isinstance(event, Decided | Ended) and cell.engine.rounds[event.round].ended:
                members = cell.engine.rounds[event.round].members
                self.presence.forget(Seat(cell.name, event.round, m) for m in members)
            if isinstance(event, Cleared | Serving):
                # It must have a session again as soon as if it had not called; and who serves
                # says that it keeps one.
                seat = Seat(cell.name, event.round, event.attempt)
                self.presence.heard(seat)
                if (within_s := self._patience_s(seat)) is not None:
                    self.presence.expect(seat, within_s=within_s)
        # A round that was opened may have taken over from another.
        settled = any(isinstance(e, Decided | Ended | Opened) for e in events)
        cell.wake(at_once=settled or not events)
        self._budgets.watch(cell)

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

    def _patience_s(self, seat: Seat) -> float | None:
        """How long it may stay away; None where the end of its session means nothing."""
        round_ = self._writer.cell(seat.name).engine.rounds.get(seat.round)
        member = round_.members.get(seat.attempt) if round_ else None
        if round_ is None or member is None or not is_followed(round_, member):
            return None
        before_verdict = round_.verdict is None
        return self.settings.reattach_s if before_verdict else self.settings.lost_after_s

    def _keep_rounds(self, name: EngineName) -> int:
        return self.policies.of(name).keep_rounds
