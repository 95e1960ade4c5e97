"""What a process says next, and what it makes of the answer. Pure: no clock, chance, I/O, threads.

A flow is a generator: it yields an effect, is sent the Answer, and returns a result or raises one
of kvaccord.errors. The driver (client.py) performs the effects; a test is a driver too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NoReturn, TypeVar, cast

from kvaccord.canonical import canonical
from kvaccord.decision import Decision, Frozen, Outcome
from kvaccord.errors import (
    Aborted,
    Failed,
    Invalid,
    NoVerdict,
    Problem,
    Refused,
    Retryable,
    Unavailable,
    problem_from,
)
from kvaccord.layout import named
from kvaccord.messages import Join, Report
from kvaccord.plan import available_bytes, needs

BACKOFF_MIN_S, BACKOFF_MAX_S = 0.2, 5.0
CALL_S = 10.0  # an answer that does not wait for other ranks is due by then
LONG_POLL_S = 25.0  # the server's cap of wait_s
GRACE_S = 60.0  # how much longer than the server's own ends a client waits
ENTER_S = 1860.0  # before the server has said its own: the default gather end + GRACE_S
SAY_S = 1.8  # a goodbye to a dead coordinator may delay an exit by 2 s, threads included
RETRY_AFTER_MAX_S = 60.0

T = TypeVar("T")
F = TypeVar("F", bound=Frozen)
What = Literal["decision", "outcome"]


# --- effects and answers ------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """An HTTP request. The Answer has status, headers and body, or error when none came."""

    method: str
    path: str
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = CALL_S


@dataclass(frozen=True)
class Sleep:
    """Wait after_s, then a random part of at_most_s. With `unless`, news from the session ends it.

    With `unless` the Answer is like that of Hear.
    """

    at_most_s: float
    after_s: float = 0.0
    unless: What | None = None


@dataclass(frozen=True)
class Hear:
    """Wait until the session has the document, cannot go on, or is cut.

    The Answer has document or problem, and attached: whether the session is up now.
    """

    what: What
    timeout_s: float


Effect = Call | Sleep | Hear


@dataclass(frozen=True)
class Answer:
    """What came of an effect. now_s is monotonic; header names are in lower case."""

    now_s: float
    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    error: str | None = None
    document: Frozen | None = None
    problem: Problem | None = None
    attached: bool = False


Flow = Generator[Effect, Answer, T]


@dataclass(frozen=True)
class Seat:
    """What a claim won: the ranks of one process in one round.

    round_s: from the claim to the last hard end before the decision; apply_s: from there on.
    """

    address: str
    namespace: str
    engine: str
    round: int
    token: str
    ranks: tuple[int, ...]
    round_s: float
    apply_s: float
    claimed_s: float

    def __str__(self) -> str:
        return f"{self.name} round {self.round} {named(self.ranks)}"

    @property
    def name(self) -> str:
        return f"{self.namespace}/{self.engine}"

    @property
    def path(self) -> str:
        return f"/v1/engines/{self.name}/rounds/{self.round}"

    @property
    def headers(self) -> dict[str, str]:
        return {"Kvaccord-Attempt": self.token}


# --- reading answers ----------------------------------------------------------------------------


class _Again(Exception):
    """No answer in earnest: the same call may be repeated."""

    def __init__(self, reason: str, retry_after_s: float | None = None) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


# What a proxy says while there is no coordinator behind it.
_NOBODY_BEHIND = {404, 408, 421, 425, 429}


def problem_in(status: int, body: bytes) -> Problem | None:
    """The problem of an answer other than 200 and 202; None when it may go away by itself.

    A refusal in words that are not ours is final too, except where a proxy speaks for a
    coordinator that is not there yet.
    """
    document = _object(body)
    if isinstance(document.get("code"), str):
        return problem_from(document, status=status)
    if 400 <= status < 500 and status not in _NOBODY_BEHIND:
        said = body[:200].decode(errors="replace").strip()
        return Refused(f"answered {status}, not as a coordinator does: {said!r}")
    return None


def decision_in(body: bytes, seat: Seat, *, digest: str | None = None) -> Decision:
    """A decision as received, checked to be whole and about this round. Raises ValueError."""
    decision = Decision(body)
    _check(decision, seat, digest, {"PASSED", "FAILED"})
    if decision.passed:
        with _reading("plan"):
            for rank in seat.ranks:
                if not decision.entries(rank):
                    raise ValueError(f"it is PASSED and has no plan for rank {rank}")
    return decision


def outcome_in(body: bytes, seat: Seat, *, digest: str | None = None) -> Outcome:
    """An outcome as received, checked like a decision."""
    outcome = Outcome(body)
    _check(outcome, seat, digest, {"SEALED", "ABORTED"})
    return outcome


def _check(frozen: Frozen, seat: Seat, digest: str | None, results: set[str]) -> None:
    if digest is not None and frozen.digest != digest:
        raise ValueError(f"the bytes have {frozen.digest}, the header says {digest}")
    with _reading("document"):
        # Only one byte string is the document: what came cut or re-spelt is not it.
        if canonical(frozen.document) != frozen.body:
            raise ValueError("the bytes are not in canonical form")
        about = (frozen.document["engine"], frozen.round, frozen.result in results)
        if about != (seat.name, seat.round, True):
            raise ValueError(f"it is about {frozen.sentence[:120]!r}")
        _ = frozen.sentence, frozen.ranks, frozen.causes, frozen.retryable


class _reading:
    """Whatever is missing in a document of theirs is a ValueError of ours."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, fault: object, tb: object) -> None:
        if kind is not None and issubclass(kind, (LookupError, TypeError, StopIteration)):
            raise ValueError(f"the {self.what} lacks something: {kind.__name__} {fault}")


