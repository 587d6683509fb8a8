"""What operators do: each action has a page that explains it and asks, and is the use case the API calls, too."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import RedirectResponse

from server.api.access import Ctx
from server.api.errors import problem_of
from server.core.errors import CoordinatorError, InvalidInput
from server.dashboard.access import Acting, Form, PageRoute, Pages, actor_of
from server.service import client_tokens, clients, deletion, federations, invites, rollback
from server.service.context import Actor, Context

router = APIRouter(route_class=PageRoute)
_DAY_S = 24 * 3600.0
_MOST_DAYS = 365
_MAX_REASON = 500


@dataclass(frozen=True)
class Secret:
    """A token that is shown once, and the command that uses it."""

    title: str
    text: str
    command: str
    command_label: str


@dataclass(frozen=True)
class Ask:
    """The page that asks before an action. `{name}` and `{target}` stand for the federation and, say, a site."""

    title: str
    text: str
    button: str
    act: Callable[[Context, Actor, str, str, Mapping[str, str]], Any]
    kind: str = ""
    fields: list[dict[str, Any]] = field(default_factory=list)
    is_last: bool = False  # the federation's page is gone afterwards


def _pause(ctx: Context, actor: Actor, name: str, _target: str, fields: Mapping[str, str]) -> None:
    reason = fields.get("reason", "").strip() or "paused by the operator"
    if len(reason) > _MAX_REASON:
        raise InvalidInput("invalid-request", f"The reason may have at most {_MAX_REASON} characters.")
    federations.pause(ctx, actor, name, reason)


def _roll_back(ctx: Context, actor: Actor, name: str, _target: str, fields: Mapping[str, str]) -> None:
    rollback.roll_back(ctx, actor, name, int(_number(fields, "to", "model", 0, 2**31 - 1)))


def _delete(ctx: Context, actor: Actor, name: str, _target: str, fields: Mapping[str, str]) -> None:
    deletion.delete_federation(ctx, actor, name, fields.get("confirm", "").strip())


def _invite(ctx: Context, actor: Actor, name: str, _target: str, fields: Mapping[str, str]) -> Secret:
    days, note = _number(fields, "days", "number of days", 0.01, _MOST_DAYS), fields.get("note", "").strip()
    if len(note) > 200 or not note.isprintable():
        raise InvalidInput("invalid-request", "The note must be one line of at most 200 characters.")
    answer = invites.create(ctx, actor, name, days * _DAY_S, note)
    command = "distrans-agent join --server {server} --name SITE --data FOLDER"
    return Secret(
        f"Invite to {name}", answer.token, f"DISTRANS_INVITE={answer.token} {command}", "On the site's machine"
    )


def _rotate(ctx: Context, actor: Actor, name: str, target: str, _fields: Mapping[str, str]) -> Secret:
    answer = client_tokens.rotate(ctx, actor, name, target)
    return Secret(
        f"New token of {target}", answer.token, "distrans-agent token", "On the site's machine, which asks for it"
    )


def _number(fields: Mapping[str, str], name: str, what: str, low: float, high: float) -> float:
    text = fields.get(name, "").strip()
    try:
        value = float(text)
    except ValueError as error:
        raise InvalidInput("invalid-request", f"The {what} is {text[:60]!r}; it must be a number.") from error
    if not low <= value <= high:
        raise InvalidInput("invalid-request", f"The {what} must be between {low:g} and {high:g}.")
    return value


ACTIONS: dict[str, Ask] = {
    "start": Ask(
        "Start {name}?",
        "Its first round opens as soon as enough sites have joined.",
        "Start",
        lambda ctx, actor, name, _target, _fields: federations.start(ctx, actor, name),
    ),
    "pause": Ask(
        "Pause {name}?",
        "Deadlines stop and no more rounds open until you resume it. The open round still accepts uploads, and sites "
        "go on predicting.",
        "Pause",
        _pause,
        fields=[{"name": "reason", "label": "Reason", "help": "Sites see it. Optional.", "attrs": {"maxlength": 500}}],
    ),
    "resume": Ask(
        "Resume {name}?",
        "The open round has as much time left as before the pause.",
        "Resume",
        lambda ctx, actor, name, _target, _fields: federations.resume(ctx, actor, name),
    ),
    "cancel": Ask(
        "Cancel {name} for good?",
        "The open round fails, and the federation can never be resumed. Its models and history stay.",
        "Cancel the federation",
        lambda ctx, actor, name, _target, _fields: federations.cancel(ctx, actor, name),
        kind="danger",
    ),
    "rollback": Ask(
        "Roll {name} back?",
        "An older model is published again under the next number, and the federation pauses. Nothing is removed; the "
        "open round fails.",
        "Roll back",
        _roll_back,
        kind="danger",
        fields=[{"name": "to", "label": "Model", "type": "number", "help": "0 is the initial model.",
                 "required": True, "attrs": {"min": 0, "step": 1}}],
    ),
    "delete": Ask(
        "Delete {name}?",
        "Its models, history and clients are removed. This cannot be undone.",
        "Delete for good",
        _delete,
        kind="danger",
        fields=[{"name": "confirm", "label": "The federation's name, as confirmation", "required": True,
                 "attrs": {"autocomplete": "off"}}],
        is_last=True,
    ),
    "invite": Ask(
        "Invite a site to {name}",
        "An invite lets one site join, and is shown once.",
        "Create the invite",
        _invite,
        fields=[
            {"name": "note", "label": "Whom it is for", "help": "Only operators see it. Optional.",
             "attrs": {"maxlength": 200}},
            {"name": "days", "label": "Days until it expires", "value": "7", "type": "number", "required": True,
             "attrs": {"min": 0.01, "max": _MOST_DAYS, "step": "any"}},
        ],
    ),
}  # fmt: skip
CLIENT_ACTIONS: dict[str, Ask] = {
    "revoke": Ask(
        "Revoke {target}'s access?",
        "Its token stops working at once, and rounds no longer wait for it. It can join again with a new invite.",
        "Revoke",
        lambda ctx, actor, name, target, _fields: clients.revoke(ctx, actor, name, target),
        kind="danger",
    ),
    "rotate": Ask(
        "New token for {target}?",
        "The old token stops working at once. Give the new one to the site over a safe channel.",
        "Create a new token",
        _rotate,
    ),
}
INVITE_ACTIONS: dict[str, Ask] = {
    "revoke": Ask(
        "Revoke this invite?",
        "Nobody can join with it any more.",
        "Revoke",
        lambda ctx, actor, name, target, _fields: invites.revoke(ctx, actor, name, target),
        kind="danger",
    ),
}


@dataclass(frozen=True)
class _Place:
    """Where an action is done, and what it is done to."""

    ask: Ask
    name: str
    path: str
    target: str = ""

    def page(self, error: CoordinatorError | None = None, sent: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Return the variables of the page that asks."""
        names = {"name": self.name, "target": self.target}
        return {
            "title": self.ask.title.format_map(names),
            "text": self.ask.text.format_map(names),
            "ask": self.ask,
            "action": self.path,
            "back": f"/federations/{self.name}",
            "sent": sent or {},
            "error": f"{error.message} {error.next_step or ''}".strip() if error else "",
        }


