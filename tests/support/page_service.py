"""The agent's web service with a page whose contents a test chooses."""

import re
from collections.abc import Callable
from typing import Any

import httpx
from support.agent_service import Service, bundle

from client_agent.errors import StateError
from client_agent.settings import ServeOptions
from client_agent.web.site import Site

HTML = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
NOTHING_YET: dict[str, Any] = {
    "agent": {
        "name": "north",
        "version": "1",
        "device": "cpu",
        "phase": "waiting",
        "doing": "waiting for work",
        "round": None,
        "progress": None,
        "trouble": "",
        "troubles": [],
        "ended": None,
        "outcome": "",
    },
    "federation": "pets",
    "coordinator": {"address": "https://coordinator.example", "reachable": True, "problem": ""},
    "method": "distrans",
    "serving": None,
    "serving_since": None,
    "held_out": None,
    "verdict": None,
    "verdict_so_far": "",
    "scores": None,
    "calibration_error": None,
    "calibration": [],
    "classes": [],
    "confusion": [],
    "pinned": None,
    "kept_models": [2, 3],
    "classes_here": {"training": None, "predicted": {}, "distance": None, "drifts": False},
    "history": [],
}


class PageService(Service):
    """Counts how often the page was made, and notes the pins."""

    def __init__(self, **options: Any) -> None:
        self.options = ServeOptions(**options)
        self.info, self.version, self.made = dict(NOTHING_YET), 0, 0
        self.pins: list[int | None] = []
        self.read_version: Callable[[], int] = lambda: self.version
        site = Site(info=self._info, version=lambda: self.read_version(), pin=self._pin)
        super().__init__(self.options, bundle(), site)
        self.http.follow_redirects = False

    def _info(self) -> dict[str, Any]:
        self.made += 1
        return self.info

    def _pin(self, number: int | None) -> None:
        if number not in (None, 2, 3):
            raise StateError(f"Model {number} is not kept here.", next_step="Kept: 2, 3.")
        self.pins.append(number)

    def page(self, **headers: str) -> httpx.Response:
        return self.http.get("/", headers=HTML | headers)

    def csrf(self, path: str) -> str:
        found = re.search(r'name="csrf" value="(\w+)"', self.http.get(path).text)
        assert found is not None
        return found[1]
