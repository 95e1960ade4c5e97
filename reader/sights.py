"""What a line of a log can show: the words between the engines' patterns and the fold."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from re import Match, Pattern
from typing import Literal

Unit = Literal["blocks", "tokens"]
# own: a rank's own count, which must equal those of its peers. offer: what a rank could hold; the
# engine goes on with the smallest. plan: the engine's one number for all ranks.
Kind = Literal["own", "offer", "plan"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a line stands."""

    file: str
    line: int


@dataclass(frozen=True, slots=True)
class Seat:
    """Who wrote a line, as far as the line says. `axes` as printed: (("pp", 0), ("tp", 3))."""

    rank: int | None = None
    axes: tuple[tuple[str, int], ...] = ()
    process: str = ""  # a worker that tells its pid alone
    engine: bool = False  # an engine's front process, which speaks for all its ranks

    @property
    def known(self) -> bool:
        return self.rank is not None or bool(self.axes) or bool(self.process)


@dataclass(frozen=True, slots=True)
class Count:
    """Blocks or tokens of one pool. `pool` tells several pools of one rank apart."""

    value: int
    unit: Unit
    kind: Kind
    pool: str = ""


@dataclass(frozen=True, slots=True)
class Fact:
    """A number of a rank, named with its unit last. `_gib` has the two decimals of the log."""

    name: str
    value: float


@dataclass(frozen=True, slots=True)
class World:
    """What the log says about sizes: axes of the layout, or the number of ranks."""

    axes: tuple[tuple[str, int], ...] = ()
    ranks: int | None = None
    version: str = ""


@dataclass(frozen=True, slots=True)
class Begin:
    """A line that a process writes once, when it starts."""

    mark: str


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a start was reached. Greater `order` is later; `ended` closes what was begun."""

    name: str
    order: int
    ended: bool = True


@dataclass(frozen=True, slots=True)
class Forget:
    """What ranks counted so far was for the profiling pass, and has been given back."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine serves."""


@dataclass(frozen=True, slots=True)
class During:
    """What is being done when the next exception is printed."""

    what: str


@dataclass(frozen=True, slots=True)
class Opened:
    """A traceback begins; its last line may come without a prefix."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Somebody says that it waits for others."""

    text: str


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something went wrong. `code` is one of docs/protocol.md, section 5.

    limit: the engine refused its own numbers. raised: any exception. died: a process is gone
    without a word. late: others did not come. victim: a consequence of somebody else's trouble.
    """

    kind: Literal["limit", "raised", "died", "late", "victim"]
    code: str
    text: str
    ranks: tuple[int, ...] = ()  # named in the text; not the writer
    missing: tuple[int, ...] = ()
    facts: tuple[tuple[str, float | str], ...] = ()


Sight = (
    Count | Fact | World | Begin | Step | Forget | Ready | During | Opened | Waiting | Trouble
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mark:
    """A row of an engine's table.

    Every line that `pattern` matches holds one of `needles`, and one of `raw` (None: the needles).
    `raw` is searched for in chunks of bytes: few strings, long and rare, so that gigabytes go by
    quickly. `serving`: also searched for once the engine serves.
    """

    needles: tuple[str, ...]
    pattern: Pattern[str]
    sights: Callable[[Match[str]], Iterable[Sight]]
    serving: bool = False
    raw: tuple[str, ...] | None = None
    engine: str = field(default="")


EXCEPTIONS = ("Error", "Exception")  # `raw` of what is always the text of an exception


def number(text: str) -> int:
    """`538,880` and `-561981` as integers."""
    return int(text.replace(",", ""))
