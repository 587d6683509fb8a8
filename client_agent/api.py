"""The site's own web service: `/predict` with this site's offset applied, and how the agent does."""

import asyncio
import base64
import binascii
import hmac
import logging
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Annotated, Any

import torch
from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic import BaseModel, ConfigDict
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from torch import Tensor

from client_agent.errors import DataError
from client_agent.images import PREDICT_FORMATS, TooManyPixels, decode, to_tensor
from client_agent.serving import PredictionQueue, QueueFull, ServingModel
from client_agent.settings import ServeOptions
from shared import __version__
from shared.plan import FederationPlan
from shared.schemas import Problem

logger = logging.getLogger(__name__)
IMAGE_TYPES = ("image/png", "image/jpeg")


class ScoredClass(BaseModel):
    """A class and how likely it is."""

    label: str
    class_id: int
    probability: float


class Prediction(BaseModel):
    """The likeliest class of one image."""

    index: int
    label: str
    class_id: int
    probability: float
    top_k: list[ScoredClass]


class ModelInfo(BaseModel):
    """Which model and which offset answered."""

    federation: str
    round: int
    digest: str
    offset_digest: str | None


class PredictAnswer(BaseModel):
    """What `/predict` answers."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "model": {"federation": "lung-nodules", "round": 12, "digest": "9f2c…", "offset_digest": "51ab…"},
                "predictions": [
                    {
                        "index": 0,
                        "label": "benign",
                        "class_id": 0,
                        "probability": 0.97,
                        "top_k": [{"label": "benign", "class_id": 0, "probability": 0.97}],
                    }
                ],
                "request_id": "0d9f0c",
            }
        }
    )
    model: ModelInfo
    predictions: list[Prediction]
    request_id: str
    without_offset: list[Prediction] | None = None


class ProblemError(Exception):
    """A request that is answered with a problem."""

    def __init__(
        self, status: HTTPStatus, code: str, detail: str, next_step: str | None = None, **headers: str
    ) -> None:
        super().__init__(detail)
        self.status, self.code, self.detail, self.next_step = status, code, detail, next_step
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    def response(self) -> JSONResponse:
        """As problem+json."""
        body = Problem(
            title=self.status.phrase, status=self.status, code=self.code, detail=self.detail, next_step=self.next_step
        )
        media_type = "application/problem+json"
        return JSONResponse(body.model_dump(exclude_none=True), self.status, self.headers, media_type=media_type)


def create_app(
    plan: FederationPlan, predictions: PredictionQueue, options: ServeOptions, info: Callable[[], dict[str, Any]]
) -> FastAPI:
    """The web service; `info` tells how the agent does."""
    app = FastAPI(title="DisTrans agent", version=__version__, description="Predictions with this site's offset.")
    decoders = ThreadPoolExecutor(max(2, options.threads), thread_name_prefix="decode")
    figures = _Figures()
    bearer = HTTPBearer(auto_error=False, description="Needed when the agent runs with a predict token.")

    def allowed(credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)]) -> None:
        given = credentials.credentials if credentials else ""
        if options.token is not None and not hmac.compare_digest(given.encode(), options.token.encode()):
            raise ProblemError(
                HTTPStatus.UNAUTHORIZED,
                "invalid-token",
                "This agent answers only with its token.",
                "Send it as Authorization: Bearer TOKEN.",
                WWW_Authenticate="Bearer",
            )

    @app.post(
        "/predict", dependencies=[Depends(allowed)], openapi_extra=_REQUEST_BODY, response_model_exclude_unset=True
    )
    async def predict(
        request: Request,
        top_k: Annotated[int, Query(ge=1, le=1000, description="How many classes to list for each image.")] = 3,
        offset: Annotated[str, Query(pattern="^(own|none|both)$", description="own, none or both.")] = "own",
    ) -> PredictAnswer:
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
        files = await _read_images(request, options)
        loop = asyncio.get_running_loop()
        images = await loop.run_in_executor(decoders, _prepare, files, plan, options)
        try:
            own = predictions.submit(images) if offset != "none" else None
            bare = predictions.submit(images, use_offset=False) if offset != "own" else None
        except QueueFull as error:
            figures.refused.inc()
            raise ProblemError(
                HTTPStatus.TOO_MANY_REQUESTS,
                "queue-full",
                "Too many images wait to be classified.",
                "Send fewer at once.",
                Retry_After="1",
            ) from error
        answered, without = None, None
        if own is not None:
            answered = await asyncio.wrap_future(own)
        if bare is not None:
            without = await asyncio.wrap_future(bare)
        model, probabilities = answered or without  # type: ignore[misc]  # one of them is there
        figures.images.inc(len(images))
        figures.latency.observe(time.perf_counter() - started)
        answer = PredictAnswer(
            model=ModelInfo(
                federation=model.federation,
                round=model.number,
                digest=model.digest,
                offset_digest=model.offset_digest if own is not None else None,
            ),
            predictions=_describe(model, probabilities, top_k),
            request_id=request.headers.get("x-request-id", "")[:64] or uuid.uuid4().hex[:16],
        )
        if own is not None and without is not None:
            answer.without_offset = _describe(*without, top_k)
        return answer

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

    @app.get("/info", dependencies=[Depends(allowed)])
    def get_info() -> dict[str, Any]:
        """The agent, its model, and what each round's model scored on this site's held-out images."""
        return info()

    @app.get("/metrics", dependencies=[Depends(allowed)])
    def metrics() -> Response:
        """Figures for Prometheus."""
        figures.model.set(predictions.model.number if predictions.model else -1)
        return Response(generate_latest(figures.registry), media_type=CONTENT_TYPE_LATEST)

    @app.exception_handler(ProblemError)
    async def refused(_request: Request, error: ProblemError) -> JSONResponse:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, error: RequestValidationError) -> JSONResponse:
        faults = "; ".join(f"{fault['loc'][-1]}: {fault['msg']}" for fault in error.errors())
        return ProblemError(HTTPStatus.UNPROCESSABLE_ENTITY, "invalid-parameters", faults).response()

    @app.exception_handler(HTTPException)
    async def http_error(_request: Request, error: HTTPException) -> JSONResponse:
        status = HTTPStatus(error.status_code)
        return ProblemError(status, status.phrase.lower().replace(" ", "-"), str(error.detail)).response()

    @app.exception_handler(Exception)
    async def unexpected(_request: Request, _error: Exception) -> JSONResponse:
        return ProblemError(
            HTTPStatus.INTERNAL_SERVER_ERROR, "internal-error", "The agent met an error that it did not expect."
        ).response()

    return app


_REQUEST_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "image/png": {"schema": {"type": "string", "format": "binary"}},
            "image/jpeg": {"schema": {"type": "string", "format": "binary"}},
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {"images": {"type": "array", "items": {"type": "string", "format": "binary"}}},
                }
            },
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["images"],
                    "properties": {"images": {"type": "array", "items": {"type": "string", "format": "byte"}}},
                }
            },
        },
    }
}


class _Figures:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.images = Counter("distrans_agent_images", "Images classified.", registry=self.registry)
        self.refused = Counter("distrans_agent_refused", "Requests refused, queue full.", registry=self.registry)
        self.latency = Histogram("distrans_agent_predict_seconds", "Time of a request.", registry=self.registry)
        self.model = Gauge("distrans_agent_model", "Number of the model served; -1: none.", registry=self.registry)


def _too_large(options: ServeOptions) -> ProblemError:
    return ProblemError(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "too-large", f"A request may have at most {options.max_body_bytes} bytes."
    )


async def _read_body(request: Request, options: ServeOptions) -> bytes:
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > options.max_body_bytes:
        raise _too_large(options)
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > options.max_body_bytes:
            raise _too_large(options)
    return bytes(body)


async def _read_images(request: Request, options: ServeOptions) -> list[bytes]:
    """The image files of a request, still encoded."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind in IMAGE_TYPES:
        files = [await _read_body(request, options)]
    elif kind == "application/json":
        files = _json_images(await _read_body(request, options))
    elif kind == "multipart/form-data":
        files = await _form_images(request, await _read_body(request, options), options)
    else:
        raise ProblemError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            "unsupported-type",
            f"Requests of type {kind or 'none'!r} are not taken.",
            "Send image/png, image/jpeg, multipart/form-data or application/json.",
        )
    if not 1 <= len(files) <= options.max_images:
        raise ProblemError(
            HTTPStatus.UNPROCESSABLE_ENTITY,
            "image-count",
            f"The request has {len(files)} images.",
            f"Send 1 … {options.max_images}, in the field `images`.",
        )
    return files


