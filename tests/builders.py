"""Small worlds for the tests: reports, joins, and the log of one engine told as a story."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from coordinator.commands import (
    Apply,
    Claim,
    Clear,
    Command,
    Leave,
    Lose,
    Reserve,
    Spend,
    Submit,
    Suspect,
    Veto,
)
from coordinator.engine import Engine, Member, Round, evolve_entry
from coordinator.events import EngineName, Event, entry_from, entry_of
from coordinator.policy import Policy
from coordinator.round import decide
from kvaccord import Layout, Report, messages, page
from kvaccord.decision import Decision, Outcome
from kvaccord.messages import Applied, BuildFailed, Join, Launch

PAGE_BYTES = 1000

# Arguments of Rendezvous.join, each of a type that it never has. (A wrong patience_s is refused by
# the name of its variable.)
WRONG: dict[str, Any] = {
    "ranks": None,
    "layout": {"tp": 1},
    "engine": 5,
    "url": 5,
    "namespace": b"x",
    "launch": 5,
    "inputs": [1],
    "groups": 5,
    "device": 5,
    "on_stop": None,
}

_nonces = count(1)


def a_report(pages: int = 90, *, page_bytes: int = PAGE_BYTES, **changes: Any) -> Report:
    """A rank whose budget holds exactly `pages` pages, with a little more memory free."""
    budget = pages * page_bytes
    fields: dict[str, Any] = {
        "free_bytes": max(budget, 0) + 77,
        "kv_budget_bytes": budget,
        "classes": [page("kv", page_bytes)],
    }
    return Report(**fields | changes)


def a_join(*ranks: int, layout: Layout | None = None, **changes: Any) -> Join:
    ranks = ranks or (0,)
    nonce = f"nonce-{next(_nonces):06}"
    fields: dict[str, Any] = {
        "ranks": ranks,
        "layout": layout or Layout(tp=max(ranks) + 1),
        "nonce": nonce,
        "launch": a_launch(),
        "host": f"host-{ranks[0]}",
        "pid": 1000 + ranks[0],
    }
    return Join(**fields | changes)


def a_launch(run: str = "run-1", restart: int = 0, source: Any = "env") -> Launch:
    return Launch(run=run, restart=restart, source=source)


class Log:
    """The log of one engine. Every entry goes through its bytes, as it does in a store."""

    def __init__(self) -> None:
        self.entries: list[bytes] = []
        self.engine = Engine(EngineName("default", "llama"), "store-1")

    def do(self, command: Command) -> tuple[Event, ...]:
        """Decide and keep. Returns the events; a Refused comes through and nothing is kept."""
        events = decide(self.engine, command)
        if events:
            self.entries.append(entry_of(events).to_bytes())
            self.engine = evolve_entry(self.engine, entry_from(self.entries[-1]).events)
        return events

    def replayed(self) -> Engine:
        """What a coordinator that starts now makes of this log."""
        engine = Engine(self.engine.name, self.engine.store_id)
        for body in self.entries:
            engine = evolve_entry(engine, entry_from(body).events)
        return engine

    def joined(self, join: Join) -> Process:
        (reserved,) = self.do(Reserve(join))
        return Process(self, reserved.attempt, join)  # type: ignore[union-attr]

    def claimed(self, *ranks: int, **changes: Any) -> Process:
        """A process that joined with these ranks and claimed them."""
        process = self.joined(a_join(*ranks, **changes))
        process.claims()
        return process

    def start(self, world: int = 2, **changes: Any) -> list[Process]:
        """Every rank of a start, each in a process of its own, joined and claimed."""
        layout = changes.pop("layout", Layout(tp=world))
        return [self.claimed(rank, layout=layout, **changes) for rank in range(world)]

    def passed(self, *pages: int, **changes: Any) -> list[Process]:
        """A start that everyone has reported to: it is PASSED."""
        processes = self.start(len(pages), **changes)
        for process, n in zip(processes, pages, strict=True):
            process.reports(n)
        assert self.round.state == "PASSED"
        return processes

    def sealed(self, *pages: int, **changes: Any) -> list[Process]:
        processes = self.passed(*pages, **changes)
        for process in processes:
            process.applies()
        assert self.round.state == "SEALED"
        return processes

    def spends(self, what: Any, round_: int | None = None) -> tuple[Event, ...]:
        return self.do(Spend(self.round.number if round_ is None else round_, what))

    @property
    def round(self) -> Round:
        """The last round."""
        assert self.engine.last is not None
        return self.engine.last

    @property
    def decision(self) -> Decision:
        return Decision(self.round.decision)

    @property
    def outcome(self) -> Outcome:
        return Outcome(self.round.outcome)


@dataclass
class Process:
    """One process of a start, by its token. Its calls go to the round it claimed."""

    log: Log
    attempt: int
    join: Join

    @property
    def round(self) -> Round:
        round_ = self.log.engine.round_of(self.attempt)
        assert round_ is not None, "it has claimed"
        return round_

    @property
    def member(self) -> Member:
        return self.round.members[self.attempt]

    def claims(self, *, watched: list[Process] | None = None) -> tuple[Event, ...]:
        seen = frozenset(p.attempt for p in watched or ())
        return self.log.do(Claim(self.attempt, Policy(), seen))

    def reports(self, report: Report | int = 90, *, round_: int | None = None) -> tuple[Event, ...]:
        report = a_report(report) if isinstance(report, int) else report
        number = self.round.number if round_ is None else round_
        return self.log.do(Submit(number, self.attempt, dict.fromkeys(self.join.ranks, report), {}))

    def vetoes(self, text: str = "CUDA out of memory", **changes: Any) -> tuple[Event, ...]:
        fields: dict[str, Any] = {"rank": self.join.ranks[0], "text": text}
        veto = messages.Veto(**fields | changes)
        return self.log.do(Veto(self.round.number, self.attempt, veto))

    def leaves(self, reason: str | None = None) -> tuple[Event, ...]:
        return self.log.do(Leave(self.round.number, self.attempt, messages.Leave(reason=reason)))

    def applies(
        self, built: dict[str, int] | None = None, *, digest: str | None = None
    ) -> tuple[Event, ...]:
        decision = Decision(self.round.decision)
        if built is None:
            built = decision.entries(self.join.ranks[0])
        said = Applied(digest=digest or decision.digest, built=built)
        return self.log.do(Apply(self.round.number, self.attempt, said))

    def fails_to_build(self, text: str = "hipMalloc failed", **changes: Any) -> tuple[Event, ...]:
        said = Applied(
            digest=Decision(self.round.decision).digest, failed=BuildFailed(text=text, **changes)
        )
        return self.log.do(Apply(self.round.number, self.attempt, said))

    def is_suspected(self, connection: str = "session-1") -> tuple[Event, ...]:
        return self.log.do(Suspect(self.round.number, self.attempt, connection))

    def is_back(self) -> tuple[Event, ...]:
        return self.log.do(Clear(self.round.number, self.attempt))

    def is_lost(self, connection: str = "session-1", after_s: float = 1.0) -> tuple[Event, ...]:
        return self.log.do(Lose(self.round.number, self.attempt, connection, after_s))


def blamed(document: Decision | Outcome) -> list[tuple[str, int | None, str | None]]:
    """Its causes as (code, rank, host), in order."""
    return [(c["code"], c.get("rank"), c.get("host")) for c in document.causes]


def lacking(what: str) -> None:
    """Ends a test that needs what this machine lacks: skipped at home, failed in CI."""
    if os.environ.get("CI"):
        pytest.fail(f"CI lacks {what}")
    pytest.skip(f"needs {what}")  # a contributor's machine need not have it all; CI's must


@contextmanager
def mounted(disk: Path, *, size: str) -> Iterator[Path]:
    """A file system of its own in a new folder, no larger than `size`, as mount writes it."""
    if os.geteuid() != 0:
        lacking("root, which may mount a file system")
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk], check=True)
    try:
        yield disk
    finally:
        subprocess.run(["umount", disk], check=True)


def is_canonical(body: bytes) -> bool:
    """Judged by the standard library alone: sorted keys, no spaces, no floats, no null."""

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} has no place in a frozen document")

    def whole(value: Any) -> None:
        match value:
            case dict():
                assert list(value) == sorted(value), "keys in order"
                assert all(key.isascii() for key in value), "ASCII keys"
                for item in value.values():
                    whole(item)
            case list():
                for item in value:
                    whole(item)
            case bool() | str():
                pass
            case int():
                assert abs(value) < 2**53
            case _:
                refuse(repr(value))

    document = json.loads(body, parse_float=refuse, parse_constant=refuse)
    whole(document)
    plain = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return plain.encode() == body
