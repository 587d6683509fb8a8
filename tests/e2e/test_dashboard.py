"""The coordinator's dashboard in a real browser, under its Content-Security-Policy."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Page, expect
from support.api import SocketApi
from support.axe import axe_script, findings
from support.busy_coordinator import Busy, busy
from support.coordinator import ADMIN_TOKEN
from support.databases import migrate
from support.signed_in import VIEWER_TOKEN
from support.web_pages import browser_page

WITHIN_MS = 60_000  # an open page notices a change at the latest when it stops resting


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Busy]:
    url = f"sqlite:///{tmp_path_factory.mktemp('browser')}/distrans.db"
    migrate(url)
    with SocketApi(url, viewer_token=VIEWER_TOKEN, requests_per_s=0) as api:
        yield busy(api, rounds=3)


@contextmanager
def signed_in(scene: Busy, token: str = ADMIN_TOKEN, path: str = "/", expected: str = "") -> Iterator[Page]:
    with browser_page(expected) as page:
        page.goto(scene.api.url + path)
        page.fill("input[name=token]", token)
        page.click("button >> text=Sign in")
        page.wait_for_selector("text=Sign out")
        yield page


def test_signing_in_leads_to_the_page_that_was_asked_for_and_out_again(scene: Busy) -> None:
    with signed_in(scene, path="/federations/lung-nodules") as page:
        expect(page.locator("h1")).to_have_text("lung-nodules")
        page.click("text=Sign out")
        expect(page.locator("h1")).to_have_text("Sign in")
        page.goto(f"{scene.api.url}/federations/lung-nodules")
        expect(page.locator("h1")).to_have_text("Sign in")


def test_a_wrong_token_is_explained_at_the_field(scene: Busy) -> None:
    with browser_page(expected=r"status of 401") as page:
        page.goto(f"{scene.api.url}/sign-in")
        page.fill("input[name=token]", "not-the-token")
        page.click("button >> text=Sign in")
        expect(page.locator("#token-error")).to_contain_text("not a token of this coordinator")
        assert page.get_attribute("#token", "aria-describedby") == "token-error"


def test_viewers_find_nothing_to_act_with(scene: Busy) -> None:
    with signed_in(scene, VIEWER_TOKEN, "/federations/lung-nodules") as page:
        expect(page.locator("h1")).to_have_text("lung-nodules")
        assert page.locator("a[data-dialog]").count() == 0
        assert (
            page.locator("main button:visible, main form").all_text_contents()
            == ["Copy"] * page.locator("main button:visible").count()
        )


def test_the_round_s_number_changes_without_reloading(scene: Busy) -> None:
    with signed_in(scene, path="/federations/lung-nodules") as page:
        expect(page.locator("#head")).to_contain_text("round 4 of 40")
        page.evaluate("window.notReloaded = true")
        page.locator("#sites").scroll_into_view_if_needed()
        before = page.evaluate("window.scrollY")
        for index in (4, 5):
            scene.upload(index, 4)
        expect(page.locator("#head")).to_contain_text("round 5 of 40", timeout=WITHIN_MS)
        expect(page.locator("#activity")).to_contain_text("Round 4 aggregated · 6 of 6 sites")
        assert page.evaluate("window.notReloaded")
        assert page.evaluate("window.scrollY") == before


def test_pausing_and_resuming_in_a_dialog(scene: Busy) -> None:
    with signed_in(scene, path="/federations/lung-nodules") as page:
        page.click("#state a:has-text('Pause')")
        page.fill("dialog input[name=reason]", "maintenance")
        page.click("dialog >> button:has-text('Pause')")
        expect(page.locator("#head")).to_contain_text("paused")
        expect(page.locator("#state")).to_contain_text("maintenance")
        page.click("#state a:has-text('Resume')")
        page.click("dialog >> button:has-text('Resume')")
        expect(page.locator("#head")).to_contain_text("running")


def test_creating_a_federation_with_an_error_and_then_correctly(scene: Busy) -> None:
    with signed_in(scene, path="/new", expected="status of 422") as page:
        page.fill("[name=name]", "from-the-browser")
        page.fill("[name=classes]", "cat")
        page.click("text=Create the federation")
        expect(page.locator("#classes-error")).to_contain_text("must have at least 2")
        assert page.input_value("[name=name]") == "from-the-browser"
        page.fill("[name=classes]", "cat\ndog")
        page.fill("[name='image.height']", "14")
        page.fill("[name='image.width']", "14")
        page.click("text=Create the federation")
        expect(page.locator("h1")).to_have_text("from-the-browser")
        expect(page.locator("#sites")).to_contain_text("distrans-server invite create from-the-browser")


def test_an_invite_s_command_is_shown_to_copy(scene: Busy) -> None:
    with signed_in(scene, path="/federations/lung-nodules") as page:
        page.click("#state a:has-text('Invite a site')")
        page.fill("dialog input[name=note]", "east")
        page.click("dialog >> button:has-text('Create the invite')")
        expect(page.locator("h1")).to_have_text("Invite to lung-nodules")
        command = page.locator("code").last.inner_text()
        assert re.fullmatch(rf"DISTRANS_INVITE=dti_\S+ distrans-agent join --server {scene.api.url} .*", command)


def test_pages_work_without_javascript(scene: Busy) -> None:
    with browser_page(java_script_enabled=False) as page:
        page.goto(scene.api.url)
        page.fill("input[name=token]", ADMIN_TOKEN)
        page.click("button >> text=Sign in")
        page.click("text=lung-nodules")
        page.click("#state a:has-text('Pause')")
        page.click("button:has-text('Pause')")
        expect(page.locator("#head")).to_contain_text("paused")
        page.click("#state a:has-text('Resume')")
        page.click("button:has-text('Resume')")
        expect(page.locator("#head")).to_contain_text("running")


@pytest.mark.parametrize("width", [390, 820, 1440])
def test_no_page_is_wider_than_the_screen(scene: Busy, width: int) -> None:
    with signed_in(scene) as page:
        page.set_viewport_size({"width": width, "height": 900})
        for path in ("/", "/federations/lung-nodules", "/audit", "/new", "/federations/lung-nodules/rollback"):
            page.goto(scene.api.url + path)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, path


def test_the_keyboard_reaches_the_content_and_the_controls(scene: Busy) -> None:
    with signed_in(scene, path="/federations/lung-nodules") as page:
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
        page.focus("#state a[data-dialog]")
        page.keyboard.press("Enter")
        page.wait_for_selector("dialog[open]")
        page.keyboard.press("Escape")
        assert not page.is_visible("dialog")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(scene: Busy, scheme: Any) -> None:
    script = axe_script()
    with signed_in(scene) as page:
        page.emulate_media(color_scheme=scheme)
        for path in ("/", "/federations/lung-nodules", "/audit", "/new", "/federations/lung-nodules/invite"):
            page.goto(scene.api.url + path)
            assert findings(page, script) == [], path
        page.click("text=Sign out")
        assert findings(page, script) == []
