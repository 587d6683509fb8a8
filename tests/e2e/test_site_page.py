"""The agent's page in a real browser: it keeps itself up to date, answers images, pins, and asks for the token."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect
from support.accessibility import serious_findings
from support.agent_service import image
from support.agent_sites import App
from support.page_service import NOTHING_YET, PageService
from support.programs import needs
from support.site_pages import finished_site, try_images
from support.web_pages import browser_page

from client_agent.web import serve


@contextmanager
def opened(agent: PageService, path: str = "/") -> Iterator[Page]:
    needs("chromium")
    with serve.web_server(agent.app, agent.options) as port, browser_page() as page:
        page.goto(f"http://127.0.0.1:{port}{path}")
        yield page
    agent.queue.stop()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[App, Path]]:
    needs("chromium")
    with finished_site(tmp_path_factory.mktemp("site"), rounds=2) as (app, data, _):
        yield app, data


def test_a_change_appears_without_reloading_and_keeps_what_was_tried(tmp_path: Path) -> None:
    agent = PageService(port=0)
    (tmp_path / "scan.png").write_bytes(image(1))
    with opened(agent) as page:
        page.set_input_files("#images", tmp_path / "scan.png")
        page.wait_for_selector(".answer canvas")
        page.evaluate("window.loaded = 'once'")
        agent.info["agent"] = NOTHING_YET["agent"] | {
            "phase": "training",
            "doing": "training round 7",
            "round": 7,
            "progress": {"batch": 30, "batches": 120},
        }
        agent.version += 1
        expect(page.locator("#headline .badge").first).to_have_text("training round 7", timeout=30_000)
        expect(page.locator("#now progress")).to_have_attribute("value", "30")
        assert page.evaluate("window.loaded") == "once"
        assert page.is_visible(".answer canvas")


def test_images_are_answered_with_bars_next_to_their_pictures(tmp_path: Path) -> None:
    agent = PageService(port=0, allow_offset_override=True)
    files = [tmp_path / "first.png", tmp_path / "second.jpg"]
    files[0].write_bytes(image(1))
    files[1].write_bytes(image(2, "JPEG"))
    with opened(agent) as page:
        page.set_input_files("#images", files)
        page.wait_for_selector(".answer >> nth=1 >> canvas")
        assert page.locator(".answer .preview").all_inner_texts() == ["first.png", "second.jpg"]
        for place in range(2):
            answer = page.locator(".answer").nth(place)
            assert answer.locator(".bar.c1").count() > answer.locator(".chart-title").count()
            assert "without the offset" in answer.inner_text()
        dropped = """async () => {
            const files = new DataTransfer();
            files.items.add(document.querySelector('#images').files[0] ?? new File([window.bytes], 'dropped.png'));
            document.querySelector('.drop').dispatchEvent(
                new DragEvent('drop', {dataTransfer: files, bubbles: true, cancelable: true}));
        }"""
        page.evaluate("window.bytes = Uint8Array.from(" + str(list(image(3))) + ")")
        page.evaluate(dropped)
        expect(page.locator(".answer")).to_have_count(1)
        expect(page.locator(".answer .preview")).to_have_text("dropped.png")
    assert agent.queue.predicted.total() == 3


def test_images_can_be_tried_without_javascript(tmp_path: Path) -> None:
    (tmp_path / "scan.png").write_bytes(image(1))
    agent = PageService(port=0)
    with opened(agent) as page:
        assert page.context.browser is not None
        plain = page.context.browser.new_context(java_script_enabled=False).new_page()
        plain.goto(page.url)
        plain.set_input_files("#images", tmp_path / "scan.png")
        plain.click("text=Classify")
        assert plain.url.endswith("/classify")
        assert plain.locator(".answer svg").count() == 1
        plain.click("text=Back to the agent")
        assert plain.inner_text("h1").startswith("north")
        plain.click("tr[data-key=model-3] >> text=Pin")
        plain.click("button:has-text('Pin model 3')")
        assert plain.inner_text("h1").startswith("north")
    assert agent.pins == [3]


def test_people_sign_in_with_the_token_and_out() -> None:
    agent = PageService(port=0, token="let-me-in")
    with opened(agent) as page:
        assert page.url.endswith("/sign-in")
        page.fill("#token", "guess")
        page.click("button:has-text('Sign in')")
        assert "This is not the agent's predict token." in page.inner_text(".field.invalid")
        page.fill("#token", "let-me-in")
        page.click("button:has-text('Sign in')")
        assert page.inner_text("h1").startswith("north")
        (cookie,) = page.context.cookies()
        assert (cookie["httpOnly"], cookie["sameSite"], cookie["secure"]) == (True, "Strict", False)
        page.click("text=Sign out")
        assert page.url.endswith("/sign-in")
        assert page.context.cookies() == []


def test_a_reader_whose_session_has_ended_is_told() -> None:
    agent = PageService(port=0, token="let-me-in")
    with opened(agent) as page:
        page.fill("#token", "let-me-in")
        page.click("button:has-text('Sign in')")
        page.context.clear_cookies()
        expect(page.locator("#connection")).to_contain_text("You have been signed out.", timeout=30_000)
        page.click("text=Sign in again")
        assert page.url.endswith("/sign-in")


def test_a_model_is_pinned_in_a_dialog_and_unpinned(site: tuple[App, Path]) -> None:
    app, _ = site
    with browser_page() as page:
        page.goto(str(app.http.base_url))
        page.click("tr[data-key=model-1] >> text=Pin")
        page.click("dialog >> button:has-text('Pin model 1')")
        expect(page.locator("#serving .fact").first).to_contain_text("pinned", timeout=30_000)
        assert app.info()["pinned"] == 1
        app.wait_until_served(1)
        page.click("tr[data-key=model-1] >> text=Unpin")
        page.click("dialog >> button:has-text('Unpin')")
        app.wait_until_served(2)
        expect(page.locator("#serving .fact").first).not_to_contain_text("pinned", timeout=30_000)


def test_the_page_of_a_real_site_shows_everything(site: tuple[App, Path]) -> None:
    app, data = site
    try_images(app, data, 40)
    with browser_page() as page:
        page.goto(str(app.http.base_url))
        charts = page.locator("main svg[role=img]").evaluate_all(
            "all => all.map(one => one.getAttribute('aria-label'))"
        )
        kinds = sorted(text.partition(":")[0] for text in charts)
        assert kinds == [
            "Bar chart",
            "Calibration curve",
            "Confusion matrix",
            "Interval chart",
            "Line chart",
            "Picture of an offset",
        ]
        assert "The federation has finished" in page.inner_text("#alerts")
        assert page.inner_text("#mix .badge") == "drifts"  # only zeros were asked about
        assert page.locator("#classes tbody tr").count() == 4
        assert page.locator("#models tbody tr").count() == 3


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_page_has_a_serious_accessibility_finding(site: tuple[App, Path], scheme: str) -> None:
    app, data = site
    with browser_page() as page:
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        for path in ("/", "/pin/1", "/sign-in"):
            page.goto(f"{app.http.base_url}{path}")
            if path == "/":
                page.set_input_files("#images", next(data.rglob("*.png")))
                page.wait_for_selector(".answer canvas")
            assert serious_findings(page) == []


@pytest.mark.parametrize("width", [320, 820, 1440])
def test_the_page_fits_every_screen(site: tuple[App, Path], width: int) -> None:
    app, data = site
    with browser_page() as page:
        page.set_viewport_size({"width": width, "height": 900})
        page.goto(str(app.http.base_url))
        page.set_input_files("#images", next(data.rglob("*.png")))
        page.wait_for_selector(".answer canvas")
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_an_agent_without_a_model_names_the_next_step() -> None:
    agent = PageService(port=0)
    agent.queue.model = None
    agent.info["kept_models"] = []
    with opened(agent) as page:
        for card in ("serving", "models"):
            assert "distrans-server federation start pets" in page.inner_text(f"#{card}")
        for card in ("verdict", "accuracy", "calibration", "confusion", "classes"):
            assert "Nothing measured yet" in page.inner_text(f"#{card}")
        assert serious_findings(page) == []
