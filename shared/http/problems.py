"""Error responses: application/problem+json as in RFC 9457."""

from collections.abc import Mapping
from http import HTTPStatus

from starlette.responses import JSONResponse

from shared.contract.messages import Problem
from shared.http.request_id import current_request_id

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
    """Return a problem response with a stable code, a sentence, and an optional next step.

    `kind` is the URI of a standardized problem type; `members` are the extra fields it defines.
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
