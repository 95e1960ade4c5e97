"""What an answer says, checked to be whole and ours. Pure.

Raises ValueError on what no coordinator would send: such an answer is asked for again.
"""

from __future__ import annotations

import json
from typing import Any, Protocol

from kvaccord.canonical import canonical
from kvaccord.decision import Decision, Frozen, Outcome
from kvaccord.errors import Problem, Refused, problem_from


class Seated(Protocol):
    """What a document must be about: a process's engine, round and ranks."""

    @property
    def name(self) -> str: ...
    @property
    def round(self) -> int: ...
    @property
    def ranks(self) -> tuple[int, ...]: ...


# What a proxy says while there is no coordinator behind it.
_NOBODY_BEHIND = {404, 408, 421, 425, 429}


def problem_in(status: int, body: bytes) -> Problem | None:
    """The problem of an answer other than 200 and 202; None when it may go away by itself.

    A refusal in words that are not ours is final too, except where a proxy speaks for a
    coordinator that is not there yet.
    """
    document = object_in(body)
    if isinstance(document.get("code"), str):
        return problem_from(document, status=status)
    if 400 <= status < 500 and status not in _NOBODY_BEHIND:
        said = body[:200].decode(errors="replace").strip()
        return Refused(f"answered {status}, not as a coordinator does: {said!r}")
    return None


def decision_in(body: bytes, seat: Seated, *, digest: str | None = None) -> Decision:
    """A decision as received, checked to be whole and about this round. Raises ValueError."""
    decision = Decision(body)
    _check(decision, seat, digest, {"PASSED", "FAILED"})
    if decision.passed:
        with reading("plan"):
            for rank in seat.ranks:
                if not decision.entries(rank):
                    raise ValueError(f"it is PASSED and has no plan for rank {rank}")
    return decision


def outcome_in(body: bytes, seat: Seated, *, digest: str | None = None) -> Outcome:
    """An outcome as received, checked like a decision."""
    outcome = Outcome(body)
    _check(outcome, seat, digest, {"SEALED", "ABORTED"})
    return outcome


def _check(frozen: Frozen, seat: Seated, digest: str | None, results: set[str]) -> None:
    if digest is not None and frozen.digest != digest:
        raise ValueError(f"the bytes have {frozen.digest}, the header says {digest}")
    with reading("document"):
        # Only one byte string is the document: what came cut or re-spelt is not it.
        if canonical(frozen.document) != frozen.body:
            raise ValueError("the bytes are not in canonical form")
        about = (frozen.document["engine"], frozen.round, frozen.result in results)
        if about != (seat.name, seat.round, True):
            raise ValueError(f"it is about {frozen.sentence[:120]!r}")
        _ = frozen.sentence, frozen.ranks, frozen.causes, frozen.retryable


class reading:
    """Whatever is missing in a document of theirs is a ValueError of ours."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, fault: object, tb: object) -> None:
        if kind is not None and issubclass(
            kind, (LookupError, TypeError, AttributeError, StopIteration, OverflowError)
        ):
            raise ValueError(f"the {self.what} lacks something: {kind.__name__} {fault}")


def object_in(body: bytes) -> dict[str, Any]:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}
