"""Requests that the site's web service refuses, each with a problem."""

from functools import partial
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from shared.fault_words import in_words
from shared.http.problems import problem
from shared.http.unmatched import http_problem


class ProblemError(Exception):
    """A request that is answered with a problem; raised in any thread."""

    def __init__(
        self,
        status: HTTPStatus,
        code: str,
        detail: str,
        next_step: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        # Built in the request's own task, which knows the request's id.
        self.response = partial(problem, status, code, detail, next_step=next_step, headers=headers)


def answer_with_problems(app: FastAPI) -> None:
    """Make every error of an application a problem. The handlers are `async`: others would run in another thread."""

    @app.exception_handler(ProblemError)
    async def refused(_request: Request, error: ProblemError) -> JSONResponse:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, error: RequestValidationError) -> JSONResponse:
        faults = "; ".join(f"{fault['loc'][-1]}: {in_words(fault)}" for fault in error.errors())
        return problem(HTTPStatus.UNPROCESSABLE_ENTITY, "invalid-parameters", faults, next_step="See /docs.")

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        return http_problem(request, error)
