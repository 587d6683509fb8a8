"""The routes of the page: look, try images, pin, sign in and out. Files and pictures are handled in other threads."""

from functools import partial
from http import HTTPStatus
from typing import Any

from fastapi import Request
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.responses import HTMLResponse, RedirectResponse, Response

from client_agent.serving.model import ServingModel, View
from client_agent.serving.queue import PredictionQueue
from client_agent.settings import ServeOptions
from client_agent.web.access import Access
from client_agent.web.desk import PredictionDesk
from client_agent.web.pages.home import HomePage
from client_agent.web.pages.rendering import page_response, render
from client_agent.web.pages.results import answer_charts
from client_agent.web.problems import ProblemError
from client_agent.web.site import Site
from shared.contract.errors import DistransError
from shared.contract.plan import FederationPlan
from shared.http.forms import BadForm, read_form

_MAX_SIGN_IN_BYTES = 8 * 1024
_MAX_DIGITS = 18


def wants_page(request: Request) -> bool:
    """Return whether a browser asks; programs get JSON."""
    return "text/html" in request.headers.get("accept", "").lower()


class SitePages:
    """The pages of one agent."""

    def __init__(
        self,
        plan: FederationPlan,
        predictions: PredictionQueue,
        options: ServeOptions,
        access: Access,
        desk: PredictionDesk,
        site: Site,
    ) -> None:
        self._plan, self._predictions, self._options = plan, predictions, options
        self._access, self._desk, self._site = access, desk, site
        self._home = HomePage(plan, predictions, options, site, may_pin=access.may_pin and site.pin is not None)

    def install(self, app: Starlette) -> None:
        """Add the routes but `/`, which it shares with programs."""
        for path, show, act in (
            ("/sign-in", self.show_sign_in, self.sign_in),
            ("/classify", self.show_form, self.classify),
            ("/pin/{number}", self.ask_to_pin, self.pin),
            ("/unpin", self.ask_to_unpin, self.unpin),
        ):
            app.add_route(path, show, methods=["GET"])
            app.add_route(path, act, methods=["POST"])
        app.add_route("/sign-out", self.sign_out, methods=["POST"])

    async def home(self, request: Request) -> Response:
        """Answer a browser at `/`."""
        if not self._access.may_see(request):
            return _to(request, "/sign-in")
        return await run_in_threadpool(
            self._home.answer, _base(request), request.headers.get("if-none-match"), self._signed_in(request)
        )

    # Signing in

    async def show_sign_in(self, request: Request) -> Response:
        """Ask for the token."""
        if self._access.session(request) is not None:
            return _to(request, "/")
        problem = "This is not the agent's predict token." if request.query_params.get("failed") else ""
        return await self._sign_in_page(request, problem)

    async def sign_in(self, request: Request) -> Response:
        """Exchange the token for a session. What is wrong is shown by another page, so that reloading tries nothing."""
        if wait_s := self._access.wait_s(request):
            problem = f"There were too many wrong tokens from this address. Try again in {wait_s} s."
            page = await self._sign_in_page(request, problem, HTTPStatus.TOO_MANY_REQUESTS)
            page.headers["Retry-After"] = str(wait_s)
            return page
        try:
            form = await read_form(request, _MAX_SIGN_IN_BYTES)
        except BadForm as error:
            return await self._sign_in_page(request, f"The form cannot be used. {error}", HTTPStatus.BAD_REQUEST)
        response = _to(request, "/")
        if not self._access.sign_in(request, form.get("token", ""), response):
            return _to(request, "/sign-in?failed=token")
        return response

    async def sign_out(self, request: Request) -> Response:
        """End the session."""
        response = _to(request, "/sign-in" if self._access.needs_sign_in else "/")
        self._access.sign_out(request, response)
        return response

    async def _sign_in_page(self, request: Request, problem: str, status: HTTPStatus = HTTPStatus.OK) -> HTMLResponse:
        page = await _rendered("sign_in.html", _base(request), federation=self._plan.name, problem=problem)
        return page_response(page, status)

    # Trying images

    async def show_form(self, request: Request) -> Response:
        """Show the form alone, for browsers that reload the answer's address."""
        if not self._access.may_see(request):
            return _to(request, "/sign-in")
        return await self._results_page(request, {})

    async def classify(self, request: Request) -> Response:
        """Answer a form with images as /predict would, under all of its limits."""
        if self._access.session(request) is None:
            return _to(request, "/sign-in")
        model = self._predictions.model
        try:
            views = {"as served": View()} if model is None else comparable_views(model, self._options)
            result = await self._desk.answer(request, *views.values())
        except ProblemError as error:
            return await self._results_page(request, {"problem": error}, error.status, error.headers)
        charts = await run_in_threadpool(partial(answer_charts, result, views))
        return await self._results_page(request, {"answers": charts, "model": result.model})

    async def _results_page(
        self,
        request: Request,
        values: dict[str, Any],
        status: HTTPStatus = HTTPStatus.OK,
        headers: dict[str, str] | None = None,
    ) -> HTMLResponse:
        known: dict[str, Any] = {
            "problem": None,
            "answers": [],
            "model": None,
            "signed_in": self._signed_in(request),
            "form": self._home.form(),
        }
        page = await _rendered("results.html", _base(request), federation=self._plan.name, **known | values)
        return page_response(page, status, headers)

    # Pinning

    async def ask_to_pin(self, request: Request) -> Response:
        """Ask whether /predict should stay with a model."""
        return await self._confirm(request, _number(request))

    async def ask_to_unpin(self, request: Request) -> Response:
        """Ask whether /predict should follow new models again."""
        return await self._confirm(request, None)

    async def pin(self, request: Request) -> Response:
        """Pin a kept model."""
        return await self._change_pin(request, _number(request))

    async def unpin(self, request: Request) -> Response:
        """Follow new models again."""
        return await self._change_pin(request, None)

    async def _change_pin(self, request: Request, number: int | None) -> Response:
        session = self._access.session(request)
        if session is None:
            return _to(request, "/sign-in")
        try:
            form = await read_form(request)
        except BadForm:
            form = {}
        if not self._access.is_from_form(session, form.get("csrf", "")):
            return await self._confirm(request, number, "This form is too old. Send it again.", HTTPStatus.FORBIDDEN)
        if self._site.pin is None or not self._access.may_pin:
            raise _not_here()
        try:
            await run_in_threadpool(self._site.pin, number)
        except (DistransError, OSError) as error:
            return await self._confirm(request, number, str(error), HTTPStatus.CONFLICT)
        self._home.expire()
        return _to(request, "/")

    async def _confirm(
        self, request: Request, number: int | None, problem: str = "", status: HTTPStatus = HTTPStatus.OK
    ) -> Response:
        session = self._access.session(request)
        if session is None:
            return _to(request, "/sign-in")
        if not self._access.may_pin:
            raise _not_here()
        page = await _rendered(
            "pin.html", _base(request), number=number, csrf=self._access.csrf(session), problem=problem
        )
        return page_response(page, status)

    def _signed_in(self, request: Request) -> bool:
        return self._access.needs_sign_in and self._access.session(request) is not None


