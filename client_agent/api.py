"""The site's own web service: `/predict` with this site's offset applied, and how the agent does."""

import asyncio
import hmac
import time
import uuid
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any, Literal

from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi.responses import JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from fastapi_offline import FastAPIOffline

from client_agent.answers import PredictAnswer, describe
from client_agent.figures import Figures
from client_agent.intake import REQUEST_BODY, prepare_images, read_images
from client_agent.refusals import ProblemError, answer_with_problems
from client_agent.serving import PredictionQueue, QueueFull
from client_agent.settings import ServeOptions
from shared import __version__
from shared.plan import FederationPlan


def create_app(
    plan: FederationPlan, predictions: PredictionQueue, options: ServeOptions, info: Callable[[], dict[str, Any]]
) -> FastAPI:
    """The web service; `info` tells how the agent does."""
    app = FastAPIOffline(  # /docs loads nothing from elsewhere
        title="DisTrans agent",
        version=__version__,
        description="Predictions with this site's offset.",
        redoc_url=None,
        static_url="/docs-assets",
    )
    answer_with_problems(app)
    figures = Figures()
    allowed = [Depends(_token_check(options.token))]

    @app.post("/predict", dependencies=allowed, openapi_extra=REQUEST_BODY, response_model=PredictAnswer)
    async def predict(
        request: Request,
        top_k: Annotated[int, Query(ge=1, le=1000, description="How many classes to list for each image.")] = 3,
        offset: Annotated[Literal["own", "none", "both"], Query(description="own, none or both.")] = "own",
    ) -> Response:
        """Classify 1 … 32 images: raw PNG or JPEG, multipart `images`, or JSON with base64."""
        started = time.perf_counter()
        if offset != "own" and not options.allow_offset_override:
            raise ProblemError(
                HTTPStatus.FORBIDDEN,
                "offset-override",
                "This agent always applies its offset.",
                "Start it with --allow-offset-override to compare.",
            )
        if predictions.model is None:
            raise ProblemError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "no-model",
                "There is no model yet.",
                "Try again after the first round.",
                Retry_After="10",
            )
        files = await read_images(request, options)
        prepare = partial(prepare_images, files, plan.image, options)
        try:
            job = predictions.submit(prepare, own=offset != "none", without_offset=offset != "own")
        except QueueFull as error:
            figures.refused.inc()
            raise ProblemError(
                HTTPStatus.TOO_MANY_REQUESTS,
                "queue-full",
                "Too many requests wait to be answered.",
                "Send fewer at once.",
                Retry_After="1",
            ) from error
        answer = await asyncio.wrap_future(job)
        request_id = request.headers.get("x-request-id", "")[:64] or uuid.uuid4().hex[:16]
        body = describe(answer, top_k, request_id).model_dump_json(exclude_unset=True)
        figures.images.inc(len(files))
        figures.latency.observe(time.perf_counter() - started)
        return Response(body, media_type="application/json")

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """The process is alive."""
        return {"status": "ok", "version": __version__}

    @app.get("/readyz")
    async def readyz() -> Response:
        """There is a model to answer with."""
        if predictions.model is None:
            raise ProblemError(HTTPStatus.SERVICE_UNAVAILABLE, "no-model", "There is no model yet.", Retry_After="10")
        return JSONResponse({"status": "ready", "round": predictions.model.number})

    @app.get("/info", dependencies=allowed)
    def get_info() -> dict[str, Any]:
        """The agent, its model, and what each round's model scored on this site's held-out images."""
        return info()

    @app.get("/metrics", dependencies=allowed)
    def metrics() -> Response:
        """Figures for Prometheus."""
        return figures.response(predictions.model)

    return app


def _token_check(token: str | None) -> Callable[..., Any]:
    """A dependency that lets callers with the token pass, or everybody when there is none."""
    bearer = HTTPBearer(auto_error=False, description="Needed when the agent runs with a predict token.")

    # `async`, so that it runs where it is called: FastAPI hands plain functions to another thread.
    async def check(credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)]) -> None:
        given = credentials.credentials if credentials else ""
        if token is not None and not hmac.compare_digest(given.encode(), token.encode()):
            raise ProblemError(
                HTTPStatus.UNAUTHORIZED,
                "invalid-token",
                "This agent answers only with its token.",
                "Send it as Authorization: Bearer TOKEN.",
                WWW_Authenticate="Bearer",
            )

    return check
