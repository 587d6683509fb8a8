"""Maps exceptions to HTTP statuses. Every error response is application/problem+json."""

import logging
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from sqlalchemy.exc import DataError, SQLAlchemyError
from starlette.exceptions import HTTPException

from server.compute.process import TorchFailed, TorchMissing
from server.core import errors
from server.service.uploads.resumable import InconsistentLength, OffsetMismatch
from server.service.uploads.transfers import UpdateTooLarge
from server.store.failures import StorageFull, is_busy
from server.store.objects.store import ObjectStoreError, ObjectStoreFull
from shared.contract.error_collection import list_errors
from shared.contract.error_messages import describe_error
from shared.contract.errors import DistransError
from shared.http.problems import problem
from shared.http.unmatched import http_problem

logger = logging.getLogger(__name__)

STATUSES: dict[type[DistransError], HTTPStatus] = {
    errors.NotAuthenticated: HTTPStatus.UNAUTHORIZED,
    errors.NotAllowed: HTTPStatus.FORBIDDEN,
    errors.NotFound: HTTPStatus.NOT_FOUND,
    errors.Conflict: HTTPStatus.CONFLICT,
    errors.Gone: HTTPStatus.GONE,
    errors.TooLarge: HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    InconsistentLength: HTTPStatus.BAD_REQUEST,
    errors.InvalidInput: HTTPStatus.UNPROCESSABLE_ENTITY,
    errors.TooMany: HTTPStatus.TOO_MANY_REQUESTS,
    TorchFailed: HTTPStatus.SERVICE_UNAVAILABLE,
    TorchMissing: HTTPStatus.SERVICE_UNAVAILABLE,
}

# Our codes and the problem types in the IETF draft on resumable uploads.
UPLOAD_PROBLEMS = {
    code: f"https://iana.org/assignments/http-problem-types#{name}"
    for code, name in {
        "offset-mismatch": "mismatching-upload-offset",
        "already-uploaded": "completed-upload",
        "inconsistent-length": "inconsistent-upload-length",
    }.items()
}

# Next steps for errors that the command line can cause, too; it has its own (see server.__main__).
NEXT_STEPS = {
    "no-such-federation": "GET /v1/federations lists them.",
    "no-such-invite": "GET /v1/federations/{name}/invites lists them.",
    "no-such-client": "GET /v1/federations/{name}/clients lists them.",
}


def install(app: FastAPI) -> None:
    """Register a handler for every exception a request can raise."""

    @app.exception_handler(DistransError)
    def distrans_error(_request: Request, error: DistransError) -> JSONResponse:
        return problem_of(error)

    @app.exception_handler(RequestValidationError)
    def invalid_request(_request: Request, error: RequestValidationError) -> JSONResponse:
        faults = list_errors(error.errors(), _fault)
        return problem(
            HTTPStatus.UNPROCESSABLE_ENTITY,
            "invalid-request",
            "The request is invalid: " + "; ".join(faults[:20]),
            next_step="See /docs for the parameters of this call.",
            faults=faults,
        )

    @app.exception_handler(HTTPException)
    def http_error(request: Request, error: HTTPException) -> JSONResponse:
        return http_problem(request, error)

    @app.exception_handler(DataError)
    def unusable_value(_request: Request, _error: DataError) -> JSONResponse:
        # For example a NUL character, which PostgreSQL cannot store in text.
        return problem(
            HTTPStatus.UNPROCESSABLE_ENTITY,
            "unusable-value",
            "The request contains a value that the database cannot store.",
        )

    @app.exception_handler(ObjectStoreError)
    def object_store_failed(_request: Request, error: ObjectStoreError) -> JSONResponse:
        logger.error("%s", error)  # not in the response: it may name the bucket
        if isinstance(error, ObjectStoreFull):
            return storage_full()
        return _unavailable("object-store-unavailable", "The coordinator cannot reach the place of its tensors.")

    @app.exception_handler(StorageFull)
    def no_room(request: Request, error: StorageFull) -> JSONResponse:
        request.app.state.ctx.db.note_full(error)
        return storage_full()

    @app.exception_handler(SQLAlchemyError)
    def database_failed(request: Request, error: SQLAlchemyError) -> JSONResponse:
        if request.app.state.ctx.db.is_out_of_room(error):
            return storage_full()  # the database has logged it
        if is_busy(error):
            logger.warning("the database was busy: %s", getattr(error, "orig", error))
            return _unavailable("database-busy", "Other requests are using the rows this request needs.")
        logger.error("the database failed", exc_info=error)  # not logger.exception: no exception is being handled here
        return _unavailable("database-unavailable", "The coordinator cannot reach its database.")


def problem_of(error: DistransError) -> JSONResponse:
    """Return the problem for an error of a use case."""
    kind = next((kind for kind in type(error).__mro__ if kind in STATUSES), None)
    status = STATUSES[kind] if kind else HTTPStatus.UNPROCESSABLE_ENTITY
    headers: dict[str, str] = {}
    members: dict[str, object] = {}
    if isinstance(error, errors.NotAuthenticated):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, errors.TooMany):
        headers["Retry-After"] = str(error.retry_after_s)
    if isinstance(error, UpdateTooLarge):
        headers["Upload-Limit"] = f"max-size={error.max_bytes}"
    if isinstance(error, OffsetMismatch):
        headers |= {"Upload-Offset": str(error.offset_bytes), "Upload-Complete": "?0"}
        members |= {"expected-offset": error.offset_bytes, "provided-offset": error.provided_bytes}
    return problem(
        status,
        error.code,
        error.message,
        next_step=error.next_step or NEXT_STEPS.get(error.code),
        headers=headers,
        kind=UPLOAD_PROBLEMS.get(error.code, "about:blank"),
        members=members,
    )


def _unavailable(code: str, detail: str) -> JSONResponse:
    return problem(
        HTTPStatus.SERVICE_UNAVAILABLE, code, detail, next_step="Try again in 5 s.", headers={"Retry-After": "5"}
    )


def storage_full(status: HTTPStatus = HTTPStatus.INSUFFICIENT_STORAGE) -> JSONResponse:
    """Return the problem for a coordinator that has no space left."""
    return problem(
        status,
        StorageFull.code,
        "The coordinator has no space left to store uploads.",
        next_step="The operator has to free space; the coordinator's log says where. Agents retry on their own.",
        headers={"Retry-After": "60"},
    )


def _fault(fault: dict[str, Any]) -> str:
    if fault["type"] == "json_invalid":  # its location is a position in the text, not a field
        return f"body: not JSON at character {fault['loc'][-1]}: {fault['ctx']['error']}"
    path = [str(part) for part in fault["loc"] if part != "body"]
    if path[:1] == ["method"] and len(path) > 2:
        path.pop(1)  # pydantic inserts the union's tag, which is not a key
    return f"{'.'.join(path) or 'body'}: {describe_error(fault)}"
