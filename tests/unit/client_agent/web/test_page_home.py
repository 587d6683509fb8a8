"""What the page costs while somebody looks."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from support.agent_service import PLAN
from support.page_service import NOTHING_YET

from client_agent.serving.queue import PredictionQueue
from client_agent.settings import ServeOptions
from client_agent.web.pages.home import HomePage
from client_agent.web.site import Site


@dataclass
class Times:
    """A clock that rendering advances."""

    now: float = 0.0
    cost_s: float = 0.02
    made: int = 0
    version: int = 0

    def __call__(self) -> float:
        return self.now

    def info(self) -> dict[str, Any]:
        self.now += self.cost_s
        self.made += 1
        return NOTHING_YET | {"federation": f"pets {self.made}"}


@pytest.fixture
def queue() -> Iterator[PredictionQueue]:
    one = PredictionQueue(1, 1, 1)
    yield one
    one.stop()


def make(times: Times, queue: PredictionQueue) -> HomePage:
    site = Site(info=times.info, version=lambda: times.version)
    return HomePage(PLAN, queue, ServeOptions(), site, may_pin=False, clock=times)


def test_rendering_takes_less_than_one_percent_of_the_time(queue: PredictionQueue) -> None:
    times = Times()
    page = make(times, queue)
    while times.now < 100:
        times.version += 1  # something changes all the time
        page.answer("", None, False)
        times.now += 0.1
    assert times.made > 10
    assert times.made * times.cost_s < 1.0


def test_a_reader_who_changed_something_sees_it_at_once(queue: PredictionQueue) -> None:
    times = Times()
    page = make(times, queue)
    first = page.answer("", None, False)
    times.version += 1
    assert page.answer("", first.headers["etag"], False).status_code == 304
    page.expire()
    assert page.answer("", first.headers["etag"], False).status_code == 200


def test_a_page_that_was_made_again_without_a_difference_is_not_sent_again(queue: PredictionQueue) -> None:
    times = Times()
    site = Site(info=lambda: NOTHING_YET, version=lambda: times.version)
    page = HomePage(PLAN, queue, ServeOptions(), site, may_pin=False, clock=times)
    etag = page.answer("", None, False).headers["etag"]
    times.version, times.now = 1, 1000.0
    assert page.answer("", etag, False).status_code == 304


def test_the_button_to_sign_out_is_for_those_who_signed_in(queue: PredictionQueue) -> None:
    page = make(Times(), queue)
    pages = {signed_in: bytes(page.answer("", None, signed_in).body).decode() for signed_in in (True, False)}
    assert ("Sign out" in pages[True], "Sign out" in pages[False]) == (True, False)
