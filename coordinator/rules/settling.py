"""How a round is settled: its decision, its seal, or its end for the causes it has. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import reduce
from itertools import chain

from coordinator.engine import Engine, Round, evolve
from coordinator.events import Cause, Decided, Ended, Event, Objected, RoundEvent, Touch, Touched
from coordinator.verdict import (
    LONG_BYTES,
    NOT_RETRYABLE,
    Verdict,
    decision_of,
    failed,
    judge_reports,
    outcome_document,
)
from kvaccord.canonical import digest
from kvaccord.messages import cut
from kvaccord.peers import Notice, slow_ranks


def settle(
    engine: Engine, number: int, *found: Event, seen: tuple[Event, ...] = ()
) -> tuple[Event, ...]:
    """The events found, and the decision or seal if they settle the round: one entry.

    seen: events of the same entry that the engine holds already; they come first.

    With a cause the round is settled by its grace (or budget), never here. While a member is
    suspect it waits: whether it is back or lost is logged within seconds, and a verdict that a
    dead rank would have to abort helps nobody.
    """
    after = reduce(evolve, found, engine)
    round_ = after.rounds[number]
    found = (*seen, *found)
    if not round_.open or round_.causes or round_.suspects or round_.waiting_for:
        return found
    if round_.phase == "report":
        verdict = judge_reports(
            round_.layout,
            round_.planned,
            round_.hosts,
            round_.groups,
            spread_limit=round_.policy.spread_limit,
        )
        late = slow_ranks(round_.spent_s, round_.hosts)
        verdict = replace(verdict, warnings=(*verdict.warnings, *late))
        return (*found, _decided(after, round_, verdict))
    message = f"every rank built what decision {digest(round_.decision)[:19]} says"
    return (*found, _ended(after, round_, Verdict("SEALED", "sealed", message)))


def end_round(engine: Engine, round_: Round, *more: Cause) -> tuple[RoundEvent, ...]:
    """End a round for its causes: FAILED before the verdict, ABORTED after it."""
    causes = (*round_.causes, *more)
    # A rank may be missing because a fault rule held back its join or claim: that must show too.
    held = [r.touched for r in engine.reservations.values() if r.join.launch == round_.launch]
    round_ = replace(round_, touches=(*round_.touches, *chain.from_iterable(held)))
    if round_.verdict is None:
        unheard = [r for r in range(round_.layout.world_size) if r not in round_.sent]
        return (_decided(engine, round_, failed("FAILED", causes, not_heard=unheard)),)
    return (_ended(engine, round_, failed("ABORTED", causes, not_heard=round_.waiting_for)),)


def _decided(engine: Engine, round_: Round, verdict: Verdict) -> Decided:
    if round_.took_over is not None:
        text = (
            f"launch {round_.launch} took the name over from launch {round_.took_over}, of which"
            " nobody kept a session; replicas that live side by side need names of their own"
        )
        notice = Notice("name_taken_over", (), text)
        verdict = replace(verdict, warnings=(*verdict.warnings, notice))
    verdict, document = decision_of(engine, round_, verdict)
    return Decided(
        round=round_.number,
        result="PASSED" if verdict.outcome == "PASSED" else "FAILED",
        document=document,
    )


def _ended(engine: Engine, round_: Round, verdict: Verdict) -> Ended:
    return Ended(
        round=round_.number,
        result="SEALED" if verdict.outcome == "SEALED" else "ABORTED",
        document=outcome_document(engine, round_, verdict),
    )


def newly_touched(round_: Round, touches: tuple[Touch, ...]) -> tuple[Touched, ...]:
    """What fault rules did, where the round does not say it yet; an ended one is frozen."""
    new = tuple(t for t in dict.fromkeys(touches) if t not in round_.touches)
    return (Touched(round=round_.number, touches=new),) if new and round_.open else ()


def objected(
    round_: Round,
    attempt: int,
    code: str,
    ranks: Iterable[int],
    host: str,
    text: str,
    *,
    gone: bool = False,
) -> Objected:
    return Objected(
        round=round_.number,
        attempt=attempt,
        gone=gone,
        cause=Cause(
            code=code,
            ranks=tuple(ranks),
            host=host,
            # A decision shows no more of it.
            text=cut(text, LONG_BYTES),
            retryable=code not in NOT_RETRYABLE,
        ),
    )
