"""Once faults stop: L2 to L5. And that nothing broke."""

from __future__ import annotations

from collections import defaultdict

from tests.simulation.account import Account, Logged, digest_of, finish, healed, overlap
from tests.simulation.verdicts import Verdict, checker

LEARN_S = 40.0  # a read timeout, the calm pause after it, a poll
TELL_S = 8.0  # an append without an answer is looked at after 0.5 s; a slow store takes its time


@checker("L2", "Every live member learns decision and outcome within one poll.")
def l2(account: Account, verdict: Verdict) -> None:
    _told_on_open_streams(account, verdict)
    _told_to_give_way(account, verdict)
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


def _told_on_open_streams(account: Account, verdict: Verdict) -> None:
    """A coordinator that goes on tells those whose session it holds what it has appended."""
    streams: dict[tuple[str, str, int], list[tuple[int, int]]] = defaultdict(list)
    for at, event in account.answers:
        _, engine, number, noun = account.call(event["x"])
        if noun == "session" and event["status"] == 200 and engine and number:
            streams[event["at"], engine, number].append((event["x"], at))
    told = {(e["x"], e.get("document")) for _, e in account.pushed}
    for generation, engine, round_ in account.rounds():
        for logged in (round_.decided, round_.ended):
            if logged is None or not account.own(generation, logged):
                continue
            end = _after(account, logged)
            if end is None or _disturbed(account, logged, end):
                continue
            passed = logged.event["result"] == "PASSED"
            for x, since in streams[logged.by, engine, round_.number]:
                attempt = account.caller(x, generation)
                if since > logged.at or account.closed.get(x, end) < end:
                    continue
                if passed and attempt not in round_.seated:
                    continue
                verdict.expect(
                    (x, digest_of(logged)) in told,
                    f"exchange {x} was not told the {logged.kind} of {engine} round"
                    f" {round_.number} within {TELL_S:g} s",
                    since,
                    logged.at,
                )


def _told_to_give_way(account: Account, verdict: Verdict) -> None:
    """Whose run has a greater restart hears it on its stream."""
    for generation, engine, round_ in account.rounds():
        opened, ours = round_.opened, round_.terms["launch"]
        if not account.own(generation, opened):
            continue
        end = _after(account, opened)
        if end is None or _disturbed(account, opened, end):
            continue
        for at, event in account.answers:
            _, name, number, noun = account.call(event["x"])
            older = generation.rounds.get((engine, number or 0))
            if noun != "session" or name != engine or older is None or at > opened.at:
                continue
            theirs = older.terms["launch"]
            over = theirs["run"] == ours["run"] and theirs["restart"] < ours["restart"]
            if over and event["at"] == opened.by and event["status"] == 200:
                verdict.expect(
                    account.closed.get(event["x"], end) < end,
                    f"exchange {event['x']} of {engine} round {number} was not told within"
                    f" {TELL_S:g} s that launch {ours['restart']} had taken over",
                    at,
                    opened.at,
                )


def _after(account: Account, logged: Logged) -> int | None:
    """The first place at which whoever was to be told must have been."""
    places = range(logged.at, finish(account))
    return next((at for at in places if _t(account, at) > logged.t + TELL_S), None)


def _t(account: Account, at: int) -> float:
    return float(account.events[at]["t"])


def _disturbed(account: Account, logged: Logged, end: int) -> bool:
    """Whether its coordinator, or the store, could not go on."""
    down = False
    for e in account.events[:end]:
        if e["kind"] == "mood":
            down = e["down"]
        if e["t"] >= logged.t and down:
            return True
        its_own = e["kind"] == "coordinator" and e["who"] == logged.by and e["what"] != "serves"
        if its_own and (e["what"] == "stalls" or e["t"] >= logged.t):
            return True
    return False


@checker("L3", "If all live, report and none vetoes, some round seals.")
def l3(account: Account, verdict: Verdict) -> None:
    _nobody_is_lost_for_nothing(account, verdict)
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


def _nobody_is_lost_for_nothing(account: Account, verdict: Verdict) -> None:
    """Who lives, and has had neither a pause nor trouble with network, coordinator or store."""
    names = {
        (account.generation(at), f"default/{notes[0][1]['engine']}", note["attempt"]): name
        for name, notes in account.processes.items()
        for at, note in notes
        if note["what"] == "entered"
    }
    for generation, engine, round_ in account.rounds():
        for lost in round_.of("objected"):
            attempt = lost.event["attempt"]
            name = names.get((generation, engine, attempt))
            if round_.of("touched"):
                continue  # a fault rule may have kept it from its session
            if lost.event["cause"]["code"] != "rank_lost" or name is None:
                continue
            if not _befell(account, name, lost.at):
                verdict.expect(
                    False, f"attempt {attempt} of {engine} was lost, and nothing befell it", lost.at
                )


def _befell(account: Account, name: str, until: int) -> bool:
    serves = 0
    for e in account.events[:until]:
        match e["kind"]:
            case "mood" | "weather" | "store":
                return True
            case "coordinator":
                serves += e["what"] == "serves"
                if serves > 1 or e["what"] not in ("starts", "serves"):
                    return True
            case "cut" | "link" | "process" if name in e["who"]:
                if e["kind"] != "process" or e["what"] in ("killed", "ends", "paused"):
                    return True
    return False


@checker("L4", "From every reachable state an outcome is reachable.")
def l4(account: Account, verdict: Verdict) -> None:
    if healed(account) is None or not account.generations:
        return
    last = [
        (at, e["who"])
        for at, e in enumerate(account.events[: finish(account)])
        if e["kind"] == "coordinator" and e["what"] == "starts"
    ][-1]
    for (engine, number), round_ in account.generations[-1].rounds.items():
        # Opened by another after this one had read the log, which nobody has asked since: issue H.
        unread = overlap(account) and last[0] < round_.opened.at and round_.opened.by != last[1]
        if unread and round_.over is None:
            continue
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
