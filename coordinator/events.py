"""What an engine's log holds: entries of events, and how they are stored.

Stored events carry a version; every version since the first release can be read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from coordinator.policy import Policy
from kvaccord.errors import TooLarge
from kvaccord.layout import Layout
from kvaccord.messages import Built, Join, Launch, Rank, Report
from kvaccord.plan import Finding, plan

STORED_VERSION: Literal[1] = 1
# What every store takes as one append. etcd's own limit is 1.5 MiB a request.
MAX_ENTRY_BYTES = 2**20


class Stored(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    @cached_property
    def body(self) -> bytes:
        """As it is stored. Made once: it is measured first, and may share its entry."""
        return self.model_dump_json(exclude_none=True).encode()


class Touch(Stored):
    """What a fault rule did to a call: the proof that stands in the decision."""

    rule: str
    kind: str
    call: str
    ranks: tuple[Rank, ...]
    field: str | None = None
    before: int | None = None
    after: int | None = None


class Reserved(Stored):
    """An attempt number was given out. It binds nothing until it is claimed."""

    event: Literal["reserved"] = "reserved"
    attempt: int
    join: Join
    touched: tuple[Touch, ...] = ()


class Opened(Stored):
    """The first claim opened a round and bound these terms."""

    event: Literal["opened"] = "opened"
    round: int
    launch: Launch
    layout: Layout
    mode: str
    policy: Policy
    took_over: str | None = None  # a launch in force whose members were not alive any more

    @model_validator(mode="before")
    @classmethod
    def _hard_ends_alone(cls, stored: Any) -> Any:
        # The first stores held `budgets`, with hard ends only.
        if isinstance(stored, dict) and "budgets" in stored:
            budgets = stored.pop("budgets")
            ends = {name: budgets[name] for name in ("report_s", "apply_s")}
            stored["policy"] = {
                "gather_s": budgets["gather_s"],
                "grace_s": min(0.5, *budgets.values()),
                **{name: {"soft": hard, "hard": hard} for name, hard in ends.items()},
            }
        return stored


class Claimed(Stored):
    """A process entered the round. It holds its slots unless it differs or they are taken."""

    event: Literal["claimed"] = "claimed"
    round: int
    attempt: int


class Reported(Stored):
    """What a process sent; `planned` has the ranks that a fault rule changed, as changed.

    spent_s: whole seconds of the report budget that were spent when it came.
    """

    event: Literal["reported"] = "reported"
    round: int
    attempt: int
    reports: dict[int, Report]
    planned: dict[int, Report] = {}
    spent_s: int = 0

    @cached_property
    def certain(self) -> tuple[Finding, ...]:
        """What no report of another rank can mend: each rank planned alone, and only once."""
        return tuple(
            replace(finding, ranks=(rank,))
            for rank, report in {**self.reports, **self.planned}.items()
            for finding in plan(Layout(), {0: report}).findings
        )


class Cause(Stored):
    """Why a round cannot go on. ranks: those it blames, may be empty."""

    code: str
    ranks: tuple[Rank, ...]
    host: str | None = None
    text: str
    retryable: bool = True


class Objected(Stored):
    """A cause was found: veto, leave, loss, difference, duplicate. `attempt` is gone if it said so.

    trace: the end of the sender's traceback; kept here, never in the decision.
    """

    event: Literal["objected"] = "objected"
    round: int
    attempt: int
    gone: bool
    cause: Cause
    trace: str | None = None


class Suspected(Stored):
    """A member's session ended without goodbye. `connection` names the session that ended."""

    event: Literal["suspected"] = "suspected"
    round: int
    attempt: int
    connection: str


class Cleared(Stored):
    event: Literal["cleared"] = "cleared"
    round: int
    attempt: int


class Applied(Stored):
    """A process built what the decision with this digest says."""

    event: Literal["applied"] = "applied"
    round: int
    attempt: int
    built: Built


class Touched(Stored):
    event: Literal["touched"] = "touched"
    round: int
    touches: tuple[Touch, ...]


class Decided(Stored):
    """The verdict, as the bytes (UTF-8) that every rank is given for ever."""

    event: Literal["decided"] = "decided"
    round: int
    result: Literal["PASSED", "FAILED"]
    document: str


class Ended(Stored):
    """How a PASSED round ended, as the bytes that every rank is given for ever."""

    event: Literal["ended"] = "ended"
    round: int
    result: Literal["SEALED", "ABORTED"]
    document: str


class Serving(Stored):
    """After the seal: the process keeps its session for as long as it serves."""

    event: Literal["serving"] = "serving"
    round: int
    attempt: int


class Departed(Stored):
    """After the seal: a member is known to be gone. The outcome stands, the standing breaks."""

    event: Literal["departed"] = "departed"
    round: int
    attempt: int
    why: str


class Retired(Stored):
    """An operator took a sealed round out of force."""

    event: Literal["retired"] = "retired"
    round: int
    reason: str


class Kept(Stored):
    """A snapshot of a round that stays when what is before it is dropped.

    more: it adds to the snapshot that came before; a large round is kept in several pieces.
    """

    event: Literal["kept"] = "kept"
    round: int
    snapshot: dict[str, Any]
    more: bool = False


class StillReserved(Stored):
    """Attempts that were given out before what is dropped, and are not claimed yet."""

    event: Literal["still_reserved"] = "still_reserved"
    reservations: dict[str, Any]


class Floor(Stored):
    """The log begins here: the rounds just kept, and what must never be forgotten.

    reservations: all of them, in stores that held them here. Else they stand before it.
    """

    event: Literal["floor"] = "floor"
    rounds: tuple[int, ...]
    last_attempt: int
    left_runs: dict[str, int]
    reservations: dict[str, Any] | None = None


RoundEvent = (
    Opened
    | Claimed
    | Reported
    | Objected
    | Suspected
    | Cleared
    | Applied
    | Touched
    | Decided
    | Ended
    | Serving
    | Departed
    | Retired
)
Event = Reserved | RoundEvent | Kept | StillReserved | Floor


@dataclass(frozen=True)
class EngineName:
    """`namespace/engine`: the full name of one replica of a served model."""

    namespace: str
    engine: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.engine}"


class Entry(Stored):
    """A batch of events that was, or will be, appended as one."""

    version: Literal[1] = STORED_VERSION
    events: tuple[Annotated[Event, Field(discriminator="event")], ...]

    @cached_property
    def body(self) -> bytes:
        events = b",".join(event.body for event in self.events)
        return b'{"version":%d,"events":[%s]}' % (self.version, events)

    def to_bytes(self) -> bytes:
        return self.body


def entry_of(events: Iterable[Event]) -> Entry:
    """The entry of these events. Raises TooLarge for one that a store need not take."""
    entry = Entry(events=tuple(events))
    if len(entry.body) > MAX_ENTRY_BYTES:
        raise TooLarge(
            f"with this call the engine's log would have an entry of {len(entry.body)} bytes, and"
            f" {MAX_ENTRY_BYTES} may be; send less of what explains the numbers (parts, inputs), or"
            " let several processes report a part of the ranks each",
            field="body",
            value=f"an entry of {len(entry.body)} bytes",
        )
    return entry


_entries: TypeAdapter[Entry] = TypeAdapter(Entry)


def entry_from(body: bytes) -> Entry:
    """Read a stored entry. Raises ValueError for a version that this coordinator does not know."""
    return _entries.validate_json(body)
