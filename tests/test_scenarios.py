"""The transcripts in tests/scenarios/: what happens, a line each, and what the log then holds.

A line is `WHO WHAT -> EVENTS`; a line without an arrow appends nothing. `refused CODE` stands for
a refusal. Blank lines and lines that begin with # are for the reader.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from coordinator.commands import Cancel, Retire, Serve, Sign, Spend
from coordinator.events import Decided, Ended, Event, Objected
from kvaccord import Layout
from kvaccord.errors import Refused
from tests.builders import Log, Process, a_launch

FILES = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))


class Stage:
    """Plays a transcript against the rules."""

    def __init__(self) -> None:
        self.log = Log()
        self.layout = Layout()
        self.people: dict[str, Process] = {}

    def play(self, line: str) -> str:
        try:
            return shown(self.do(line))
        except Refused as refusal:
            return f"refused {refusal.code}"

    def do(self, line: str) -> Iterable[Event]:
        for pattern, act in ACTS:
            if found := re.fullmatch(pattern, line):
                return act(self, *found.groups())
        raise AssertionError(f"no such line: {line!r}")

    def enter(self, name: str, rank: str, launch: str | None, restart: str | None) -> list[Event]:
        process = self.log.joined(
            _join(int(rank), self.layout, launch or "start-1", int(restart or 0))
        )
        self.people[name] = process
        return list(process.claims(watched=self.watching()))

    def watching(self) -> list[Process]:
        """Who keeps a session: everyone that was not said to have ended it."""
        return [p for p in self.people.values() if getattr(p, "watching", True)]

    def ends_session(self, name: str) -> Iterable[Event]:
        self.people[name].watching = False  # type: ignore[attr-defined]
        return self.people[name].is_suspected(f"{name}'s session")


def _join(rank: int, layout: Layout, run: str, restart: int):
    from tests.builders import a_join

    return a_join(rank, layout=layout, launch=a_launch(run, restart))


def _set_layout(stage: Stage, text: str) -> Iterable[Event]:
    axes = dict(part.split("=") for part in text.split())
    stage.layout = Layout(**{axis: int(size) for axis, size in axes.items()})
    return ()


ACTS = [
    (r"layout (.+)", _set_layout),
    (r"(\w+) claims rank (\d+)(?: of (\S+))?(?: restart (\d+))?", Stage.enter),
    (r"(\w+) reports (-?\d+) pages", lambda s, who, n: s.people[who].reports(int(n))),
    (r'(\w+) vetoes "(.+)"', lambda s, who, text: s.people[who].vetoes(text)),
    (r'(\w+) leaves "(.+)"', lambda s, who, text: s.people[who].leaves(text)),
    (r"(\w+) builds", lambda s, who: s.people[who].applies()),
    (r"(\w+) builds (\d+) pages", lambda s, who, n: s.people[who].applies({"kv": int(n)})),
    (r"(\w+)'s session ends", Stage.ends_session),
    (r"(\w+)'s session is back", lambda s, who: s.people[who].is_back()),
    (r"(\w+) stays away", lambda s, who: s.people[who].is_lost(f"{who}'s session")),
    (r"(\w+) serves", lambda s, who: _serve(s, who)),
    (r"(grace|shortfall|gather|report|apply) is spent", lambda s, what: s.log.spends(what)),
    (r"(report|apply) reaches its soft end, (\w+) is stuck", lambda s, *a: _soft(s, *a)),
    (r'the operator cancels "(.+)"', lambda s, why: s.log.do(Cancel(s.log.round.number, why))),
    (r'the operator retires "(.+)"', lambda s, why: s.log.do(Retire(s.log.round.number, why))),
]


def _serve(stage: Stage, who: str) -> Iterable[Event]:
    process = stage.people[who]
    return stage.log.do(Serve(process.round.number, process.attempt))


def _soft(stage: Stage, what: str, who: str) -> Iterable[Event]:
    rank = stage.people[who].join.ranks[0]
    signs = {
        r: Sign("loading", 400.0 if r == rank else 2.0, r == rank)
        for r in stage.log.round.waiting_for
    }
    return stage.log.do(Spend(stage.log.round.number, what, soft=True, signs=signs))  # type: ignore[arg-type]


def shown(events: Iterable[Event]) -> str:
    return ", ".join(map(_event, events))


def _event(event: Event) -> str:
    match event:
        case Decided(document=document):
            verdict = json.loads(document)["verdict"]
            return f"{verdict['outcome']} {verdict['code']}{_blamed(verdict)}"
        case Ended(document=document):
            outcome = json.loads(document)
            return f"{outcome['outcome']} {outcome['code']}{_blamed(outcome)}"
        case Objected(cause=cause):
            return f"objected {cause.code}"
        case _:
            return event.event


def _blamed(verdict: dict) -> str:
    return f" {verdict['ranks']}" if verdict["ranks"] else ""


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_log_holds_what_the_transcript_says(file: Path) -> None:
    stage = Stage()
    for number, line in enumerate(file.read_text().splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        what, _, expected = (part.strip() for part in line.partition("->"))
        assert stage.play(what) == expected, f"{file.name}:{number}: {what}"


def test_there_are_transcripts() -> None:
    assert len(FILES) >= 8
