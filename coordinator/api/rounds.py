"""A round's calls and documents."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Body, Header, Query, Request, Response
from pydantic import WrapValidator

from coordinator.api.common import (
    LONG_POLL_S,
    AnyRound,
    Place,
    Process,
    RoundNumber,
    WaitS,
    decision_or_wait,
    effect_on,
    finished,
    frozen,
    json_response,
    missing,
    service_of,
    waiting,
)
from coordinator.api.session import SessionStream, is_proxied
from coordinator.engine import Round
from coordinator.hints import round_hints
from coordinator.verdict import faults, report_document
from coordinator.views import standing
from kvaccord.errors import NotFound
from kvaccord.faulty import few_faults
from kvaccord.messages import Applied, Leave, Phase, RankKey, Reason, Report, Veto

router = APIRouter(prefix="/v1/engines/{ns}/{engine}/rounds/{n}")

Reports = Annotated[dict[RankKey, Report], WrapValidator(few_faults), Body(min_length=1)]


@router.put("/reports")
async def report(
    request: Request, process: Process, n: RoundNumber, body: Reports, wait_s: WaitS = 0
) -> Response:
    """Report and hear the decision. 200: decided. 202: not yet, repeat this same request."""
    service = service_of(request)
    service.check_reports(process.name, n, process.attempt, body)  # before a rule counts it
    effect = await effect_on(request, process, "report", body)
    round_ = await service.report(
        process.name,
        n,
        process.attempt,
        body,
        planned=effect.planned,
        wait_s=min(wait_s, LONG_POLL_S),
        touched=effect.touched,
    )
    return decision_or_wait(service, process.name, round_, effect)


@router.put("/applied")
async def applied(
    request: Request, process: Process, n: RoundNumber, body: Applied, wait_s: WaitS = 0
) -> Response:
    """Say what was built and hear the outcome. 200: ended. 202: not yet, repeat."""
    service = service_of(request)
    effect = await effect_on(request, process, "applied")
    round_ = await service.applied(
        process.name,
        n,
        process.attempt,
        body,
        wait_s=min(wait_s, LONG_POLL_S),
        touched=effect.touched,
    )
    if round_.ended:
        return frozen(round_.outcome or round_.decision, round_, effect)
    return finished(waiting(service, process.name, round_), effect)


@router.put("/veto")
async def veto(request: Request, process: Process, n: RoundNumber, body: Veto) -> Response:
    """A rank's no, with its first cause. 200 with the document that ended the round, else 202."""
    service = service_of(request)
    effect = await effect_on(request, process, "veto")
    round_ = await service.veto(process.name, n, process.attempt, body, effect.touched)
    if round_.ended:
        return frozen(round_.outcome or round_.decision, round_, effect)
    return finished(waiting(service, process.name, round_), effect)


@router.put("/leave")
async def leave(request: Request, process: Process, n: RoundNumber, body: Leave) -> Response:
    """A process goes away. Before the seal that ends the round for all."""
    service = service_of(request)
    effect = await effect_on(request, process, "leave")
    round_ = await service.leave(process.name, n, process.attempt, body, effect.touched)
    if round_.ended:
        return frozen(round_.outcome or round_.decision, round_, effect)
    return finished(waiting(service, process.name, round_), effect)


@router.post("/phase", status_code=204)
async def phase(request: Request, process: Process, n: RoundNumber, body: Phase) -> Response:
    """A sign of progress. Never stored; the last one stands in a verdict that needs it."""
    await service_of(request).phase(process.name, n, process.attempt, body)
    return Response(status_code=204)


@router.post("/serving")
async def serving(request: Request, process: Process, n: RoundNumber) -> Response:
    """After the seal: this process serves and keeps its session. Answers the standing."""
    round_ = await service_of(request).serve(process.name, n, process.attempt)
    return json_response(standing(round_))


@router.post("/check")
async def check(request: Request, process: Process, n: RoundNumber, body: Reports) -> Response:
    """Whether the plan in force still has room. A question: nothing changes."""
    return json_response(await service_of(request).check(process.name, n, process.attempt, body))


@router.post("/cancel")
async def cancel(request: Request, name: Place, n: RoundNumber, body: Reason) -> Response:
    """An operator ends an open round; its ranks hear `cancelled`."""
    round_ = await service_of(request).cancel(name, n, body.reason)
    return frozen(round_.outcome or round_.decision, round_)


@router.post("/retire")
async def retire(request: Request, name: Place, n: RoundNumber, body: Reason) -> Response:
    """An operator takes a sealed round out of force. Answers the standing."""
    round_ = await service_of(request).retire(name, n, body.reason)
    return json_response(standing(round_))