def _object(body: bytes) -> dict[str, Any]:
    try:
        document = json.loads(body)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def _in_earnest(answer: Answer) -> None:
    """Return for 200 and 202. Raises what refuses, and _Again for what may go away."""
    if answer.error is not None:
        raise _Again(answer.error)
    if answer.status in (200, 202):
        return
    problem = problem_in(answer.status, answer.body)
    if problem is not None and not isinstance(problem, Unavailable | Retryable):
        raise problem
    retry_after_s = problem.retry_after_s if problem else None
    raise _Again(f"answered {answer.status}" + (f" {problem}" if problem else ""), retry_after_s)


@dataclass
class _Patience:
    """How long a flow goes on trying, and what it has to say when that ends."""

    address: str
    wanted: str
    now_s: float
    patience_s: float
    explicit: bool  # the caller's own word is not lengthened by what the server says
    tries: int = 0
    pause_s: float = BACKOFF_MIN_S
    last: str = "nothing yet"

    def __post_init__(self) -> None:
        self.began_s = self.now_s
        self.deadline_s = self.now_s + self.patience_s

    @property
    def left_s(self) -> float:
        return self.deadline_s - self.now_s

    def lengthen(self, left_s: float) -> None:
        """The server's ends wait while it is down, so its word of now may lie later than ours."""
        if not self.explicit:
            self.deadline_s = max(self.deadline_s, self.now_s + left_s)

    def answered(self, answer: Answer) -> None:
        self.now_s = answer.now_s
        self.tries += 1
        if answer.error is None and answer.status in (200, 202):
            self.pause_s = BACKOFF_MIN_S
            self.last = f"answered {answer.status}"

    def pause(self, again: _Again, *, unless: What | None = None) -> Flow[Answer]:
        """Back off before the next try. Raises NoVerdict when there will be none."""
        self.last = str(again)
        after_s = min(again.retry_after_s or 0.0, RETRY_AFTER_MAX_S)
        if self.left_s <= after_s:
            self.end()
        self.pause_s, at_most_s = min(self.pause_s * 2, BACKOFF_MAX_S), self.pause_s
        answer = yield Sleep(min(at_most_s, self.left_s - after_s), after_s, unless)
        self.now_s = answer.now_s
        return answer

    def end(self) -> NoReturn:
        raise NoVerdict(
            f"{self.address}: {self.wanted} after {self.now_s - self.began_s:.1f} s and"
            f" {self.tries} tries, the last: {self.last}; do not allocate, exit"
        )


