"""Joining and claiming, and the list of engines."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request, Response

from coordinator.api.common import (
    Place,
    Process,
    effect_on,
    faults_of,
    finished,
    json_response,
    service_of,
)
from coordinator.engine import Engine
from coordinator.faults import NO_EFFECT
from coordinator.views import last_word
from kvaccord.canonical import digest
from kvaccord.messages import Join

router = APIRouter(prefix="/v1/engines")


@router.post("/{ns}/{engine}/join")
async def join(request: Request, name: Place, body: Join) -> Response:
    """Reserve an attempt number. Opens nothing and binds nothing; repeat freely."""
    faults = faults_of(request)
    effect = NO_EFFECT if faults is None else faults.on(name, "join", body.ranks)
    answer = await service_of(request).join(name, body, effect.touched)
    # A join binds nothing, so its answer is what a delay holds back: the touch is kept by then.
    await asyncio.sleep(effect.delay_s)
    return finished(json_response(answer), effect)


@router.post("/{ns}/{engine}/claim")
async def claim(request: Request, process: Process) -> Response:
    """Take the slots of this attempt's ranks. Repeat freely."""
    effect = await effect_on(request, process, "claim")
    answer = await service_of(request).claim(process.name, process.attempt, effect.touched)
    return finished(json_response(answer), effect)


@router.get("")
async def engines(request: Request) -> Response:
    """Every engine that has joined here, with the state of its last round."""
    return json_response({"engines": [_line(e) for e in service_of(request).engines]})


@router.get("/{ns}/{engine}/rounds")
async def rounds(request: Request, name: Place) -> Response:
    """The rounds of an engine, newest first."""
    engine = service_of(request).engine(name)
    return json_response(
        {
            "rounds": [
                {
                    "round": r.number,
                    "state": r.state,
                    "mode": r.mode,
                    "launch": r.launch.model_dump(),
                    "digest": digest(r.decision) if r.decision else None,
                    **last_word(r),
                }
                for r in engine.newest_first()
            ]
        }
    )


def _line(engine: Engine) -> dict[str, Any]:
    line: dict[str, Any] = {"namespace": engine.name.namespace, "engine": engine.name.engine}
    if engine.last:
        line |= {"round": engine.last.number, "state": engine.last.state}
    return line
