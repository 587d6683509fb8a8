"""The page of the API in a real browser, under the coordinator's Content-Security-Policy."""

from pathlib import Path
from urllib.parse import urlsplit

from playwright.sync_api import sync_playwright
from support.coordinator import running
from support.programs import needs


def test_a_browser_shows_every_call_and_asks_no_other_host(tmp_path: Path) -> None:
    chromium = needs("chromium")
    asked: list[str] = []
    complaints: list[str] = []
    with running(f"sqlite:///{tmp_path}/distrans.db", tmp_path) as coordinator, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])  # CI runs as root
        page = browser.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: complaints.append(message.text))  # also what the policy refused
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(f"{coordinator.url}/docs")
        page.wait_for_selector(".opblock")
        document = coordinator.http.get("/openapi.json").json()
        calls = [call for methods in document["paths"].values() for call in methods.values()]
        assert page.locator(".opblock").count() == sum(len(call["tags"]) for call in calls)
        page.click(".opblock-summary-path >> nth=0")
        page.wait_for_selector(".opblock-body")
        browser.close()
    assert {urlsplit(url).netloc for url in asked} == {urlsplit(coordinator.url).netloc}
    assert complaints == []
