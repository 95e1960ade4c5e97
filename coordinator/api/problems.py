"""Whatever goes wrong becomes one problem document: code, rank, field, value, and what to do."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from coordinator.api.common import service_of
from coordinator.events import EngineName
from kvaccord.errors import Invalid, LaunchMissing, NotFound, Problem, Refused, Unavailable
from kvaccord.faulty import fault_of
from kvaccord.messages import cut

log = logging.getLogger(__name__)

LAUNCH_MISSING = (
    "launch is missing or a placeholder; without it the ranks of two starts cannot be told apart:"
    " set KVACCORD_LAUNCH to a value that all ranks of this start share and no other start has"
)


def answer(problem: Problem, *, status: int | None = None) -> Response:
    """The problem document; `status` where HTTP itself has a closer one than the code's."""
    status = status or problem.http_status
    headers = {}
    if problem.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, round(problem.retry_after_s)))
    # ASCII escapes: a quoted value may hold what has no UTF-8 spelling.
    return Response(
        json.dumps(problem.document() | {"status": status}),
        status_code=status,
        media_type="application/problem+json",
        headers=headers,
    )


def install(app: FastAPI) -> None:
    @app.exception_handler(Problem)
    async def on_problem(request: Request, problem: Problem) -> Response:
        return await refuse(request, problem)

    @app.exception_handler(RequestValidationError)
    async def on_invalid(request: Request, error: RequestValidationError) -> Response:
        return await refuse(request, invalid(error.errors(), error.body))

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> Response:
        if isinstance(error.__cause__, Problem):  # of a middleware
            return await refuse(request, error.__cause__)
        path = cut(request.url.path, 200)
        if error.status_code == 404:
            return answer(
                NotFound(f"nothing is served at {path}; docs/protocol.md lists the calls")
            )
        if error.status_code == 400:  # what FastAPI says of JSON that Python cannot read
            problem = Invalid(
                "the body cannot be read as JSON; send numbers below 2^53", field="body"
            )
            return await refuse(request, problem)
        said = f"{request.method} {path}: {error.detail}; docs/protocol.md lists the calls"
        return answer(Invalid(said), status=error.status_code)

    @app.exception_handler(Exception)
    async def on_fault(request: Request, error: Exception) -> Response:
        log.error("%s %s", request.method, request.url.path, exc_info=error)
        return answer(
            Unavailable(
                "the coordinator met a fault of its own (its log has the traceback); repeat the"
                " call, and report the fault if it stays",
                retry_after_s=1.0,
            )
        )


async def refuse(request: Request, problem: Problem) -> Response:
    """A refusal is an answer too: when it is told, its process is not suspect any more."""
    token, path = request.headers.get("kvaccord-attempt"), request.path_params
    if token is not None and "ns" in path and not isinstance(problem, Unavailable):
        try:
            await service_of(request).refused(EngineName(path["ns"], path["engine"]), token)
        except Unavailable as unkept:
            return answer(unkept)
    return answer(problem)


def invalid(errors: Sequence[Any], body: Any = None) -> Refused:
    """The first error of a validation, as a sentence that names rank, field, value and remedy."""
    error = errors[0]
    if error["type"] == "json_invalid":
        return Invalid(f"the body is no JSON: {error['ctx']['error']}; correct it", field="body")
    path = [part for part in error["loc"] if part not in ("body", "path", "query", "header")]
    rank, path = _rank_of(path, body)
    fault = fault_of(error, path, whole="body")
    if path[:1] == ["launch"] and (error["type"] == "missing" or path[1:2] == ["run"]):
        return LaunchMissing(LAUNCH_MISSING, rank=rank, field="launch", value=fault.value)
    named = rank is None or fault.sentence.startswith(f"rank {rank} ")
    detail = fault.sentence if named else f"rank {rank}: {fault.sentence}"
    # What is said of a place that holds the first fault follows from it.
    others = sum(1 for e in errors if e["loc"] != error["loc"][: len(e["loc"])])
    faults = "fault" if others == 1 else "faults"
    more = f" ({others} more {faults} in this body)" if others else ""
    return Invalid(
        f"{cut(detail, 1000)}{more}", rank=rank, field=fault.field, value=cut(fault.value, 200)
    )


def _rank_of(path: list[Any], body: Any) -> tuple[int | None, list[Any]]:
    """A report stands under its rank, or in a row that names it."""
    if path and str(path[0]).isascii() and str(path[0]).isdigit():
        return int(str(path[0])[:9]), path[1:]
    if path[:1] == ["reports"] and len(path) > 1 and isinstance(path[1], int):
        try:
            rank = body["reports"][path[1]]["rank"]
        except (KeyError, TypeError, IndexError):
            rank = None
        return (rank if type(rank) is int else None), path[2:]
    if isinstance(body, dict):
        ranks = body.get("ranks")
        if isinstance(ranks, list) and ranks and type(ranks[0]) is int:
            return ranks[0], path
        if type(body.get("rank")) is int:
            return body["rank"], path
    return None, path
