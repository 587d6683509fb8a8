"""The API docs of both web services in a real browser, under their Content-Security-Policy."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
from playwright.sync_api import Page, sync_playwright
from support.agent_service import Service, bundle
from support.coordinator import running
from support.programs import needs

from client_agent.settings import ServeOptions
from client_agent.web import serve


@contextmanager
def browser_page(chromium: str) -> Iterator[Page]:
    with sync_playwright() as playwright:
        options = ["--no-sandbox", "--host-resolver-rules=MAP evil.example 127.0.0.1"]  # CI runs as root
        browser = playwright.chromium.launch(executable_path=chromium, args=options)
        yield browser.new_page()
        browser.close()


def check_docs(page: Page, url: str) -> None:
    """Check that every call is shown, no other host is contacted, and the policy blocks nothing the page needs."""
    asked: list[str] = []
    complaints: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: complaints.append(message.text))  # includes what the policy blocked
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(f"{url}/docs")
    page.wait_for_selector(".opblock")
    document = httpx.get(f"{url}/openapi.json", trust_env=False).json()
    calls = [call for methods in document["paths"].values() for call in methods.values()]
    assert page.locator(".opblock").count() == sum(len(call.get("tags", ["default"])) for call in calls)
    page.click(".opblock-summary-path >> nth=0")
    page.wait_for_selector(".opblock-body")
    assert {urlsplit(address).netloc for address in asked} == {urlsplit(url).netloc}
    assert complaints == []


def test_the_docs_page_shows_every_call_and_contacts_no_other_host(tmp_path: Path) -> None:
    chromium = needs("chromium")
    with running(f"sqlite:///{tmp_path}/distrans.db", tmp_path) as coordinator, browser_page(chromium) as page:
        check_docs(page, coordinator.url)


def test_agents_docs_page_works_offline_and_only_under_its_own_host() -> None:
    chromium, options = needs("chromium"), ServeOptions(port=0)
    agent = Service(options, bundle())
    post = "async () => (await fetch('/predict', {method: 'POST', body: 'no image'})).status"
    with serve.web_server(agent.app, options) as port, browser_page(chromium) as page:
        check_docs(page, f"http://127.0.0.1:{port}")
        assert page.evaluate(post) == 415  # the page may call it; text is not an image
        rebound = page.goto(f"http://evil.example:{port}/info")
        assert rebound is not None
        assert rebound.status == 421
    agent.queue.stop()
