"""Once faults stop: L2 to L5. And that nothing broke."""

from __future__ import annotations

from tests.simulation.account import Account, finish, healed
from tests.simulation.clocks import overlap
from tests.simulation.verdicts import Verdict, checker

LEARN_S = 40.0  # a read timeout, the calm pause after it, a poll


@checker("L2", "Every live member learns decision and outcome within one poll.")
def l2(account: Account, verdict: Verdict) -> None:
    well = healed(account)
    if well is None or overlap(account):
        return
    healed_s = account.events[well]["t"] if account.events else 0.0
    generation = account.generations[-1] if account.generations else None
    if generation is None:
        return
    last_s = account.events[finish(account) - 1]["t"]
    for name, notes in account.processes.items():
        found = next(((at, n) for at, n in notes if n["what"] == "entered"), None)
        if found is None or account.generation(found[0]) is not generation:
            continue  # it has no seat, or a store gave it out that is no more
        entered = found[1]
        engine = next(n["engine"] for _, n in notes if n["what"] == "begins")
        round_ = generation.rounds.get((f"default/{engine}", entered["round"]))
        if round_ is None or entered["attempt"] not in round_.seated:
            continue
        ended = next((n for _, n in notes if n["what"] in ("ends", "killed")), None)
        pauses = [n for _, n in notes if n["what"] in ("paused", "wakes")]
        for kind, logged in (("decision", round_.decided), ("outcome", round_.ended)):
            if logged is None or entered["attempt"] in round_.gone:
                continue
            start_s = max([logged.t, healed_s, entered["t"], *[p["t"] for p in pauses]])
            by_s = start_s + LEARN_S
            if ended is not None and ended["t"] <= by_s:
                if ended["what"] == "ends":
                    knows = ended["how"].startswith(("Failed", "Aborted", "Superseded", "done"))
                    verdict.judged += knows
                continue
            if by_s > last_s:
                continue
            heard = any(
                e["kind"] == "fact" and e["who"] == name and e["event"] == kind and e["t"] <= by_s
                for e in account.events
            ) or any(
                n["what"] in (("agreed", "sealed") if kind == "decision" else ("sealed",))
                and n["t"] <= by_s
                for _, n in notes
            )
            verdict.expect(heard, f"{name} had not heard the {kind} by {by_s:.1f} s", logged.at)


@checker("L3", "If all live, report and none vetoes, some round seals.")
def l3(account: Account, verdict: Verdict) -> None:
    start = next((at for at, e in enumerate(account.events) if e["kind"] == "last start"), None)
    if start is None:
        return
    sealed = [e for e in account.events[start:] if e["kind"] == "process" and e["what"] == "sealed"]
    verdict.expect(
        len(sealed) == account.events[start]["processes"],
        f"{len(sealed)} of {account.events[start]['processes']} processes of a start without fault"
        " were sealed",
        start,
    )


@checker("L4", "From every reachable state an outcome is reachable.")
def l4(account: Account, verdict: Verdict) -> None:
    if healed(account) is None or not account.generations:
        return
    for (engine, number), round_ in account.generations[-1].rounds.items():
        verdict.expect(
            round_.over is not None,
            f"{engine} round {number} is open at the end",
            round_.opened.at,
        )


@checker("L5", "Nothing accumulates past retention.")
def l5(account: Account, verdict: Verdict) -> None:
    if healed(account) is None or not account.generations:
        return
    keep = account.history.settings["policy"]["keep_rounds"]
    for engine, kept in account.generations[-1].kept.items():
        verdict.expect(
            len(kept) <= 2 * keep + 1,
            f"{engine} keeps {len(kept)} rounds at the end, where {2 * keep} and the one in force"
            " may be",
        )


@checker("sound", "Nothing broke: no handler, no client, no task ended in an error nobody expects.")
def sound(account: Account, verdict: Verdict) -> None:
    for at, event in enumerate(account.events):
        if event["kind"] == "fault":
            verdict.breach(event["text"], at)
    for text in account.history.settings.get("faults_of_nobody", ()):
        verdict.breach(text)
    verdict.saw()
