"""Arming and ending fault rules: staging only, chaos token only."""

from __future__ import annotations

import hmac
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Request, Response

from coordinator.api.common import faults_of, json_response
from coordinator.faults import Faults, Rule
from kvaccord.errors import Forbidden, Unauthorized


async def armed_and_allowed(
    request: Request, authorization: Annotated[str | None, Header()] = None
) -> Faults:
    faults = faults_of(request)
    if faults is None:
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
    return faults


Allowed = Annotated[Faults, Depends(armed_and_allowed)]

router = APIRouter(prefix="/v1/faults")


@router.post("")
async def arm(faults: Allowed, rule: Rule) -> Response:
    """Arm a rule. It ends by itself after `expires_s`."""
    return json_response(faults.arm(rule), status_code=201)


@router.get("")
async def active(faults: Allowed) -> Response:
    return json_response({"faults": faults.active()})


@router.delete("/{rule_id}")
async def disarm(faults: Allowed, rule_id: str) -> Response:
    faults.disarm(rule_id)
    return Response(status_code=204)


@router.delete("")
async def disarm_all(faults: Allowed) -> Response:
    """Every rule ends now."""
    faults.disarm_all()
    return Response(status_code=204)
