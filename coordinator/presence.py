"""Which processes are there: sessions that are open, and what the end of one leads to.

Presence is the kernel's word: a session is one long-lived stream, and its end without goodbye is
a finding that the service carries to the log. Nothing here is stored.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from coordinator.commands import Finding, Lose, Suspect
from coordinator.events import EngineName
from coordinator.served import served_sleep

# So many sessions of so many hosts that end together: the network or a proxy is likelier.
MASS_WINDOW_S = 5.0
MASS_SHARE = 0.2
MASS_HOSTS = 3


@dataclass(frozen=True)
class Seat:
    """One process in one round."""

    name: EngineName
    round: int
    attempt: int


@dataclass(frozen=True)
class Connection:
    seat: Seat
    host: str = ""
    id: str = field(default_factory=lambda: secrets.token_hex(8))


class Presence:
    """Tracks the sessions that this coordinator holds.

    report: takes a finding to the log; does not return before it is kept or is of no use any more.
    patience_s: how long a suspect of this seat may stay away before it is lost, in seconds.
    doubt_s: how much longer everyone may stay away after a mass end of sessions.
    """

    def __init__(
        self,
        report: Callable[[EngineName, Finding], Awaitable[object]],
        patience_s: Callable[[Seat], float],
        doubt_s: float,
    ) -> None:
        self._report = report
        self._patience_s = patience_s
        self._doubt_s = doubt_s
        self._open: dict[Seat, Connection] = {}
        self._of_engine: dict[EngineName, set[int]] = defaultdict(set)  # attempts, session open
        self._tasks: dict[Seat, asyncio.Task[None]] = {}
        self._ends: deque[tuple[float, str]] = deque()  # (when, host) of the last few seconds
        self._doubt_until_s = 0.0

    @property
    def sessions(self) -> int:
        return len(self._open)

    @property
    def doubt_left_s(self) -> float:
        """Seconds for which nobody is judged, because many sessions ended together."""
        return max(0.0, self._doubt_until_s - asyncio.get_running_loop().time())

    def watched(self, name: EngineName) -> frozenset[int]:
        """The attempts of an engine whose session is open."""
        return frozenset(self._of_engine.get(name, ()))

    def follows(self, seat: Seat) -> bool:
        """Whether its session or its return is being waited for."""
        return seat in self._tasks

    def expect(self, seat: Seat, *, within_s: float) -> None:
        """A process without a session must open one, or it is lost."""
        if seat not in self._open:
            self._start(seat, self._await_opening(seat, within_s))

    def attach(self, seat: Seat, host: str) -> Connection:
        """A session opened. Of two for one seat the newer counts."""
        connection = self._open[seat] = Connection(seat, host)
        self._of_engine[seat.name].add(seat.attempt)
        self._forget(seat)
        return connection

    def detach(self, connection: Connection, *, by_peer: bool) -> None:
        """A session ended. One that the coordinator closed itself starts no clock."""
        if self._open.get(connection.seat) is not connection:
            return
        seat = connection.seat
        del self._open[seat]
        self._of_engine[seat.name].discard(seat.attempt)
        if not self._of_engine[seat.name]:
            del self._of_engine[seat.name]
        if by_peer:
            self._count_end(connection.host)
            self._start(connection.seat, self._await_return(connection))

    def forget_round(self, name: EngineName, round_: int) -> None:
        """The round has ended: nobody is waited for any more."""
        for seat in [s for s in self._tasks if (s.name, s.round) == (name, round_)]:
            self._forget(seat)

    def close(self) -> None:
        for seat in list(self._tasks):
            self._forget(seat)

    def _count_end(self, host: str) -> None:
        now_s = asyncio.get_running_loop().time()
        self._ends.append((now_s, host))
        while self._ends[0][0] < now_s - MASS_WINDOW_S:
            self._ends.popleft()
        hosts = {host for _, host in self._ends}
        together = len(self._ends) >= MASS_SHARE * (len(self._ends) + len(self._open))
        if together and len(hosts) >= MASS_HOSTS:
            self._doubt_until_s = now_s + self._doubt_s

    def _start(self, seat: Seat, waiting: Coroutine[Any, Any, None]) -> None:
        self._forget(seat)
        task = self._tasks[seat] = asyncio.create_task(waiting)
        task.add_done_callback(lambda done: self._drop(seat, done))

    async def _await_opening(self, seat: Seat, within_s: float) -> None:
        await self._wait(within_s)
        never = Connection(seat)
        await self._report(seat.name, Suspect(seat.round, seat.attempt, never.id))
        lose = Lose(seat.round, seat.attempt, never.id, within_s, was_open=False)
        await self._report(seat.name, lose)

    async def _await_return(self, ended: Connection) -> None:
        seat = ended.seat
        await self._report(seat.name, Suspect(seat.round, seat.attempt, ended.id))
        after_s = self._patience_s(seat)
        await self._wait(after_s)
        lose = Lose(seat.round, seat.attempt, ended.id, after_s, was_open=True)
        await self._report(seat.name, lose)

    async def _wait(self, seconds: float) -> None:
        await served_sleep(seconds)
        while (held_s := self.doubt_left_s) > 0:
            await served_sleep(held_s)

    def _forget(self, seat: Seat) -> None:
        if task := self._tasks.pop(seat, None):
            task.cancel()

    def _drop(self, seat: Seat, done: asyncio.Task[None]) -> None:
        if self._tasks.get(seat) is done:
            del self._tasks[seat]
