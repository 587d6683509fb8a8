"""Entry points of the three programs, which refuse to start with another project's packages.

`shared`, `server`, `client_agent` and `lab` are common names: a folder on PYTHONPATH or another distribution may
contain one too, and Python imports whichever it finds first. This module's name is unique, and it imports nothing else
of the project before checking where those packages come from.
"""

import importlib
import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path
from typing import NoReturn

_HOME = Path(__file__).resolve().parent
_PACKAGES = {
    "server": ("shared", "server"),
    "client_agent": ("shared", "client_agent"),
    "lab": ("shared", "server", "client_agent", "lab"),
}


def server() -> NoReturn:
    """Run `distrans-server`."""
    _run("server")


def agent() -> NoReturn:
    """Run `distrans-agent`."""
    _run("client_agent")


def lab() -> NoReturn:
    """Run `distrans-lab`."""
    _run("lab")


def _run(program: str) -> NoReturn:
    for package in _PACKAGES[program]:
        _check_origin(package)
    try:
        main = importlib.import_module(f"{program}.__main__").main
    except ImportError as error:
        _explain(error)
        raise
    sys.exit(main())


def _check_origin(package: str) -> None:
    """Exit if `import package` would not load the package next to this file."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:  # without __init__.py, a folder is a namespace package without an origin
        sys.exit(f"error: The module {package!r} is missing from {_HOME}. Reinstall DisTrans.")
    origin = Path(spec.origin)
    if origin.resolve() == _HOME / package / "__init__.py":
        return
    found = origin.parent if origin.name == "__init__.py" else origin
    sys.exit(
        f"error: The module {package!r} was loaded from {found}, not from DisTrans ({_HOME / package}). "
        f"{_next_step(package, found.parent)}"
    )


def _next_step(package: str, folder: Path) -> str:
    if folder in [Path(entry).absolute() for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]:
        return f"Remove {folder} from PYTHONPATH; use DISTRANS_PLUGINS for folders with your own backbones."
    if str(folder) == sys.path[0]:  # the current folder, by `python -m`
        return "Start DisTrans from another folder."
    return f"{_owners(package) or folder} and DisTrans need separate virtual environments."


def _explain(error: ImportError) -> None:
    """Exit if another distribution wrote its files over one of our packages."""
    package = (error.name or "").partition(".")[0]
    owners = _owners(package) if package in _PACKAGES["lab"] else ""
    if owners:
        sys.exit(
            f"error: {error}. {owners} also installs a package named {package!r}. "
            f"Reinstall DisTrans in a separate virtual environment."
        )


def _owners(package: str) -> str:
    names = importlib.metadata.packages_distributions().get(package, [])
    return ", ".join(sorted(set(names) - {"distrans"}))
