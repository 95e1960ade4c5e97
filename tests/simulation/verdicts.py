"""What a checker says of a history, and the register of all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tests.simulation.account import Account

TOLERANCE_S = 0.05  # an answer may be on its way to the history for so long


@dataclass
class Verdict:
    name: str
    promise: str
    judged: int = 0
    breaches: list[tuple[str, list[int]]] = field(default_factory=list)

    @property
    def holds(self) -> bool | None:
        """None: nothing in this history puts it to the test."""
        if self.breaches:
            return False
        return True if self.judged else None

    def saw(self) -> None:
        self.judged += 1

    def breach(self, text: str, *places: int) -> None:
        self.breaches.append((text, sorted(set(places))))

    def expect(self, so: object, text: str, *places: int) -> None:
        self.judged += 1
        if not so:
            self.breach(text, *places)


Checker = Callable[[Account, Verdict], None]


Checker = Callable[[Account, Verdict], None]
CHECKERS: dict[str, tuple[str, Checker]] = {}


def checker(name: str, promise: str) -> Callable[[Checker], Checker]:
    def register(check: Checker) -> Checker:
        CHECKERS[name] = (promise, check)
        return check

    return register
