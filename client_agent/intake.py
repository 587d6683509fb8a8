"""The images of a `/predict` request: out of its body, then into the plan's tensors."""

import base64
import binascii
from http import HTTPStatus
from typing import Any

import torch
from fastapi import Request
from pydantic import BaseModel, ConfigDict
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from torch import Tensor

from client_agent.errors import DataError
from client_agent.images import PREDICT_FORMATS, TooManyPixels, decode, to_tensor
from client_agent.refusals import ProblemError
from client_agent.settings import ServeOptions
from shared.plan import ImagePlan

IMAGE_TYPES = ("image/png", "image/jpeg")
_FILE = {"type": "string", "format": "binary"}
REQUEST_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            **{kind: {"schema": _FILE} for kind in IMAGE_TYPES},
            "multipart/form-data": {
                "schema": {"type": "object", "properties": {"images": {"type": "array", "items": _FILE}}}
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


class _Images(BaseModel):
    model_config = ConfigDict(extra="forbid")
    images: list[str]


async def read_images(request: Request, options: ServeOptions) -> list[bytes]:
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


def prepare_images(files: list[bytes], shape: ImagePlan, options: ServeOptions) -> Tensor:
    """(B, C, H, W) as training sees images; one that cannot be used fails the whole request and is named."""
    images = []
    for index, data in enumerate(files):
        try:
            images.append(to_tensor(decode(data, PREDICT_FORMATS, options.max_pixels), shape))
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


def _too_large(options: ServeOptions) -> ProblemError:
    return ProblemError(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "too-large", f"A request may have at most {options.max_body_bytes} bytes."
    )


def _json_images(body: bytes) -> list[bytes]:
    try:
        texts = _Images.model_validate_json(body).images
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
