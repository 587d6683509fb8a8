"""Assembles the coordinator's ASGI application."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import Depends, FastAPI
from fastapi.middleware.cors import CORSMiddleware

from server.api import clients, errors, federations, openapi, operations, rounds, uploads
from server.api.hot_models import HotModels
from server.api.limits import Limits
from server.api.streaming import UploadStalled
from server.api.task_desk import TaskDesk
from server.dashboard import routes
from server.dashboard.pages import Dashboard
from server.http.background import BackgroundJobs
from server.http.change_notifier import ChangeNotifier
from server.http.proxies import Proxies
from server.http.rate_limits import FailureThrottle, RateLimitMiddleware
from server.service.context import Context
from server.service.heartbeats import Heartbeats
from server.service.settings import Settings
from server.store.database import Database
from server.store.schema import require_current
from shared import __version__
from shared.contract import versions
from shared.http import docs_page, page_files
from shared.http.openapi import HEADERS, operation_id, problem_responses
from shared.http.rate_limiter import RateLimiter
from shared.http.request_id import RequestIds
from shared.http.security_headers import SecurityHeaders
from shared.http.server_protocol import ON_STOP
from shared.http.unexpected_errors import UnexpectedErrors
from shared.http.unmatched import reject_unknown_query


def create_app(settings: Settings) -> FastAPI:
    """Return the coordinator as an ASGI application; raise if its database schema is not current."""
    db = Database(settings.db_url, settings.blobs, options=settings.database)
    require_current(db)
    ctx, heartbeats = Context(db), Heartbeats()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, Any]]:
        notifier = app.state.notifier = ChangeNotifier(db, settings.poll_interval_s)
        jobs = BackgroundJobs(ctx, heartbeats, settings.retention)
        notifier.start(asyncio.get_running_loop())
        jobs.start()
        try:
            yield {ON_STOP: notifier.close}  # the web server waits for open requests, including long polls
        finally:
            notifier.close()
            await asyncio.to_thread(notifier.stop)
            await asyncio.to_thread(jobs.stop)
            db.close()

    app = FastAPI(
        title="DisTrans coordinator",
        version=__version__,
        description=openapi.DESCRIPTION,
        contact=openapi.CONTACT,
        openapi_tags=openapi.TAGS,
        servers=[{"url": settings.root_path or "/"}],
        generate_unique_id_function=operation_id,
        redirect_slashes=False,
        separate_input_output_schemas=False,  # one name per schema, whatever the release of FastAPI and pydantic
        lifespan=lifespan,
        docs_url=None,  # docs_page serves it
        redoc_url=None,
    )
    app.state.ctx, app.state.settings, app.state.heartbeats = ctx, settings, heartbeats
    app.state.throttle, app.state.requests = FailureThrottle(), RateLimiter(settings.requests_per_s)
    app.state.limits, app.state.desk = Limits(settings), TaskDesk(ctx)
    app.state.hot_models = HotModels(db)
    app.state.dashboard = Dashboard(ctx, settings)
    errors.install(app)
    app.add_exception_handler(UploadStalled, uploads.stalled)
    docs_page.install(app)
    page_files.install(app)
    app.include_router(operations.router)
    app.include_router(operations.scraping)
    for router in (clients.joining, clients.router, federations.router, rounds.router, uploads.router):
        app.include_router(
            router, dependencies=[Depends(reject_unknown_query)], responses=problem_responses(409, 422, 503, 507)
        )
    app.include_router(routes.router)
    _add_middleware(app, settings)
    openapi.install(app)
    return app


def _add_middleware(app: FastAPI, settings: Settings) -> None:
    """Add the middleware; the last one added sees a request first."""
    app.add_middleware(RateLimitMiddleware, requests_per_s=settings.requests_per_s)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=list(HEADERS),
        )
    app.add_middleware(UnexpectedErrors, program="coordinator")
    app.add_middleware(SecurityHeaders, own={versions.HEADER: str(versions.PROTOCOL)})
    app.add_middleware(RequestIds)
    app.add_middleware(
        Proxies,
        trusted=settings.trusted_proxies,
        certificate_header=settings.client_certificate_header,
        root_path=settings.root_path,
    )
