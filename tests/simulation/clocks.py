"""Neither early nor late: S9 and L1, and when nobody served."""

from __future__ import annotations

import json
from typing import Any

from tests.simulation.account import Account, Logged, Round, before, finish, overlap
from tests.simulation.verdicts import TOLERANCE_S, Verdict, checker

TICK_S = 1.0
FORGOTTEN_S = 3.5  # what a restart forgets of a budget: it is kept every 2 s, in ticks of 1 s
AT_ONCE = {"rank_replaced", "superseded", "cancelled"}


@checker("S9", "No budget ends early, by the coordinator's own clock.")
def s9(account: Account, verdict: Verdict) -> None:
    # With two coordinators at once nobody's own clock is the round's.
    absent = [] if overlap(account) else away(account, store=False)
    unwritable = [] if overlap(account) else without_store(account)
    for generation, engine, round_ in account.rounds():
        for end in (round_.decided, round_.ended):
            if end is None or not account.own(generation, end):
                continue
            document = json.loads(end.event["document"])
            said = document.get("verdict", document)
            if said["outcome"] not in ("PASSED", "SEALED"):
                _not_early(round_, end, said, [*absent, *unwritable], verdict)
                if not overlap(account):
                    _only_stuck(account, generation, engine, round_, end, said, verdict)
        for lost in round_.of("objected", "departed"):
            if account.own(generation, lost):
                _not_lost_early(account, engine, round_, lost, absent, verdict)


def _not_early(
    round_: Round, end: Logged, said: Any, absent: list[tuple[float, float]], verdict: Verdict
) -> None:
    policy = round_.terms["policy"]
    causes = before(round_.of("objected"), end)
    if end is round_.ended:
        assert round_.decided is not None
        causes = [e for e in causes if e.n > round_.decided.n]
        began, budget = round_.decided, policy["apply_s"]
    elif round_.full is not None and (round_.full.n, round_.full.index) < (end.n, end.index):
        began, budget = round_.full, policy["report_s"]
    else:
        began, budget = round_.opened, {"soft": policy["gather_s"], "hard": policy["gather_s"]}
    served_s = end.t - began.t - spent(absent, began.t, end.t)
    codes = {c["code"] for c in said["causes"]} | {said["code"]}
    where = f"round {round_.number} ended as {said['code']} after {served_s:.3f} s"
    if causes:
        first = causes[0].event["cause"]["code"]
        verdict.expect(
            said["code"] == first, f"{where}; its first cause is {first}", causes[0].at, end.at
        )
        if not codes & AT_ONCE:
            since_s = end.t - causes[0].t
            verdict.expect(
                since_s >= policy["grace_s"] - TOLERANCE_S or served_s >= budget["hard"] - TICK_S,
                f"{where}, {since_s:.3f} s after its first cause; grace_s is {policy['grace_s']}",
                causes[0].at,
                end.at,
            )
        return
    which = "hard" if codes & {"ranks_missing", "rank_lost"} else "soft"
    if codes & {"ranks_missing", "rank_lost", "rank_stuck"}:
        verdict.expect(
            served_s >= budget[which] - TOLERANCE_S,
            f"{where} in which a coordinator served: its budget's {which} end is {budget[which]} s",
            began.at,
            end.at,
        )


def _only_stuck(
    account: Account,
    generation: Any,
    engine: str,
    round_: Round,
    end: Logged,
    said: Any,
    verdict: Verdict,
) -> None:
    """Whoever is blamed as stuck showed no sign of progress for stall_s."""
    stall_s = round_.terms["policy"]["stall_s"]
    for rank in [c["rank"] for c in said["causes"] if c["code"] == "rank_stuck"]:
        attempt = round_.slots[rank]
        signs = [
            e.t
            for e in before(round_.of("claimed", "reported", "applied", "decided"), end)
            if e.event.get("attempt", attempt) == attempt
        ]
        verdict.expect(
            end.t - max(signs) >= stall_s - TICK_S,  # signs are timed by the budget's ticks
            f"rank {rank} of {engine} is stuck {end.t - max(signs):.3f} s after it showed"
            f" progress; stall_s is {stall_s:g}",
            end.at,
        )


