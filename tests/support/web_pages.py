"""Pages in Debian's Chromium, which must not complain about anything."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright
from support.programs import needs


@contextmanager
def browser_page(expected: str = "", **options: Any) -> Iterator[Page]:
    """Open a page; fail if its console has had any message, which includes what the policy blocked.

    Messages that match `expected` are fine: browsers report each answer that is an error.
    """
    complaints: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=needs("chromium"), args=["--no-sandbox"]
        )  # CI runs as root
        page = browser.new_page(**options)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        yield page
        browser.close()
    unexpected = [one for one in complaints if not (expected and re.search(expected, one))]
    assert unexpected == []


def photograph(
    urls: Mapping[str, str],
    folder: Path,
    state: Path | None = None,
    prepare: Callable[[Page], None] = lambda _page: None,
) -> None:
    """Write screenshots of pages at three widths in both themes; `state` has the cookies of a session."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=needs("chromium"), args=["--no-sandbox"])
        for width in (390, 820, 1440):
            for scheme in ("light", "dark"):
                context = browser.new_context(
                    viewport={"width": width, "height": 900},
                    color_scheme="dark" if scheme == "dark" else "light",
                    storage_state=state,
                )
                page = context.new_page()
                for name, url in urls.items():
                    page.goto(url)
                    prepare(page)
                    page.screenshot(path=folder / f"{name}-{width}-{scheme}.png", full_page=True)
                context.close()
        browser.close()
