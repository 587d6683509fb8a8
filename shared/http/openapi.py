"""What the OpenAPI documents of both programs share.

FastAPI describes the parameters and bodies that functions declare. `install` adds what it cannot know: that every error
is a problem, which headers responses carry, that HEAD has no body, and which calls need no token. It works on the whole
document, so new routes need no extra code.
"""

from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute

from shared.contract import versions
from shared.contract.messages import Problem
from shared.http.problems import MEDIA_TYPE

Responses = dict[int | str, dict[str, Any]]

_TEXT, _INTEGER = {"type": "string"}, {"type": "integer", "minimum": 0}
HEADERS: dict[str, dict[str, Any]] = {
    "Accept-Encoding": {"description": "Accepted encodings of request bodies.", "schema": _TEXT},
    "Accept-Ranges": {"description": "`bytes`: Range requests are supported.", "schema": _TEXT},
    "Content-Range": {"description": "Position of these bytes in the whole body, and its size.", "schema": _TEXT},
    versions.HEADER: {"description": "The protocol version of this coordinator.", "schema": _INTEGER},
    "ETag": {
        "description": "SHA-256 of the whole body, in quotes; for If-None-Match and If-Range.",
        "schema": _TEXT,
    },
    "Location": {"description": "URL of the upload, for HEAD, PATCH and DELETE.", "schema": _TEXT},
    "Repr-Digest": {"description": "RFC 9530: `sha-256=:BASE64:` of the whole body.", "schema": _TEXT},
    "Retry-After": {"description": "Seconds to wait before the next attempt.", "schema": _INTEGER},
    "Upload-Complete": {"description": "`?1` if the upload is complete, else `?0`.", "schema": _TEXT},
    "Upload-Length": {"description": "Size of the whole upload in bytes, once known.", "schema": _INTEGER},
    "Upload-Limit": {"description": "`max-size=N`: the maximum size of an update in bytes.", "schema": _TEXT},
    "Upload-Offset": {"description": "Bytes stored so far: where the next part starts.", "schema": _INTEGER},
    "WWW-Authenticate": {"description": "`Bearer`: send a token.", "schema": _TEXT},
    "X-Request-ID": {
        "description": "The request's id in the service's log: the one the caller sent, if any.",
        "schema": _TEXT,
    },
}
_EVERYWHERE = ("X-Request-ID",)
_BY_STATUS = {
    HTTPStatus.UNAUTHORIZED: ("WWW-Authenticate",),
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE: ("Accept-Encoding",),
    HTTPStatus.TOO_MANY_REQUESTS: ("Retry-After",),
    HTTPStatus.SERVICE_UNAVAILABLE: ("Retry-After",),
    HTTPStatus.INSUFFICIENT_STORAGE: ("Retry-After",),
}
_WITH_TOKEN, _WITH_BODY = (401, 403), (408, 413, 415, 422)  # any operation with a token or a body can fail like this
_METHODS = {"get", "put", "post", "delete", "head", "patch"}


def operation_id(route: APIRoute) -> str:
    """Return the name of the route's function in camel case; HEAD routes of `get_…` functions start with `head`."""
    first, *others = route.name.split("_")
    if route.methods == {"HEAD"} and first == "get":
        first = "head"
    return first + "".join(word.capitalize() for word in others)


def problem_responses(*statuses: int) -> Responses:
    """Declare that an operation can respond with a problem of each of these statuses."""
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {status: {"description": HTTPStatus(status).phrase, "content": content} for status in statuses}


def headers(*names: str) -> dict[str, Any]:
    """Declare that a response has these headers from `HEADERS`."""
    return {"headers": {name: {"$ref": f"#/components/headers/{name}"} for name in names}}


def request_headers(**descriptions: str) -> dict[str, Any]:
    """Declare optional request headers that the code reads directly; underscores stand for hyphens."""
    return {
        "parameters": [
            {"name": name.replace("_", "-"), "in": "header", "required": False, "schema": _TEXT, "description": text}
            for name, text in descriptions.items()
        ]
    }


def install(
    app: FastAPI,
    *,
    anywhere: Sequence[int],
    always: Sequence[str] = (),
    complete: Callable[[dict[str, Any]], None] = lambda _document: None,
) -> None:
    """Complete the application's document, then let `complete` add the application-specific parts.

    Every operation can respond with the problems in `anywhere`; every response has the headers in `always`.
    """
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _completed(generate(), anywhere, always)
            complete(app.openapi_schema)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI's documentation recommends


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield method, path and operation of every operation in a document."""
    for path, item in document["paths"].items():
        yield from ((method, path, operation) for method, operation in item.items() if method in _METHODS)


def _completed(document: dict[str, Any], anywhere: Sequence[int], always: Sequence[str]) -> dict[str, Any]:
    document["info"]["license"] = {"name": "Apache License 2.0", "identifier": "Apache-2.0"}
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own form of a 422, which is never sent
        schemas.pop(name, None)
    schemas["Problem"] = Problem.model_json_schema()
    for schema in schemas.values():
        _drop_object_defaults(schema)
    used: set[str] = set()
    for method, _, operation in operations(document):
        operation.setdefault("security", [])
        for parameter in operation.get("parameters", ()):
            parameter["schema"] = _without_null(parameter["schema"])
        for content in operation.get("requestBody", {}).get("content", {}).values():
            content["schema"] = _without_null(content["schema"])
        responses = operation["responses"]
        with_token = _WITH_TOKEN if operation["security"] else ()
        with_body = _WITH_BODY if "requestBody" in operation else ()
        for status in (*anywhere, *with_token, *with_body):
            responses.setdefault(str(status), {})
        operation["responses"] = dict(sorted(responses.items()))
        for status, response in responses.items():
            _complete_response(int(status), response, always, has_body=method != "head")
            used |= response["headers"].keys()
    components["headers"] = {name: HEADERS[name] for name in sorted(used)}
    return document


def _complete_response(status: int, response: dict[str, Any], always: Sequence[str], *, has_body: bool) -> None:
    if status >= HTTPStatus.BAD_REQUEST:
        response |= problem_responses(status)[status]
    names = (*_EVERYWHERE, *always, *_BY_STATUS.get(HTTPStatus(status), ()))
    response["headers"] = headers(*names)["headers"] | response.get("headers", {})
    if not has_body:
        response.pop("content", None)


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Drop null from the schema of an optional parameter: it can be left out, but not sent as null."""
    others = [choice for choice in schema.get("anyOf", ()) if choice != {"type": "null"}]
    if len(others) != 1 or len(schema["anyOf"]) == 1:
        return schema
    return {**others[0], **{key: value for key, value in schema.items() if key in ("title", "description")}}


def _drop_object_defaults(schema: dict[str, Any]) -> None:
    """Remove defaults that are objects: generators cannot express them, and the fields inside have their own."""
    for field in schema.get("properties", {}).values():
        if isinstance(field.get("default"), dict):
            del field["default"]
