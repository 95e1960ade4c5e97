"""Sessions, timers and long polls of one process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from tests.model.log import Log, Process
from tests.model.monitors import Key, must
from tests.model.rules import Rules
from tests.model.search import Liveness, Scope

LOST_ANSWERED = "S12 lost although it was answered since its suspicion was logged"
LOST_ATTACHED = "S12 lost while its session is open"
NO_IN_HAND_ = "S3/S7 a round was settled with a member's no in the coordinator's hands"


class Coordinator(NamedTuple):
    """What one coordinator has in memory about the process that is followed.

    open: the session it holds. timer: "s" it will call this session's end suspect, "l" it has, and
    will call it lost. call: taken up, "seen" is over; poll: kept, and waits to be answered.
    """

    up: bool = True
    open: str = ""
    timer: str = ""  # "", "s:CONNECTION", "l:CONNECTION"
    call: str = ""


class Watch(NamedTuple):
    log: int
    alive: bool
    session: str  # the connection that the process itself holds open
    holders: tuple[Coordinator, ...]
    logged: str = ""  # attach="logged": the connection that the log holds of it
    answered: bool = False  # since the suspicion that the log holds
    orphan: tuple[str, int] = ("", -1)  # an append of a dead coordinator that may still land
    crashes: int = 0


class PresenceScope(Scope):
    """The session of one process, at one or two coordinators, beside a whole round of `world`.

    apart    by mistake, the call of a suspect does not hold its Cleared; it is appended before it.
    serves   after the seal the process says that it serves, and is followed until it has departed.
    attach   "suspects": an attach appends only if the log holds a suspicion; "always": every
             attach is appended with its connection, and only its end makes suspect.
    """

    name = "presence"

    def __init__(
        self,
        rules: Rules,
        *,
        world: int = 3,
        coordinators: int = 1,
        attach: str = "suspects",
        tells_first: bool = False,
        clears_polls: bool = True,
        expects_at_start: bool = True,
        expects_all: bool = False,
        orphans: bool = False,
        crashes: int = 1,
        spends: bool = True,
        apart: bool = False,
        serves: bool = False,
        expects_servers: bool = True,
        unheard: bool = True,
        reads_again: bool = True,
    ) -> None:
        self.log = Log(rules, tuple(Process(f"p{r}", (r,)) for r in range(world)), world)
        self.n, self.attach, self.apart = coordinators, attach, apart
        self.tells_first, self.clears_polls = tells_first, clears_polls
        self.expects_at_start, self.orphans = expects_at_start, orphans
        self.crashes, self.spends = crashes, spends
        self.expects_all = expects_all
        self.serves, self.expects_servers = serves, expects_servers
        self.unheard, self.reads_again = unheard and serves, reads_again
        assert not serves or coordinators == 1, "a seal forgets its timers where it was appended"

    def first(self) -> tuple[Any, ...]:
        at = self.log.start
        for p in range(len(self.log.processes)):
            at = self.log.step(at, ("join", p)).after
            at = self.log.step(at, ("claim", p, self.log.find(at, p)[0], ())).after
        holders = [Coordinator() for _ in range(self.n)]
        # The first coordinator answered the claim: it expects the session.
        holders[0] = Coordinator(timer="s:00")
        return Watch(at, True, "", tuple(holders), "00" if self.attach == "always" else "")

    def is_over(self, state: tuple[Any, ...]) -> bool:
        last, me = self.log.last(state[0]), self._me(state[0])
        if self.serves and last.ended == "SEALED":
            return me.departed is not None
        return not last.open or me.gone

    def _is_followed(self, at: int) -> bool:
        return self.log.last(at).open or self._me(at).kept

    def _me(self, at: int) -> Any:
        return self.log.last(at).members[self._attempt]

    _attempt = 1

    def next(self, state: tuple[Any, ...]) -> Iterator[tuple[str, tuple[Any, ...]]]:
        if self.is_over(state):
            return
        s: Watch = state  # type: ignore[assignment]
        yield from self._others(s)
        yield from self._process(s)
        for c in range(self.n):
            yield from self._coordinator(s, c)
        connection, at = s.orphan
        if connection:
            if at == s.log:
                self.trying = f"landed: suspect {connection} by a dead coordinator"
                yield self.trying, self._suspect(s._replace(orphan=("", -1)), connection)
            yield "drop", s._replace(orphan=("", -1))

    # the log ---------------------------------------------------------------------------------

    def _do(self, s: Watch, key: Key) -> Watch:
        """A step of the log, with what S12 says about it."""
        step = self.log.step(s.log, key)
        if step.events:
            s = s._replace(orphan=("", -1))  # the log is longer: what was under way is refused
        if any(e.event == "suspected" for e in step.events):
            s = s._replace(answered=False)
        before, after = self.log.last(s.log), self.log.last(step.after)
        mine = [c for c in after.causes[len(before.causes) :] if c.code == "rank_lost"]
        if after.ended and not before.ended and key[0] == "spend":
            said = after.outcome or after.decision
            must(b"rank_lost" not in said or not self._attached(s), LOST_ATTACHED)
            must(b"rank_lost" not in said or not s.answered, LOST_ANSWERED)
        mine += [e for e in step.events if e.event == "departed"]
        if after.ended and not before.ended:
            s = s._replace(holders=tuple(h._replace(timer="") for h in s.holders))
        if mine:
            must(not s.answered, LOST_ANSWERED)
            must(not self._attached(s), LOST_ATTACHED)
        if not self._me(step.after).suspect:
            s = s._replace(answered=False)
        s = s._replace(log=step.after)
        return s

    def _attached(self, s: Watch) -> bool:
        return bool(s.session) and any(h.open == s.session for h in s.holders)

    def _others(self, s: Watch) -> Iterator[tuple[str, tuple[Any, ...]]]:
        last = self.log.last(s.log)
        # The others are alike: the lowest goes first.
        for p in range(1, len(self.log.processes)):
            member = last.members[p + 1]
            if last.verdict is None and p not in last.sent:
                self.trying = f"report p{p}"
                yield self.trying, self._do(s, ("report", p, p + 1, last.number, 0))
                break
            if last.verdict and last.open and member.applied is None:
                self.trying = f"built p{p}"
                yield self.trying, self._do(s, ("applied", p, p + 1, last.number, "built"))
                break
        for what in ("report", "apply") if self.spends else ():
            self.trying = f"spend {what}"
            yield self.trying, self._do(s, ("spend", last.number, what))

    # the process -----------------------------------------------------------------------------

    def _process(self, s: Watch) -> Iterator[tuple[str, tuple[Any, ...]]]:
        if not s.alive:
            return
        yield "die", s._replace(alive=False, session="")
        if s.session:
            yield "cut", s._replace(session="")
        for c in range(self.n):
            if s.holders[c].up and not s.session:
                self.trying = f"attach[{c}]"
                yield self.trying, self._attach(s, c)

    def _attach(self, s: Watch, c: int) -> Watch:
        fresh = self._fresh(s, c)
        if self.tells_first:
            # By mistake: answered, and Cleared is appended later (never, if it crashes).
            if self._me(s.log).suspect:
                s = s._replace(answered=True)
        else:
            s = self._do(s, ("clear", self._attempt, 1))
        if self.attach == "always":
            s = s._replace(logged=fresh, orphan=("", -1))
        s = s._replace(session=fresh)
        return self._hold(s, c, open=fresh, timer="")

    # a coordinator ---------------------------------------------------------------------------

    def _hold(self, s: Watch, c: int, **changes: Any) -> Watch:
        holder = s.holders[c]._replace(**changes)
        return s._replace(holders=(*s.holders[:c], holder, *s.holders[c + 1 :]))

    def _fresh(self, s: Watch, c: int) -> str:
        used = {s.session, s.logged, self._me(s.log).suspect, s.orphan[0]}
        used |= {h.open for h in s.holders} | {h.timer[2:] for h in s.holders}
        return next(f"{c}{k}" for k in range(9) if f"{c}{k}" not in used)

    def _coordinator(self, s: Watch, c: int) -> Iterator[tuple[str, tuple[Any, ...]]]:
        h = s.holders[c]
        if not h.up:
            yield f"restart[{c}]", self._restart(s, c)
            return
        if s.crashes < self.crashes:
            gone = self._hold(s, c, up=False, open="", timer="", call="")
            if h.open and h.open == s.session:
                gone = gone._replace(session="")
            yield f"crash[{c}]", gone._replace(crashes=s.crashes + 1)
            if self.orphans and h.timer[:1] == "s":
                lands = gone._replace(crashes=s.crashes + 1, orphan=(h.timer[2:], s.log))
                yield f"crash[{c}] while it appends", lands
        if h.open and h.open != s.session:
            yield f"detach[{c}]", self._hold(s, c, open="", timer=f"s:{h.open}")
        kind, _, connection = h.timer.partition(":")
        if kind == "s":
            self.trying = f"suspect[{c}] {connection}"
            now = self._suspect(s, connection)
            yield self.trying, self._hold(now, c, timer=f"l:{connection}")
        if kind == "l":
            self.trying = f"lose[{c}] {connection}"
            now = self._do(s, ("lose", self._attempt, 1, connection))
            yield self.trying, self._hold(now, c, timer="")
        if h.call:
            self.trying = f"answer[{c}] {h.call}"
            yield self.trying, self._answer(s, c)
        else:
            for call in ("report", "built", "veto", *(("serve",) if self.serves else ())):
                # A dead process's packets stay in flight.
                if s.alive or call in ("report", "serve"):
                    self.trying = f"{call}[{c}]"
                    yield self.trying, self._call(s, c, call)
            if self.unheard and self._may(s, "serve"):
                self.trying = f"serve[{c}], its append unanswered"
                now = self._do(s, self._key("serve"))
                if self.reads_again and not self.is_over(now):
                    now = self._expect(now, c)
                yield self.trying, now

    def _suspect(self, s: Watch, connection: str) -> Watch:
        if self.attach == "always" and connection != s.logged:
            return s  # it has been here since
        return self._do(s, ("suspect", self._attempt, 1, connection))

    def _restart(self, s: Watch, c: int) -> Watch:
        """Everyone in the round is expected, whatever the log says of it.

        With every attach in the log, only those whose latest connection was this coordinator's.
        """
        timer = "s:" + self._fresh(s, c)
        if self.attach == "always":
            own = s.logged.startswith(str(c)) or self.expects_all
            timer = f"s:{s.logged}" if own else ""
        expected = self.expects_at_start and self._is_followed(s.log)
        return self._hold(s, c, up=True, timer=timer if expected else "")

    def _call(self, s: Watch, c: int, call: str) -> Watch:
        """A call is taken up. Apart: of a suspect, Cleared is appended first."""
        suspect = bool(self._me(s.log).suspect)
        if self.apart:
            if suspect:
                must(call != "veto" or not self._settles(s), NO_IN_HAND_)
                s = self._do(s, ("clear", self._attempt, 1))
        elif self._may(s, call):
            s = self._do(s, self._key(call))
            if self.expects_servers and call == "serve" and not self.is_over(s):
                s = self._expect(s, c)
        if suspect and not self.is_over(s):
            s = self._expect(s, c)
        return self._hold(s, c, call=call)

    def _expect(self, s: Watch, c: int) -> Watch:
        """A suspect that called must have a session, here or soon."""
        open_ = s.holders[c].open
        connection = open_ or self._fresh(s, c)
        if self.attach == "always":
            s = s._replace(logged=connection)
        return s if open_ else self._hold(s, c, timer=f"s:{connection}")

    def _settles(self, s: Watch) -> bool:
        before = self.log.last(s.log)
        after = self.log.last(self.log.step(s.log, ("clear", self._attempt, 1)).after)
        return (before.verdict, before.ended) != (after.verdict, after.ended)

    def _may(self, s: Watch, call: str) -> bool:
        last = self.log.last(s.log)
        if call == "serve":
            return last.ended == "SEALED"
        return last.verdict is not None if call == "built" else last.open

    def _key(self, call: str) -> Key:
        if call == "serve":
            return ("serve", 0, self._attempt, 1)
        if call == "report":
            return ("report", 0, self._attempt, 1, 0)
        if call == "veto":
            return ("veto", 0, self._attempt, 1)
        return ("applied", 0, self._attempt, 1, "built")

    def _answer(self, s: Watch, c: int) -> Watch:
        """Apart, it is carried out only now. It is answered now, perhaps after a long poll."""
        call = s.holders[c].call
        if self.apart and self._may(s, call):
            s = self._do(s, self._key(call))
        if not self.apart and self.clears_polls:
            suspect = bool(self._me(s.log).suspect)
            s = self._do(s, ("clear", self._attempt, 1))
            if suspect and not self.is_over(s):
                s = self._expect(s, c)
        if self._me(s.log).suspect:
            s = s._replace(answered=True)
        return self._hold(s, c, call="")

    def livenesses(self) -> Iterable[Liveness]:
        yield Liveness("L4 no end is reachable", lambda s: not self.is_over(s), self.is_over)
        inside = ("detach", "suspect", "lose", "restart", "landed:", "drop")
        yield Liveness(
            "L4 a process that died is not found lost by the coordinators alone",
            lambda s: not s.alive and not self.is_over(s) and self._is_followed(s.log),
            self.is_over,
            lambda kind: kind.startswith(inside),
        )
        well = ("attach", "report", "built", "answer", "restart")
        yield Liveness(
            "L3 the process is well and no seal is reachable without a budget's end",
            lambda s: s.alive and not self.is_over(s) and not self.log.last(s.log).causes,
            lambda s: self.log.last(s.log).ended == "SEALED",
            lambda kind: kind.startswith(well),
        )
