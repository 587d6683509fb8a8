"""axe-core's findings about a page: https://github.com/dequelabs/axe-core."""

import os
from pathlib import Path

import pytest
from playwright.sync_api import Page

_BAD = ("serious", "critical")


def axe_script() -> str:
    """Return axe-core as JavaScript. Without it, skip the test, or fail it in CI."""
    folders = (Path(folder).parent for folder in os.environ["PATH"].split(os.pathsep) if folder.endswith(".bin"))
    found = next((file for folder in folders if (file := folder / "axe-core" / "axe.min.js").is_file()), None)
    if found is None:
        message = "axe-core is not installed"
        pytest.fail(message) if os.environ.get("CI") == "true" else pytest.skip(message)
    return found.read_text()


def findings(page: Page, script: str) -> list[str]:
    """Return what is seriously wrong with the page for people with disabilities."""
    page.evaluate(script)  # not a script element, which the policy would block
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{one['id']}: {one['help']}: {node['html'][:200]}: {node['failureSummary'][:200]}"
        for one in found["violations"]
        if one["impact"] in _BAD
        for node in one["nodes"][:3]
    ]
