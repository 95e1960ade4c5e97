"""The worlds that are searched. README.md has a table of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from tests.model.protocol import Breach, Key, Liveness, Log, Process, Rules, Scope, Step, must

WORDS = ("report", "veto", "leave", "applied")
GOOD = {"join", "claim", "report", "built", "clear"}


class RoundScope(Scope):
    """One round of one launch: every call and finding, at any time, as often as it likes.

    Nothing is kept but the log: whatever a process could ever have sent may arrive at any time,
    for ever. That is the widest network there is.
    """

    name = "round"

    def __init__(self, rules: Rules, processes: tuple[Process, ...], world: int) -> None:
        self.equal = len({(p.length, p.short) for p in processes}) == 1
        self.equal = self.equal and not processes[0].short
        alike = self.equal and len(processes) == world
        self.log = Log(rules, processes, world, alike=alike)
        self.everyone = range(len(processes))

    def first(self) -> tuple[Any, ...]:
        return (self.log.start,)

    def next(self, state: tuple[Any, ...]) -> Iterator[tuple[str, tuple[Any, ...]]]:
        for label, key in self._commands(state[0]):
            self.trying = label
            yield label, (self.log.step(state[0], key).after,)

    def _commands(self, at: int) -> Iterator[tuple[str, Key]]:
        last = self.log.last(at)
        for p in self.everyone:
            name = self.log.processes[p].name
            yield f"join {name}", ("join", p)
            attempt, number = self.log.find(at, p)
            if not attempt:
                continue
            yield f"claim {name}", ("claim", p, attempt, ())
            if not number:
                continue
            yield f"report {name}", ("report", p, attempt, number, 0)
            if last.sent.keys() & set(self.log.processes[p].ranks):
                yield f"report-other {name}", ("report", p, attempt, number, 5)
            yield f"report-next {name}", ("report", p, attempt, number + 1, 0)
            yield f"veto {name}", ("veto", p, attempt, number)
            yield f"leave {name}", ("leave", p, attempt, number)
            for how in ("built", "differently", "other", "failed"):
                label = "built" if how == "built" else f"applied-{how}"
                yield f"{label} {name}", ("applied", p, attempt, number, how)
            yield f"clear {name}", ("clear", attempt, number)
            for connection in ("a", "b"):
                yield f"suspect {name} {connection}", ("suspect", attempt, number, connection)
                yield f"lose {name} {connection}", ("lose", attempt, number, connection)
            yield f"serve {name}", ("serve", p, attempt, number)
            yield f"serve-next {name}", ("serve", p, attempt, number + 1)
            stuck = self.log.processes[p].ranks
            for what in ("report", "apply"):
                for soft in (True, False):
                    label = f"spend-{'soft' if soft else 'hard'} {what}, {name} stuck"
                    yield label, ("spend", number, what, soft, stuck)
        if last is not None:
            for what in ("gather", "report", "apply", "grace", "shortfall"):
                yield f"spend {what}", ("spend", last.number, what)
            for what in ("report", "apply"):
                yield f"spend-soft {what}", ("spend", last.number, what, True, ())
            yield "cancel", ("cancel", last.number)
            yield "retire", ("retire", last.number)

    def livenesses(self) -> Iterable[Liveness]:
        yield from super().livenesses()
        if not self.equal:
            return
        yield Liveness(
            "L3 all are well and no seal is reachable without a budget's end",
            lambda s: (
                (r := self.log.last(s[0])) is not None
                and r.open
                and not r.causes
                and not any(m.gone for m in r.members.values())
            ),
            lambda s: (r := self.log.last(s[0])) is not None and r.ended == "SEALED",
            lambda kind: kind in GOOD,
        )


LAPSED = 999  # an attempt that no log knows


class Alive(NamedTuple):
    """A process. lapsed: the attempt that it heard of is no longer in the log."""

    started: bool = False
    heard: bool = False
    lapsed: bool = False
    dead: bool = False


class LaunchScope(Scope):
    """Processes that die, are started again, in this launch, the next, or another run.

    A join that is answered may still be unheard. What was sent stays in flight for ever, so a
    dead process's claim may come at any time, if it lived to hear its attempt.
    one_step: by mistake, the join claims.
    """

    name = "launch"

    def __init__(
        self,
        rules: Rules,
        processes: tuple[Process, ...],
        world: int,
        *,
        watched: tuple[int, ...] | None = None,
        serves: tuple[int, ...] = (),
        retires: bool = False,
        one_step: bool = False,
    ) -> None:
        """watched: the processes whose sessions may end; all of them if not given.

        serves: those that may say that they serve, and leave.
        """
        self.log = Log(rules, processes, world)
        self.everyone = range(len(processes))
        self.watched = self.everyone if watched is None else watched
        self.serves, self.retires, self.one_step = serves, retires, one_step
        self.successor = {p.after: i for i, p in enumerate(processes) if p.after is not None}

    def first(self) -> tuple[Any, ...]:
        # Whose join is under way from the start may as well arrive whenever it likes.
        return (self.log.start, *(Alive(started=p.after is None) for p in self.log.processes))

    def next(self, state: tuple[Any, ...]) -> Iterator[tuple[str, tuple[Any, ...]]]:
        at, processes = state[0], state[1:]

        def now(p: int, log: int = at, **changes: Any) -> tuple[Any, ...]:
            new = [*processes[:p], processes[p]._replace(**changes), *processes[p + 1 :]]
            for q, process in enumerate(new):
                if process.heard and not process.lapsed and not self.log.find(log, q)[0]:
                    new[q] = process._replace(lapsed=True)
            return (log, *new)

        def does(p: int, key: Key) -> Step:
            step = self.log.step(at, key)
            self._evicts_nobody(state, p, step.after)
            return step

        for p in self.everyone:
            me, spec = processes[p], self.log.processes[p]
            if not me.started:
                if spec.after is None or processes[spec.after].dead:
                    yield f"start {spec.name}", now(p, started=True)
                continue
            if p in self.successor and not me.dead:
                yield f"die {spec.name}", now(p, dead=True)
            yield from self._joins(state, p, now, does)
            yield from self._calls(state, p, now, does)
        last = self.log.last(at)
        orders: list[tuple[str, Key]] = []
        if last is not None and last.open:
            orders = [
                (f"spend {what}", ("spend", last.number, what))
                for what in ("gather", "report", "apply", "grace")
            ]
        # Where nobody serves, a round of the past has nothing that an order could change.
        known = self.log.engines[at].rounds
        for number in known if self.serves else list(known)[-1:]:
            orders.append((f"cancel {number}", ("cancel", number)))
            if self.retires:
                orders.append((f"retire {number}", ("retire", number)))
        for label, key in orders:
            self.trying = label
            yield label, (self.log.step(at, key).after, *processes)

    def _joins(
        self, state: tuple[Any, ...], p: int, now: Any, does: Any
    ) -> Iterator[tuple[str, tuple[Any, ...]]]:
        me, name = state[1 + p], self.log.processes[p].name
        self.trying = f"join {name}"
        after = does(p, ("join", p)).after
        attempt, number = self.log.find(after, p)
        if self.one_step and not number:
            after = self.log.step(after, ("claim", p, attempt, ())).after
            self._evicts_nobody(state, p, after)
        if me.heard or me.dead or p in self.successor:
            yield self.trying, now(p, after)
        if not me.heard and not me.dead:
            # Who cannot die hears the answer, sooner or later: later is a later claim.
            yield f"join-heard {name}", now(p, after, heard=True)

    def _calls(
        self, state: tuple[Any, ...], p: int, now: Any, does: Any
    ) -> Iterator[tuple[str, tuple[Any, ...]]]:
        at, me, name = state[0], state[1 + p], self.log.processes[p].name
        if not me.heard:
            return
        attempt = LAPSED if me.lapsed else self.log.find(at, p)[0]
        engine = self.log.engines[at]
        round_ = engine.round_of(attempt)
        if round_ is None:
            for watched in self._watched(at):
                self.trying = f"claim {name}" + (" while its members are watched" * bool(watched))
                yield self.trying, now(p, does(p, ("claim", p, attempt, watched)).after)
            return
        number, calls = round_.number, []
        if round_.number < engine.last.number or not round_.open:
            # All that may still come of it; nothing may come of it.
            for key in (("report", p, attempt, number, 0), ("report", p, attempt, number + 1, 0)):
                self.trying = f"report {name} for round {key[3]}"
                yield self.trying, now(p, does(p, key).after)
            for key in (("veto", p, attempt, number), ("lose", attempt, number, "s")):
                self.trying = f"{key[0]} {name} late"
                yield self.trying, now(p, does(p, key).after)
            for key in self._after(p, attempt, number):
                self.trying = f"{key[0]} {name} after the end"
                yield self.trying, now(p, does(p, key).after)
            return
        calls.append((f"report {name}", ("report", p, attempt, number, 0)))
        if round_.verdict:
            calls.append((f"built {name}", ("applied", p, attempt, number, "built")))
        if p in self.watched:
            calls += [
                (f"suspect {name}", ("suspect", attempt, number, "s")),
                (f"clear {name}", ("clear", attempt, number)),
                (f"lose {name}", ("lose", attempt, number, "s")),
            ]
        for label, key in calls:
            self.trying = label
            yield label, now(p, does(p, key).after)

    def _after(self, p: int, attempt: int, number: int) -> Iterator[Key]:
        if p not in self.serves:
            return
        yield ("serve", p, attempt, number)
        yield ("leave", p, attempt, number)
        yield ("suspect", attempt, number, "s")
        yield ("clear", attempt, number)

    def _watched(self, at: int) -> Iterator[tuple[int, ...]]:
        yield ()
        for round_ in self.log.engines[at].rounds.values():
            if round_.ended == "SEALED":
                yield tuple(sorted(m.attempt for m in round_.seated))

    def _evicts_nobody(self, state: tuple[Any, ...], p: int, after: int) -> None:
        """A dead process whose successor holds the slot disturbs it no more."""
        heir = self.successor.get(p)
        if heir is None or not state[1 + p].dead or not state[1 + heir].heard:
            return
        attempt, number = self.log.find(state[0], heir)
        before, now = self.log.last(state[0]), self.log.last(after)
        if number and number == before.number and before.open and before.members[attempt].seated:
            must(
                now.number == before.number and now.open and len(now.causes) == len(before.causes),
                "S5 a dead process's packet ended the round of its living successor",
            )


class Slow(NamedTuple):
    """A call or finding that a coordinator decided and has not appended yet."""

    command: Key
    seen: int  # the log it was decided on
    again: bool = False  # its append was kept, and the answer lost


class StaleScope(Scope):
    """Two coordinators on one log: one is slow between its decision and its append.

    The other one decides and appends in one step: a decision that is appended was made on the log
    it is appended to, so it may as well have been made at that moment. `slow` coordinators are
    those for which the model does not take that for granted.
    """

    name = "stale"

    def __init__(
        self,
        rules: Rules,
        world: int,
        *,
        slow: int = 1,
        compares: bool = True,
        tells_first: bool = False,
        repeats_blindly: bool = False,
    ) -> None:
        self.log = Log(rules, tuple(Process(f"p{r}", (r,)) for r in range(world)), world)
        self.slow, self.compares, self.tells_first = slow, compares, tells_first
        self.repeats_blindly = repeats_blindly

    def first(self) -> tuple[Any, ...]:
        at = self.log.start
        for p in range(len(self.log.processes)):
            at = self.log.step(at, ("join", p)).after
            at = self.log.step(at, ("claim", p, self.log.find(at, p)[0], ())).after
        return (at, *(None for _ in range(self.slow)), ())

    def next(self, state: tuple[Any, ...]) -> Iterator[tuple[str, tuple[Any, ...]]]:
        at, slow, told = state[0], state[1:-1], state[-1]
        if self.is_over(state) and not any(slow):
            return
        for label, key in self._commands(at):
            self.trying = label
            yield label, self._told(self.log.step(at, key).after, slow, told)
            for c, busy in enumerate(slow):
                if busy is None:
                    early = told
                    if self.tells_first:
                        early = self._early(at, key, told)
                    now = (*slow[:c], Slow(key, at), *slow[c + 1 :])
                    yield f"decide[{c}] {label}", (at, *now, early)
        for c, busy in enumerate(slow):
            if busy is None:
                continue
            idle = (*slow[:c], None, *slow[c + 1 :])
            yield f"crash[{c}]", (at, *idle, told)
            self.trying = f"append[{c}] {' '.join(map(str, busy.command))}"
            if busy.again and not self.repeats_blindly:
                # It is read again before it is decided again.
                yield f"reread[{c}]", (at, *slow[:c], Slow(busy.command, at), *slow[c + 1 :], told)
                continue
            if busy.seen == at or not self.compares or busy.again:
                kept = self._append(at, busy)
                yield self.trying, self._told(kept, idle, told)
                if not busy.again:
                    unheard = (*slow[:c], busy._replace(again=True), *slow[c + 1 :])
                    yield f"{self.trying}, unanswered", self._told(kept, unheard, told)
            else:
                fresh = (*slow[:c], Slow(busy.command, at), *slow[c + 1 :])
                yield f"conflict[{c}]", (at, *fresh, told)

    def _append(self, at: int, busy: Slow) -> int:
        if busy.seen == at and not busy.again:
            return self.log.step(at, busy.command).after
        step = self.log.step(busy.seen, busy.command)
        if not step.events:
            return at
        command = self.log.command(self.log.engines[busy.seen], busy.command)
        return self.log.append(at, step.events, command).after

    def _early(self, at: int, key: Key, told: tuple[Any, ...]) -> tuple[Any, ...]:
        after = self.log.last(self.log.step(at, key).after)
        said = after.ended or after.verdict
        return tuple(sorted({*told, said})) if said and said != self.log.last(at).verdict else told

    def _told(self, at: int, slow: tuple[Any, ...], told: tuple[Any, ...]) -> tuple[Any, ...]:
        last = self.log.last(at)
        final = {"FAILED", "PASSED"} if last.verdict else set()
        for said in told:
            if said in final:
                must(said == last.verdict, f"S1 {said} was told, the log says {last.verdict}")
            elif last.ended:
                must(said == last.ended, f"S2 {said} was told, the log says {last.ended}")
        return (at, *slow, told)

    def _commands(self, at: int) -> Iterator[tuple[str, Key]]:
        number = self.log.last(at).number
        for p, process in enumerate(self.log.processes):
            attempt, _ = self.log.find(at, p)
            yield f"report {process.name}", ("report", p, attempt, number, 0)
            yield f"built {process.name}", ("applied", p, attempt, number, "built")
            if p == 0:
                yield f"veto {process.name}", ("veto", p, attempt, number)
            if p == 1:
                yield f"suspect {process.name}", ("suspect", attempt, number, "s")
                yield f"clear {process.name}", ("clear", attempt, number)
                yield f"lose {process.name}", ("lose", attempt, number, "s")
        for what in ("report", "apply", "grace"):
            yield f"spend {what}", ("spend", number, what)
        yield "cancel", ("cancel", number)


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


LOST_ANSWERED = "S12 lost although it was answered since its suspicion was logged"
LOST_ATTACHED = "S12 lost while its session is open"
NO_IN_HAND_ = "S3/S7 a round was settled with a member's no in the coordinator's hands"

__all__ = ["Breach", "LaunchScope", "PresenceScope", "RoundScope", "StaleScope"]