def _ask(call: Call, patience: _Patience, read: Callable[[Answer], T]) -> Flow[T]:
    """Repeat a call until it is answered in earnest. `read` raises ValueError on garbage."""
    while patience.left_s > 0:
        answer = yield replace(call, timeout_s=min(call.timeout_s, patience.left_s))
        patience.answered(answer)
        try:
            _in_earnest(answer)
            return read(answer)
        except _Again as again:
            yield from patience.pause(again)
        except ValueError as fault:
            yield from patience.pause(_Again(f"answered garbage: {fault}"))
    patience.end()


# --- the flows ----------------------------------------------------------------------------------


def enter(
    address: str,
    namespace: str,
    engine: str,
    join: Join,
    *,
    now_s: float,
    patience_s: float | None = None,
) -> Flow[Seat]:
    """Reserve an attempt, then claim the slot."""
    path = f"/v1/engines/{namespace}/{engine}"
    patience = _Patience(
        address,
        f"no seat for {named(join.ranks)} of {namespace}/{engine}",
        now_s,
        ENTER_S if patience_s is None else patience_s,
        explicit=patience_s is not None,
    )
    body = join.model_dump_json(exclude_none=True).encode()
    reserve = Call("POST", f"{path}/join", body, {"Content-Type": "application/json"})
    token, server_s = yield from _ask(reserve, patience, _reserved)
    if patience_s is None:
        patience.deadline_s = patience.now_s + server_s

    def seated(answer: Answer) -> Seat:
        with _reading("claim"):
            document = _object(answer.body)
            report_s = float(document["budgets"]["report_s"]["hard"])
            return Seat(
                address=address,
                namespace=namespace,
                engine=engine,
                round=int(document["round"]),
                token=token,
                ranks=join.ranks,
                # remaining_s is of the budget that runs now, gather or report.
                round_s=float(document["remaining_s"]) + report_s,
                apply_s=float(document["budgets"]["apply_s"]["hard"]),
                claimed_s=answer.now_s,
            )

    claim = Call("POST", f"{path}/claim", None, {"Kvaccord-Attempt": token})
    return (yield from _ask(claim, patience, seated))


def _reserved(answer: Answer) -> tuple[str, float]:
    with _reading("join"):
        document = _object(answer.body)
        token = document["token"]
        if not (isinstance(token, str) and token.isascii() and token.isprintable() and token):
            raise ValueError(f"its token is {token!r}")
        return token, float(document["patience_s"])


def agree(
    seat: Seat,
    reports: Mapping[int, Report],
    *,
    now_s: float,
    patience_s: float | None = None,
) -> Flow[Decision]:
    """Report, hear the decision, and check that it asks for no more than was offered."""
    patience = _Patience(
        seat.address,
        f"no verdict for {seat}",
        now_s,
        seat.claimed_s + seat.round_s + GRACE_S - now_s if patience_s is None else patience_s,
        explicit=patience_s is not None,
    )
    body = json.dumps(
        {str(rank): report.model_dump(exclude_none=True) for rank, report in reports.items()}
    ).encode()
    decision = yield from _settle(seat, "decision", "reports", body, patience, decision_in)
    if not decision.passed:
        raise Failed(decision)
    check_offer(decision, reports)
    return decision


def build(
    seat: Seat,
    decision: Decision,
    applied: bytes,
    *,
    now_s: float,
    patience_s: float | None = None,
) -> Flow[Outcome]:
    """Say what was built, and hear that every rank has built."""
    patience = _Patience(
        seat.address,
        f"no outcome for {seat}",
        now_s,
        seat.apply_s + GRACE_S if patience_s is None else patience_s,
        explicit=patience_s is not None,
    )
    outcome = yield from _settle(seat, "outcome", "applied", applied, patience, outcome_in)
    if not outcome.sealed:
        raise Aborted(decision, outcome)
    return outcome


