"""What a process says next, and what it makes of the answer. Pure: no clock, chance, I/O, threads.

A flow is a generator: it yields an effect, is sent the Answer, and returns a result or raises one
of kvaccord.errors. A driver performs the effects: client.py by blocking, aio.py by awaiting; a
test is a driver too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NoReturn, TypeVar, cast

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
)
from kvaccord.layout import named
from kvaccord.messages import Join, Report
from kvaccord.room import available_bytes, needs
from worker_client.reading import decision_in, object_in, outcome_in, problem_in, reading

BACKOFF_MIN_S, BACKOFF_MAX_S = 0.2, 5.0
CALL_S = 10.0  # an answer that does not wait for other ranks is due by then, at first
LONG_POLL_S = 25.0  # the server's cap of wait_s
ANSWER_S = 1.0  # what an answer may take beside the wait that was asked for
PACE_S = 0.2  # between calls that do not wait, where no session brings the news
LEAST_S = 0.1  # a try with less time than this only says that it had none
GRACE_S = 60.0  # how much longer than the server's own ends a client waits
ENTER_S = 1860.0  # before the server has said its own: the default gather end + GRACE_S
SAY_S = 1.8  # a goodbye to a dead coordinator may delay an exit by 2 s, threads included
RETRY_AFTER_MAX_S = 60.0
REFUSED_FORM = (400, 413, 422)  # of what was sent, whoever sent it

T = TypeVar("T")
F = TypeVar("F", bound=Frozen)
What = Literal["decision", "outcome"]


# --- effects and answers ------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """An HTTP request. The Answer has status, headers and body, or error when none came in time."""

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


@dataclass(frozen=True)
class Attach:
    """Open the session of this seat unless it is open, and wait so long for it to be up."""

    seat: Seat
    wait_s: float


@dataclass(frozen=True)
class Detach:
    """End the session, wait so long for its threads, and close all connections."""

    wait_s: float


Effect = Call | Sleep | Hear | Attach | Detach


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


# --- repeating ----------------------------------------------------------------------------------


class _Again(Exception):
    """No answer in earnest: the same call may be repeated."""

    def __init__(self, reason: str, retry_after_s: float | None = None) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


def _in_earnest(answer: Answer) -> None:
    """Return for 200 and 202. Raises what refuses, and _Again for what may go away."""
    if answer.error is not None:
        raise _Again(answer.error)
    if answer.status in (200, 202):
        if "html" in answer.headers.get("content-type", ""):
            raise _Again(f"answered {answer.status} with a page of HTML: no coordinator is there")
        return
    if 300 <= answer.status < 400:
        raise _redirected(answer)
    problem = problem_in(answer.status, answer.body)
    if problem is not None and not isinstance(problem, Unavailable | Retryable):
        raise problem
    retry_after_s = problem.retry_after_s if problem else None
    said = f"answered {answer.status}"
    if problem is not None:
        said += f" {problem}"
    elif "html" in answer.headers.get("content-type", ""):
        said += " with a page of HTML: something else answers there"
    raise _Again(said, retry_after_s)


def _redirected(answer: Answer) -> Refused | _Again:
    """No redirect is followed: tokens go only where they were sent. One for good stays one."""
    target = answer.headers.get("location", "")[:200]
    said = (
        f"answered {answer.status}, a redirect to {target or 'nowhere'}, which is not followed: no"
        " coordinator redirects; set KVACCORD_URL to the coordinator's own http://HOST:PORT"
    )
    if answer.status in (301, 308):
        return Refused(said, field="KVACCORD_URL", value=target)
    return _Again(said)


@dataclass
class _Patience:
    """How long a flow goes on trying, and what it has to say when that ends."""

    address: str
    wanted: str
    now_s: float
    patience_s: float
    explicit: bool  # the caller's own word is not lengthened by what the server says
    then: str = "do not allocate, exit"
    call_s: float = CALL_S
    limit_s: float = 0.0  # of the call that is under way
    tries: int = 0
    pause_s: float = BACKOFF_MIN_S
    last: str = "nothing yet"
    failed: bool = False
    before: str = ""  # what came before the last, if it was something else

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

    def limit(self, wait_s: float = 0.0) -> float:
        """How long the next call may take, which asks the server to wait for `wait_s`."""
        self.limit_s = min(wait_s + self.call_s, self.left_s)
        return self.limit_s

    def answered(self, answer: Answer) -> None:
        if answer.error is not None and answer.now_s - self.now_s > self.limit_s - LEAST_S:
            # The coordinator may have a queue that is longer than the limit. Given up and repeated
            # with the same one, every call of it would be for nothing, and the queue never drain.
            self.call_s *= 2
        self.now_s = answer.now_s
        self.tries += 1

    def understood(self, answer: Answer) -> None:
        """It was answered by a coordinator: only that ends the backing off."""
        self.pause_s = BACKOFF_MIN_S
        self.last = f"answered {answer.status}"

    def pause(self, again: _Again, *, unless: What | None = None) -> Flow[Answer]:
        """Back off before the next try. Raises NoVerdict when there will be none."""
        if str(again) != self.last:
            # The last try has little time left and often says no more than that.
            self.before, self.last = (self.last if self.failed else ""), str(again)
        self.failed = True
        after_s = min(again.retry_after_s or 0.0, RETRY_AFTER_MAX_S)
        if self.left_s <= after_s:
            self.end()
        self.pause_s, at_most_s = min(self.pause_s * 2, BACKOFF_MAX_S), self.pause_s
        answer = yield Sleep(min(at_most_s, self.left_s - after_s), after_s, unless)
        self.now_s = answer.now_s
        if self.left_s < LEAST_S and answer.document is None and answer.problem is None:
            self.end()
        return answer

    def end(self) -> NoReturn:
        before = f", before: {self.before}" if self.before else ""
        raise NoVerdict(
            f"{self.address}: {self.wanted} after {self.now_s - self.began_s:.1f} s and"
            f" {self.tries} tries, the last: {self.last}{before}; {self.then}"
        )


def _ask(call: Call, patience: _Patience, read: Callable[[Answer], T]) -> Flow[T]:
    """Repeat a call until it is answered in earnest. `read` raises ValueError on garbage."""
    while patience.left_s > 0:
        answer = yield replace(call, timeout_s=patience.limit())
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
    reserved: Callable[[str], None] = lambda token: None,
) -> Flow[Seat]:
    """Reserve an attempt, then claim the slot. reserved: told the token before it is claimed."""
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
    reserved(token)
    if patience_s is None:
        patience.deadline_s = patience.now_s + server_s
    return (yield from _claim(address, namespace, engine, join, token, patience))


def claim_again(
    address: str, namespace: str, engine: str, join: Join, token: str, *, now_s: float
) -> Flow[Seat | None]:
    """The seat of a claim whose answer was not heard; None where there is none, or no answer.

    Never raises.
    """
    patience = _Patience(address, "no seat", now_s, SAY_S / 2, explicit=True)
    try:
        return (yield from _claim(address, namespace, engine, join, token, patience))
    except (Problem, NoVerdict):
        return None


def _claim(
    address: str, namespace: str, engine: str, join: Join, token: str, patience: _Patience
) -> Flow[Seat]:
    def seated(answer: Answer) -> Seat:
        with reading("claim"):
            document = object_in(answer.body)
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

    path = f"/v1/engines/{namespace}/{engine}/claim"
    claim = Call("POST", path, None, {"Kvaccord-Attempt": token})
    return (yield from _ask(claim, patience, seated))


def _reserved(answer: Answer) -> tuple[str, float]:
    with reading("join"):
        document = object_in(answer.body)
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
    decision = yield from _settle(
        seat, "decision", "reports", _reports(reports), patience, decision_in
    )
    if not decision.passed:
        raise Failed(decision)
    check_offer(decision, reports)
    return decision


def _reports(reports: Mapping[int, Report]) -> bytes:
    return json.dumps(
        {str(rank): report.model_dump(exclude_none=True) for rank, report in reports.items()}
    ).encode()


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
        # What is waited for there must still be answered before patience ends here.
        wait_s = 0.0 if news.attached else max(0.0, min(LONG_POLL_S, patience.left_s - ANSWER_S))
        answer = yield Call(
            "PUT",
            f"{seat.path}/{noun}?wait_s={wait_s:.3f}",
            body,
            {**seat.headers, "Content-Type": "application/json"},
            timeout_s=patience.limit(wait_s),
        )
        asked_s = patience.now_s
        patience.answered(answer)
        try:
            _in_earnest(answer)
            if answer.status == 200:
                return read(answer.body, seat, digest=answer.headers.get("kvaccord-digest", ""))
            remaining_s = object_in(answer.body).get("remaining_s")
            if not isinstance(remaining_s, int | float):
                raise ValueError("202 without remaining_s")
        except _Again as again:
            news = yield from patience.pause(again, unless=what)
            continue
        except ValueError as fault:
            news = yield from patience.pause(_Again(f"answered garbage: {fault}"), unless=what)
            continue
        patience.understood(answer)
        patience.lengthen(remaining_s + GRACE_S)
        pace_s = max(PACE_S, min(wait_s, 1.0))
        if not news.attached and answer.now_s - asked_s < pace_s:
            # It did not wait: it is draining, or something in between does not, or it was not told
            # to, since patience is about to end.
            news = yield Sleep(min(pace_s, max(0.0, patience.left_s)), unless=what)
        else:
            news = yield Hear(what, max(0.0, min(LONG_POLL_S, patience.left_s)))


def check_offer(decision: Decision, reports: Mapping[int, Report]) -> None:
    """Raise Invalid when the plan asks a rank for more than it offered.

    Invalid, since what was sent cannot be true, and so a veto on the way out: the bytes are those
    that all ranks hold, asking again gives the same, and the peers must hear the reason.
    A plan for less is no fault: a fault rule may have shrunk the report.
    """
    for rank, report in reports.items():
        each, entries = needs(report).entry_bytes, decision.entries(rank)
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
    seat: Seat,
    noun: Literal["veto", "leave"],
    body: bytes,
    *,
    least: bytes | None = None,
    now_s: float,
    deadline_s: float | None = None,
) -> Flow[Answer | None]:
    """Say why this process goes; returns what was answered, None for nobody. Never raises.

    least: what is said instead, once, where the form of the body is refused.
    """
    deadline_s = now_s + SAY_S if deadline_s is None else deadline_s
    while (left_s := deadline_s - now_s) > 0:
        answer = yield Call(
            "PUT",
            f"{seat.path}/{noun}",
            body,
            {**seat.headers, "Content-Type": "application/json"},
            timeout_s=left_s,
        )
        if answer.error is None and answer.status in REFUSED_FORM and least is not None:
            body, least, now_s = least, None, answer.now_s
            continue
        if answer.error is None and 200 <= answer.status < 500:
            return answer
        answer = yield Sleep(min(BACKOFF_MIN_S, max(0.0, deadline_s - answer.now_s)))
        now_s = answer.now_s
    return None


# --- after the seal -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Standing:
    """How the sealed round stands. ranks: those that are known to have left or been lost.

    retired: an operator took the plan out of force, for this reason; then it is not whole.
    """

    whole: bool
    ranks: tuple[int, ...] = ()
    retired: bool = False
    reason: str = ""


@dataclass(frozen=True)
class Room:
    """What the plan in force asks of one class on one rank, and what there is room for now."""

    rank: int
    name: str
    planned: int
    room: int

    @property
    def fits(self) -> bool:
        return self.room >= self.planned


@dataclass(frozen=True)
class Fit:
    """Whether there is room for the plan in force. A rank without it must not allocate."""

    fits: bool
    rooms: tuple[Room, ...] = ()

    def __str__(self) -> str:
        if self.fits:
            return "the plan in force fits"
        short = [r for r in self.rooms if not r.fits]
        each = (f"rank {r.rank}: {r.name} planned {r.planned}, room for {r.room}" for r in short)
        return f"plan_no_longer_fits: {'; '.join(each)}"


def standing(seat: Seat, *, now_s: float, patience_s: float | None = None) -> Flow[Standing]:
    """Ask how the sealed round stands; says that this process serves and keeps its session."""

    def read(answer: Answer) -> Standing:
        with reading("standing"):
            document = object_in(answer.body)
            if (word := document["standing"]) not in ("whole", "broken", "retired"):
                raise ValueError(f"its standing is {word!r}")
            return Standing(
                word == "whole",
                tuple(map(int, document.get("ranks", ()))),
                word == "retired",
                str(document.get("reason", "")),
            )

    call = Call("POST", f"{seat.path}/serving", None, seat.headers)
    return (yield from _ask(call, _question(seat, "no standing", now_s, patience_s), read))


def check(
    seat: Seat,
    reports: Mapping[int, Report],
    *,
    now_s: float,
    patience_s: float | None = None,
) -> Flow[Fit]:
    """Ask whether these reports still have room for the plan in force."""

    def read(answer: Answer) -> Fit:
        with reading("answer to check"):
            document = object_in(answer.body)
            if not isinstance(document["fits"], bool):
                raise ValueError(f"fits is {document['fits']!r}")
            rooms = (
                Room(int(r["rank"]), str(r["class"]), int(r["planned"]), int(r["room"]))
                for r in document.get("ranks", ())
            )
            return Fit(document["fits"], tuple(rooms))

    headers = {**seat.headers, "Content-Type": "application/json"}
    call = Call("POST", f"{seat.path}/check", _reports(reports), headers)
    return (yield from _ask(call, _question(seat, "no answer to check", now_s, patience_s), read))


def _question(seat: Seat, wanted: str, now_s: float, patience_s: float | None) -> _Patience:
    return _Patience(
        seat.address,
        f"{wanted} for {seat}",
        now_s,
        GRACE_S if patience_s is None else patience_s,
        explicit=patience_s is not None,
        then="what was sealed stands",
    )
