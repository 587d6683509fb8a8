"""Programs that pip cannot bring."""

import os
import shutil

import pytest


def needs(*alternatives: str) -> str:
    """Where the first of them is. With none the test is skipped, or fails where everything has to be there."""
    places = (shutil.which(program, path=f"{os.environ['PATH']}{os.pathsep}/usr/sbin") for program in alternatives)
    found = next(filter(None, places), None)
    if found is None:
        message = f"{' or '.join(alternatives)} is not installed"
        pytest.fail(message) if os.environ.get("CI") == "true" else pytest.skip(message)
    return found
