"""The images of a `/predict` request: from its body to tensors in the plan's form."""

import base64
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from torch import Tensor

from client_agent.data.images import PREDICT_FORMATS, TooManyPixels, load, open_image, to_tensor
from client_agent.errors import DataError
from client_agent.settings import ServeOptions
from client_agent.web.limits import too_large
from client_agent.web.problems import ProblemError
from shared.contract.plan import ImagePlan

IMAGE_TYPES = ("image/png", "image/jpeg")
_FILE = {"type": "string", "format": "binary"}
REQUEST_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            **{kind: {"schema": _FILE} for kind in IMAGE_TYPES},
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["images"],
                    "properties": {"images": {"type": "array", "items": _FILE}},
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


class _Images(BaseModel):
    model_config = ConfigDict(extra="forbid")
    images: list[str]


class _InMemory(MultiPartParser):
    """Starlette's parser without temporary files: patients' images do not belong on disk, and bodies are bounded."""

    spool_max_size = 0  # no limit


def check_headers(request: Request, options: ServeOptions) -> str:
    """Return the request's content type; raise ProblemError if the headers alone rule the request out."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in REQUEST_BODY["requestBody"]["content"]:
        raise ProblemError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            "unsupported-type",
            f"Unsupported content type {kind[:100]!r}." if kind else "The request has no content type.",
            "Send image/png, image/jpeg, multipart/form-data or application/json.",
        )
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > options.max_body_bytes:
        raise too_large(options.max_body_bytes)
    return kind


async def read_images(
    kind: str, headers: Headers, pieces: AsyncGenerator[bytes, None], options: ServeOptions
) -> Sequence[bytes | str]:
    """Return the image files of a request, not decoded; base64 images are returned as text."""
    if kind == "multipart/form-data":
        files: Sequence[bytes | str] = await _form_images(headers, pieces, options)
    else:
        body = b"".join([piece async for piece in pieces])
        files = _json_images(body, options) if kind == "application/json" else [body]
    if not 1 <= len(files) <= options.max_images:
        raise _image_count(f"The request has {len(files)} images.", options)
    return files


def prepare_images(files: Sequence[bytes | str], shape: ImagePlan, options: ServeOptions) -> Tensor:
    """Return the images as (B, C, H, W), prepared as for training; one bad image fails the request and is named.

    No pixels are decoded until the headers of all images have been read and their pixels counted.
    """
    images, pixels = [], 0
    for index, file in enumerate(files):
        with _naming(index):
            data = file if isinstance(file, bytes) else _from_base64(file)
            image = open_image(data, PREDICT_FORMATS, options.max_pixels)
        images.append(image)
        pixels += image.width * image.height
    if pixels > options.max_request_pixels:
        raise ProblemError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            "too-many-pixels",
            f"The {len(images)} images have {pixels} pixels in total; a request may have {options.max_request_pixels}.",
            "Send fewer images per request, or scale them down.",
        )
    tensors = []
    for index, image in enumerate(images):
        with _naming(index):
            tensors.append(to_tensor(load(image), shape))
        image.close()
    return torch.stack(tensors)


@contextmanager
def _naming(index: int) -> Iterator[None]:
    """Turn an image's error into a problem that names its index."""
    try:
        yield
    except TooManyPixels as error:
        raise ProblemError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            "too-many-pixels",
            f"Image {index}: {error.message}",
            "Scale the image down.",
        ) from error
    except DataError as error:
        raise ProblemError(
            HTTPStatus.BAD_REQUEST,
            "undecodable-image",
            f"Image {index}: {error.message}",
            "Nothing was predicted; send PNG or JPEG.",
        ) from error


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:  # also binascii.Error
        raise DataError("It is not valid base64.") from error


def _json_images(body: bytes, options: ServeOptions) -> list[str]:
    # Base64 has no commas, so more commas mean too many images; refuse them before a parser builds them all.
    if body.count(b",") >= options.max_images:
        raise _image_count(f"The request has more than {options.max_images} images.", options)
    try:
        return _Images.model_validate_json(body).images
    except ValueError as error:
        raise ProblemError(
            HTTPStatus.UNPROCESSABLE_ENTITY,
            "invalid-json",
            "The body is not the expected JSON.",
            'Send {"images": ["BASE64", …]}.',
        ) from error


async def _form_images(headers: Headers, pieces: AsyncGenerator[bytes, None], options: ServeOptions) -> list[bytes]:
    parser = _InMemory(headers, pieces, max_files=options.max_images, max_fields=0)
    try:
        form = await parser.parse()
    except MultiPartException as error:
        if len(parser.items) >= options.max_images:
            raise _image_count(f"The request has more than {options.max_images} files.", options) from error
        raise ProblemError(
            HTTPStatus.UNPROCESSABLE_ENTITY, "invalid-form", error.message, "Send files only, in the field `images`."
        ) from error
    files = [await value.read() for value in form.getlist("images") if isinstance(value, UploadFile)]
    await form.close()
    return files


def _image_count(detail: str, options: ServeOptions) -> ProblemError:
    next_step = f"Send 1 … {options.max_images} per request, in the field `images`."
    return ProblemError(HTTPStatus.UNPROCESSABLE_ENTITY, "image-count", detail, next_step)
