"""Starts of an engine: who dies, who comes again, who takes over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.model.log import Log, Process, Step
from tests.model.monitors import Key, must
from tests.model.rules import Rules
from tests.model.search import Scope

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
