"""axe-core, the accessibility checker, on a page in a browser."""

import os
from pathlib import Path

import pytest
from playwright.sync_api import Page

_SERIOUS = ("serious", "critical")


def serious_findings(page: Page) -> list[str]:
    """Return what is wrong with the page; skip the test if axe-core is not installed, or fail it in CI."""
    page.evaluate(_axe())  # not a script element, which the page's policy would refuse
    found = page.evaluate("axe.run()")["violations"]
    return [
        f"{one['id']}: {one['help']}: {node['html'][:200]}"
        for one in found
        if one["impact"] in _SERIOUS
        for node in one["nodes"]
    ]


def _axe() -> str:
    for folder in os.environ["PATH"].split(os.pathsep):
        file = Path(folder).parent / "axe-core" / "axe.min.js"
        if file.is_file():
            return file.read_text()
    if os.environ.get("CI") == "true":
        pytest.fail("axe-core is not installed")
    pytest.skip("axe-core is not installed")
