"""One round of one launch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from tests.model.log import Log, Process
from tests.model.monitors import Key
from tests.model.rules import Rules
from tests.model.search import Liveness, Scope

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