@router.get("/session")
async def session(
    request: Request,
    process: Process,
    n: RoundNumber,
    last_event_id: Annotated[str | None, Header(pattern=r"^[0-9]{1,15}\.[0-9]{1,15}$")] = None,
    proxied: bool = False,
    facts: bool = True,
    opening: Annotated[int | None, Query(ge=1, lt=2**53)] = None,
) -> Response:
    """The stream that says that this process is there, and tells it every fact of its round.

    proxied: something lies between, so beats are needed too. facts: off leaves the documents.
    opening: a process numbers its requests, so that one that was held up is known for late.
    """
    service = service_of(request)
    connection = await service.attach(
        process.name,
        n,
        process.attempt,
        proxied=proxied or is_proxied(request.headers),
        opening=opening,
    )
    return SessionStream(service, connection, last_event_id, facts=facts)


@router.get("/decision")
async def decision(request: Request, name: Place, n: AnyRound) -> Response:
    """The decision's bytes; 404 while there is none."""
    round_ = service_of(request).round(name, n)
    if not round_.decision:
        raise NotFound(f"{name} round {round_.number} is not decided yet", field="round")
    return frozen(round_.decision, round_)


@router.get("/outcome")
async def outcome(request: Request, name: Place, n: AnyRound) -> Response:
    """The outcome's bytes after PASSED; the decision's after FAILED; 404 while it is open."""
    round_ = service_of(request).round(name, n)
    if not round_.ended:
        raise NotFound(f"{name} round {round_.number} has not ended yet", field="round")
    return frozen(round_.outcome or round_.decision, round_)


@router.get("")
@router.get("/status")
async def status(request: Request, name: Place, n: AnyRound, wait_s: WaitS = 0) -> Response:
    """The live document: who is there, whom the round waits for. It promises nothing.

    wait_s: answer at the next change of the engine, or after so many seconds.
    """
    service = service_of(request)
    round_ = service.round(name, n)
    if wait_s and round_.open:
        await service.cell(name).change(min(wait_s, LONG_POLL_S))
        round_ = service.round(name, n)
    found = await asyncio.to_thread(round_hints, round_)  # a large start's take a second
    watched = service.presence.watched(name)
    return json_response(
        {
            "engine": str(name),
            "round": round_.number,
            "state": round_.state,
            "launch": round_.launch.model_dump(),
            "layout": round_.layout.model_dump(mode="json"),
            "missing": missing(round_),
            "remaining_s": service.remaining_s(name, round_),
            "causes": [c.model_dump(mode="json", exclude_none=True) for c in round_.causes],
            **found,
            "faults": faults(round_.touches),
            "mode": round_.mode,
            "policy": round_.policy.model_dump(exclude_none=True),
            "standing": standing(round_),
            "doubt_left_s": round(service.presence.doubt_left_s, 1),
            "members": [
                {
                    "attempt": m.attempt,
                    "ranks": list(m.ranks),
                    "host": m.join.host,
                    "pid": m.join.pid,
                    "presence": _presence(round_, m.attempt, watched),
                    "phase": phase,
                    "progress_age_s": round(age_s, 1),
                    "reported": m.seated and m.ranks[0] in round_.sent,
                    "applied": m.applied is not None,
                }
                for m in round_.members.values()
                for phase, age_s in [service.cell(name).progress(m.attempt)]
            ],
        }
    )


@router.get("/reports")
async def reports(request: Request, name: Place, n: AnyRound) -> Response:
    """What every rank sent: reports, as planned too where a fault rule changed one; traces."""
    round_ = service_of(request).round(name, n)
    rows: dict[str, Any] = {}
    for rank in sorted(round_.sent):
        sent, planned = round_.sent[rank], round_.planned[rank]
        rows[str(rank)] = {"sent": report_document(sent)}
        if planned != sent:
            rows[str(rank)]["planned"] = report_document(planned)
    traces = [{"ranks": list(ranks), "trace": trace} for ranks, trace in round_.traces]
    answer = {"engine": str(name), "round": round_.number, "reports": rows, "traces": traces}
    if round_.groups:
        answer["groups"] = {str(rank): g.model_dump() for rank, g in round_.groups.items()}
    return json_response(answer)


def _presence(round_: Round, attempt: int, watched: frozenset[int]) -> str:
    member = round_.members[attempt]
    if member.gone:
        return "gone"
    if member.suspect:
        return "suspect"
    return "present" if attempt in watched else "unwatched"
