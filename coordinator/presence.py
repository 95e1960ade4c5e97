"""Which processes are there: sessions that are open, and what the end of one leads to.

Presence is the kernel's word: a session is one long-lived stream, and its end without goodbye is
a finding that the service carries to the log. A proxy may hold the stream of a dead process open,
so behind one the process must be heard too. Nothing here is stored.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

from coordinator.commands import Finding, Lose, Suspect
from coordinator.events import EngineName
from coordinator.served import served_sleep
from kvaccord.errors import Unavailable

# So many sessions of so many hosts that end together: the network or a proxy is likelier.
MASS_WINDOW_S = 5.0
MASS_SHARE = 0.2
MASS_HOSTS = 3
LISTEN_TICK_S = 1.0


@dataclass(frozen=True)
class Seat:
    """One process in one round."""

    name: EngineName
    round: int
    attempt: int


@dataclass(frozen=True)
class Connection:
    """A session. proxied: what lies between may hold it open without the process."""

    seat: Seat
    host: str = ""
    proxied: bool = False
    id: str = field(default_factory=lambda: secrets.token_hex(8))


class Presence:
    """Tracks the sessions that this coordinator holds.

    report: takes a finding to the log; does not return before it is kept or is of no use any more.
    patience_s: how long a suspect of this seat may stay away before it is lost, in seconds; None
    where the end of its session means nothing.
    doubt_s: how much longer everyone may stay away after a mass end of sessions.
    silent_after_s, lost_after_s: of a proxied session of which nothing was heard for so long.
    """

    def __init__(
        self,
        report: Callable[[EngineName, Finding], Awaitable[object]],
        patience_s: Callable[[Seat], float | None],
        doubt_s: float,
        *,
        silent_after_s: float = 25.0,
        lost_after_s: float = 120.0,
    ) -> None:
        self._report = report
        self._patience_s = patience_s
        self._doubt_s = doubt_s
        self._silent_after_s = silent_after_s
        self._lost_after_s = lost_after_s
        self._open: dict[Seat, Connection] = {}
        self._of_engine: dict[EngineName, set[int]] = defaultdict(set)  # attempts, watched
        self._tasks: dict[Seat, asyncio.Task[None]] = {}
        self._openings: dict[Seat, int] = {}  # the highest number, while open or waited for
        self._served_s = 0.0  # counted while a proxied session is listened to
        self._heard_at_s: dict[Seat, float] = {}  # proxied sessions that are not silent
        self._listening: asyncio.Task[None] | None = None
        self._ends: deque[tuple[float, str]] = deque()  # (when, host) of the last few seconds
        self._hosts_of_ends: Counter[str] = Counter()
        self._doubt_until_s = 0.0

    @property
    def sessions(self) -> int:
        return len(self._open)

    @property
    def doubt_left_s(self) -> float:
        """Seconds for which nobody is judged, because many sessions ended together."""
        return max(0.0, self._doubt_until_s - asyncio.get_running_loop().time())

    def watched(self, name: EngineName) -> frozenset[int]:
        """The attempts of an engine whose session is open, and not a proxy's alone."""
        return frozenset(self._of_engine.get(name, ()))

    def follows(self, seat: Seat) -> bool:
        """Whether its session or its return is being waited for."""
        return seat in self._tasks

    def expect(self, seat: Seat, *, within_s: float) -> None:
        """A process without a session must open one, or it is lost."""
        if seat not in self._open:
            self._start(seat, self._await_opening(seat, within_s))

    def refuse_if_late(self, seat: Seat, opening: int | None) -> None:
        """Refuse a request whose process has given it up and opened a later session since.

        It was held up on the way, and its end would be taken for the end of the session that
        counts. Raises Unavailable: nobody was heard.
        """
        latest = self._openings.get(seat, 0)
        if opening is not None and opening < latest:
            raise Unavailable(
                f"session request {opening} of attempt {seat.attempt} came after its request"
                f" {latest}, which counts; open one with a higher number",
                field="opening",
                value=str(opening),
            )

    def attach(
        self, seat: Seat, host: str, *, proxied: bool = False, opening: int | None = None
    ) -> Connection:
        """A session opened. Of two for one seat the one with the greater number counts, of equals
        and of those without number the one that came later. Raises Unavailable for another.
        """
        self.refuse_if_late(seat, opening)
        if opening is not None:
            self._openings[seat] = opening
        connection = self._open[seat] = Connection(seat, host, proxied)
        self._of_engine[seat.name].add(seat.attempt)
        self._forget(seat)
        self._heard_at_s.pop(seat, None)
        self.heard(seat)
        return connection

    def heard(self, seat: Seat) -> None:
        """A process called, and is not suspect in the log: its proxied session is its own."""
        connection = self._open.get(seat)
        if connection is None or not connection.proxied:
            return
        self._heard_at_s[seat] = self._served_s
        self._of_engine[seat.name].add(seat.attempt)
        self._forget(seat)
        if self._listening is None:
            self._listening = asyncio.create_task(self._listen())

    def detach(self, connection: Connection, *, by_peer: bool) -> None:
        """A session ended. One that the coordinator closed itself starts no clock."""
        seat = connection.seat
        if self._open.get(seat) is not connection:
            return
        del self._open[seat]
        self._heard_at_s.pop(seat, None)
        self._unwatch(seat)
        if by_peer and self._patience_s(seat) is not None:
            self._count_end(connection.host)
            self._start(seat, self._await_return(connection))
        elif seat not in self._tasks:
            self._openings.pop(seat, None)

    def forget(self, seats: Iterable[Seat]) -> None:
        """Their round has ended: they are not waited for any more."""
        for seat in seats:
            self._forget(seat)

    def close(self) -> None:
        for seat in list(self._tasks):
            self._forget(seat)
        if self._listening is not None:
            self._listening.cancel()

    def _unwatch(self, seat: Seat) -> None:
        attempts = self._of_engine[seat.name]
        attempts.discard(seat.attempt)
        if not attempts:
            del self._of_engine[seat.name]

    async def _listen(self) -> None:
        """Count served seconds, and find who has fallen silent, while anyone is listened to.

        One task for all of them: thousands of sessions may share one proxy.
        """
        loop = asyncio.get_running_loop()
        tick_s = min(LISTEN_TICK_S, self._silent_after_s / 5)
        while self._heard_at_s:
            began_s = loop.time()
            await asyncio.sleep(tick_s)
            self._served_s += min(loop.time() - began_s, tick_s)
            latest_s = self._served_s - self._silent_after_s
            for seat in [s for s, at_s in self._heard_at_s.items() if at_s <= latest_s]:
                del self._heard_at_s[seat]
                self._unwatch(seat)
                self._start(seat, self._await_word(self._open[seat]))
        self._listening = None

    def _count_end(self, host: str) -> None:
        now_s = asyncio.get_running_loop().time()
        self._ends.append((now_s, host))
        self._hosts_of_ends[host] += 1
        while self._ends[0][0] < now_s - MASS_WINDOW_S:
            _, old = self._ends.popleft()
            self._hosts_of_ends[old] -= 1
            if not self._hosts_of_ends[old]:
                del self._hosts_of_ends[old]
        together = len(self._ends) >= MASS_SHARE * (len(self._ends) + len(self._open))
        if together and len(self._hosts_of_ends) >= MASS_HOSTS:
            self._doubt_until_s = now_s + self._doubt_s

    def _start(self, seat: Seat, waiting: Coroutine[Any, Any, None]) -> None:
        if before := self._tasks.get(seat):
            before.cancel()
        task = self._tasks[seat] = asyncio.create_task(waiting)
        task.add_done_callback(lambda done: self._drop(seat, done))

    async def _await_opening(self, seat: Seat, within_s: float) -> None:
        await self._wait(within_s)
        never = Connection(seat)
        await self._report(seat.name, Suspect(seat.round, seat.attempt, never.id))
        lose = Lose(seat.round, seat.attempt, never.id, within_s, session="not opened")
        await self._report(seat.name, lose)

    async def _await_return(self, ended: Connection) -> None:
        seat = ended.seat
        await self._report(seat.name, Suspect(seat.round, seat.attempt, ended.id))
        after_s = self._patience_s(seat)
        if after_s is None:
            return  # the round has ended meanwhile
        await self._wait(after_s)
        lose = Lose(seat.round, seat.attempt, ended.id, after_s)
        await self._report(seat.name, lose)

    async def _await_word(self, silent: Connection) -> None:
        seat = silent.seat
        await self._report(seat.name, Suspect(seat.round, seat.attempt, silent.id))
        await self._wait(self._lost_after_s - self._silent_after_s)
        lose = Lose(seat.round, seat.attempt, silent.id, self._lost_after_s, session="silent")
        await self._report(seat.name, lose)

    async def _wait(self, seconds: float) -> None:
        await served_sleep(seconds)
        while (held_s := self.doubt_left_s) > 0:
            await served_sleep(held_s)

    def _forget(self, seat: Seat) -> None:
        if task := self._tasks.pop(seat, None):
            task.cancel()
        if seat not in self._open:
            self._openings.pop(seat, None)

    def _drop(self, seat: Seat, done: asyncio.Task[None]) -> None:
        if self._tasks.get(seat) is done:
            self._forget(seat)
