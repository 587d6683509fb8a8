"""Liveness, readiness, and figures for Prometheus."""

import asyncio
from collections.abc import Iterable
from http import HTTPStatus

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, RedirectResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy import func, select

from server.api.access import Ctx, Documented, authenticate_scraper
from server.api.guard import guarded
from server.service.context import Context
from server.store.failures import StorageFull
from server.store.tables import Blob, Client, Federation, Round, Update
from shared import __version__
from shared.http.openapi import problem_responses
from shared.http.problems import problem

router = APIRouter(tags=["operations"])
scraping = APIRouter(tags=["operations"], route_class=guarded(authenticate_scraper))


@router.get("/healthz")
async def check_health() -> dict[str, str]:
    """The process is alive."""
    return {"status": "ok", "version": __version__}


@router.get("/readyz", responses=problem_responses(503))
async def check_readiness(request: Request, ctx: Ctx) -> Response:
    """The process can serve: its database answers, there is room to store uploads, and it is not about to stop."""
    if request.app.state.news.closed:
        return problem(HTTPStatus.SERVICE_UNAVAILABLE, "stopping", "The coordinator is about to stop.")
    await asyncio.to_thread(ctx.db.check)  # not one of the threads that requests can use up
    if await asyncio.to_thread(ctx.db.is_full):
        return problem(
            HTTPStatus.SERVICE_UNAVAILABLE,
            StorageFull.code,
            "The coordinator has no room to store uploads.",
            next_step="Make room on the disk of its database; see its log.",
            headers={"Retry-After": "60"},
        )
    return JSONResponse({"status": "ready"})


@scraping.get("/metrics", response_class=PlainTextResponse, responses=problem_responses(401, 403, 429, 503))
def get_metrics(ctx: Ctx, _documented: Documented) -> Response:
    """Figures for Prometheus, read from the database; with the admin or the scrape token."""
    registry = CollectorRegistry()
    registry.register(_DatabaseFigures(ctx))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


@router.get("/", include_in_schema=False)
def root(request: Request) -> RedirectResponse:
    """The description of the API."""
    return RedirectResponse(request.scope.get("root_path", "") + "/docs")


class _DatabaseFigures(Collector):
    """The same on every replica, because they come from the database."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx

    def collect(self) -> Iterable[Metric]:
        done = GaugeMetricFamily("distrans_rounds_done", "Rounds done.", labels=["federation"])
        running = GaugeMetricFamily("distrans_federation_state", "1 for its state.", labels=["federation", "state"])
        best = GaugeMetricFamily("distrans_best_accuracy", "Best pooled accuracy.", labels=["federation"])
        clients = GaugeMetricFamily("distrans_clients", "Clients by state.", labels=["federation", "state"])
        seen = GaugeMetricFamily("distrans_client_silent_seconds", "Time since heard.", labels=["federation", "client"])
        rounds = GaugeMetricFamily("distrans_rounds", "Rounds by state.", labels=["federation", "state"])
        updates = GaugeMetricFamily("distrans_updates", "Updates accepted.", labels=["federation"])
        stored = GaugeMetricFamily("distrans_blob_bytes", "Bytes of tensors in the database.")
        with self._ctx.db.read() as session:
            names: dict[int, str] = {}
            for federation_id, name, state, completed_rounds, best_accuracy in session.execute(
                select(  # not the plans, which are large
                    Federation.id,
                    Federation.name,
                    Federation.state,
                    Federation.completed_rounds,
                    Federation.best_accuracy,
                ).where(Federation.deleted_at.is_(None))
            ):
                names[federation_id] = name
                done.add_metric([name], completed_rounds)
                running.add_metric([name, state], 1)
                if best_accuracy is not None:
                    best.add_metric([name], best_accuracy)
            for federation_id, state, number in session.execute(
                select(Client.federation_id, Client.state, func.count()).group_by(Client.federation_id, Client.state)
            ):
                if federation_id in names:  # else it was just deleted or created
                    clients.add_metric([names[federation_id], state], number)
            now = self._ctx.clock()
            active = select(Client.federation_id, Client.name, Client.last_seen_at).where(Client.state == "active")
            for federation_id, name, last_seen_at in session.execute(active):
                if federation_id in names:  # else it was just deleted or created
                    seen.add_metric([names[federation_id], name], max(0.0, now - last_seen_at))
            for federation_id, state, number in session.execute(
                select(Round.federation_id, Round.state, func.count()).group_by(Round.federation_id, Round.state)
            ):
                if federation_id in names:  # else it was just deleted or created
                    rounds.add_metric([names[federation_id], state], number)
            for federation_id, number in session.execute(
                select(Round.federation_id, func.count())
                .join(Update, Update.round_id == Round.id)
                .group_by(Round.federation_id)
            ):
                if federation_id in names:  # else it was just deleted or created
                    updates.add_metric([names[federation_id]], number)
            size = session.execute(select(func.coalesce(func.sum(Blob.size_bytes), 0))).scalar_one()
            stored.add_metric([], float(size))
        return [done, running, best, clients, seen, rounds, updates, stored]
