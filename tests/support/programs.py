"""Programs that pip cannot bring."""

import os
import shutil

import pytest


def needs(program: str) -> str:
    """Where it is. Without it the test is skipped, or fails where everything has to be there."""
    found = shutil.which(program, path=f"{os.environ['PATH']}{os.pathsep}/usr/sbin")
    if found is None:
        message = f"{program} is not installed"
        pytest.fail(message) if os.environ.get("CI") == "true" else pytest.skip(message)
    return found
