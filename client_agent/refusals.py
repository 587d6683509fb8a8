"""Requests that the site's web service does not serve, each answered with a problem."""

from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from shared.schemas import Problem


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


def answer_with_problems(app: FastAPI) -> None:
    """Make every error of an application a problem."""

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
