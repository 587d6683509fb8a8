"""The site's web application: `/predict` with what the gate chose for this site, the agent's status, and its page."""

from http import HTTPStatus
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from client_agent.serving.model import View
from client_agent.serving.queue import PredictionQueue
from client_agent.settings import ServeOptions
from client_agent.web.access import Access
from client_agent.web.desk import PredictionDesk, no_model
from client_agent.web.direct_route import direct_route
from client_agent.web.metrics import Metrics
from client_agent.web.origins import HostAndOriginCheck
from client_agent.web.pages.routes import SitePages, wants_page
from client_agent.web.problems import ProblemError, install_problem_handlers
from client_agent.web.requests import REQUEST_BODY
from client_agent.web.responses import Overview, PredictAnswer, predict_answer
from client_agent.web.site import Site
from shared import __version__
from shared.contract.plan import FederationPlan
from shared.http import docs_page, openapi, page_files
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


def create_app(plan: FederationPlan, predictions: PredictionQueue, options: ServeOptions, site: Site) -> FastAPI:
    """Create the web application of an agent."""
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
    page_files.install(app)
    metrics, access = Metrics(predictions.predicted, plan.classes), Access(options)
    desk = PredictionDesk(plan.image, predictions, options, metrics)
    pages = SitePages(plan, predictions, options, access, desk, site)
    pages.install(app)
    allowed = [Depends(access.token_check())]

    @app.get(
        "/",
        dependencies=[Depends(access.token_check(wants_page))],
        response_model=Overview,
        tags=["agent"],
        responses=problem_responses(401),
    )
    async def get_overview(request: Request) -> Overview | Response:
        """Return what this service is, which model it serves, and where to go from here. Browsers get a page."""
        if wants_page(request):
            return await pages.home(request)
        model = predictions.model
        return Overview(federation=plan.name, model=None if model is None else model.key.number)

    router = APIRouter(route_class=direct_route(access.check_header))

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
        if offset != "own" and not options.allow_offset_override:
            raise ProblemError(
                HTTPStatus.FORBIDDEN,
                "offset-override",
                "This agent always applies its offset.",
                "Start the agent with --allow-offset-override to compare.",
            )
        answer = await desk.answer(request, *(View(use_offset, prior) for use_offset in _OFFSETS[offset]))
        described = predict_answer(answer, top_k, current_request_id() or "").model_dump_json(exclude_unset=True)
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
            raise no_model()
        return JSONResponse({"status": "ready", "round": predictions.model.key.number})

    @app.get("/info", dependencies=allowed, tags=["agent"], responses=problem_responses(401))
    def get_info() -> dict[str, Any]:
        """Return the agent's status, its model, and what each round's model scored on this site's held-out images."""
        return site.info()

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