async def _do(
    request: Request, ctx: Context, session: Acting, dashboard: Pages, fields: Mapping[str, str], place: _Place
) -> Response:
    """Do what was asked for, then show the federation, or a secret that is shown once."""
    try:
        found = await run_in_threadpool(
            place.ask.act, ctx, actor_of(request, session), place.name, place.target, fields
        )
    except CoordinatorError as error:
        status, values = problem_of(error).status_code, place.page(error, fields)
        return dashboard.form_page(request, session, "confirm.html", status, **values)
    if isinstance(found, Secret):
        server = str(request.base_url).rstrip("/")
        command = found.command.replace("{server}", server)
        values = {"secret": found, "command": command, "back": f"/federations/{place.name}"}
        return dashboard.form_page(request, session, "secret.html", **values)
    base = request.scope.get("root_path", "")
    return RedirectResponse(base + ("/" if place.ask.is_last else f"/federations/{place.name}"), HTTPStatus.SEE_OTHER)


def _add_routes(actions: Mapping[str, Ask], folder: str) -> None:
    """Add the page that asks and the action for each. `folder` is the part of the path after the federation."""
    for verb, ask in actions.items():
        path = f"/federations/{{name}}{folder}/{verb}"
        router.add_api_route(path, _page_for(ask), methods=["GET"], response_model=None)
        router.add_api_route(path, _action_for(ask), methods=["POST"], response_model=None)


def _page_for(ask: Ask) -> Callable[..., Response]:
    def show(request: Request, session: Acting, dashboard: Pages) -> Response:
        return dashboard.form_page(request, session, "confirm.html", **_place(request, ask).page())

    return show


def _action_for(ask: Ask) -> Callable[..., Awaitable[Response]]:
    async def act(request: Request, ctx: Ctx, session: Acting, dashboard: Pages, fields: Form) -> Response:
        return await _do(request, ctx, session, dashboard, fields, _place(request, ask))

    return act


def _place(request: Request, ask: Ask) -> _Place:
    found, base = request.path_params, request.scope.get("root_path", "")
    return _Place(ask, found["name"], request.url.path.removeprefix(base), found.get("target", ""))


_add_routes(ACTIONS, "")
_add_routes(CLIENT_ACTIONS, "/clients/{target}")
_add_routes(INVITE_ACTIONS, "/invites/{target}")