def comparable_views(model: ServingModel, options: ServeOptions) -> dict[str, View]:
    """Return how the page answers: as served, and without the offset and the prior where that makes a difference."""
    views = {"as served": View()}
    if options.allow_offset_override and model.has_offset:
        views["without the offset"] = View(use_offset=False)
    applied = model.applied_prior()
    if applied not in (None, "none"):
        views["without the prior"] = View(prior="none")
    return views


async def _rendered(template: str, base: str, **values: Any) -> str:
    """Render in another thread: the first time, templates are read and compiled."""
    return await run_in_threadpool(partial(render, template, base, **values))


def _base(request: Request) -> str:
    return str(request.scope.get("root_path", "")).rstrip("/")


def _to(request: Request, path: str) -> RedirectResponse:
    return RedirectResponse(f"{_base(request)}{path}", HTTPStatus.SEE_OTHER)


def _number(request: Request) -> int:
    text = str(request.path_params["number"])
    if text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS:
        return int(text)
    raise ProblemError(HTTPStatus.NOT_FOUND, "not-found", "There is no such model.", "See / for those that are kept.")


def _not_here() -> ProblemError:
    return ProblemError(
        HTTPStatus.FORBIDDEN,
        "pin-not-allowed",
        "Models cannot be pinned here: everyone on the network can see this page.",
        "Use distrans-agent pin on the agent's machine, or run the agent with a predict token.",
    )
