"""Files that a bench writes at its end, checked before it starts."""

import importlib.util
import os
import platform
from pathlib import Path

from shared.contract.errors import DistransError

_FORMATS = (".png", ".svg", ".pdf")


def check_outputs(json_file: Path | None = None, plot: Path | None = None) -> None:
    """Raise if a file could not be written at the end, or if nothing could draw the plot."""
    for file in (json_file, plot):
        if file is not None and not file.absolute().parent.is_dir():
            raise DistransError(f"The folder of {file} does not exist.", next_step="Create it, or use another folder.")
    if plot is None:
        return
    if plot.suffix not in _FORMATS:
        raise DistransError(f"--plot {plot} has no known format.", next_step=f"End its name in {', '.join(_FORMATS)}.")
    if importlib.util.find_spec("matplotlib") is None:
        raise DistransError("--plot needs matplotlib.", next_step="Run: pip install 'distrans[figures]'")


def describe_machine() -> dict[str, str | int | None]:
    """Return what the measurements of a file belong to."""
    return {"platform": platform.platform(), "python": platform.python_version(), "cores": os.cpu_count()}
