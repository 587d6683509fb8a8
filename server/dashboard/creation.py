"""Creating a federation through a form."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import RedirectResponse

from server.api.access import Ctx
from server.api.errors import problem_of
from server.dashboard.access import Acting, Form, PageRoute, Pages, actor_of
from server.dashboard.plan_form import METHOD_SETTINGS, preset_names, read_form, settings_of
from server.service import federations
from shared.contract.errors import DistransError
from shared.contract.method_options import METHOD_NAMES
from shared.contract.presets import DEFAULT_PRESET, PRESETS

router = APIRouter(route_class=PageRoute)


@router.get("/new")
def show_form(
    request: Request,
    session: Acting,
    dashboard: Pages,
    preset: Annotated[str, Query(max_length=64)] = DEFAULT_PRESET,
) -> Response:
    """Show the form, with a preset's defaults."""
    return dashboard.form_page(request, session, "new.html", **_values({"preset": preset}, {}))


@router.post("/new")
async def create(request: Request, ctx: Ctx, session: Acting, dashboard: Pages, fields: Form) -> Response:
    """Create the federation, or show the form again with what is wrong next to the fields."""
    plan, errors = await run_in_threadpool(read_form, fields)
    status: int = HTTPStatus.UNPROCESSABLE_ENTITY
    if plan is not None:
        try:
            await run_in_threadpool(federations.create, ctx, actor_of(request, session), plan)
        except DistransError as error:
            place = "name" if error.code == "name-taken" else ""
            errors = {place: [f"{error.message} {error.next_step or ''}".strip()]}
            status = problem_of(error).status_code
        else:
            base = request.scope.get("root_path", "")
            return RedirectResponse(f"{base}/federations/{plan.name}", HTTPStatus.SEE_OTHER)
    return dashboard.form_page(request, session, "new.html", status, **_values(fields, errors))


def _values(sent: Mapping[str, str], errors: Mapping[str, list[str]]) -> dict[str, Any]:
    preset = sent.get("preset", "")
    chosen = preset if preset in PRESETS else DEFAULT_PRESET
    return {
        "sent": sent,
        "errors": {name: "; ".join(messages) for name, messages in errors.items()},
        "preset": chosen,
        "presets": preset_names(),
        "groups": settings_of(chosen),
        "method_choices": [(name, name) for name in METHOD_NAMES],
        "preset_method": PRESETS[chosen].get("method", {}).get("name", "distrans"),
        "method_settings": METHOD_SETTINGS,
    }
