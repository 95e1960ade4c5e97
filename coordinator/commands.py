"""What may happen to an engine: calls of workers, orders of operators, findings. Pure.

A finding is what the shell saw of time and presence; a command never states a clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from coordinator.engine import Phase
from coordinator.events import Touch
from coordinator.policy import Policy
from kvaccord import messages
from kvaccord.messages import Join, Report


@dataclass(frozen=True)
class Reserve:
    join: Join
    touched: tuple[Touch, ...] = ()


@dataclass(frozen=True)
class Claim:
    """watched: the attempts of the engine whose session is open now (a finding)."""

    attempt: int
    policy: Policy
    watched: frozenset[int] = frozenset()
    touched: tuple[Touch, ...] = ()


@dataclass(frozen=True)
class Submit:
    """A process reports. planned: the ranks that a fault rule changed, as changed.

    spent_s: whole seconds of the report budget that were spent when it came (a finding).
    """

    round: int
    attempt: int
    reports: Mapping[int, Report]
    planned: Mapping[int, Report]
    touched: tuple[Touch, ...] = ()
    spent_s: int = 0


@dataclass(frozen=True)
class Veto:
    round: int
    attempt: int
    veto: messages.Veto
    touched: tuple[Touch, ...] = ()


@dataclass(frozen=True)
class Leave:
    round: int
    attempt: int
    leave: messages.Leave
    touched: tuple[Touch, ...] = ()


@dataclass(frozen=True)
class Apply:
    round: int
    attempt: int
    applied: messages.Applied
    touched: tuple[Touch, ...] = ()


@dataclass(frozen=True)
class Serve:
    """After the seal: this process serves and keeps its session."""

    round: int
    attempt: int
    touched: tuple[Touch, ...] = ()


@dataclass(frozen=True)
class Cancel:
    """An operator ends an open round."""

    round: int
    reason: str


@dataclass(frozen=True)
class Retire:
    """An operator takes a sealed round out of force."""

    round: int
    reason: str


@dataclass(frozen=True)
class Suspect:
    """Found: this session of a member ended without goodbye."""

    round: int
    attempt: int
    connection: str


@dataclass(frozen=True)
class Clear:
    """Found: a suspect is back. Appended before it is answered."""

    round: int
    attempt: int


@dataclass(frozen=True)
class Lose:
    """Found: a suspect did not come back, or never opened a session, in `after_s` seconds.

    session: what became of it. A silent one is held open by a proxy, and no beat came.
    """

    round: int
    attempt: int
    connection: str
    after_s: float
    session: Literal["ended", "not opened", "silent"] = "ended"


@dataclass(frozen=True)
class Sign:
    """Found: what a rank was last seen at. stuck: without progress for stall_s and more."""

    phase: str
    age_s: float
    stuck: bool


@dataclass(frozen=True)
class Spend:
    """Found: a budget of the round has been spent to its soft or hard end, or a grace has.

    what: the budget, or `grace` after the first cause, or `shortfall` after a report that makes
    failure certain. signs: of the ranks that the budget waits for.
    """

    round: int
    what: Phase | Literal["grace", "shortfall"]
    soft: bool = False
    signs: Mapping[int, Sign] = field(default_factory=dict)


@dataclass(frozen=True)
class Mark:
    """A fault rule holds back a call of this attempt; whatever comes of it, that is kept first."""

    attempt: int
    touched: tuple[Touch, ...]


Call = Reserve | Claim | Submit | Veto | Leave | Apply | Serve
Order = Cancel | Retire
Finding = Suspect | Clear | Lose | Spend
Command = Call | Order | Mark | Finding
