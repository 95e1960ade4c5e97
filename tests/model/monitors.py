"""What every appended entry must keep. Written from docs/protocol.md, not from the rules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from coordinator import commands
from kvaccord.canonical import digest
from kvaccord.decision import Decision
from kvaccord.messages import Join
from tests.model.rules import Rules

if TYPE_CHECKING:
    from tests.model.log import Log

ENTRY_BYTES = 10

Key = tuple[Any, ...]


class Breach(Exception):
    """A property does not hold. `what` begins with its name."""


_only: frozenset[str] | None = None  # the properties that are checked; all of them if None


@contextmanager
def checking(only: Iterable[str]) -> Iterator[None]:
    """Check these properties alone, `S3` or `L4`; all of them if none is named."""
    global _only
    before, _only = _only, frozenset(only) or None
    try:
        yield
    finally:
        _only = before


def must(holds: object, what: str) -> None:
    if not holds and is_checked(what):
        raise Breach(what)


def is_checked(what: str) -> bool:
    return _only is None or not _only.isdisjoint(what.partition(" ")[0].split("/"))


def check_entry(log: Log, before: Any, after: Any, command: Any, events: tuple[Any, ...]) -> None:
    """What every appended entry must keep. Written from docs/protocol.md, not from the rules."""
    _frozen(before, after)
    _numbers(before, after)
    check_claim(log, before, after, command, events)
    rules, now = log.rules, before
    for event in events:
        then, now = now, rules.engine.evolve(now, event)
        kind = event.event
        if kind == "reserved":
            continue
        round_ = now.rounds[event.round]
        if kind in ("opened", "claimed"):
            _launch_is_not_older(now, round_)
        if kind == "claimed":
            member = round_.members[event.attempt]
            if member.seated:
                must(then.rounds[event.round].open, "S5 a process took a seat in an ended round")
                must(
                    member.join.launch == round_.launch and member.join.layout == round_.layout,
                    f"S5 round {round_.number} seats another start: {member.join.launch}",
                )
            continue
        if kind == "opened":
            continue
        was = then.rounds[event.round]
        if kind in ("serving", "departed", "retired"):
            _stands(then, was, command, event)
            continue
        if kind in ("suspected", "cleared") and was.ended == "SEALED":
            member = was.members[event.attempt]
            must(
                member.seated and member.kept, f"S5 {kind} was appended of one that does not serve"
            )
            must(member.departed is None, f"S5 {kind} was appended of one that had departed")
            continue
        must(was.open, f"S5 {kind} was appended to a round that had ended")
        must(was.number == before.last.number, f"S5 {kind} was appended to an older round")
        if hasattr(event, "attempt"):
            must(event.attempt in was.members, f"S5 {kind} by a process of another round")
            _is_current(now, was, event)
        if kind == "reported":
            must(was.members[event.attempt].seated, "S5 a report of a process without a seat")
            must(command.round == event.round, "S5 a report for another round was kept")
        if kind == "applied":
            _applied_is_true(was, command, event)
        if kind == "suspected":
            must(was.members[event.attempt].seated, "S5 a process without a seat is suspect")
        if kind == "objected" and event.cause.code == "rank_lost":
            suspect = was.members[event.attempt].suspect
            must(
                suspect and suspect == getattr(command, "connection", None),
                "S12 lost although the suspicion was cleared, or is of another session",
            )
        if kind == "decided":
            _decided(log, was, command, event)
        if kind == "ended":
            _ended(was, command, event)


def _frozen(before: Any, after: Any) -> None:
    for number, was in before.rounds.items():
        now = after.rounds.get(number)
        must(now is not None, "S6 a round is gone")
        if was.decision:
            must(now.decision == was.decision, "S1 a second decision of one round")
            must(now.verdict == was.verdict, "S1 an abort rewrote the verdict")
        if was.outcome or was.ended:
            must((now.outcome, now.ended) == (was.outcome, was.ended), "S2 an outcome changed")
            must(_proof(now) == _proof(was), "S2 what an outcome rests on changed")


def _proof(round_: Any) -> Key:
    built = {m.attempt: m.applied for m in round_.seated}
    return dict(round_.slots), dict(round_.sent), round_.causes, built


def _stands(engine: Any, was: Any, command: Any, event: Any) -> None:
    """What may come after the seal: words of its own members, and what was found of servers."""
    kind, said = event.event, type(command).__name__
    must(was.ended == "SEALED", f"S5 {kind} was appended to a round that is not sealed")
    if kind == "retired":
        must(said == "Retire" and command.round == was.number, "S5 retired without an order")
        return
    must(event.attempt in was.members, f"S5 {kind} of a process of another round")
    member = was.members[event.attempt]
    must(member.seated, f"S5 {kind} of a process without a seat")
    if said in ("Serve", "Leave"):
        own = (command.round, command.attempt) == (was.number, event.attempt)
        must(own, f"S5 {kind}, which it did not say of itself")
    if kind == "serving":
        must(said == "Serve", "S5 serving, which it did not say")
        _is_current(engine, was, event)
        return
    must(member.departed is None, "S5 one departed twice")
    match said:
        case "Leave":
            now = (_in_force(engine), engine.last.number)
            must(was.number in now, "S5 the leave of a round of the past was kept")
        case "Claim":
            ranks = engine.reservations[command.attempt].join.ranks
            must(set(ranks) & set(member.ranks), "S5 departed, and nobody wants its place")
        case "Lose":
            must(
                member.suspect and member.suspect == command.connection,
                "S12 departed although the suspicion was cleared, or is of another session",
            )
        case _:
            must(False, f"S5 departed by {said}")


def _in_force(engine: Any) -> int:
    """The number of the latest sealed round, if it was not retired."""
    sealed = [n for n, r in engine.rounds.items() if r.ended == "SEALED"]
    return max(sealed) if sealed and engine.rounds[max(sealed)].retired is None else 0


def check_floor(rules: Rules, engine: Any) -> None:
    """Dropping all but the latest round forgets nothing that the rules go by."""
    if len(engine.rounds) < 2 or not is_checked("S6"):
        return
    now = engine
    for event in rules.compaction(engine, 1):
        now = rules.engine.evolve(now, event)
    must(now.last == engine.last, "S6 a floor forgets the last round")
    must(now.in_force == engine.in_force, "S6 a floor forgets the round in force")
    must(now.rounds.items() <= engine.rounds.items(), "S6 a floor changes a round")
    for name in ("last_attempt", "left_runs", "reservations"):
        must(getattr(now, name) == getattr(engine, name), f"S6 a floor changes {name}")


def _numbers(before: Any, after: Any) -> None:
    must(after.last_attempt >= before.last_attempt, "S6 attempts went back")
    new = sorted(after.rounds.keys() - before.rounds.keys())
    first = max(before.rounds, default=0) + 1
    must(new == list(range(first, first + len(new))), f"S6 rounds {new} after {first - 1}")
    known = {a for r in before.rounds.values() for a in r.members} | set(before.reservations)
    given = after.reservations.keys() - before.reservations.keys()
    must(not given & known, "S6 an attempt was given out twice")
    must(all(a > before.last_attempt for a in given), "S6 an older attempt was given out")
    for number, round_ in after.rounds.items():
        earlier = {a for n, r in after.rounds.items() if n < number for a in r.members}
        must(not earlier & round_.members.keys(), "S5 one process takes part in two rounds")


def _launch_is_not_older(engine: Any, round_: Any) -> None:
    earlier = [r for r in engine.rounds.values() if r.number < round_.number]
    launch = round_.launch
    for r in earlier:
        if r.launch.run == launch.run:
            must(r.launch.restart <= launch.restart, "S5 an older restart opened a round")
            between = [x for x in earlier if x.number > r.number and x.launch.run != launch.run]
            must(not between, "S5 an earlier run opened a round")


def _is_current(engine: Any, round_: Any, event: Any) -> None:
    """Nothing of a process has effect once a newer one holds one of its slots.

    Newer is a later round's, or a higher attempt of its own run. A lower attempt of another run may
    have waited for that one to end.
    """
    me = round_.members[event.attempt]
    ranks, run = set(me.ranks), me.join.launch.run
    newer = [
        m
        for r in engine.rounds.values()
        for m in r.members.values()
        if m.seated and m.attempt != event.attempt and ranks & set(m.ranks)
        if r.number > round_.number or (m.join.launch.run == run and m.attempt > event.attempt)
    ]
    must(not newer, f"S5 {event.event} of a replaced process was kept")


def _applied_is_true(round_: Any, command: Any, event: Any) -> None:
    said, member = command.applied, round_.members[event.attempt]
    must(round_.verdict == "PASSED", "S7 applied before PASSED")
    must(said.digest == digest(round_.decision), "S7 applied with another digest was kept")
    decision = Decision(round_.decision)
    for rank in member.ranks:
        must(event.built == decision.entries(rank), "S7 applied with other entries was kept")


def _decided(log: Log, was: Any, command: Any, event: Any) -> None:
    must(not was.decision, "S1 a second decision of one round")
    decision = Decision(event.document.encode())
    if event.result == "FAILED":
        _causes_are_whole(was, decision, command)
        return
    must(not was.causes, "S3 PASSED over a cause")
    must(not isinstance(command, commands.Veto | commands.Leave), NO_IN_HAND)
    pages = []
    for rank in range(was.layout.world_size):
        must(rank in was.slots, f"S3 PASSED without rank {rank}")
        holder = was.members[was.slots[rank]]
        process = log.process_of(holder.join)
        must(holder.join.launch == was.launch, "S5 a decision over two starts")
        must(not holder.gone, f"S3 PASSED with rank {rank} gone")
        must(not holder.suspect, f"S3 PASSED while rank {rank} is suspect")
        mine = [log.report(process, extra)[rank] for extra in (0, 5)]
        must(was.sent.get(rank) in mine, f"S3 PASSED without a report of rank {rank}'s process")
        pages.append(was.sent[rank].kv_budget_bytes // ENTRY_BYTES)
    must(len({r.max_model_len for r in was.sent.values()}) == 1, "S3 PASSED over unequal inputs")
    for rank in range(was.layout.world_size):
        must(decision.entries(rank) == {"kv": min(pages)}, "S3 not the minimum of the reports")


NO_IN_HAND = "S3 the coordinator passed a round with a member's no in its hands"


def _causes_are_whole(was: Any, document: Any, command: Any) -> None:
    """Rule 8 and S4: the causes found, in order, then those of this command; none invented."""
    said = [(c["code"], c.get("rank")) for c in document.causes]
    kept = [(c.code, c.ranks[0] if c.ranks else None) for c in was.causes]
    must(said[: len(kept)] == kept, f"RULE8 the causes {kept} became {said}")
    found = said[len(kept) :]
    what, soft = getattr(command, "what", None), getattr(command, "soft", False)
    if what not in (None, "grace", "shortfall"):
        must(what == was.phase, f"RULE3 the budget {what} ended a round in {was.phase}")
    if what is not None and not was.verdict:
        certain = {r for r, report in was.sent.items() if report.kv_budget_bytes < ENTRY_BYTES}
        must(
            certain == {r for code, r in found if code == "does_not_fit"},
            f"RULE8 the reports of {certain} make failure certain, found was {found}",
        )
        must(what != "shortfall" or certain, "RULE3 a shortfall of nobody ended a round")
    must(what != "shortfall" or not kept, "RULE3 a shortfall ended another cause's grace")
    if type(command).__name__ == "Cancel":
        must(found == [("cancelled", None)], f"RULE8 cancelled for {found}")
    stuck = {r for code, r in found if code == "rank_stuck"}
    must(not soft or stuck, "RULE11 a soft end ended a round in which nobody is stuck")
    if stuck:
        signs = {r for r, sign in command.signs.items() if sign.stuck}
        must(stuck <= signs, f"RULE11 {stuck - signs} stuck although they move")
    blamed = stuck | {r for code, r in found if code == "ranks_missing"}
    heard = (
        was.sent.keys()
        if was.verdict is None
        else {r for m in was.seated if m.applied is not None for r in m.ranks}
    )
    late = blamed & set(heard)
    must(not late, f"S4 {late} missing or stuck although acknowledged")
    if was.phase == "gather":
        must(not blamed & was.slots.keys(), "S4 a claimed rank is missing in gather")
    lost = {r for code, r in found if code == "rank_lost"}
    for rank in lost:
        must(was.holder(rank).suspect, f"S12 rank {rank} lost by time and not suspect")
    if what in ("gather", "report", "apply") and not soft:
        must(blamed >= set(was.waiting_for), f"RULE11 of {was.waiting_for} only {blamed} blamed")


def _ended(was: Any, command: Any, event: Any) -> None:
    must(was.verdict == "PASSED", "S1 an outcome without PASSED")
    document = Decision(event.document.encode()).document
    must(document["decision_digest"] == digest(was.decision), "S2 an outcome of another decision")
    if event.result == "ABORTED":
        _causes_are_whole(was, _Outcome(document["causes"]), command)
        return
    must(not was.causes, "S7 SEALED over a cause")
    for rank in range(was.layout.world_size):
        member = was.members[was.slots[rank]]
        must(member.applied is not None, f"S7 SEALED and rank {rank} has not built")
        must(not member.gone and not member.suspect, f"S7 SEALED while rank {rank} is away")
        newer = [a for a, m in was.members.items() if a > member.attempt and rank in m.ranks]
        must(not newer, f"S7 SEALED and rank {rank} was replaced")
    must(type(command).__name__ not in ("Veto", "Leave"), NO_IN_HAND)


class _Outcome(NamedTuple):
    causes: list[dict[str, Any]]


def check_claim(log: Log, before: Any, after: Any, command: Any, events: tuple[Any, ...]) -> None:
    """Rule 7 as a table: what a first claim meets, and what must come of it."""
    if type(command).__name__ != "Claim" or before.round_of(command.attempt):
        return
    reserved, last = before.reservations.get(command.attempt), before.last
    if reserved is None:
        must(not events, "S5 a claim without a reservation had an effect")
        return
    wanted = _claim_table(before, reserved.join, command.watched)
    opened = [e.round for e in events if e.event == "opened"]
    seated = bool(events) and after.round_of(command.attempt).members[command.attempt].seated
    ended = bool(last and last.open and not after.rounds[last.number].open)
    new_cause = len(after.rounds[last.number].causes) > len(last.causes) if last else False
    got = (
        "refused"
        if not events
        else "replaces"
        if opened and ended
        else "opens"
        if opened
        else "takes"
        if seated and not new_cause
        else "fails"
        if new_cause
        else "late"
    )
    must(got == wanted, f"RULE7 a claim {got}, it should have been: {wanted}")
    if events:
        _lapse(before, after, reserved.join, command.attempt)
    if got == "opens" and last and last.ended == "SEALED" and reserved.join.launch == last.launch:
        left = [last.slots[r] for r in reserved.join.ranks if r in last.slots]
        gone = [after.rounds[last.number].members[a].departed for a in left]
        must(all(gone), "RULE7 who was replaced after the seal still stands")


def _lapse(before: Any, after: Any, join: Join, attempt: int) -> None:
    """What lapses with a claim: what was reserved earlier, by the same run, for its ranks."""
    lapsed = {
        a
        for a, r in before.reservations.items()
        if a < attempt
        and r.join.launch.run == join.launch.run
        and set(r.join.ranks) & set(join.ranks)
    }
    left = before.reservations.keys() - after.reservations.keys()
    must(left == lapsed | {attempt}, f"RULE7 with {attempt} lapsed {left}, not {lapsed}")


def _claim_table(engine: Any, join: Join, watched: Iterable[int]) -> str:
    last = engine.last
    if last is None:
        return "opens"
    same_run = join.launch.run == last.launch.run
    holders = [last.members[last.slots[r]] for r in join.ranks if r in last.slots]
    alive = _living(last, watched)
    next_ = "replaces" if last.open else "opens"
    if join.launch != last.launch:
        if same_run:
            return "refused" if join.launch.restart < last.launch.restart else next_
        if any(r.launch.run == join.launch.run for r in engine.rounds.values()):
            return "refused"
        if in_force := _in_force(engine):
            alive = alive | _living(engine.rounds[in_force], watched)
        return "refused" if alive else next_
    if last.ended == "FAILED" and not holders:
        here = any(set(m.ranks) & set(join.ranks) for m in last.members.values())
        return "opens" if here else "late"
    if last.ended == "SEALED" and (alive & {m.attempt for m in holders} if holders else alive):
        return "refused"
    if not last.open:
        return "opens"
    if join.layout != last.layout:
        return "fails"
    if not holders:
        return "takes"
    return "fails" if any(m.attempt in alive for m in holders) else "replaces"


def _living(round_: Any, watched: Iterable[int]) -> set[int]:
    """In an open round neither gone nor suspect; sealed: with a session, or serving."""
    if round_.open:
        return {m.attempt for m in round_.seated if not m.gone and not m.suspect}
    if round_.ended != "SEALED":
        return set()
    serve = {m.attempt for m in round_.seated if m.kept and not m.suspect and not m.departed}
    return serve | {m.attempt for m in round_.seated} & set(watched)
