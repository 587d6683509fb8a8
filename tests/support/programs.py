"""Programs that pip cannot install."""

import os
import shutil

import pytest


def needs(*alternatives: str) -> str:
    """Return the path of the first one installed. If none is, skip the test, or fail it in CI."""
    places = (shutil.which(program, path=f"{os.environ['PATH']}{os.pathsep}/usr/sbin") for program in alternatives)
    found = next(filter(None, places), None)
    if found is None:
        message = f"{' or '.join(alternatives)} is not installed"
        pytest.fail(message) if os.environ.get("CI") == "true" else pytest.skip(message)
    return found
