"""The site's web application: `/predict` with what the gate chose for this site, and the agent's status."""

import hmac
import time
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from fastapi.security.utils import get_authorization_scheme_param

from client_agent.serving.model import View
from client_agent.serving.queue import PredictionQueue, QueueFull
from client_agent.settings import ServeOptions
from client_agent.web.direct_route import direct_route
from client_agent.web.limits import HeldBodies
from client_agent.web.metrics import Metrics
from client_agent.web.origins import HostAndOriginCheck
from client_agent.web.problems import ProblemError, install_problem_handlers
from client_agent.web.requests import REQUEST_BODY, check_headers, prepare_images, read_images
from client_agent.web.responses import Overview, PredictAnswer, predict_answer
from shared import __version__
from shared.contract.plan import FederationPlan
from shared.http import docs_page, openapi
from shared.http.openapi import problem_responses
from shared.http.request_id import RequestIds, current_request_id
from shared.http.security_headers import SecurityHeaders
from shared.http.unexpected_errors import UnexpectedErrors
from shared.http.unmatched import reject_unknown_query

ACCESS_LOG = "client_agent.access"
_DESCRIPTION = """Predictions from what works best at this site: a federation's model, the site's own, or both.

If the agent runs with a predict token, send it as `Authorization: Bearer TOKEN`. Errors are
`application/problem+json` with a stable `code`."""
_OFFSETS = {"own": (True,), "none": (False,), "both": (True, False)}  # whether each part of the answer applies it
_TAGS = [
    {"name": "predictions", "description": "Classify images."},
    {"name": "agent", "description": "What the agent serves, and its status."},
]


def create_app(
    plan: FederationPlan, predictions: PredictionQueue, options: ServeOptions, info: Callable[[], dict[str, Any]]
) -> FastAPI:
    """Create the web application; `info` returns the body of `/info`."""
    app = FastAPI(
        title="DisTrans agent",
        version=__version__,
        description=_DESCRIPTION,
        contact={"name": "The operator of this agent"},
        openapi_tags=_TAGS,
        servers=[{"url": "/"}],
        generate_unique_id_function=openapi.operation_id,
        redirect_slashes=False,
        docs_url=None,  # ours is in docs_page
        redoc_url=None,
    )
    openapi.install(app, anywhere=(400, 403, 421, 500))
    install_problem_handlers(app)
    docs_page.install(app)
    _add_middleware(app, options)
    metrics, bodies = Metrics(), HeldBodies(options)
    allowed = [Depends(_token_check(options.token))]

    @app.get("/", dependencies=allowed, tags=["agent"], responses=problem_responses(401))
    async def get_overview() -> Overview:
        """Return what this service is, which model it serves, and where to go from here."""
        model = predictions.model
        return Overview(federation=plan.name, model=None if model is None else model.key.number)

    router = APIRouter(route_class=direct_route(partial(_check_header, options.token)))

    @router.post(
        "/predict",
        dependencies=[*allowed, Depends(reject_unknown_query)],
        openapi_extra=REQUEST_BODY,
        response_model=PredictAnswer,
        tags=["predictions"],
        responses=problem_responses(401, 408, 413, 415, 422, 429, 503),
    )
    async def predict_images(
        request: Request,
        top_k: Annotated[int, Query(ge=1, le=1000, description="Number of classes to list per image.")] = 3,
        offset: Annotated[
            Literal["own", "none", "both"],
            Query(description="Apply this site's offset (own), do not apply it (none), or answer with both."),
        ] = "own",
        prior: Annotated[
            Literal["site", "none"] | None,
            Query(
                description="Assume this site's class frequencies (site) or the federation's (none); "
                "unset: as the agent was started."
            ),
        ] = None,
    ) -> Response:
        """Classify 1 … 32 images: raw PNG or JPEG, multipart `images`, or JSON with base64."""
        started = time.perf_counter()
        if offset != "own" and not options.allow_offset_override:
            raise ProblemError(
                HTTPStatus.FORBIDDEN,
                "offset-override",
                "This agent always applies its offset.",
                "Start the agent with --allow-offset-override to compare.",
            )
        if predictions.model is None:
            raise _no_model()
        if predictions.is_full:
            metrics.refused.inc()
            raise _queue_full()
        kind = check_headers(request, options)
        with bodies.hold() as body:
            async with bodies.receive(request, body) as pieces:
                files = await read_images(kind, request.headers, pieces, options)
            prepare = partial(prepare_images, files, plan.image, options)
            try:
                views = [View(use_offset, prior) for use_offset in _OFFSETS[offset]]
                answer = await predictions.predict(prepare, *views, size_bytes=body.held_bytes)
            except QueueFull as error:  # it filled up while the body arrived
                metrics.refused.inc()
                raise _queue_full() from error
        described = predict_answer(answer, top_k, current_request_id() or "").model_dump_json(exclude_unset=True)
        metrics.images.inc(len(files))
        metrics.latency.observe(time.perf_counter() - started)
        return Response(described, media_type="application/json")

    app.include_router(router)

    @app.get("/healthz", tags=["agent"])
    async def check_health() -> dict[str, str]:
        """Return 200 while the process is alive."""
        return {"status": "ok", "version": __version__}

    @app.get("/readyz", tags=["agent"], responses=problem_responses(503))
    async def check_readiness() -> Response:
        """Return 200 once there is a model to answer with."""
        if predictions.model is None:
            raise _no_model()
        return JSONResponse({"status": "ready", "round": predictions.model.key.number})

    @app.get("/info", dependencies=allowed, tags=["agent"], responses=problem_responses(401))
    def get_info() -> dict[str, Any]:
        """Return the agent's status, its model, and what each round's model scored on this site's held-out images."""
        return info()

    @app.get(
        "/metrics",
        dependencies=allowed,
        tags=["agent"],
        response_class=PlainTextResponse,
        responses=problem_responses(401),
    )
    def get_metrics() -> Response:
        """Return metrics in Prometheus' text format."""
        return metrics.response(predictions.model)

    return app


