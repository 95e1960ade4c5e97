"""Whatever goes wrong becomes one problem document: code, rank, field, value, and what to do."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from kvaccord.errors import Invalid, LaunchMissing, NotFound, Problem, Refused, Unavailable
from kvaccord.messages import cut

log = logging.getLogger(__name__)

LAUNCH_MISSING = (
    "launch is missing or a placeholder; without it the ranks of two starts cannot be told apart:"
    " set KVACCORD_LAUNCH to a value that all ranks of this start share and no other start has"
)
WHAT_TO_DO = {
    "missing": "it is required: add it",
    "extra_forbidden": "no such field in this protocol: remove it or correct its name",
    "int_type": "expected a whole number, without quotes or decimals",
    "string_type": "expected a string",
}


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
    async def on_problem(_: Request, problem: Problem) -> Response:
        return answer(problem)

    @app.exception_handler(RequestValidationError)
    async def on_invalid(_: Request, error: RequestValidationError) -> Response:
        return answer(invalid(error.errors(), error.body))

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> Response:
        path = cut(request.url.path, 200)
        if error.status_code == 404:
            return answer(
                NotFound(f"nothing is served at {path}; docs/protocol.md lists the calls")
            )
        if error.status_code == 400:  # what FastAPI says of JSON that Python cannot read
            return answer(
                Invalid("the body cannot be read as JSON; send numbers below 2^53", field="body")
            )
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


def invalid(errors: Sequence[Any], body: Any = None) -> Refused:
    """The first error of a validation, as a sentence that names rank, field, value and remedy."""
    error = errors[0]
    if error["type"] == "json_invalid":
        return Invalid(f"the body is no JSON: {error['ctx']['error']}; correct it", field="body")
    path = [part for part in error["loc"] if part not in ("body", "path", "query", "header")]
    rank, path = _rank_of(path, body)
    context = error.get("ctx") or {}
    if path[:1] == ["launch"] and (error["type"] == "missing" or path[1:2] == ["run"]):
        return LaunchMissing(LAUNCH_MISSING, rank=rank, field="launch", value=_shown(error))
    field = ".".join(map(str, path)) or "body"
    if error["type"] == "impossible":
        value, named_field = str(context["value"]), str(context["field"])
        if named_field:
            field = named_field if path == [] else f"{field}.{named_field}"
            detail = str(context["sentence"])
        else:
            detail = f"{field} {value}: {context['sentence']}"
    else:
        value = _shown(error)
        detail = f"{field} {value}: {WHAT_TO_DO.get(error['type'], _with_remedy(error['msg']))}"
    if rank is not None:
        detail = f"rank {rank}: {detail}"
    more = f" ({len(errors) - 1} more faults in this body)" if len(errors) > 1 else ""
    return Invalid(f"{cut(detail, 1000)}{more}", rank=rank, field=field, value=cut(value, 200))


def _with_remedy(message: str) -> str:
    return f"{message[:1].lower()}{message[1:]}; correct it"


def _shown(error: Any) -> str:
    if error["type"] == "missing":
        return "absent"
    given = error.get("input")
    if isinstance(given, dict | list):
        return f"(a JSON {'object' if isinstance(given, dict) else 'array'})"
    return cut(str(given), 80)


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
