"""From templates to responses."""

import re
from functools import lru_cache
from http import HTTPStatus
from pathlib import Path
from typing import Any

from jinja2 import Environment
from starlette.responses import HTMLResponse

from shared.pages.environment import environment

LIVE_S = 2.0  # between two questions of an open page whether it has changed


@lru_cache
def _environment() -> Environment:
    """Templates are read once, when somebody looks."""
    found = environment(Path(__file__).with_name("templates"))
    found.filters["wrapping"] = _wrapping
    return found


def render(template: str, base: str, live_s: float = 0.0, **values: Any) -> str:
    """Return a page; `base` is the path under which a proxy serves the agent."""
    return _environment().get_template(template).render(base=base, program="agent", live_s=live_s, **values)


def page_response(
    body: str | bytes, status: int = HTTPStatus.OK, headers: dict[str, str] | None = None
) -> HTMLResponse:
    """Return a page whose forms may be sent."""
    # Under the usual policy, no-referrer, browsers send forms with the origin "null", which is refused.
    return HTMLResponse(body, status, {"Referrer-Policy": "same-origin", **(headers or {})})


def _wrapping(text: str) -> str:
    """Return the text of an error with at most a few lines' worth of characters, without control characters."""
    return re.sub(r"[\x00-\x1f\x7f]+", " ", text)[:600]
