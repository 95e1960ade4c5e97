"""Coordinators that decide on a log that has gone on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.model.log import Log, Process
from tests.model.monitors import Key, must
from tests.model.rules import Rules
from tests.model.search import Scope


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
