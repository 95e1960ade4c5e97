"""Arming and ending fault rules: staging only, chaos token only."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.routing import APIRoute

from coordinator.api.common import faults_of, json_response
from coordinator.faults import Faults, Rule
from kvaccord.errors import Forbidden, Unauthorized


def check_allowed(request: Request) -> None:
    """Raises Forbidden where no rule can be armed, Unauthorized for whoever may not."""
    authorization = request.headers.get("authorization")
    if faults_of(request) is None:
        raise Forbidden(
            "fault injection is off; start a staging coordinator with --enable-faults"
            " --chaos-token-file FILE"
        )
    expected = f"Bearer {request.app.state.chaos_token}"
    if not hmac.compare_digest(expected.encode(), (authorization or "").encode()):
        raise Unauthorized(
            "header Authorization must be `Bearer TOKEN` with the token of --chaos-token-file",
            field="Authorization",
            value="absent" if authorization is None else "another token",
        )


async def armed(request: Request) -> Faults:
    faults = faults_of(request)
    assert faults is not None, "the route has checked that"
    return faults


class Guarded(APIRoute):
    """Asks for the token before it reads the body."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            check_allowed(request)
            return await handle(request)

        return guarded


Armed = Annotated[Faults, Depends(armed)]

router = APIRouter(prefix="/v1/faults", route_class=Guarded)


@router.post("")
async def arm(faults: Armed, rule: Rule) -> Response:
    """Arm a rule. It ends by itself after `expires_s`."""
    return json_response(faults.arm(rule), status_code=201)


@router.get("")
async def active(faults: Armed) -> Response:
    return json_response({"faults": faults.active()})


@router.delete("/{rule_id}")
async def disarm(faults: Armed, rule_id: str) -> Response:
    faults.disarm(rule_id)
    return Response(status_code=204)


@router.delete("")
async def disarm_all(faults: Armed) -> Response:
    """Every rule ends now."""
    faults.disarm_all()
    return Response(status_code=204)
