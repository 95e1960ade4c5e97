"""Neither early nor late: S9 and L1, and when nobody served."""

from __future__ import annotations

import json
from typing import Any

from tests.simulation.account import Account, Logged, Round, before, finish
from tests.simulation.verdicts import TOLERANCE_S, Verdict, checker

TICK_S = 1.0
FORGOTTEN_S = 3.5  # what a restart forgets of a budget: it is kept every 2 s, in ticks of 1 s
AT_ONCE = {"rank_replaced", "superseded", "cancelled"}


@checker("S9", "No budget ends early, by the coordinator's own clock.")
def s9(account: Account, verdict: Verdict) -> None:
    # With two coordinators at once nobody's own clock is the round's.
    absent = [] if overlap(account) else away(account, store=False)
    for generation, engine, round_ in account.rounds():
        for end in (round_.decided, round_.ended):
            if end is None or not account.own(generation, end):
                continue
            document = json.loads(end.event["document"])
            said = document.get("verdict", document)
            if said["outcome"] not in ("PASSED", "SEALED"):
                _not_early(round_, end, said, absent, verdict)
        for lost in round_.of("objected", "departed"):
            if account.own(generation, lost):
                _not_lost_early(account, engine, round_, lost, verdict)


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


def _not_lost_early(
    account: Account, engine: str, round_: Round, lost: Logged, verdict: Verdict
) -> None:
    """Whoever is suspect has its time to come back."""
    text = lost.event["why"] if lost.kind == "departed" else lost.event["cause"]["text"]
    if "its session ended and did not come back" not in text:
        return
    attempt = lost.event["attempt"]
    suspected = [e for e in before(round_.of("suspected"), lost) if e.event["attempt"] == attempt]
    decided = round_.decided
    since = suspected[-1]
    passed = decided is not None and (decided.n, decided.index) < (since.n, since.index)
    patience_s = account.history.settings["lost_after_s" if passed else "reattach_s"]
    verdict.expect(
        lost.t - since.t >= patience_s - TOLERANCE_S,
        f"attempt {attempt} of {engine} was given up {lost.t - since.t:.3f} s after its session"
        f" ended, and may be away for {patience_s:g} s",
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


def overlap(account: Account) -> bool:
    """Two coordinators served at once: they share no presence and no clock (issue H)."""
    return any(e["kind"] == "coordinator" and e["what"] == "second beside" for e in account.events)


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
