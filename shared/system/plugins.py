"""Functions that users write themselves and name as "package.module:function"."""

import importlib
import os
import sys
from pathlib import Path
from typing import Any

from shared.contract.errors import DistransError

VARIABLE = "DISTRANS_PLUGINS"
_OURS = ("client_agent", "distrans", "lab", "server", "shared")


def load_function(name: str, failure: type[DistransError], where: str) -> Any:
    """Import "package.module:function" from the installed packages, else from the folders in DISTRANS_PLUGINS.

    Raise `failure` with the reason, the folders searched and the next step; `where` says who must take it.
    """
    module_name, _, function_name = name.partition(":")
    folders = [str(Path(folder).absolute()) for folder in os.environ.get(VARIABLE, "").split(os.pathsep) if folder]
    # Last on the path, so they cannot shadow an installed package; never removed, as modules may import others later.
    sys.path += [folder for folder in folders if folder not in sys.path]
    importlib.invalidate_caches()  # a folder that was missing at an earlier attempt may exist now
    try:
        return getattr(importlib.import_module(module_name), function_name)
    except (Exception, SystemExit) as error:  # the user's module may raise anything while it is imported
        raise failure(
            f"{name!r} cannot be imported: {error}. "
            f"Searched the installed packages and {VARIABLE} ({os.pathsep.join(folders) or 'not set'}).",
            next_step=f"{_remedy(error, module_name)} {where}.",
        ) from error


def _remedy(error: BaseException, module_name: str) -> str:
    missing = (error.name or "") if isinstance(error, ImportError) else ""
    if (package := missing.partition(".")[0]) in _OURS:
        return f"DisTrans has a package named {package!r}: rename yours"
    if isinstance(error, ModuleNotFoundError):
        return f"Install {missing!r}, or add the folder that contains it to {VARIABLE},"
    return f"Fix {module_name!r}"