def _settle(
    seat: Seat,
    what: What,
    noun: str,
    body: bytes,
    patience: _Patience,
    read: Callable[..., F],
) -> Flow[F]:
    """PUT something, and wait for the document that settles it.

    With the session up, the document comes there; the repeated PUT is a safety net. Without it
    the PUT itself waits.
    """
    news = yield Hear(what, 0.0)
    if news.document is not None and news.document.result in ("PASSED", "SEALED"):
        # Only what ends a round may come before our own word. Said again, the server answers it.
        news = replace(news, document=None)
    while True:
        if news.document is not None:
            return cast(F, news.document)
        if news.problem is not None:
            raise news.problem
        patience.now_s = news.now_s
        if patience.left_s <= 0:
            patience.end()
        wait_s = 0.0 if news.attached else min(LONG_POLL_S, patience.left_s)
        answer = yield Call(
            "PUT",
            f"{seat.path}/{noun}?wait_s={wait_s:.3f}",
            body,
            {**seat.headers, "Content-Type": "application/json"},
            timeout_s=min(wait_s + CALL_S, patience.left_s + 1.0),
        )
        asked_s = patience.now_s
        patience.answered(answer)
        try:
            _in_earnest(answer)
            if answer.status == 200:
                return read(answer.body, seat, digest=answer.headers.get("kvaccord-digest", ""))
            remaining_s = _object(answer.body).get("remaining_s")
            if not isinstance(remaining_s, int | float):
                raise ValueError("202 without remaining_s")
        except _Again as again:
            news = yield from patience.pause(again, unless=what)
            continue
        except ValueError as fault:
            news = yield from patience.pause(_Again(f"answered garbage: {fault}"), unless=what)
            continue
        patience.lengthen(remaining_s + GRACE_S)
        if wait_s and answer.now_s - asked_s < min(wait_s, 1.0):
            # Told to wait, it did not: it is draining, or something in between does not wait.
            news = yield Sleep(1.0, unless=what)
        else:
            news = yield Hear(what, max(0.0, min(LONG_POLL_S, patience.left_s)))


def check_offer(decision: Decision, reports: Mapping[int, Report]) -> None:
    """Raise Invalid when the plan asks a rank for more than it offered.

    Invalid, since what was sent cannot be true, and so a veto on the way out: the bytes are those
    that all ranks hold, asking again gives the same, and the peers must hear the reason.
    A plan for less is no fault: a fault rule may have shrunk the report.
    """
    for rank, report in reports.items():
        need, entries = needs(report), decision.entries(rank)
        each = dict(need.state_bytes)
        if need.page is not None:
            each[need.page.name] = need.page_bytes
        if entries.keys() != each.keys():
            raise Invalid(
                f"the plan for rank {rank} has the classes {sorted(entries)}, its report"
                f" {sorted(each)}; do not allocate, exit",
                rank=rank,
            )
        asked = sum(entries[name] * size for name, size in each.items())
        if asked > available_bytes(report):
            raise Invalid(
                f"the plan asks rank {rank} for {asked} bytes and it offered"
                f" {available_bytes(report)}; do not allocate, exit",
                rank=rank,
            )


def say(
    seat: Seat, noun: Literal["veto", "leave"], body: bytes, *, now_s: float
) -> Flow[Answer | None]:
    """Say why this process goes; returns what was answered, None for nobody. Never raises."""
    deadline_s = now_s + SAY_S
    while (left_s := deadline_s - now_s) > 0:
        answer = yield Call(
            "PUT",
            f"{seat.path}/{noun}",
            body,
            {**seat.headers, "Content-Type": "application/json"},
            timeout_s=left_s,
        )
        if answer.error is None and 200 <= answer.status < 500:
            return answer
        answer = yield Sleep(min(BACKOFF_MIN_S, max(0.0, deadline_s - answer.now_s)))
        now_s = answer.now_s
    return None
