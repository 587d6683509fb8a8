"""Errors of the web service, returned as problems."""

from functools import partial
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from shared.contract.error_messages import describe_error
from shared.http.problems import problem
from shared.http.unmatched import http_problem


class ProblemError(Exception):
    """An error that becomes a problem response; may be raised in any thread."""

    def __init__(
        self,
        status: HTTPStatus,
        code: str,
        detail: str,
        next_step: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status, self.detail, self.next_step, self.headers = status, detail, next_step, headers or {}
        # Built later, in the request's own task, which knows the request's id.
        self.response = partial(problem, status, code, detail, next_step=next_step, headers=headers)


def install_problem_handlers(app: FastAPI) -> None:
    """Return a problem for every error. The handlers are `async`: plain functions would run in another thread."""

    @app.exception_handler(ProblemError)
    async def refused(_request: Request, error: ProblemError) -> JSONResponse:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, error: RequestValidationError) -> JSONResponse:
        faults = "; ".join(f"{fault['loc'][-1]}: {describe_error(fault)}" for fault in error.errors())
        return problem(HTTPStatus.UNPROCESSABLE_ENTITY, "invalid-parameters", faults, next_step="See /docs.")

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        return http_problem(request, error)
