"""Puts the coordinator together."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import Depends, FastAPI
from fastapi.middleware.cors import CORSMiddleware

from server.api import clients, document, errors, federations, operations, rounds
from server.api.limits import Limits
from server.api.news import News
from server.api.proxies import Proxies
from server.api.request_limits import Budget, FailureThrottle, RequestLimits
from server.api.streaming import Stalled
from server.service.context import Context
from server.service.housekeeping import Heartbeats
from server.settings import Settings
from server.store.schema import require_current
from server.store.session import Database
from server.worker import Worker
from shared import __version__, versions
from shared.http import docs_page
from shared.http.headers import SecurityHeaders
from shared.http.last_resort import LastResort
from shared.http.openapi import HEADERS, operation_id, problem_responses
from shared.http.protocol import ON_STOP
from shared.http.request_id import RequestIds
from shared.http.unmatched import known_query


def create_app(settings: Settings) -> FastAPI:
    """The coordinator as an ASGI application; its schema must be current."""
    db = Database(settings.db_url, settings.blobs, options=settings.database)
    require_current(db)
    ctx, heartbeats = Context(db), Heartbeats()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, Any]]:
        news = app.state.news = News(db, settings.poll_interval_s)
        worker = Worker(ctx, heartbeats, settings.retention)
        news.start(asyncio.get_running_loop())
        worker.start()
        try:
            yield {ON_STOP: news.close}  # the web server waits for requests under way, long polls among them
        finally:
            news.close()
            await asyncio.to_thread(news.stop)
            await asyncio.to_thread(worker.stop)
            db.close()

    app = FastAPI(
        title="DisTrans coordinator",
        version=__version__,
        description=document.DESCRIPTION,
        contact=document.CONTACT,
        openapi_tags=document.TAGS,
        servers=[{"url": settings.root_path or "/"}],
        generate_unique_id_function=operation_id,
        redirect_slashes=False,
        separate_input_output_schemas=False,  # one name per schema, with every release of FastAPI and pydantic
        lifespan=lifespan,
        docs_url=None,  # ours is in docs_page
        redoc_url=None,
    )
    app.state.ctx, app.state.settings, app.state.heartbeats = ctx, settings, heartbeats
    app.state.throttle, app.state.requests = FailureThrottle(), Budget(settings.requests_per_s)
    app.state.limits = Limits(settings)
    errors.install(app)
    app.add_exception_handler(Stalled, rounds.stalled)
    docs_page.install(app)
    app.include_router(operations.router)
    app.include_router(operations.scraping)
    for router in (clients.joining, clients.router, federations.router, rounds.router):
        app.include_router(router, dependencies=[Depends(known_query)], responses=problem_responses(409, 422, 503, 507))
    _add_middleware(app, settings)
    document.install(app)
    return app


def _add_middleware(app: FastAPI, settings: Settings) -> None:
    """The last one added is the first to see a request."""
    app.add_middleware(RequestLimits, requests_per_s=settings.requests_per_s)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=list(HEADERS),
        )
    app.add_middleware(LastResort, program="coordinator")
    app.add_middleware(SecurityHeaders, own={versions.HEADER: str(versions.PROTOCOL)})
    app.add_middleware(RequestIds)
    app.add_middleware(
        Proxies,
        trusted=settings.trusted_proxies,
        certificate_header=settings.client_certificate_header,
        root_path=settings.root_path,
    )
