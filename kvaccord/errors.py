"""Every way a call can end other than well. One tree; code and HTTP status beside the class.

KvaccordError
├── Refused            the sender is wrong; do not repeat (4xx, this process only)
│   ├── LaunchMissing, Invalid, TooLarge, Unauthorized, Forbidden, NotFound, Conflict
│   ├── DuplicateRank, Superseded, StoreReplaced, ProtocolTooOld
│   └── Retryable      the same call may succeed later: EngineNameInUse, SlowDown
├── Unavailable        the coordinator cannot answer now; repeat (503)
├── RoundEnded         Failed, Aborted: the round's own answer, the same on every rank
└── NoVerdict          patience ended without an answer: neither pass nor fail
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from kvaccord.decision import Decision, Outcome


class KvaccordError(Exception):
    """Root of everything kvaccord raises on purpose."""


class Problem(KvaccordError):
    """An answer that is an RFC 9457 problem document with a stable `code`.

    detail: one sentence with the rank, the field, the value and the remedy.
    """

    code: ClassVar[str] = "problem"
    http_status: ClassVar[int] = 500

    def __init__(
        self,
        detail: str,
        *,
        rank: int | None = None,
        field: str | None = None,
        value: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.rank = rank
        self.field = field
        self.value = value
        self.retry_after_s = retry_after_s

    def document(self) -> dict[str, Any]:
        """The problem as it crosses the wire; absent fields are left out."""
        body = {
            "type": f"urn:kvaccord:problem:{self.code}",
            "title": self.code.replace("_", " "),
            "status": self.http_status,
            "code": self.code,
            "detail": self.detail,
            "rank": self.rank,
            "field": self.field,
            "value": self.value,
            "retry_after_s": self.retry_after_s,
        }
        return {key: value for key, value in body.items() if value is not None}


class Refused(Problem):
    """The sender is wrong: repeating the same call gives the same answer."""

    code, http_status = "refused", 400


class LaunchMissing(Refused):
    """A world larger than 1 without a launch: ranks of two starts could not be told apart."""

    code, http_status = "launch_missing", 422


class Invalid(Refused):
    """What was sent cannot be true or cannot be read; nothing of it is kept."""

    code, http_status = "invalid", 422


class TooLarge(Refused):
    code, http_status = "too_large", 413


class Unauthorized(Refused):
    code, http_status = "unauthorized", 401


class Forbidden(Refused):
    code, http_status = "forbidden", 403


class NotFound(Refused):
    code, http_status = "not_found", 404


class Conflict(Refused):
    """The same identity already sent another document; the first stands."""

    code, http_status = "conflict", 409


class DuplicateRank(Refused):
    """The slot belongs to a living process of a round that stands."""

    code, http_status = "duplicate_rank", 409


class Superseded(Refused):
    """A newer start of this engine has taken over; this process belongs to an older one."""

    code, http_status = "superseded", 410


class StoreReplaced(Refused):
    """The token was given out by another store than the one that answers now."""

    code, http_status = "store_replaced", 410


class ProtocolTooOld(Refused):
    code, http_status = "protocol_too_old", 426


class Retryable(Refused):
    """A refusal that may end by itself: the client repeats it within its patience."""


class EngineNameInUse(Retryable):
    """Another start of this name is alive; it is not disturbed."""

    code, http_status = "engine_name_in_use", 409


class SlowDown(Retryable):
    code, http_status = "slow_down", 429


class Unavailable(Problem):
    """The coordinator cannot keep what it is told right now; nothing was kept, repeat."""

    code, http_status = "unavailable", 503


PROBLEMS: dict[str, type[Problem]] = {
    kind.code: kind
    for kind in (
        LaunchMissing,
        Invalid,
        TooLarge,
        Unauthorized,
        Forbidden,
        NotFound,
        Conflict,
        DuplicateRank,
        Superseded,
        StoreReplaced,
        ProtocolTooOld,
        EngineNameInUse,
        SlowDown,
        Unavailable,
    )
}


def problem_from(document: dict[str, Any], *, status: int) -> Problem:
    """The exception a problem document stands for; an unknown code keeps its kind by status."""
    kind = PROBLEMS.get(str(document.get("code")), Unavailable if status >= 500 else Refused)
    return kind(
        str(document.get("detail") or f"the coordinator answered {status}"),
        rank=document.get("rank"),
        field=document.get("field"),
        value=document.get("value"),
        retry_after_s=_seconds(document.get("retry_after_s")),
    )


def _seconds(said: object) -> float | None:
    # From the wire: it may be anything.
    if isinstance(said, int | float) and 0 <= said < float("inf"):
        return float(said)
    return None


class RoundEnded(KvaccordError):
    """The round is over and was not sealed. The text is the same on every rank.

    decision: the frozen decision; outcome: the frozen outcome, None for a FAILED verdict.
    """

    def __init__(self, decision: Decision, outcome: Outcome | None = None) -> None:
        self.decision = decision
        self.outcome = outcome
        super().__init__((outcome or decision).sentence)


class Failed(RoundEnded):
    """The verdict is FAILED: nobody may allocate. Exit; the launcher starts new processes."""


class Aborted(RoundEnded):
    """The numbers were agreed, but not every rank built them. Exit as after Failed."""


class NoVerdict(KvaccordError):
    """Patience ended without an answer. Neither pass nor fail: do not allocate, exit.

    The text names the coordinator's address and what was tried.
    """
