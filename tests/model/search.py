"""Every order of messages, crashes and findings, within small scopes.

The log's transitions are those of the SHIPPED rules (rules.py), perhaps with a planted mistake.
What the model adds is the world around the log (scopes): messages that are lost, repeated, delayed
for ever or reordered, processes that die and are started again, coordinators that decide on old
snapshots, crash and forget, sessions and timers.

README.md says what each scope holds and what it leaves out.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tests.model.log import Log
from tests.model.monitors import Breach, checking, is_checked


class Scope:
    """A world: its first state, and what may happen next.

    State is a tuple; its first item is the log's. An action's label begins with its kind.
    """

    name = ""
    log: Log
    trying = ""  # the action whose effect is being worked out

    def first(self) -> tuple[Any, ...]:
        raise NotImplementedError

    def next(self, state: tuple[Any, ...]) -> Iterator[tuple[str, tuple[Any, ...]]]:
        raise NotImplementedError

    def livenesses(self) -> Iterable[Liveness]:
        return (
            Liveness(
                "L4 no outcome is reachable without an operator",
                lambda s: not self.is_over(s),
                self.is_over,
                lambda kind: kind != "cancel",
            ),
        )

    def is_over(self, state: tuple[Any, ...]) -> bool:
        last = self.log.last(state[0])
        return last is None or not last.open


class Liveness(NamedTuple):
    """From each state that `of` holds for, a state of `to` is reachable by actions of `by`."""

    what: str
    of: Callable[[tuple[Any, ...]], bool]
    to: Callable[[tuple[Any, ...]], bool]
    by: Callable[[str], bool] = lambda _: True


@dataclass
class Found:
    """What a search found: nothing, or a breach and the shortest way to it."""

    states: int
    logs: int
    edges: int
    seconds: float
    breach: str = ""
    trace: list[str] = field(default_factory=list)
    complete: bool = True

    def __str__(self) -> str:
        head = "holds" if not self.breach else f"BREACH {self.breach}"
        if not self.complete:
            head += " (not complete: stopped at the bound)"
        size = f"{self.states} states, {self.edges} steps, {self.logs} logs, {self.seconds:.1f} s"
        return "\n".join(
            [f"{head}; {size}", *(f"  {n + 1}. {a}" for n, a in enumerate(self.trace))]
        )


def explore(scope: Scope, *, only: Iterable[str] = (), bound: int = 3_000_000) -> Found:
    """Breadth first, so that what is found is found by a shortest trace.

    only: the properties to check, `S3` or `L4`; all of them if none is named.
    """
    with checking(only):
        return _explored(scope, bound)


def _explored(scope: Scope, bound: int) -> Found:
    began = time.monotonic()
    start = scope.first()
    ids: dict[tuple[Any, ...], int] = {start: 0}
    parent: list[tuple[int, str]] = [(-1, "")]
    edges: list[tuple[int, int, str]] = []
    queue = deque([start])

    def path(at: int, *last: str) -> list[str]:
        back = list(last)
        while at > 0:
            at, action = parent[at]
            back.append(action)
        return back[::-1]

    def found(breach: str = "", trace: Sequence[str] = (), complete: bool = True) -> Found:
        spent = time.monotonic() - began
        logs = len(scope.log.engines)
        return Found(len(ids), logs, len(edges), spent, breach, list(trace), complete)

    while queue:
        state = queue.popleft()
        here = ids[state]
        try:
            for label, after in scope.next(state):
                if after == state:
                    continue
                there = ids.get(after)
                if there is None:
                    there = ids[after] = len(parent)
                    if there >= bound:
                        return found(complete=False)
                    parent.append((here, label))
                    queue.append(after)
                edges.append((here, there, label))
        except Breach as breach:
            return found(str(breach), path(here, scope.trying))
    states = list(ids)
    for liveness in filter(lambda li: is_checked(li.what), scope.livenesses()):
        stuck = _cannot_reach(states, edges, liveness)
        if stuck is not None:
            return found(liveness.what, path(stuck))
    return found()


def _cannot_reach(
    states: list[tuple[Any, ...]], edges: list[tuple[int, int, str]], liveness: Liveness
) -> int | None:
    back: list[list[int]] = [[] for _ in states]
    allowed: dict[str, bool] = {}
    for here, there, label in edges:
        kind = label.partition(" ")[0]
        if allowed.setdefault(kind, liveness.by(kind)):
            back[there].append(here)
    stack = [i for i, s in enumerate(states) if liveness.to(s)]
    reaches = bytearray(len(states))
    for i in stack:
        reaches[i] = 1
    while stack:
        for i in back[stack.pop()]:
            if not reaches[i]:
                reaches[i] = 1
                stack.append(i)
    return next((i for i, s in enumerate(states) if not reaches[i] and liveness.of(s)), None)
