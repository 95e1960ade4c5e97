"""Who keeps an engine's name, and who gets a slot: rule 7 of docs/protocol.md, as S5 needs it.

By the log alone: what the coordinator knows of sessions besides can only keep a name longer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tests.simulation.account import Account, Generation, Logged, Round, before
from tests.simulation.verdicts import Verdict


def took_over(engine: str, generation: Generation, verdict: Verdict) -> None:
    """No round opens over the living: not of another run, and not in the place of one of them."""
    rounds = {number: r for (name, number), r in generation.rounds.items() if name == engine}
    for number, round_ in rounds.items():
        last = rounds.get(number - 1)
        if last is None:
            continue
        opened, ours = round_.opened, round_.terms["launch"]
        opener = next(e for e in round_.events if e.kind == "claimed")
        ranks = generation.joins[engine, opener.event["attempt"]].event["join"]["ranks"]
        theirs = last.terms["launch"]
        standing = _in_force(rounds, opened)
        if ours["run"] != theirs["run"]:
            alive = [a for r in {last.number: last, **standing}.values() for a in living(r, opened)]
            verdict.expect(
                not alive,
                f"run {ours['run']} took {engine} over in round {number} from attempts {alive},"
                " which live",
                opened.at,
            )
        elif ours["restart"] == theirs["restart"]:
            holders = list(dict.fromkeys(last.slots[r] for r in ranks if r in last.slots))
            alive = [a for a in living(last, opened) if not holders or a in holders]
            verdict.expect(
                not alive,
                f"round {number} of {engine} took the place of attempts {alive}, which live",
                opened.at,
            )
            if last.ended is not None and last.ended.event["result"] == "SEALED":
                gone = {e.event["attempt"] for e in last.of("departed") if e.n <= opened.n}
                verdict.expect(
                    set(holders) <= gone,
                    f"round {number} of {engine} replaced attempts {holders}; departed are {gone}",
                    opened.at,
                )


def living(round_: Round, at: Logged) -> list[int]:
    """The attempts that the log takes for alive when this is appended."""
    events = [e for e in before(round_.events, at) if e.n < at.n]
    if any(e.kind == "decided" and e.event["result"] == "FAILED" for e in events):
        return []
    ended = [e for e in events if e.kind == "ended"]
    if ended and ended[0].event["result"] == "ABORTED":
        return []
    kept, away, gone = set(), set(), set()
    for e in events:
        attempt = e.event.get("attempt")
        match e.kind:
            case "serving":
                kept.add(attempt)
            case "suspected":
                away.add(attempt)
            case "cleared":
                away.discard(attempt)
            case "departed":
                gone.add(attempt)
            case "objected" if e.event["gone"]:
                gone.add(attempt)
    seated = kept if ended else set(round_.seated) & {e.event.get("attempt") for e in events}
    return sorted(seated - away - gone)


def _in_force(rounds: dict[int, Round], at: Logged) -> dict[int, Round]:
    found: dict[int, Round] = {}
    for number, round_ in rounds.items():
        sealed = before(round_.of("ended"), at)
        enforced = round_.terms["mode"] == "enforce"
        if sealed and sealed[0].event["result"] == "SEALED" and enforced:
            found = {} if before(round_.of("retired"), at) else {number: round_}
    return found


def still_kept(engine: str, generation: Generation, verdict: Verdict) -> None:
    """Whatever is dropped, the plan in force stays."""
    rounds = {number: r for (name, number), r in generation.rounds.items() if name == engine}
    for e in generation.events[engine]:
        if e.kind == "floor":
            in_force = set(_in_force(rounds, e))
            kept = set(e.event["rounds"])
            verdict.expect(in_force <= kept, f"{engine} dropped {in_force}, in force", e.at)


def is_kept(round_: Round, at: Logged) -> bool:
    """Whether the session of whom this event is about means anything after the seal."""
    mine = [
        e.kind
        for e in before(round_.of("serving", "departed"), at)
        if e.event["attempt"] == at.event["attempt"]
    ]
    return "serving" in mine and "departed" not in mine


def out_of_place(engine: str, generation: Generation, round_: Round, said: Logged) -> Iterator[str]:
    """Who was replaced serves no more; who leaves a round of the past changes nothing."""
    rounds = {number: r for (name, number), r in generation.rounds.items() if name == engine}
    later = [r for number, r in rounds.items() if number > round_.number and r.opened.n < said.n]
    attempt = said.event["attempt"]
    if said.kind == "serving":
        ranks = set(round_.seated.get(attempt, ()))
        for r in later:
            held = {rank for a, them in r.seated.items() for rank in them if _claimed(r, a, said)}
            if ranks & held:
                yield f"attempt {attempt} of {engine} serves, and was replaced in round {r.number}"
    elif (
        later
        and said.event["why"].startswith("left:")
        and round_.number not in _in_force(rounds, said)
    ):
        yield f"attempt {attempt} left {engine} round {round_.number}, which is of the past"


def _claimed(round_: Round, attempt: int, at: Logged) -> bool:
    return any(e.event["attempt"] == attempt for e in before(round_.of("claimed"), at))


def refused_for_the_living(account: Account, verdict: Verdict) -> None:
    """A name is in use, a reservation has lapsed: only where somebody lives or has claimed."""
    arrived = {event["x"]: at for at, event in account.arrivals}
    for at, event in account.answers:
        _, engine, _, noun = account.call(event["x"])
        generation = account.generation(at)
        attempt = account.caller(event["x"], generation)
        if noun != "claim" or event["status"] < 400 or generation is None or attempt is None:
            continue
        assert engine is not None
        said = json.loads(event["body"])
        if said["code"] == "engine_name_in_use":
            # Decided between these two: it may share its entry with the last one's leave.
            verdict.expect(
                any(
                    _somebody_lives(account, generation, engine, place, event["at"])
                    for place in (arrived[event["x"]], at)
                ),
                f"{engine} was refused as in use, and nobody lives",
                at,
            )
        elif "has lapsed" in said.get("detail", ""):
            _somebody_claimed(generation, engine, attempt, at, verdict)


def _somebody_lives(
    account: Account, generation: Generation, engine: str, at: int, by: str
) -> bool:
    here = [r for (name, _), r in generation.rounds.items() if name == engine and r.opened.at < at]
    logged = [e for e in generation.events[engine] if e.at < at]
    if not here or not logged:
        return False
    after = logged[-1]
    next_one = Logged(at, after.t, by, after.n + 1, 0, {"event": ""})
    alive = [a for r in here for a in living(r, next_one)]
    seated = {a for r in here for a in r.seated}
    streams = [e for t, e in account.answers if t < at and e["at"] == by and e["status"] == 200]
    held = [
        e["x"]
        for e in streams
        if account.call(e["x"])[1::2] == (engine, "session")
        and account.closed.get(e["x"], at) >= at
        and account.caller(e["x"], generation) in seated
    ]
    return bool(alive or held)


def _somebody_claimed(
    generation: Generation, engine: str, attempt: int, at: int, verdict: Verdict
) -> None:
    join = generation.joins[engine, attempt].event["join"]
    verdict.expect(
        any(
            e.at < at and e.event["attempt"] >= attempt
            for e in generation.events[engine]
            if e.kind == "claimed" and _overlaps(_join(generation, engine, e), join)
        ),
        f"attempt {attempt} of {engine} was told that it lapsed, and no newer one has claimed",
        at,
    )


def _join(generation: Generation, engine: str, claimed: Logged) -> Any:
    return generation.joins[engine, claimed.event["attempt"]].event["join"]


def _overlaps(one: Any, other: Any) -> bool:
    same = one["launch"]["run"] == other["launch"]["run"]
    return same and bool(set(one["ranks"]) & set(other["ranks"]))


def late_members(engine: str, round_: Round, generation: Generation) -> Iterator[tuple[str, int]]:
    """In a start that has failed only slots that nobody had claimed are noted late."""
    if round_.over is None:
        return
    taken: set[int] = set()
    for e in round_.of("claimed"):
        ranks = _join(generation, engine, e)["ranks"]
        if (e.n, e.index) > (round_.over.n, round_.over.index) and taken & set(ranks):
            yield (
                f"attempt {e.event['attempt']} of {engine} is late for a slot that was taken",
                e.at,
            )
        taken |= set(ranks)
