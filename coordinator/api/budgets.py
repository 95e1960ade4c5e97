"""The agreed budgets, one row an engine, for dashboards."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from coordinator.api.common import json_response, service_of
from coordinator.views import budget_row

router = APIRouter()

# Bounded: translating a glob takes time that grows with the square of its length.
GlobQuery = Annotated[str, Query(max_length=128, description="a glob, e.g. llama-*")]


@router.get("/v1/budgets")
async def budgets(
    request: Request,
    ns: GlobQuery = "*",
    engine: GlobQuery = "*",
    state: Annotated[str | None, Query(max_length=16, description="e.g. SEALED")] = None,
) -> Response:
    """What every engine agreed on last, and the state of its last round."""
    rows = [
        budget_row(e)
        for e in service_of(request).engines
        if fnmatchcase(e.name.namespace, ns) and fnmatchcase(e.name.engine, engine)
    ]
    return json_response(
        {"budgets": [row for row in rows if state is None or row["state"] == state]}
    )
