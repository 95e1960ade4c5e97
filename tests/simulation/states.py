"""Rare states: whether a history reached them. What is not reached was not searched.

Also every code of docs/protocol.md section 5, as `FAILED x`, `ABORTED x` and `refused x`.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from tests.simulation.account import Account, Logged, Round
from tests.simulation.history import History

FAILED = [
    *("reserve_exceeds_free", "no_free_memory", "request_exceeds_free", "does_not_fit"),
    *("state_floor_exceeds_budget", "inputs_disagree", "implausible_report", "spread_too_wide"),
    *("rank_vetoed", "rank_left", "rank_lost", "rank_replaced", "duplicate_rank", "rank_stuck"),
    *("ranks_missing", "cancelled", "superseded"),
]
ABORTED = [
    *("apply_failed", "applied_differently", "rank_left", "rank_lost", "rank_replaced"),
    *("duplicate_rank", "rank_stuck", "ranks_missing", "cancelled", "superseded"),
]
REFUSED = [
    *("launch_missing", "invalid", "too_large", "unauthorized", "forbidden", "not_found"),
    *("conflict", "duplicate_rank", "engine_name_in_use", "superseded", "store_replaced"),
    *("protocol_too_old", "slow_down", "unavailable"),
]

State = Callable[[Account], bool]
STATES: dict[str, State] = {}


def state(name: str) -> Callable[[State], State]:
    def register(found: State) -> State:
        STATES[name] = found
        return found

    return register


def reached(history: History) -> set[str]:
    """The names of the states that this history went through."""
    account = Account(history)
    return {name for name, found in STATES.items() if found(account)} | _codes(account)


def all_states() -> list[str]:
    codes = [f"FAILED {c}" for c in FAILED] + [f"ABORTED {c}" for c in ABORTED]
    return [*STATES, "PASSED", "SEALED", *codes, *(f"refused {c}" for c in REFUSED)]


def _codes(account: Account) -> set[str]:
    found = set()
    for _, _, round_ in account.rounds():
        if round_.decided is not None:
            said = json.loads(round_.decided.event["document"])["verdict"]
            failed = said["outcome"] == "FAILED"
            found.add(f"FAILED {said['code']}" if failed else "PASSED")
        if round_.ended is not None:
            said = json.loads(round_.ended.event["document"])
            aborted = said["outcome"] == "ABORTED"
            found.add(f"ABORTED {said['code']}" if aborted else "SEALED")
    for _, answer in account.answers:
        if answer["status"] >= 400 and answer.get("body", "").startswith("{"):
            found.add(f"refused {_code_in(answer['body'])}")
    return found


def _code_in(body: str) -> str:
    return body.partition('"code": "')[2].partition('"')[0]


def _some(account: Account, kind: str, **fields: object) -> bool:
    return any(
        e["kind"] == kind and all(e.get(k) == v for k, v in fields.items()) for e in account.events
    )


def _passed(round_: Round) -> Logged | None:
    decided = round_.decided
    return decided if decided is not None and decided.event["result"] == "PASSED" else None


def _after(events: list[Logged], start: Logged, end: Logged | None) -> list[Logged]:
    return [e for e in events if start.n < e.n and (end is None or e.n <= end.n)]


# --- two writers, and appends whose end is unknown ------------------------------------------------


@state("two coordinators decide at once")
def _(a: Account) -> bool:
    return _some(a, "store", what="conflict")


@state("append succeeded, its answer was lost")
def _(a: Account) -> bool:
    return _some(a, "store", what="unheard")


@state("coordinator dies before an append")
def _(a: Account) -> bool:
    return _some(a, "store", what="crash before")


@state("coordinator dies after an append")
def _(a: Account) -> bool:
    return _some(a, "store", what="crash after")


@state("a decision is kept and its coordinator dies before telling it")
def _(a: Account) -> bool:
    deaths = {(e["at"], e["n"]) for e in a.events if e.get("what") == "crash after"}
    return any(
        r.decided is not None and (r.decided.by, r.decided.n) in deaths for _, _, r in a.rounds()
    )


@state("a decision's append is unheard")
def _(a: Account) -> bool:
    unheard = {(e["at"], e["n"]) for e in a.events if e.get("what") == "unheard"}
    return any(
        r.decided is not None and (r.decided.by, r.decided.n) in unheard for _, _, r in a.rounds()
    )


@state("the store is away while a round is open")
def _(a: Account) -> bool:
    return _some(a, "store", what="down")


@state("the store is replaced by an older copy")
def _(a: Account) -> bool:
    return _some(a, "restored")


@state("an older copy lacks a decision that was told")
def _(a: Account) -> bool:
    return any(
        any(
            key not in new.rounds or new.rounds[key].decided is None
            for key, r in old.rounds.items()
            if r.decided is not None
        )
        for old, new in zip(a.generations, a.generations[1:], strict=False)
    )


@state("a SQLite file")
def _(a: Account) -> bool:
    return a.history.settings["store"] == "sqlite"


@state("old rounds are dropped")
def _(a: Account) -> bool:
    return any(g.floors for g in a.generations)


# --- coordinators ---------------------------------------------------------------------------------


@state("a coordinator stalls with a round open")
def _(a: Account) -> bool:
    return any(
        any(r.opened.t < e["t"] and (r.over is None or r.over.t > e["t"]) for _, _, r in a.rounds())
        for e in a.events
        if e["kind"] == "coordinator" and e["what"] == "stalls"
    )


@state("a coordinator drains under open sessions")
def _(a: Account) -> bool:
    return any(e["event"] == "move" for _, e in a.pushed)


@state("a budget runs on over a restart, and ends")
def _(a: Account) -> bool:
    serves = [e["t"] for e in a.events if e["kind"] == "coordinator" and e["what"] == "serves"]
    for _, _, round_ in a.rounds():
        over = round_.over
        missing = over is not None and "ranks_missing" in over.event["document"]
        if missing and any(round_.opened.t < t < over.t for t in serves):  # type: ignore[union-attr]
            return True
    return False


@state("the wall clock jumps")
def _(a: Account) -> bool:
    return _some(a, "clock")


# --- processes ------------------------------------------------------------------------------------


@state("claim during PASSED")
def _(a: Account) -> bool:
    for _, _, round_ in a.rounds():
        passed = _passed(round_)
        if passed is not None:
            if _after(round_.of("claimed"), passed, round_.ended):
                return True
            ended = round_.ended
            if ended is not None and '"code":"rank_replaced"' in ended.event["document"]:
                return True
    return False


@state("a superseded process's report arrives late")
def _(a: Account) -> bool:
    for at, event in a.arrivals:
        _, engine, number, noun = a.call(event["x"])
        generation = a.generation(at)
        round_ = generation.rounds.get((engine or "", number or 0)) if generation else None
        if noun == "reports" and round_ is not None and round_.over is not None:
            newer = generation and generation.rounds.get((engine or "", (number or 0) + 1))
            if newer and newer.opened.at < at:
                return True
    return False


@state("a request arrives after its process has died")
def _(a: Account) -> bool:
    dead = {
        who: at for who, notes in a.processes.items() for at, n in notes if n["what"] == "killed"
    }
    return any(
        dead.get(a.requests[e["x"]][1]["who"], at) < at
        and a.requests[e["x"]][0] < dead.get(a.requests[e["x"]][1]["who"], at)
        for at, e in a.arrivals
    )


@state("a dead process's join or claim arrives late")
def _(a: Account) -> bool:
    dead = {
        who: at for who, notes in a.processes.items() for at, n in notes if n["what"] == "killed"
    }
    return any(
        dead.get(a.requests[e["x"]][1]["who"], at) < at and a.call(e["x"])[3] in ("join", "claim")
        for at, e in a.arrivals
    )


@state("a zombie wakes after its round is over")
def _(a: Account) -> bool:
    for notes in a.processes.values():
        number = next((n["round"] for _, n in notes if n["what"] == "entered"), None)
        for at, note in notes:
            if note["what"] == "wakes" and number is not None:
                generation = a.generation(at)
                round_ = generation.rounds.get(("default/llama", number)) if generation else None
                if round_ is not None and round_.over is not None and round_.over.at < at:
                    return True
    return False


@state("re-attach races with lost")
def _(a: Account) -> bool:
    lost = {
        (engine, e.event["attempt"]): e
        for _, engine, r in a.rounds()
        for e in r.of("objected")
        if e.event["cause"]["code"] == "rank_lost"
    }
    for _, event in a.arrivals:
        _, engine, _, noun = a.call(event["x"])
        attempt = a.requests[event["x"]][1].get("attempt")
        found = lost.get((engine, attempt))  # type: ignore[arg-type]
        if noun == "session" and found is not None and abs(event["t"] - found.t) < 0.5:
            return True
    return False


@state("a session request arrives after a later one")
def _(a: Account) -> bool:
    latest: dict[tuple[str | None, ...], int] = {}
    for _, event in a.arrivals:
        method, engine, _, noun = a.call(event["x"])
        if (method, noun) == ("GET", "session"):
            request = a.requests[event["x"]][1]
            key = engine, request.get("store"), request.get("attempt")
            if event["x"] < latest.get(key, 0):
                return True
            latest[key] = event["x"]
    return False


@state("a process behind a proxy falls silent")
def _(a: Account) -> bool:
    return any(
        "sent no beat" in str(e.event)
        for _, _, r in a.rounds()
        for e in r.of("objected", "departed")
    )


@state("a suspect comes back in time")
def _(a: Account) -> bool:
    return any(r.of("cleared") for _, _, r in a.rounds())


@state("the return of a suspect settles the round")
def _(a: Account) -> bool:
    for _, _, round_ in a.rounds():
        cleared = {e.n for e in round_.of("cleared")}
        if any(end is not None and end.n in cleared for end in (round_.decided, round_.ended)):
            return True
    return False


@state("veto in the grace of another")
def _(a: Account) -> bool:
    for _, _, round_ in a.rounds():
        no = [e for e in round_.of("objected") if e.event["gone"]]
        if len({e.event["attempt"] for e in no}) > 1 and no[0].n != no[1].n:
            return True
    return False


@state("applied and abort race")
def _(a: Account) -> bool:
    for at, event in a.arrivals:
        _, engine, number, noun = a.call(event["x"])
        generation = a.generation(at)
        round_ = generation.rounds.get((engine or "", number or 0)) if generation else None
        if noun == "applied" and round_ is not None and _passed(round_) is not None:
            no = [e for e in round_.of("objected") if e.n > _passed(round_).n]  # type: ignore[union-attr]
            if no and no[0].at < at and (round_.ended is None or at < round_.ended.at):
                return True
    return False


@state("budget ends with all claimed and none reported")
def _(a: Account) -> bool:
    return any(
        r.full is not None
        and r.decided is not None
        and not r.of("reported")
        and '"code":"ranks_missing"' in r.decided.event["document"]
        for _, _, r in a.rounds()
    )


@state("a shortfall ends a round before all have reported")
def _(a: Account) -> bool:
    for _, _, round_ in a.rounds():
        if round_.decided is not None and not round_.of("objected"):
            said = json.loads(round_.decided.event["document"])["verdict"]
            short = said["code"] in ("does_not_fit", "no_free_memory", "state_floor_exceeds_budget")
            if short and said["not_heard"]:
                return True
    return False


@state("a late member of a start that failed")
def _(a: Account) -> bool:
    return any(
        r.over is not None and any(e.n > r.over.n for e in r.of("claimed"))
        for _, _, r in a.rounds()
    )


@state("a member that serves departs")
def _(a: Account) -> bool:
    return any(r.of("departed") for _, _, r in a.rounds())


@state("a name is taken over")
def _(a: Account) -> bool:
    return any(
        r.decided is not None and '"name_taken_over"' in r.decided.event["document"]
        for _, _, r in a.rounds()
    )


@state("a run of MASTER_ADDR comes back")
def _(a: Account) -> bool:
    runs = [r.terms["launch"] for _, _, r in a.rounds()]
    seen: list[str] = []
    for launch in runs:
        if (
            launch["source"] == "master"
            and launch["run"] in seen[:-1]
            and seen[-1] != launch["run"]
        ):
            return True
        seen.append(launch["run"])
    return False


@state("a stream is resumed")
def _(a: Account) -> bool:
    return any(request.get("after") for _, request in a.requests.values())


@state("a fault rule touches a decision")
def _(a: Account) -> bool:
    return any(r.of("touched") and r.decided is not None for _, _, r in a.rounds())


@state("an observed round is sealed")
def _(a: Account) -> bool:
    return any(r.terms["mode"] == "observe" and r.ended is not None for _, _, r in a.rounds())


@state("an observing client is heard")
def _(a: Account) -> bool:
    begins = (n for notes in a.processes.values() for _, n in notes if n["what"] == "begins")
    observed = any(
        r.terms["mode"] == "observe" and r.ended is not None and r.ended.event["result"] == "SEALED"
        for _, _, r in a.rounds()
    )
    return observed and any(n["client"] == "observe" for n in begins)


@state("a blocking client is sealed")
def _(a: Account) -> bool:
    return any(
        notes[0][1].get("client") == "blocking" and any(n["what"] == "sealed" for _, n in notes)
        for notes in a.processes.values()
    )


@state("named groups are agreed")
def _(a: Account) -> bool:
    return any(
        _passed(r) is not None and '"group"' in r.decided.event["document"]  # type: ignore[union-attr]
        for _, _, r in a.rounds()
    )


@state("named groups differ")
def _(a: Account) -> bool:
    return any("group" in str(e.event) for _, _, r in a.rounds() for e in r.of("objected"))


@state("a join shortens the budgets")
def _(a: Account) -> bool:
    return any(_shortened(a, r) and _passed(r) is not None for _, _, r in a.rounds())


@state("a budget that a join shortened ends")
def _(a: Account) -> bool:
    return any(
        _shortened(a, r) and r.over is not None and "ranks_missing" in r.over.event["document"]
        for _, _, r in a.rounds()
    )


def _shortened(account: Account, round_: Round) -> bool:
    return bool(round_.terms["policy"]["gather_s"] < account.history.settings["policy"]["gather_s"])


@state("two engines at one coordinator")
def _(a: Account) -> bool:
    return len({engine for _, engine, _ in a.rounds()}) > 1


@state("16 ranks and more")
def _(a: Account) -> bool:
    return any(r.world >= 16 and _passed(r) is not None for _, _, r in a.rounds())


@state("64 ranks")
def _(a: Account) -> bool:
    return any(r.world == 64 for _, _, r in a.rounds())


@state("two processes of one rank")
def _(a: Account) -> bool:
    return any(
        '"code":"duplicate_rank"' in r.over.event["document"]
        for _, _, r in a.rounds()
        if r.over is not None
    )


@state("five rounds in one world")
def _(a: Account) -> bool:
    return any(r.number >= 5 for _, _, r in a.rounds())
