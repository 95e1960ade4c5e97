"""What every route needs: who calls, for which engine, and the shapes of an answer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Annotated, Any, cast

from fastapi import Depends, Header, Path, Query, Request, Response
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from coordinator.engine import Round
from coordinator.events import EngineName
from coordinator.faults import NO_EFFECT, CallName, Effect, Faults
from coordinator.service import Service
from kvaccord.canonical import digest
from kvaccord.messages import EngineWord, Join, Report

LONG_POLL_S = 25.0


def service_of(request: Request) -> Service:
    return cast(Service, request.app.state.service)


def faults_of(request: Request) -> Faults | None:
    return cast("Faults | None", request.app.state.faults)


Word = Annotated[EngineWord, Path()]


async def place(ns: Word, engine: Word) -> EngineName:
    return EngineName(ns, engine)


Place = Annotated[EngineName, Depends(place)]


@dataclass(frozen=True)
class Caller:
    """A process that has joined: its engine, attempt number, and what it said when it joined."""

    name: EngineName
    attempt: int
    join: Join


async def caller(
    request: Request,
    ns: Word,
    engine: Word,
    kvaccord_attempt: Annotated[str | None, Header()] = None,
) -> Caller:
    name = EngineName(ns, engine)  # a dependency of its own would cost more than all of this
    said = str(request.path_params.get("n", ""))
    number = int(said) if said.isascii() and said.isdigit() and len(said) < 16 else None
    attempt, join = service_of(request).attempt_of(name, kvaccord_attempt, number)
    return Caller(name, attempt, join)


Process = Annotated[Caller, Depends(caller)]


async def round_number(
    n: Annotated[str, Path(pattern=r"^([1-9][0-9]{0,14}|current)$")],
) -> int | None:
    """A round's number; None for `current`, the last one opened."""
    return None if n == "current" else int(n)


AnyRound = Annotated[int | None, Depends(round_number)]
RoundNumber = Annotated[int, Path(alias="n", ge=1, lt=2**53)]
WaitS = Annotated[float, Query(ge=0, description="seconds to wait for an answer, at most 25")]


async def effect_on(
    request: Request, process: Caller, call: CallName, reports: dict[int, Report] | None = None
) -> Effect:
    """Apply fault rules to a call of a process. A delay is kept in the log before it begins."""
    faults = faults_of(request)
    if faults is None:
        return NO_EFFECT
    effect = faults.on(process.name, call, process.join.ranks, reports)
    if effect.delay_s:
        await service_of(request).touch(process.name, process.attempt, effect.touched)
        await asyncio.sleep(effect.delay_s)
    return effect


def frozen(body: bytes, round_: Round, effect: Effect = NO_EFFECT) -> Response:
    """A decision or outcome: its bytes and nothing else."""
    response = Response(
        body,
        media_type="application/json",
        headers={"Kvaccord-Digest": digest(body), "Kvaccord-Outcome": round_.ended or "open"},
    )
    return finished(response, effect)


def decision_or_wait(service: Service, name: EngineName, round_: Round, effect: Effect) -> Response:
    """200 with the decision, or 202 with whom it waits for."""
    if round_.decision:
        return frozen(round_.decision, round_, effect)
    return finished(waiting(service, name, round_), effect)


def waiting(service: Service, name: EngineName, round_: Round) -> Response:
    return json_response(
        {
            "missing": missing(round_),
            "remaining_s": service.remaining_s(name, round_),
        },
        status_code=202,
    )


def missing(round_: Round) -> list[dict[str, Any]]:
    return [
        {"rank": rank} | ({"host": host} if (host := round_.host(rank)) else {})
        for rank in round_.waiting_for
    ]


def json_response(document: Any, *, status_code: int = 200) -> Response:
    return JSONResponse(document, status_code=status_code)


def finished(response: Response, effect: Effect) -> Response:
    return CutAnswer() if effect.drop_answer else response


class CutAnswer(Response):
    """An answer that never arrives: the connection closes before its first byte of content."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-length", b"1"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        # Returning now makes the server close the connection: a promised byte is missing.
