"""What was told and what it means: S1 to S4, S7, S11."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from tests.simulation.account import Account, Logged, Round, before, digest_of, suspects
from tests.simulation.verdicts import Verdict, checker


def _told(account: Account) -> Iterable[tuple[int, str, int, str, str]]:
    """(place, engine, round, kind, digest) of every frozen document that left a coordinator."""
    for at, event in [*account.answers, *account.pushed]:
        if name := event.get("document"):
            document = account.document(name)
            kind = "decision" if "verdict" in document else "outcome"
            yield at, document["engine"], document["round"], kind, name


@checker("S1", "One decision a round; every copy ever sent has the same digest.")
def s1(account: Account, verdict: Verdict) -> None:
    first: dict[Any, tuple[str, int]] = {}
    for at, engine, number, kind, name in _told(account):
        key = (account.document(name)["store_id"], engine, number, kind)
        known, where = first.setdefault(key, (name, at))
        verdict.expect(known == name, f"two {kind}s of {engine} round {number}", where, at)
    for at, event in account.answers:
        if "document" in event:
            verdict.expect(event["digest"] == event["document"], "a digest of other bytes", at)
    for _, engine, round_ in account.rounds():
        verdict.expect(
            len(round_.of("decided")) <= 1 and len(round_.of("ended")) <= 1,
            f"{engine} round {round_.number} was decided or ended twice",
            *[e.at for e in round_.of("decided", "ended")],
        )
    for name, notes in account.processes.items():
        for at, note in notes:
            if note["what"] == "agreed":
                document = account.document(note["digest"])
                key = (document["store_id"], document["engine"], note["round"], "decision")
                told, where = first[key]
                verdict.expect(told == note["digest"], f"{name} holds another decision", at, where)
                passed = document["verdict"]["outcome"] == "PASSED"
                verdict.expect(passed, f"{name} went on after a decision that is no PASSED", at)
                generation = account.generation(at)
                seat = generation and generation.rounds.get((document["engine"], note["round"]))
                entered = next(n for _, n in notes if n["what"] == "entered")
                if seat and document["store_id"] == generation.store:  # type: ignore[union-attr]
                    verdict.expect(
                        entered["attempt"] in seat.seated,
                        f"{name} builds by a plan that it has no part in",
                        at,
                    )


@checker("S2", "A decision or outcome, once readable, never changes and survives any crash.")
def s2(account: Account, verdict: Verdict) -> None:
    for at, engine, number, kind, name in _told(account):
        generation = account.generation(at)
        round_ = generation.rounds.get((engine, number)) if generation else None
        if round_ is None and account.document(name)["store_id"] != (
            generation.store if generation else ""
        ):
            continue
        logged = None if round_ is None else round_.decided if kind == "decision" else round_.ended
        same = logged is not None and digest_of(logged) == name and logged.at < at
        verdict.expect(
            same,
            f"the {kind} of {engine} round {number} was told, and is not in the log",
            at,
            *([logged.at] if logged else []),
        )
    _read_back(account, verdict)


def _read_back(account: Account, verdict: Verdict) -> None:
    """What a coordinator that was started after the end still answers."""
    start = next((at for at, e in enumerate(account.events) if e["kind"] == "reading back"), None)
    generation = account.generations[-1] if account.generations else None
    if start is None or generation is None:
        return
    read: dict[tuple[str, int, str], tuple[int, Any]] = {}
    for at, event in account.answers:
        if at > start and account.requests[event["x"]][1]["who"] == "reader":
            _, engine, number, noun = account.call(event["x"])
            if engine and number:
                read[engine, number, noun] = (at, event.get("document"))
    for (engine, number), round_ in generation.rounds.items():
        if number not in generation.kept[engine]:
            continue
        for noun, logged in (("decision", round_.decided), ("outcome", round_.over)):
            if logged is not None and logged.at < start:
                at, document = read.get((engine, number, noun), (start, None))
                verdict.expect(
                    document == digest_of(logged),
                    f"the {noun} of {engine} round {number} did not survive",
                    logged.at,
                    at,
                )


@checker("S3", "PASSED: all reported, no veto, equal inputs, minima over exactly those reports.")
def s3(account: Account, verdict: Verdict) -> None:
    for generation, engine, round_ in account.rounds():
        joins = generation.joins
        if round_.decided is None or round_.decided.event["result"] != "PASSED":
            continue
        at = round_.decided.at
        where = f"{engine} round {round_.number}"
        reports: dict[int, Any] = {}
        for reported in before(round_.of("reported"), round_.decided):
            ours = reported.event["reports"] | reported.event.get("planned", {})
            for rank, report in ours.items():
                if round_.slots.get(int(rank)) == reported.event["attempt"]:
                    reports[int(rank)] = report
        verdict.expect(
            reports.keys() == set(range(round_.world)),
            f"{where} PASSED with reports of {sorted(reports)} alone",
            at,
        )
        no = before(round_.of("objected"), round_.decided)
        verdict.expect(not no, f"{where} PASSED after a no", at, *[e.at for e in no])
        away = suspects(round_, round_.decided)
        verdict.expect(not away, f"{where} PASSED while {away} were suspect", at)
        seated = [joins[engine, attempt].event["join"] for attempt in round_.seated]
        if reports.keys() == set(range(round_.world)):
            names = {int(r): g for join in seated for r, g in (join.get("groups") or {}).items()}
            decision = json.loads(round_.decided.event["document"])
            for text in _wrong_plan(round_, reports, names, decision):
                verdict.expect(False, f"{where}: {text}", at)
        said = [join.get("inputs") for join in seated]
        inputs = {json.dumps(i, sort_keys=True) for i in said if i is not None}
        verdict.expect(len(inputs) <= 1, f"{where} PASSED, and the inputs of its joins differ", at)
        verdict.saw()


def _wrong_plan(
    round_: Round, reports: dict[int, Any], names: dict[int, Any], decision: Any
) -> Iterable[str]:
    """The planner's arithmetic once more, for the classes that a simulated rank has."""
    for key in ("max_num_seqs", "inputs"):
        if len({json.dumps(r.get(key), sort_keys=True) for r in reports.values()}) > 1:
            yield f"{key} differ"
    layout = round_.terms["layout"]
    size = layout["pp"] * layout["pcp"] * layout["tp"]
    peers = size * layout["dp"] if layout.get("equal_over") else size
    if names and names.keys() != reports.keys():
        yield f"{sorted(reports.keys() - names.keys())} name no groups, and others do"
        return
    scheduler = {r: names[r]["scheduler"] if names else r // peers for r in reports}
    fits: dict[int, int] = {}
    for rank, report in reports.items():
        rest = _available(report) - sum(b * n for b, n in _states(report).values())
        page = next(c for c in report["classes"] if c["kind"] == "page")
        many = page.get("multiple_of", 1)
        fits[rank] = max(0, rest) // page["entry_bytes"] // many * many
    for row in decision["plan"]["schedulers"]:
        for rank in row["ranks"]:
            least = min(fits[r] for r in reports if scheduler[r] == scheduler[rank])
            if row["entries"]["kv"] != least:
                yield f"rank {rank} gets {row['entries']['kv']} pages, the minimum is {least}"
            report = reports[rank]
            page = next(c for c in report["classes"] if c["kind"] == "page")
            states = _states(report)
            asked = row["entries"]["kv"] * page["entry_bytes"]
            asked += sum(row["entries"][name] * b for name, (b, _) in states.items())
            if asked > _available(report):
                yield f"rank {rank} is asked for {asked} bytes and offered {_available(report)}"
            if least < max(1, page.get("min_entries") or 0):
                yield f"rank {rank} has room for {least} pages, which is too few"


def _available(report: Any) -> int:
    return int(
        min(report["kv_budget_bytes"], report["free_bytes"]) - report.get("reserve_bytes", 0)
    )


def _states(report: Any) -> dict[str, tuple[int, int]]:
    seqs = report.get("max_num_seqs", 0)
    return {
        c["name"]: (
            c["entry_bytes"],
            seqs * c.get("entries_per_req", 0) + c.get("extra_entries", 0),
        )
        for c in report["classes"]
        if c["kind"] == "state"
    }


@checker("S4", "A rank blamed as missing never had a report acknowledged.")
def s4(account: Account, verdict: Verdict) -> None:
    acknowledged: dict[Any, int] = {}
    for at, event in account.answers:
        _, engine, number, noun = account.call(event["x"])
        generation = account.generation(at)
        attempt = account.caller(event["x"], generation)
        if noun == "reports" and event["status"] in (200, 202) and attempt:
            acknowledged.setdefault((id(generation), engine, number, attempt), at)
    for generation, engine, round_ in account.rounds():
        if round_.decided is None or round_.decided.event["result"] != "FAILED":
            continue
        causes = json.loads(round_.decided.event["document"])["verdict"]["causes"]
        for rank in [c["rank"] for c in causes if c["code"] == "ranks_missing"]:
            kept = [
                e.at
                for e in before(round_.of("reported"), round_.decided)
                if str(rank) in e.event["reports"]
            ]
            attempt = round_.slots.get(rank)
            told = acknowledged.get((id(generation), engine, round_.number, attempt))
            late = told is not None and told < round_.decided.at
            verdict.expect(
                not kept and not late,
                f"{engine} round {round_.number}: rank {rank} is missing, and its report was kept",
                round_.decided.at,
                *kept,
                *([told] if told else []),
            )


@checker("S7", "SEALED: every member, unreplaced since PASSED, sent the digest and built its row.")
def s7(account: Account, verdict: Verdict) -> None:
    said: dict[tuple[str, int, int], set[str]] = defaultdict(set)
    for _, event in account.arrivals:
        _, engine, number, noun = account.call(event["x"])
        _, request = account.requests[event["x"]]
        if noun == "applied" and engine and number and request.get("attempt"):
            try:
                said[engine, number, request["attempt"]].add(json.loads(request["body"])["digest"])
            except (ValueError, KeyError, TypeError):
                continue
    ended = {
        (g.store, engine, r.number): r.ended.event["result"]
        for g, engine, r in account.rounds()
        if r.ended is not None
    }
    for name, notes in account.processes.items():
        for at, note in notes:
            if note["what"] == "sealed":
                document = account.document(note["digest"])
                key = (document["store_id"], document["engine"], note["round"])
                verdict.expect(
                    ended.get(key) == "SEALED", f"{name} serves a round that is not SEALED", at
                )
    _another_digest(account, verdict)
    for _, engine, round_ in account.rounds():
        if round_.ended is None or round_.ended.event["result"] != "SEALED":
            continue
        assert round_.decided is not None
        where, at = f"{engine} round {round_.number}", round_.ended.at
        rows = json.loads(round_.decided.event["document"])["plan"]["schedulers"]
        applied = {
            e.event["attempt"]: e.event["built"] for e in before(round_.of("applied"), round_.ended)
        }
        no = [e for e in before(round_.of("objected"), round_.ended) if e.n > round_.decided.n]
        verdict.expect(not no, f"{where} is SEALED after a no", at, *[e.at for e in no])
        verdict.expect(
            not suspects(round_, round_.ended), f"{where} is SEALED while one was suspect", at
        )
        for rank in range(round_.world):
            attempt = round_.slots[rank]
            built = applied.get(attempt)
            if built is None:
                verdict.expect(False, f"{where} is SEALED without rank {rank}", at)
                continue
            row = next(r["entries"] for r in rows if rank in r["ranks"])
            of_rank = built.get(str(rank), built)
            if round_.terms["mode"] == "enforce":
                verdict.expect(of_rank == row, f"{where}: rank {rank} built {of_rank}", at)
            verdict.expect(
                digest_of(round_.decided) in said[engine, round_.number, attempt],
                f"{where}: rank {rank} never named the decision",
                at,
            )


def _another_digest(account: Account, verdict: Verdict) -> None:
    """Whoever names another decision is refused."""
    for at, event in account.answers:
        _, engine, number, noun = account.call(event["x"])
        generation = account.generation(at)
        if noun != "applied" or event["status"] not in (200, 202) or generation is None:
            continue
        round_ = generation.rounds.get((engine or "", number or 0))
        if round_ is not None and round_.decided is not None:
            said = json.loads(account.requests[event["x"]][1]["body"])["digest"]
            verdict.expect(
                said == digest_of(round_.decided),
                f"{said[:15]} was taken for the decision of {engine} round {number}",
                at,
            )


@checker("S11", "A decision made under a fault rule says so.")
def s11(account: Account, verdict: Verdict) -> None:
    for generation, engine, round_ in account.rounds():
        for end in (round_.decided, round_.ended):
            if end is None:
                continue
            touched = [t for e in before(round_.of("touched"), end) for t in e.event["touches"]]
            document = json.loads(end.event["document"])
            if document.get("verdict", {}).get("code") == "ranks_missing":
                touched += _held_back(generation, engine, round_, end)
            shrunk = [
                rank
                for e in before(round_.of("reported"), end)
                for rank in e.event.get("planned", {})
            ]
            faults = document["faults"]
            named = {(f["id"], f["call"]) for f in faults}
            if touched or shrunk:
                verdict.expect(
                    {(t["rule"], t["call"]) for t in touched} <= named or "more_faults" in document,
                    f"{engine} round {round_.number} hides a fault rule",
                    end.at,
                )
                kinds = {f["kind"] for f in faults}
                verdict.expect(
                    not shrunk or "shrink_memory" in kinds or "more_faults" in document,
                    f"{engine} round {round_.number} hides that memory was shrunk",
                    end.at,
                )


def _held_back(generation: Any, engine: str, round_: Round, end: Logged) -> list[Any]:
    """What fault rules did to joins of this launch that had not claimed yet."""
    earlier = before(generation.events[engine], end)
    claimed = [e.event["attempt"] for e in earlier if e.kind == "claimed"]
    return [
        touch
        for e in earlier
        if e.kind == "reserved"
        and e.event["join"]["launch"] == round_.terms["launch"]
        and e.event["attempt"] > max(claimed, default=0)  # else it may have lapsed
        for touch in e.event.get("touched", ())
    ]