def _add_middleware(app: FastAPI, options: ServeOptions) -> None:
    """Add middleware; the last one added sees a request first."""
    app.add_middleware(HostAndOriginCheck, hosts=(options.host, *options.allowed_hosts))
    app.add_middleware(UnexpectedErrors, program="agent")
    app.add_middleware(SecurityHeaders)
    app.add_middleware(RequestIds, log=ACCESS_LOG)


def _no_model() -> ProblemError:
    return ProblemError(
        HTTPStatus.SERVICE_UNAVAILABLE,
        "no-model",
        "There is no model yet.",
        "Try again after the first round.",
        {"Retry-After": "10"},
    )


def _queue_full() -> ProblemError:
    return ProblemError(
        HTTPStatus.TOO_MANY_REQUESTS,
        "queue-full",
        "Too many requests are waiting for an answer.",
        "Send fewer requests at once.",
        {"Retry-After": "1"},
    )


def _token_check(token: str | None) -> Callable[..., Any]:
    """Return a dependency that rejects callers without the token; without a token, everyone may call."""
    bearer = HTTPBearer(auto_error=False, description="Required if the agent runs with a predict token.")

    # `async`, so that it runs in place: FastAPI runs plain functions in another thread.
    async def check(credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)]) -> None:
        _check_token(token, credentials.credentials if credentials else "")

    return check


def _check_header(token: str | None, request: Request) -> None:
    """Do the same without FastAPI."""
    scheme, given = get_authorization_scheme_param(request.headers.get("authorization"))
    _check_token(token, given if scheme.lower() == "bearer" else "")


def _check_token(token: str | None, given: str) -> None:
    if token is not None and not hmac.compare_digest(given.encode(), token.encode()):
        raise ProblemError(
            HTTPStatus.UNAUTHORIZED,
            "invalid-token",
            "This agent requires a token.",
            "Send it as Authorization: Bearer TOKEN.",
            {"WWW-Authenticate": "Bearer"},
        )
