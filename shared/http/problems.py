"""Errors as they leave a web service: RFC 9457's application/problem+json."""

from collections.abc import Mapping
from http import HTTPStatus

from starlette.responses import JSONResponse

from shared.http.request_id import current_request_id
from shared.schemas import Problem

MEDIA_TYPE = "application/problem+json"


def problem(
    status: HTTPStatus,
    code: str,
    detail: str,
    *,
    next_step: str | None = None,
    faults: list[str] | None = None,
    headers: dict[str, str] | None = None,
    kind: str = "about:blank",
    members: Mapping[str, object] | None = None,
) -> JSONResponse:
    """Return a problem response with a stable code, a sentence and, where there is one, a next step.

    `kind` is the URI of a problem type that a standard defines, `members` are the fields that belong to it.
    """
    body = Problem(
        type=kind,
        title=status.phrase,
        status=status,
        code=code,
        detail=detail,
        next_step=next_step,
        errors=faults,
        request_id=current_request_id(),
    )
    content = body.model_dump(exclude_none=True) | dict(members or {})
    return JSONResponse(content, status, headers, media_type=MEDIA_TYPE)