def _not_lost_early(
    account: Account,
    engine: str,
    round_: Round,
    lost: Logged,
    absent: list[tuple[float, float]],
    verdict: Verdict,
) -> None:
    """Whoever is suspect has its time to come back, in seconds in which a coordinator served."""
    text = lost.event["why"] if lost.kind == "departed" else lost.event["cause"]["text"]
    attempt, settings = lost.event["attempt"], account.history.settings
    mine = [e for e in before(round_.events, lost) if e.event.get("attempt") == attempt]
    if "its session ended and did not come back" in text:
        since = [e for e in mine if e.kind == "suspected"][-1]
    elif "its session is held open by a proxy" in text:
        since = [e for e in mine if e.kind == "suspected"][-1]
        settings = settings | dict.fromkeys(
            ("lost_after_s", "reattach_s"), settings["silent_for_s"]
        )
    elif "its session was not opened" in text:
        if overlap(account):
            return  # it may wait from its own start for one whose claim another coordinator took
        since = [e for e in mine if e.kind in ("claimed", "cleared", "serving")][-1]
    else:
        return
    decided = round_.decided
    passed = decided is not None and (decided.n, decided.index) < (since.n, since.index)
    patience_s = settings["lost_after_s" if passed or since.kind == "claimed" else "reattach_s"]
    # A coordinator gives everyone its time anew.
    starts = [
        e["t"]
        for e in account.events[: lost.at]
        if e["kind"] == "coordinator" and e["what"] == "starts" and e["who"] == lost.by
    ]
    since_s = max([since.t, *starts])
    served_s = lost.t - since_s - spent(absent, since_s, lost.t)
    # Of a pause a tick of the wait counts, which may be longer than that of a budget.
    slack_s = max(TOLERANCE_S, patience_s / 20 if served_s < lost.t - since_s else 0.0)
    verdict.expect(
        served_s >= patience_s - slack_s,
        f"attempt {attempt} of {engine} was given up after {served_s:.3f} s in which a coordinator"
        f" served, and may be away for {patience_s:g} s",
        since.at,
        lost.at,
    )


@checker("L1", "Every round is decided, then sealed or aborted, within its budgets and 5 s.")
def l1(account: Account, verdict: Verdict) -> None:
    end_of_all = finish(account)
    if overlap(account):
        return
    absent = away(account, store=True)
    for generation, engine, round_ in account.rounds():
        policy = round_.terms["policy"]
        phases = [
            (round_.opened, round_.full or round_.decided, policy["gather_s"]),
            (round_.full, round_.decided, policy["report_s"]["hard"]),
        ]
        if round_.over is not round_.decided or round_.decided is None:
            phases.append((round_.decided, round_.ended, policy["apply_s"]["hard"]))
        for began, end, budget_s in phases:
            if began is None or not account.own(generation, began) or began.at >= end_of_all:
                continue
            if end is None and generation is not account.generations[-1]:
                continue
            if end is not None and end.at > end_of_all:
                continue
            until_s = end.t if end is not None else account.events[end_of_all - 1]["t"]
            away_s, restarts = spent(absent, began.t, until_s), 0
            for e in account.events[began.at : end.at if end is not None else end_of_all]:
                restarts += e["kind"] == "coordinator" and e["what"] == "serves"
            allowed_s = budget_s + 5.0 + away_s + restarts * FORGOTTEN_S
            verdict.expect(
                until_s - began.t <= allowed_s,
                f"{engine} round {round_.number}: {until_s - began.t:.1f} s in a budget of"
                f" {budget_s:g} s, with {away_s:.1f} s without a coordinator or store and"
                f" {restarts} restarts",
                began.at,
                *([end.at] if end else []),
            )


def away(account: Account, *, store: bool) -> list[tuple[float, float]]:
    """When no coordinator served (store: with a store that was well). Of a stall a tick counts."""
    spans: list[tuple[float, float]] = []
    up: set[str] = set()
    stalled: dict[str, float] = {}
    ill = False
    since: float | None = 0.0
    for e in account.events:
        match e["kind"], e.get("what"):
            case "coordinator", "serves":
                up.add(e["who"])
            case "coordinator", "drains" if not store:
                continue  # its own clock runs until it stops
            case "coordinator", "crash" | "stopped" | "drains":
                up.discard(e["who"])
                if e["who"] in stalled:
                    spans.append((stalled.pop(e["who"]), e["t"]))
            case "coordinator", "stalls":
                stalled[e["who"]] = e["t"] + (0.0 if store else TICK_S)
            case "coordinator", "goes on":
                spans.append((stalled.pop(e["who"]), e["t"]))
            case "mood", _:
                ill = store and _is_ill(e)
            case "healed", _:
                ill = False
        well = bool(up) and not ill
        if well and since is not None:
            spans.append((since, e["t"]))
            since = None
        elif not well and since is None:
            since = e["t"]
    if since is not None:
        spans.append((since, account.events[-1]["t"]))
    return spans


def without_store(account: Account) -> list[tuple[float, float]]:
    """When nothing could be written, from when a coordinator must have found that out."""
    spans: list[tuple[float, float]] = []
    since: float | None = None
    for e in account.events:
        if e["kind"] not in ("mood", "healed", "end"):
            continue
        if since is not None:
            spans.append((since + FORGOTTEN_S, e["t"]))
        since = e["t"] if e.get("down") or e.get("full") else None
    return [(a, b) for a, b in spans if a < b]


def _is_ill(mood: Any) -> bool:
    chances = ("fail", "unheard", "full", "down", "crash_before", "crash_after")
    return mood["slow_s"] > 0.01 or any(mood[name] for name in chances)


def spent(spans: list[tuple[float, float]], start_s: float, end_s: float) -> float:
    """Seconds of the spans that lie within, each second once."""
    total, reached_s = 0.0, start_s
    for a, b in sorted(spans):
        a, b = max(a, reached_s), min(b, end_s)
        if b > a:
            total, reached_s = total + b - a, b
    return total