def _json_images(body: bytes) -> list[bytes]:
    class Images(BaseModel):
        model_config = ConfigDict(extra="forbid")
        images: list[str]

    try:
        texts = Images.model_validate_json(body).images
    except ValueError as error:
        raise ProblemError(
            HTTPStatus.UNPROCESSABLE_ENTITY, "invalid-json", 'The body is not {"images": ["BASE64", …]}.'
        ) from error
    files = []
    for index, text in enumerate(texts):
        try:
            files.append(base64.b64decode(text, validate=True))
        except (binascii.Error, ValueError) as error:
            raise ProblemError(
                HTTPStatus.BAD_REQUEST, "undecodable-image", f"Image {index} is not base64.", "Nothing was predicted."
            ) from error
    return files


async def _form_images(request: Request, body: bytes, options: ServeOptions) -> list[bytes]:
    async def replay() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    again = Request(request.scope, replay)
    try:
        async with again.form(max_files=options.max_images + 1, max_fields=0) as form:
            uploads = [value for value in form.getlist("images") if isinstance(value, UploadFile)]
            return [await upload.read() for upload in uploads]
    except HTTPException as error:
        raise ProblemError(HTTPStatus.UNPROCESSABLE_ENTITY, "invalid-form", str(error.detail)) from error


def _prepare(files: list[bytes], plan: FederationPlan, options: ServeOptions) -> Tensor:
    images = []
    for index, data in enumerate(files):
        try:
            images.append(to_tensor(decode(data, PREDICT_FORMATS, options.max_pixels), plan.image))
        except TooManyPixels as error:
            raise ProblemError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "too-many-pixels", f"Image {index}: {error.message}"
            ) from error
        except DataError as error:
            raise ProblemError(
                HTTPStatus.BAD_REQUEST,
                "undecodable-image",
                f"Image {index}: {error.message}",
                "Nothing was predicted; send PNG or JPEG.",
            ) from error
    return torch.stack(images)


def _describe(model: ServingModel, probabilities: Tensor, top_k: int) -> list[Prediction]:
    values, positions = probabilities.topk(min(top_k, len(model.classes)), dim=1)
    predictions = []
    for index, (row, places) in enumerate(zip(values.tolist(), positions.tolist(), strict=True)):
        ranked = [
            ScoredClass(label=model.classes[place], class_id=place, probability=value)
            for value, place in zip(row, places, strict=True)
        ]
        predictions.append(Prediction(index=index, top_k=ranked, **ranked[0].model_dump()))
    return predictions
