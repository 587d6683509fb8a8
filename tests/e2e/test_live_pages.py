"""The script that keeps pages up to date, in a real browser: what the reader is doing stays."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from support import gallery
from support.sockets import serving
from support.web_pages import browser_page

from shared.http import page_files
from shared.http.security_headers import SecurityHeaders
from shared.pages.environment import environment

PAGE = """{% extends "shared/layout.html" %}{% import "shared/macros.html" as ui %}
{% block title %}{{ number }}{% endblock %}
{% block main %}{% call ui.card("Round", "round") %}<p class="number">Round {{ number }}</p><p id="same">same text</p>
<input id="typed" value=""><details data-keep="more"><summary>More</summary><p>Details of {{ number }}</p></details>
<ul>{% for one in range(number, number + 3) %}<li data-key="{{ one }}">{{ one }}</li>{% endfor %}</ul>
{{ ui.action("form", "Pause") }}{% endcall %}{% endblock %}"""
FORM = """{% extends "shared/layout.html" %}{% import "shared/macros.html" as ui %}{% block title %}Pause{% endblock %}
{% block main %}{{ ui.confirm("Pause?", "Really.", "/form", "Pause it", "x", "/") }}{% endblock %}"""


class Changing:
    """A page whose number the test changes, and which counts how often it was asked and rendered."""

    def __init__(self, folder: Path) -> None:
        (folder / "page.html").write_text(PAGE)
        (folder / "form.html").write_text(FORM)
        self._templates = environment(folder)
        self.number, self.asked, self.rendered, self.fails = 1, 0, 0, False
        inner = Starlette(routes=[Route("/", self.page), Route("/form", self.form)])
        page_files.install(inner)
        self.app = SecurityHeaders(inner)

    def page(self, request: Request) -> Response:
        self.asked += 1
        if self.fails:
            return Response(status_code=204)  # not what the script expects, but nothing a console would report
        etag = f'"{self.number}"'
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers={"ETag": etag})
        self.rendered += 1
        return self._render("page.html", {"ETag": etag})

    def form(self, _request: Request) -> Response:
        return self._render("form.html", {})

    def _render(self, name: str, headers: dict[str, str]) -> Response:
        values = {"base": "", "program": "test", "live_s": 0.05, "number": self.number}
        return HTMLResponse(self._templates.get_template(name).render(values), headers=headers)


@contextmanager
def opened(folder: Path) -> Iterator[tuple[Changing, Page]]:
    changing = Changing(folder)
    with serving(changing.app) as url, browser_page() as page:
        page.goto(url)
        yield changing, page


def wait_for_number(page: Page, number: int) -> None:
    expect(page.locator(".number")).to_have_text(f"Round {number}")


def test_what_the_reader_is_doing_survives_an_update(tmp_path: Path) -> None:
    with opened(tmp_path) as (changing, page):
        page.click("summary")
        page.fill("#typed", "half a sent")
        page.evaluate("document.getSelection().selectAllChildren(document.getElementById('same'))")
        page.evaluate("document.getElementById('typed').focus({preventScroll: true})")
        page.evaluate("window.before = document.querySelector('li[data-key=\"3\"]')")
        changing.number = 2
        wait_for_number(page, 2)
        assert page.input_value("#typed") == "half a sent"
        assert page.evaluate("document.activeElement.id") == "typed"
        assert page.is_visible("text=Details of 2")
        assert page.evaluate("window.before === document.querySelector('li[data-key=\"3\"]')")
        assert page.locator("li").all_text_contents() == ["2", "3", "4"]
        assert page.title() == "2 · DisTrans"


def test_selected_text_changes_only_once_it_is_no_longer_selected(tmp_path: Path) -> None:
    with opened(tmp_path) as (changing, page):
        page.evaluate("document.getSelection().selectAllChildren(document.querySelector('.number'))")
        changing.number = 2
        expect(page).to_have_title("2 · DisTrans")
        assert page.inner_text(".number") == "Round 1"
        page.evaluate("document.getSelection().removeAllRanges()")
        wait_for_number(page, 2)


def test_an_unchanged_page_is_asked_for_but_not_rendered_again(tmp_path: Path) -> None:
    with opened(tmp_path) as (changing, page):
        for _ in range(6):
            page.wait_for_event("response")
        assert changing.asked > 5
        assert changing.rendered == 2  # for the reader, and for the script, which then knows its ETag


def test_forms_open_in_a_dialog_that_stays_open_while_the_page_changes(tmp_path: Path) -> None:
    with opened(tmp_path) as (changing, page):
        page.click("text=Pause")
        page.wait_for_selector("dialog[open] >> text=Pause it")
        changing.number = 2
        wait_for_number(page, 2)
        assert page.is_visible("dialog >> text=Pause it")
        page.click("text=Keep as it is")
        assert not page.is_visible("dialog")
        assert page.evaluate("document.activeElement.textContent") == "Pause"


def test_a_lost_connection_is_announced_until_it_is_back(tmp_path: Path) -> None:
    with opened(tmp_path) as (changing, page):
        changing.fails = True
        page.wait_for_selector("#connection >> text=Connection lost")
        changing.fails = False
        page.wait_for_selector("#connection", state="hidden")


def test_a_hidden_page_does_not_ask(tmp_path: Path) -> None:
    with opened(tmp_path) as (changing, page):
        hide = "hidden => {Object.defineProperty(document, 'hidden', {value: hidden, configurable: true}); "
        page.evaluate(hide + "document.dispatchEvent(new Event('visibilitychange'))}", True)
        page.evaluate("fetch('/form')")  # a question under way ends before this one is answered
        changing.number = 2
        asked = changing.asked
        page.evaluate("new Promise(done => setTimeout(done, 300))")
        assert changing.asked <= asked + 1
        page.evaluate(hide + "document.dispatchEvent(new Event('visibilitychange'))}", False)
        wait_for_number(page, 2)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 820, 1440])
def test_every_chart_fits_every_screen_and_breaks_no_policy(width: int, scheme: str) -> None:
    with serving(gallery.app()) as url, browser_page() as page:
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        page.set_viewport_size({"width": width, "height": 900})
        page.goto(url)
        assert page.locator("svg[role=img]").count() > 9
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.click("summary >> nth=0")
        assert page.is_visible("figure table >> nth=0")
