"""The page at `/`: rendered when something has changed and somebody looks, and then kept."""

import hashlib
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from markupsafe import Markup
from starlette.responses import Response

from client_agent.serving.queue import PredictionQueue
from client_agent.settings import ServeOptions
from client_agent.web.pages import figures
from client_agent.web.pages.rendering import LIVE_S, page_response, render
from client_agent.web.pages.view import describe
from client_agent.web.site import Site
from shared import __version__
from shared.contract.plan import FederationPlan

_REST_FACTOR = 150  # a page rests for this many times what it cost: open pages take less than 1 % of a core
_MAX_REST_S = 30.0


@dataclass(frozen=True)
class _Kept:
    """A rendered page, and until when it may be out of date."""

    version: Hashable
    etag: str
    body: bytes
    rests_until: float


class HomePage:
    """Renders the page, at most as often as it may cost. Thread-safe."""

    def __init__(
        self,
        plan: FederationPlan,
        predictions: PredictionQueue,
        options: ServeOptions,
        site: Site,
        *,
        may_pin: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan, self._predictions, self._options, self._site = plan, predictions, options, site
        self._may_pin, self._clock = may_pin, clock
        self._lock = threading.Lock()
        self._kept: dict[tuple[str, bool], _Kept] = {}
        self._figures: dict[str, tuple[Hashable, Any]] = {}

    def answer(self, base: str, known_etag: str | None, signed_in: bool) -> Response:
        """Return the page, or 304 if the caller has it."""
        kept = self._kept.get((base, signed_in))
        if kept is None or not self._lock.locked():  # somebody else is making a newer one: this one will do
            with self._lock:
                kept = self._page(base, signed_in)
        headers = {"ETag": kept.etag, "Vary": "Accept, Cookie"}
        if known_etag == kept.etag:
            return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
        return page_response(kept.body, headers=headers)

    def expire(self) -> None:
        """Render anew for the next reader, who has just changed something."""
        with self._lock:
            self._kept.clear()

    def form(self) -> dict[str, int]:
        """Return what the form for images must know."""
        return {"max_images": self._options.max_images, "max_bytes": self._options.max_body_bytes}

    def _page(self, base: str, signed_in: bool) -> _Kept:
        key = base, signed_in
        kept, now = self._kept.get(key), self._clock()
        if kept is not None and now < kept.rests_until:
            return kept
        model = self._predictions.model
        version = (self._site.version(), None if model is None else (model.key, model.record))
        if kept is not None and kept.version == version:
            return kept
        body = self._render(base, signed_in).encode()
        etag = f'"{hashlib.sha256(__version__.encode() + body).hexdigest()[:32]}"'
        rest_s = min(_MAX_REST_S, _REST_FACTOR * (self._clock() - now))
        kept = self._kept[key] = _Kept(version, etag, body, self._clock() + rest_s)
        return kept

    def _render(self, base: str, signed_in: bool) -> str:
        info, model = self._site.info(), self._predictions.model
        return render(
            "home.html",
            base,
            LIVE_S,
            page=describe(info, self._plan, may_pin=self._may_pin),
            charts=self._charts(info),
            form=self.form(),
            has_model=model is not None,
            signed_in=signed_in,
            now=time.time(),
        )

    def _charts(self, info: dict[str, Any]) -> dict[str, Any]:
        """Return the charts; those whose data have not changed are drawn only once."""
        model = self._predictions.model
        offset = None if model is None else model.offset
        confusion = [tuple(cell) for cell in info["confusion"]]
        made: dict[str, tuple[Any, Callable[[], Any]]] = {
            "accuracy": (info["history"], lambda: figures.accuracy_chart(info["history"])),
            "verdict": (info["verdict"], lambda: figures.verdict_chart(info["verdict"])),
            "confusion": (confusion, lambda: figures.confusion_chart(confusion)),
            "calibration": (
                (info["calibration"], info["calibration_error"]),
                lambda: figures.calibration_chart(info["calibration"], info["calibration_error"]),
            ),
            "offset": (None if model is None else model.key, lambda: figures.offset_chart(offset)),
            "mix": (info["classes_here"], lambda: figures.class_mix_chart(info["classes_here"])),
        }
        found = {}
        for name, (data, draw) in made.items():
            kept = self._figures.get(name)
            if kept is None or kept[0] != data:
                kept = self._figures[name] = data, _drawn(draw())
            found[name] = kept[1]
        return found


def _drawn(found: Any) -> Any:
    """Return a chart as HTML, with its note if it has one."""
    if found is None:
        return None
    chart, note = found if isinstance(found, tuple) else (found, "")
    return {"html": Markup(chart.__html__()), "note": note}  # noqa: S704 - charts escape their texts
