"""A start told as acts in time, and what came of it. tests/play.py plays it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvaccord.decision import Decision, Frozen, Outcome


@dataclass(frozen=True)
class Who:
    """One process: its engine, its ranks, and its name among the processes of these ranks."""

    engine: str
    ranks: tuple[int, ...]
    name: str

    def __str__(self) -> str:
        return f"{self.engine} rank {', '.join(map(str, self.ranks))} ({self.name})"


@dataclass(frozen=True)
class Act:
    """Something that a process does, or that befalls it, `at_s` seconds after the beginning."""

    at_s: float
    who: Who


@dataclass(frozen=True)
class Comes(Act):
    """It joins with this document, claims, opens its session. Repeated: the same packets again."""

    join: Mapping[str, Any]


@dataclass(frozen=True)
class Shows(Act):
    """A sign of progress."""

    phase: str
    progress: int


@dataclass(frozen=True)
class Reports(Act):
    """Sent as it stands: the coordinator judges its form too. What is refused becomes a veto."""

    report: Mapping[str, Any]


@dataclass(frozen=True)
class Raises(Act):
    text: str


@dataclass(frozen=True)
class Leaves(Act):
    reason: str


@dataclass(frozen=True)
class Dies(Act):
    """Its streams end without goodbye; it does nothing any more."""


@dataclass(frozen=True)
class Returns(Act):
    """It was thought dead and opens its session again."""


@dataclass(frozen=True)
class Look:
    """Somebody asks how the engine is."""

    at_s: float
    engine: str


@dataclass(frozen=True)
class Restart:
    """The coordinator is replaced by another one over the same log."""

    at_s: float


@dataclass
class Story:
    """engines: what each has of policy fields; the rest is the default."""

    engines: dict[str, dict[str, Any]] = field(default_factory=dict)
    acts: list[Act | Look | Restart] = field(default_factory=list)
    lost_after_s: float = 30.0


@dataclass(frozen=True)
class Heard:
    """A frozen document as a process got it."""

    at_s: float
    who: Who
    document: Frozen


@dataclass(frozen=True)
class Refusal:
    at_s: float
    who: Who
    status: int
    problem: Mapping[str, Any]


@dataclass(frozen=True)
class Seen:
    """What the status says. ready: there is a plan in force, and it stands whole."""

    at_s: float
    engine: str
    status: Mapping[str, Any]

    @property
    def missing(self) -> list[int]:
        return [m["rank"] for m in self.status["missing"]]

    @property
    def ready(self) -> bool:
        return bool(self.status["standing"]["standing"] == "whole")


@dataclass
class History:
    heard: list[Heard] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    # (engine, round) -> when it was logged, and the document
    decisions: dict[tuple[str, int], tuple[float, Decision]] = field(default_factory=dict)
    outcomes: dict[tuple[str, int], tuple[float, Outcome]] = field(default_factory=dict)
    # At the end: the latest status of each engine, and which round each process was in.
    status: dict[str, dict[str, Any]] = field(default_factory=dict)
    rounds: dict[Who, int] = field(default_factory=dict)

    def documents(self, engine: str) -> list[tuple[float, Frozen]]:
        """Every frozen document of an engine and when it was logged, by round."""
        found: list[tuple[int, float, Frozen]] = [
            (number, at_s, document)
            for kind in (self.decisions, self.outcomes)
            for (name, number), (at_s, document) in kind.items()
            if name == engine
        ]
        return [(at_s, document) for _, at_s, document in sorted(found, key=lambda f: f[:2])]
