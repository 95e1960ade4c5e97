"""What has an effect, in which order, and when it is told: S5, S6, S8, S10, S12."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

from kvaccord import Report
from tests.simulation import names
from tests.simulation.account import UNTOLD, Account, Generation, Logged, overlap
from tests.simulation.verdicts import Verdict, checker

AFTER_THE_END = {"serving", "departed", "retired", "suspected", "cleared"}
# What a call appends, and whether a round that is over makes it append nothing.
NOUNS: dict[str, tuple[tuple[str, ...], bool]] = {
    "join": (("reserved",), False),
    "claim": (("claimed",), False),
    "reports": (("reported",), True),
    "applied": (("applied",), True),
    "veto": (("objected",), True),
    "leave": (("objected", "departed"), True),
    "serving": (("serving",), False),
    "cancel": ((), True),
    "retire": (("retired",), False),
}


@checker("S5", "Nothing of a superseded process, an older round or another run has any effect.")
def s5(account: Account, verdict: Verdict) -> None:
    for generation in account.generations:
        for engine, events in generation.events.items():
            _starts_in_order(engine, events, generation, verdict)
            names.took_over(engine, generation, verdict)
            names.still_kept(engine, generation, verdict)
            last = 0
            for e in events:
                if e.kind in UNTOLD:
                    continue
                number = e.event["round"]
                last = max(last, number)
                round_ = generation.rounds[engine, number]
                over = round_.over is not None and (round_.over.n, round_.over.index) < (
                    e.n,
                    e.index,
                )
                sealed = round_.ended is not None and round_.ended.event["result"] == "SEALED"
                if number < last or over:
                    late = e.kind == "claimed" and number == last and not sealed
                    verdict.expect(
                        late or (e.kind in AFTER_THE_END and sealed),
                        f"{e.kind} in {engine} round {number}, which is over",
                        e.at,
                        round_.over.at if round_.over else round_.opened.at,
                    )
                if over and sealed and e.kind in ("suspected", "cleared"):
                    verdict.expect(
                        names.is_kept(round_, e),
                        f"{e.kind} of attempt {e.event['attempt']} in {engine} round {number}, of"
                        " which no session is kept",
                        e.at,
                    )
                if e.kind in ("serving", "departed"):
                    for text in names.out_of_place(engine, generation, round_, e):
                        verdict.expect(False, text, e.at)
                if e.kind in ("reported", "applied"):
                    attempt = e.event["attempt"]
                    gone = round_.gone.get(attempt)
                    verdict.expect(
                        attempt in round_.seated
                        and (gone is None or (gone.n, gone.index) > (e.n, e.index)),
                        f"{e.kind} of attempt {attempt}, which holds no slot of {engine} round"
                        f" {number}",
                        e.at,
                    )
                if e.kind == "claimed":
                    join = generation.joins[engine, e.event["attempt"]].event["join"]
                    verdict.expect(
                        join["launch"] == round_.terms["launch"],
                        f"attempt {e.event['attempt']} of another launch is in round {number}",
                        e.at,
                    )
    for generation, engine, round_ in account.rounds():
        for text, at in names.late_members(engine, round_, generation):
            verdict.expect(False, text, at)
    if not overlap(account):
        _sized_for_the_plan_in_force(account, verdict)
        names.refused_for_the_living(account, verdict)
    for _, engine, round_ in account.rounds():
        if round_.decided is not None:
            launch = json.loads(round_.decided.event["document"])["launch"]
            verdict.expect(
                launch["run"] == round_.terms["launch"]["run"]
                and launch["restart"] == round_.terms["launch"]["restart"],
                f"the decision of {engine} round {round_.number} names another launch",
                round_.decided.at,
            )


def _sized_for_the_plan_in_force(account: Account, verdict: Verdict) -> None:
    """`check` is answered for the round in force alone."""
    arrived = {event["x"]: at for at, event in account.arrivals}
    for at, event in account.answers:
        _, engine, number, noun = account.call(event["x"])
        generation = account.generation(at)
        if noun != "check" or event["status"] != 200 or generation is None or engine is None:
            continue
        verdict.expect(
            number in {_in_force(generation, engine, p) for p in (arrived[event["x"]], at)},
            f"round {number} of {engine} was sized for, which was not in force",
            at,
        )


def _in_force(generation: Generation, engine: str, at: int) -> int | None:
    found = None
    for (name, number), round_ in generation.rounds.items():
        ended = round_.ended
        if name != engine or ended is None or ended.at > at:
            continue
        if ended.event["result"] == "SEALED" and round_.terms["mode"] == "enforce":
            retired = any(e.at < at for e in round_.of("retired"))
            found = None if retired else number
    return found


def _starts_in_order(
    engine: str, events: list[Logged], generation: Generation, verdict: Verdict
) -> None:
    """A lower restart never opens a round, nor does a run that was left."""
    left: dict[str, int] = {}
    launch: Any = None
    attempts = 0
    newer: dict[Any, int] = {}  # by run and rank: the newest that has claimed it
    for e in events:
        if e.kind == "reserved":
            attempts = max(attempts, e.event["attempt"])
        if e.kind == "claimed":
            join = generation.joins[engine, e.event["attempt"]].event["join"]
            for rank in join["ranks"]:
                newest = newer.setdefault((join["launch"]["run"], rank), e.event["attempt"])
                verdict.expect(
                    newest <= e.event["attempt"],
                    f"attempt {e.event['attempt']} claimed rank {rank} of {engine} after attempt"
                    f" {newest}, which is newer",
                    e.at,
                )
                newer[join["launch"]["run"], rank] = max(newest, e.event["attempt"])
        if e.kind != "opened":
            continue
        new = e.event["launch"]
        opener = next(
            c.event["attempt"]
            for c in generation.rounds[engine, e.event["round"]].events
            if c.kind == "claimed"
        )
        if launch and new["run"] == launch["run"]:
            verdict.expect(
                new["restart"] >= launch["restart"],
                f"restart {new['restart']} opened {engine} round {e.event['round']} after"
                f" {launch['restart']}",
                e.at,
            )
        elif launch:
            if new["run"] in left:
                back = new["source"] == "master" and opener > left[new["run"]]
                verdict.expect(back, f"run {new['run']} came back to {engine}", e.at)
            left[launch["run"]] = attempts
        launch = new


@checker("S6", "Rounds and attempts never go back, in one store.")
def s6(account: Account, verdict: Verdict) -> None:
    for generation in account.generations:
        for engine, entries in generation.entries.items():
            for n, (entry, at) in enumerate(entries):
                verdict.expect(entry["n"] == n, f"{engine}: entry {entry['n']} follows {n - 1}", at)
            rounds = attempts = lapsed = 0
            named: dict[Any, int] = {}
            for e in generation.events[engine]:
                if e.kind == "opened":
                    verdict.expect(
                        e.event["round"] == rounds + 1,
                        f"round {e.event['round']} after {rounds}",
                        e.at,
                    )
                    rounds = e.event["round"]
                if e.kind in ("claimed", "floor"):
                    # With a round that is dropped its processes are forgotten too.
                    lapsed = max(lapsed, e.event.get("attempt", attempts + 1))
                if e.kind == "reserved":
                    join = e.event["join"]
                    process = (join["nonce"], *join["ranks"])
                    known_as = named.setdefault(process, e.event["attempt"])
                    verdict.expect(
                        known_as in (e.event["attempt"], *range(lapsed)),
                        f"one process is attempt {known_as} and {e.event['attempt']}",
                        e.at,
                    )
                    again = generation.joins[engine, e.event["attempt"]]
                    verdict.expect(
                        e.event["attempt"] == attempts + 1
                        or again.event["join"] == e.event["join"],
                        f"attempt {e.event['attempt']} after {attempts}",
                        e.at,
                    )
                    attempts = max(attempts, e.event["attempt"])
    places: dict[Any, tuple[int, int]] = {}
    for at, event in account.answers:
        _, engine, _, noun = account.call(event["x"])
        if noun == "claim" and event["status"] == 200:
            gen = account.generation(at)
            attempt = account.caller(event["x"], gen)
            number = json.loads(event["body"])["round"]
            known, where = places.setdefault((id(gen), engine, attempt), (number, at))
            verdict.expect(known == number, f"attempt {attempt} is in two rounds", where, at)


@checker("S8", "Acknowledged means durable.")
def s8(account: Account, verdict: Verdict) -> None:
    for at, event in account.answers:
        generation = account.generation(at)
        if event["status"] in (200, 202):
            _acknowledged(account, generation, at, event, verdict)
        elif event["status"] == 410 and not overlap(account):
            _not_forgotten(account, generation, at, event, verdict)
    for at, event in account.pushed:
        if event.get("id"):
            _, engine, number, _ = account.call(event["x"])
            generation = account.generation(at)
            logged = _by_id(generation, engine or "", event["id"], number)
            verdict.expect(
                logged is not None and logged.at < at,
                f"{event['event']} {event['id']} was pushed before it was durable",
                at,
                *([logged.at] if logged else []),
            )


def _not_forgotten(
    account: Account, generation: Generation | None, at: int, event: Any, verdict: Verdict
) -> None:
    """A claim that was kept is answered like that however often it is repeated."""
    _, engine, _, noun = account.call(event["x"])
    attempt = account.caller(event["x"], generation)
    if noun != "claim" or generation is None or attempt is None:
        return
    for (name, number), round_ in generation.rounds.items():
        if name == engine and number in generation.kept[engine]:
            mine = [e for e in round_.of("claimed") if e.event["attempt"] == attempt and e.at < at]
            verdict.expect(
                not mine,
                f"attempt {attempt} of {engine} had claimed, and was answered that it lapsed",
                *[e.at for e in mine],
                at,
            )


def _by_id(
    generation: Generation | None, engine: str, ident: str, number: int | None
) -> Logged | None:
    if generation is None:
        return None
    n, index = map(int, ident.split("."))
    found = [e for e in generation.events[engine] if (e.n, e.index) == (n, index)]
    if not found or found[0].kind == "floor":
        # Its facts are gone: the documents are told again at the place of the floor.
        round_ = generation.rounds.get((engine, number or 0))
        entry = [e for e in generation.events[engine] if e.n == n and e.kind == "floor"]
        if entry and round_ is not None:
            return round_.decided if index == 0 else round_.ended
    return found[0] if found else None


def _acknowledged(
    account: Account, generation: Generation | None, at: int, event: Any, verdict: Verdict
) -> None:
    method, engine, number, noun = account.call(event["x"])
    attempt = account.caller(event["x"], generation)
    if method == "GET" or engine is None or noun not in NOUNS:
        return
    if noun == "join":
        attempt = json.loads(event["body"])["attempt"]
        logged = generation.joins.get((engine, attempt)) if generation else None
        verdict.expect(
            logged is not None and logged.at < at, f"join answered attempt {attempt}, not kept", at
        )
        return
    if generation is None:
        verdict.breach(f"{noun} was answered, and nothing is in the log", at)
        return
    if noun == "claim":
        number = json.loads(event["body"])["round"]
    round_ = generation.rounds.get((engine, number or 0))
    if round_ is None:
        verdict.breach(f"{noun} was answered for a round that is not in the log", at)
        return
    kinds, ends = NOUNS[noun]
    mine = [e for e in round_.of(*kinds) if e.event.get("attempt", attempt) == attempt]
    gone = round_.gone.get(attempt or 0)
    over = round_.over if ends else None
    if noun == "reports":
        over = round_.decided
    if noun in ("reports", "applied") and attempt not in round_.seated:
        return
    if noun == "reports" and mine and event["status"] in (200, 202):
        said = _reports(account.requests[event["x"]][1]["body"])
        kept = _reports(json.dumps(mine[0].event["reports"]))
        verdict.expect(
            said == kept,
            f"attempt {attempt} of {engine} reported something else than what was kept, and that"
            " was acknowledged",
            mine[0].at,
            at,
        )
    excuses = [e for e in (*mine, gone, over) if e is not None]
    verdict.expect(
        any(e.at < at for e in excuses),
        f"{noun} of attempt {attempt} in {engine} round {number} was answered, not kept",
        at,
        *[e.at for e in excuses],
    )


def _reports(body: str) -> dict[int, Report]:
    return {int(r): Report.model_validate(report) for r, report in json.loads(body).items()}


@checker("S10", "Facts of an engine arrive in order, once, without gaps, resumable.")
def s10(account: Account, verdict: Verdict) -> None:
    for generation in account.generations:
        for engine, entries in generation.entries.items():
            for entry, at in entries:
                events = [json.dumps(e) for e in entry["events"]]
                once = len(set(events)) == len(events)
                verdict.expect(once, f"entry {entry['n']} of {engine} says one thing twice", at)
        for engine, logged in generation.events.items():
            _said_once(engine, logged, verdict)
    opened = {event["x"]: at for at, event in account.answers}
    for x, facts in account.heard.items():
        _, engine, number, _ = account.call(x)
        at_request, request = account.requests[x]
        # Of the store that the stream was opened on: it may be replaced before the last is heard.
        generation = account.generation(opened[x])
        if generation is None or engine is None or number is None:
            continue
        round_ = generation.rounds.get((engine, number))
        unseated = round_ is not None and account.caller(x, generation) not in round_.seated
        after = _place(request.get("after") or "-1.-1")
        documents_alone = "facts=0" in request["target"]
        heard: list[tuple[int, int]] = []
        for at, event in facts:
            if not event["id"]:
                continue
            place = _place(event["id"])
            last = heard[-1] if heard else after
            verdict.expect(
                place > last,
                f"fact {event['id']} of exchange {x} came after {last}",
                at_request,
                at,
            )
            heard.append(place)
        if not heard:
            continue
        floor = generation.floors.get(engine, -1)
        for e in generation.events[engine]:
            if e.kind in UNTOLD or e.event["round"] != number:
                continue
            if documents_alone and e.kind not in ("decided", "ended"):
                continue
            if unseated and e.kind == "decided" and e.event["result"] == "PASSED":
                continue  # who has no part in the plan is not told it
            place = (e.n, e.index)
            if after < place <= heard[-1] and e.n >= floor:
                verdict.expect(
                    place in heard, f"fact {e.id} never came on exchange {x}", e.at, facts[-1][0]
                )


ONCE = {"claimed", "reported", "applied", "serving", "departed", "retired"}


def _said_once(engine: str, events: list[Logged], verdict: Verdict) -> None:
    """What is repeated by its sender stands in the log once."""
    said: dict[Any, int] = {}
    away: dict[Any, str] = {}
    touches: dict[Any, list[Any]] = defaultdict(list)
    for e in events:
        who = (e.event.get("round"), e.event.get("attempt"))
        new = True
        match e.kind:
            case "suspected":
                new = away.get(who) != e.event["connection"]
                away[who] = e.event["connection"]
            case "cleared":
                new = away.pop(who, None) is not None
            case "departed":
                away.pop(who, None)
                new = (e.kind, *who) not in said
            case "touched":
                new = not any(t in touches[who] for t in e.event["touches"])
                touches[who] += e.event["touches"]
            case "reserved":
                touched = e.event.get("touched", [])
                new = who not in touches or any(t not in touches[who] for t in touched)
                touches[who] += touched
            case "objected" if not e.event["gone"]:
                continue  # others say no for it, each for a reason of its own
            case kind if kind in ONCE or kind == "objected":
                new = (e.kind, *who) not in said
        verdict.expect(
            new,
            f"{engine}: {e.kind} of {who[1]} in round {who[0]} is said twice",
            said.get((e.kind, *who), e.at),
            e.at,
        )
        said[e.kind, *who] = e.at


def _place(ident: str) -> tuple[int, int]:
    entry, index = ident.split(".")
    return int(entry), int(index)


@checker("S12", "A rank judged lost had not been answered since its suspicion was logged.")
def s12(account: Account, verdict: Verdict) -> None:
    answered: dict[Any, list[int]] = defaultdict(list)
    if not overlap(account):
        _cleared_before_answered(account, verdict)
    for at, event in account.answers:
        attempt = account.caller(event["x"], account.generation(at))
        _, engine, _, _ = account.call(event["x"])
        # 503 says that nobody was heard: a store that is away takes down no return.
        if attempt and engine and event["status"] != 503:
            answered[event["at"], engine, attempt].append(at)
    for generation, engine, round_ in account.rounds():
        suspected: dict[int, Logged] = {}
        for e in round_.events:
            attempt = e.event.get("attempt")
            if e.kind == "suspected":
                suspected[e.event["attempt"]] = e
            lost = e.kind == "objected" and e.event["cause"]["code"] == "rank_lost"
            if not lost or attempt not in suspected or not account.own(generation, e):
                continue
            since = suspected[attempt]
            # From the moment in which the coordinator knew that it was durable.
            start = account.acks.get((e.by, engine, since.n), since.at)
            told = [at for at in answered[e.by, engine, attempt] if start < at < e.at]
            held = _newest_session(account, e, engine, attempt)
            verdict.expect(
                held is None,
                f"attempt {attempt} of {engine} was lost by {e.by}, which holds its session",
                *([held] if held is not None else []),
                e.at,
            )
            verdict.expect(
                not told,
                f"attempt {attempt} of {engine} was lost by {e.by}, which had answered it",
                since.at,
                *told,
                e.at,
            )


def _cleared_before_answered(account: Account, verdict: Verdict) -> None:
    """Whoever calls while suspect is answered when that is no longer in the log."""
    arrived = {(event["x"], event["at"]): at for at, event in account.arrivals}
    for at, event in account.answers:
        generation = account.generation(at)
        attempt = account.caller(event["x"], generation)
        came = arrived.get((event["x"], event["at"]))
        if event["status"] >= 500 or generation is None or attempt is None or came is None:
            continue
        _, engine, _, _ = account.call(event["x"])
        for (name, _), round_ in generation.rounds.items():
            if name != engine or attempt not in round_.seated:
                continue
            over, gone = round_.over, round_.gone.get(attempt)
            if (over is not None and over.at < at) or (gone is not None and gone.at < at):
                continue
            about = [e for e in round_.of("suspected", "cleared") if e.at < at]
            mine = [e for e in about if e.event["attempt"] == attempt]
            if not mine or mine[-1].kind == "cleared":
                continue
            known = account.acks.get((event["at"], engine, mine[-1].n), at)
            verdict.expect(
                known > came,
                f"attempt {attempt} of {engine} was answered while it was suspect",
                mine[-1].at,
                came,
                at,
            )


def _newest_session(account: Account, lost: Logged, engine: str, attempt: int) -> int | None:
    """Where the newest session of a process at its judge was opened, if that is still open.

    Behind a proxy one that is open says nothing.
    """
    text = lost.event["why"] if lost.kind == "departed" else lost.event["cause"]["text"]
    generation = account.generation(lost.at)
    mine = [
        (at, event["x"])
        for at, event in account.answers
        if at < lost.at
        and event["at"] == lost.by
        and event["status"] == 200
        and account.caller(event["x"], generation) == attempt
        and account.call(event["x"])[1::2] == (engine, "session")
    ]
    if "held open by a proxy" in text or not mine:
        return None
    at, newest = mine[-1]
    return None if account.closed.get(newest, len(account.events)) < lost.at else at
