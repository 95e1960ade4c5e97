"""The ASGI application, from a service that is not started yet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator import telemetry
from coordinator.api import budgets, engines, faults, plan, problems, rounds
from coordinator.api.common import json_response, service_of
from coordinator.faults import Faults
from coordinator.page import routes as page
from coordinator.service import Service
from kvaccord import __version__
from kvaccord.errors import Problem, TooLarge, Unavailable
from kvaccord.messages import PROTOCOL

MAX_BODY_BYTES = 2**20
# A body that is too large is read to its end, up to here: closing on a sender that is still
# writing would reset the connection, and the sender would never see why.
MAX_DRAIN_BYTES = 2**28
# How long the rest of a body is waited for while this coordinator stops; it would wait for it.
STOPPING_S = 0.5
STOPPING = "this coordinator is stopping; another one will answer"


def create_app(
    service: Service, *, faults_: Faults | None = None, chaos_token: str = ""
) -> FastAPI:
    """The whole coordinator, round a service that the server starts and the application closes.

    faults_ is None: no fault can be armed, whatever the token.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await service.close()

    app = FastAPI(
        title="kvaccord",
        version=__version__,
        lifespan=lifespan,
        # The documentation pages load scripts from outside; the schema itself stays.
        docs_url=None,
        redoc_url=None,
    )
    app.state.service = service
    app.state.faults = faults_
    app.state.chaos_token = chaos_token
    app.state.metrics = telemetry.Metrics(service)
    problems.install(app)
    for router in (engines, rounds, budgets, plan, faults, page):
        app.include_router(router.router)
    app.add_middleware(BodyLimit)

    @app.get("/healthz")
    async def healthz() -> Response:
        """200 while the process answers; says nothing about the store."""
        return json_response({"status": "ok"})

    @app.get("/readyz")
    async def readyz(request: Request) -> Response:
        """200 when the store answers and this coordinator takes calls."""
        if service_of(request).stopping:
            raise Unavailable(STOPPING)
        service = service_of(request)
        await service.check_store()
        return json_response(
            {
                "status": "ready",
                "version": __version__,
                "protocol": PROTOCOL,
                "store_id": service.store_id,
            }
        )

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        return Response(request.app.state.metrics.exposition(), media_type=telemetry.CONTENT_TYPE)

    return app


async def _received(receive: Receive, service: Service) -> Message | None:
    """The next message; None where none comes and the coordinator stops."""
    while True:
        with suppress(TimeoutError):
            async with asyncio.timeout(STOPPING_S):
                return await receive()
        if service.stopping:
            return None


def _refusing(problem: Problem) -> Receive:
    async def refuse() -> Message:
        raise HTTPException(problem.http_status) from problem

    return refuse


class BodyLimit:
    """Refuses a body above MAX_BODY_BYTES without keeping any of it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        service: Service = scope["app"].state.service
        body, size = [], 0
        while True:
            message = await _received(receive, service)
            if message is None:
                await self._app(scope, _refusing(Unavailable(STOPPING)), send)
                return
            if message["type"] == "http.disconnect":
                return
            size += len(message.get("body", b""))
            if size <= MAX_BODY_BYTES:
                body.append(message.get("body", b""))
            elif size > MAX_DRAIN_BYTES:
                break
            if not message.get("more_body", False):
                break
        if size > MAX_BODY_BYTES:
            problem = TooLarge(
                f"the body is larger than {MAX_BODY_BYTES} bytes; a report of a few kB is usual:"
                " send fewer ranks at once",
                field="body",
                value=f"more than {MAX_BODY_BYTES} bytes",
            )
            await self._app(scope, _refusing(problem), send)
            return
        read = iter([{"type": "http.request", "body": b"".join(body), "more_body": False}])

        async def replay() -> Message:
            return next(read, None) or await receive()

        await self._app(scope, replay, send)
