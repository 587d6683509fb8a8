"""Liveness, readiness, and metrics for Prometheus."""

import asyncio
from collections.abc import Iterable
from http import HTTPStatus

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from server.api.access import Ctx, Documented, authenticate_scraper
from server.api.errors import storage_full
from server.api.guard import guarded
from server.service.context import Context
from server.service.monitoring import status
from shared import __version__
from shared.http.openapi import problem_responses
from shared.http.problems import problem

router = APIRouter(tags=["operations"])
scraping = APIRouter(tags=["operations"], route_class=guarded(authenticate_scraper))


@router.get("/healthz")
async def check_health() -> dict[str, str]:
    """Report that the process is alive."""
    return {"status": "ok", "version": __version__}


@router.get("/readyz", responses=problem_responses(503))
async def check_readiness(request: Request, ctx: Ctx) -> Response:
    """Report whether the process can serve: its database responds, has room for uploads, and it is not stopping."""
    if request.app.state.notifier.closed:
        return problem(HTTPStatus.SERVICE_UNAVAILABLE, "stopping", "The coordinator is about to stop.")
    await asyncio.to_thread(ctx.db.check)  # not in one of the threads that requests can exhaust
    if await asyncio.to_thread(ctx.db.is_full):
        return storage_full(HTTPStatus.SERVICE_UNAVAILABLE)
    return JSONResponse({"status": "ready"})


@scraping.get("/metrics", response_class=PlainTextResponse, responses=problem_responses(401, 403, 429, 503))
def get_metrics(ctx: Ctx, _documented: Documented) -> Response:
    """Return metrics for Prometheus, read from the database. Needs the admin token or the scrape token."""
    registry = CollectorRegistry()
    registry.register(_StatusMetrics(ctx))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


class _StatusMetrics(Collector):
    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx

    def collect(self) -> Iterable[Metric]:
        done = GaugeMetricFamily("distrans_rounds_done", "Completed rounds.", labels=["federation"])
        state = GaugeMetricFamily(
            "distrans_federation_state", "1 for the state the federation is in.", labels=["federation", "state"]
        )
        best = GaugeMetricFamily("distrans_best_accuracy", "Best pooled accuracy.", labels=["federation"])
        clients = GaugeMetricFamily("distrans_clients", "Clients by state.", labels=["federation", "state"])
        silent = GaugeMetricFamily(
            "distrans_client_silent_seconds",
            "Seconds since the client was last heard.",
            labels=["federation", "client"],
        )
        rounds = GaugeMetricFamily("distrans_rounds", "Rounds by state.", labels=["federation", "state"])
        updates = GaugeMetricFamily("distrans_updates", "Accepted updates.", labels=["federation"])
        stored = GaugeMetricFamily("distrans_blob_bytes", "Bytes of stored tensors.")
        found = status(self._ctx)
        for one in found.federations:
            done.add_metric([one.name], one.rounds_done)
            state.add_metric([one.name, one.state], 1)
            if one.best_accuracy is not None:
                best.add_metric([one.name], one.best_accuracy)
            for family, numbers in ((clients, one.clients), (silent, one.silent_s), (rounds, one.rounds)):
                for label, number in numbers.items():
                    family.add_metric([one.name, label], number)
            if one.updates:
                updates.add_metric([one.name], one.updates)
        stored.add_metric([], found.blob_bytes)
        return [done, state, best, clients, silent, rounds, updates, stored]
