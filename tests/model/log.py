"""The states of one engine's log, and the steps between them that a command makes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from coordinator import commands
from coordinator.policy import Policy
from kvaccord import Layout, Report, messages, page
from kvaccord.canonical import digest
from kvaccord.decision import Decision
from kvaccord.errors import Problem
from kvaccord.messages import Join, Launch
from tests.model.monitors import (
    ENTRY_BYTES,
    Breach,
    Key,
    check_claim,
    check_entry,
    check_floor,
    must,
)
from tests.model.rules import Rules

OTHER_DIGEST = "sha256:" + "0" * 64


class Process(NamedTuple):
    """after: the process that must have died before this one is started.

    short: its report alone makes failure certain.
    """

    name: str
    ranks: tuple[int, ...]
    run: str = "A"
    restart: int = 0
    after: int | None = None
    tp: int = 0  # another layout than the scope's, if not 0
    length: int = 8  # max_model_len, which must be equal over the engine
    short: bool = False


def sorted_tuple(items: Iterable[Any]) -> Key:
    return tuple(sorted(items))


class Step(NamedTuple):
    """What a command did: the state afterwards, and what was appended or why it was refused."""

    after: int
    events: tuple[Any, ...] = ()
    refused: str = ""


class Log:
    """The states of one engine's log, each known by a small integer, and the steps between them.

    Two logs are one state when the rules and the properties cannot tell them apart: how long the
    log is, and what the documents and causes of the past say, is left out of the key. That
    documents do not change is checked on every step itself.
    """

    def __init__(
        self, rules: Rules, processes: Sequence[Process], world: int, *, alike: bool = False
    ) -> None:
        """alike: no two processes share a rank and all may do the same; so may their names."""
        self.rules, self.processes, self.world, self.alike = rules, processes, world, alike
        self.engines: list[Any] = []
        self._ids: dict[Key, int] = {}
        self._steps: dict[tuple[int, Key], Step] = {}
        self._found: dict[tuple[int, int], tuple[int, int]] = {}
        self._rivals = [
            (f"process-{a}", f"process-{b}")
            for b, q in enumerate(processes)
            for a, p in enumerate(processes[:b])
            if set(p.ranks) & set(q.ranks)
        ]
        self._by_nonce = {f"process-{i}": i for i in range(len(processes))}
        self.joins = [
            Join(
                ranks=p.ranks,
                layout=Layout(tp=p.tp or world),
                nonce=f"process-{i}",
                launch=Launch(run=p.run, restart=p.restart),
                host=f"host-{p.name}",
                pid=100 + i,
            )
            for i, p in enumerate(processes)
        ]
        self.start = self._id(rules.empty())

    def report(self, process: int, pages: int) -> dict[int, Report]:
        """Every process has other numbers, so that a plan shows whose reports made it."""
        budget = (pages + 10 + process) * 10
        if self.processes[process].short:
            budget = ENTRY_BYTES - 1 - pages  # not one page
        report = Report(
            free_bytes=budget + 3,
            kv_budget_bytes=budget,
            max_model_len=self.processes[process].length,
            classes=(page("kv", ENTRY_BYTES),),
        )
        return dict.fromkeys(self.processes[process].ranks, report)

    def process_of(self, join: Join) -> int:
        return self._by_nonce[join.nonce]

    def find(self, state: int, process: int) -> tuple[int, int]:
        """(attempt, round) of a process; round 0: reserved only; (0, 0): neither."""
        known = self._found.get((state, process))
        if known is None:
            known = self._found[state, process] = self._find(state, process)
        return known

    def _find(self, state: int, process: int) -> tuple[int, int]:
        engine, nonce = self.engines[state], f"process-{process}"
        for round_ in engine.newest_first():
            for member in round_.members.values():
                if member.join.nonce == nonce:
                    return member.attempt, round_.number
        for attempt, reservation in engine.reservations.items():
            if reservation.join.nonce == nonce:
                return attempt, 0
        return 0, 0

    def last(self, state: int) -> Any:
        return self.engines[state].last

    def command(self, engine: Any, key: Key) -> Any:
        match key:
            case ("join", process):
                return commands.Reserve(self.joins[process])
            case ("claim", _, attempt, watched):
                return commands.Claim(attempt, Policy(), frozenset(watched))
            case ("report", process, attempt, number, pages):
                return commands.Submit(number, attempt, self.report(process, pages), {})
            case ("veto", process, attempt, number):
                said = messages.Veto(rank=self.processes[process].ranks[0], text="no")
                return commands.Veto(number, attempt, said)
            case ("leave", _, attempt, number):
                return commands.Leave(number, attempt, messages.Leave())
            case ("applied", process, attempt, number, how):
                return commands.Apply(number, attempt, self._applied(engine, process, number, how))
            case ("suspect", attempt, number, connection):
                return commands.Suspect(number, attempt, connection)
            case ("clear", attempt, number):
                return commands.Clear(number, attempt)
            case ("lose", attempt, number, connection):
                return commands.Lose(number, attempt, connection, 1.0)
            case ("spend", number, what):
                return commands.Spend(number, what)
            case ("spend", number, what, soft, stuck):
                # As the shell finds them: of the claimed ranks, perhaps some time ago.
                signs = {
                    r: commands.Sign("at", 1.0, r in stuck) for r in engine.rounds[number].slots
                }
                return commands.Spend(number, what, soft, signs)
            case ("serve", _, attempt, number):
                return commands.Serve(number, attempt)
            case ("cancel", number):
                return commands.Cancel(number, "so")
            case ("retire", number):
                return commands.Retire(number, "so")
        raise AssertionError(key)

    def _applied(self, engine: Any, process: int, number: int, how: str) -> messages.Applied:
        decision = engine.rounds[number].decision if number in engine.rounds else b""
        name = digest(decision) if decision and how != "other" else OTHER_DIGEST
        if how == "failed":
            return messages.Applied(digest=name, failed=messages.BuildFailed(text="no"))
        built = {"kv": 1}
        if decision and how in ("built", "other"):
            built = Decision(decision).entries(self.processes[process].ranks[0]) or built
        return messages.Applied(digest=name, built=built)

    def step(self, state: int, key: Key) -> Step:
        """One command, decided on a state and appended to it. Raises Breach."""
        known = self._steps.get((state, key))
        if known is None:
            known = self._steps[state, key] = self._step(state, key)
        return known

    def _step(self, state: int, key: Key) -> Step:
        before = self.engines[state]
        command = self.command(before, key)
        try:
            events = self.rules.decide(before, command)
        except Problem as refusal:
            check_claim(self, before, before, command, ())
            return Step(state, refused=refusal.code)
        except Breach:
            raise
        except Exception as fault:  # the rules are total: any other end is a breach
            must(False, f"TOTAL the rules fail on {key}: {type(fault).__name__} {fault}")
            return Step(state, refused="broken")
        if not events:
            check_claim(self, before, before, command, events)
            return Step(state)
        return self.append(state, events, command)

    def append(self, state: int, events: tuple[Any, ...], command: Any) -> Step:
        """Append what was decided, here or (by mistake) on another state. Raises Breach."""
        before = self.engines[state]
        try:
            after = self.rules.evolve(before, events)
        except Exception as fault:  # the rules are total: any end but a state is a breach
            must(False, f"TOTAL evolve fails: {type(fault).__name__} {fault}")
            return Step(state, refused="broken")
        check_entry(self, before, after, command, events)
        return Step(self._id(after), events)

    def _id(self, engine: Any) -> int:
        key = self._key(engine)
        known = self._ids.get(key)
        if known is None:
            known = self._ids[key] = len(self.engines)
            self.engines.append(engine)
            check_floor(self.rules, engine)
        return known

    def _key(self, engine: Any) -> Key:
        if self.alike:
            return self._alike_key(engine)
        rounds = list(engine.newest_first())[::-1]
        given = {r.join.nonce: a for a, r in engine.reservations.items()}
        for round_ in rounds:
            given |= {m.join.nonce: a for a, m in round_.members.items()}
        return (
            sorted_tuple(r.join.nonce for r in engine.reservations.values()),
            # Attempts are compared where two processes want one rank, and nowhere else.
            tuple(
                None if a not in given or b not in given else given[a] < given[b]
                for a, b in self._rivals
            ),
            tuple((r.number, r.launch, *self._standing(r)) for r in rounds[:-1]),
            self._round_key(rounds[-1]) if rounds else None,
        )

    def _standing(self, r: Any) -> Key:
        """What may still matter of a round that has ended."""
        members = r.members.values()
        if r.ended != "SEALED":
            return (False, sorted_tuple((m.join.nonce, m.seated) for m in members))
        each = sorted_tuple((m.join.nonce, m.seated, *_after_the_seal(m)) for m in members)
        return (True, r.retired is not None, each)

    def _alike_key(self, engine: Any) -> Key:
        """One round of processes that only their names tell apart: what each has come to, sorted.

        Names of attempts, ranks and (per process) of two connections may be exchanged.
        """
        last = engine.last
        if last is None:
            return (len(engine.reservations),)
        if last.ended == "SEALED":
            each = sorted_tuple((m.kept, bool(m.suspect), bool(m.departed)) for m in last.seated)
            return len(engine.reservations), last.number, last.retired is not None, each
        if last.ended:
            return (
                len(engine.reservations),
                last.ended,
                sorted_tuple((m.seated, bool(m.suspect)) for m in last.members.values()),
                bool(last.causes),
            )
        each = sorted_tuple(
            (m.seated, bool(m.suspect), m.gone, m.applied is not None, m.ranks[0] in last.sent)
            for m in last.members.values()
        )
        return len(engine.reservations), last.number, last.verdict, each, bool(last.causes)

    def _round_key(self, r: Any) -> Key:
        if r.ended:
            return r.number, r.launch, r.layout.tp, r.ended, self._standing(r), bool(r.causes)
        members = sorted_tuple(
            (m.join.nonce, m.seated, m.suspect or "", m.gone, m.applied is not None)
            for m in r.members.values()
        )
        sent = tuple((rank, report.kv_budget_bytes) for rank, report in sorted(r.sent.items()))
        return r.number, r.launch, r.layout.tp, r.verdict, members, sent, bool(r.causes)


def _after_the_seal(member: Any) -> Key:
    return member.kept, member.suspect or "", member.departed is not None
