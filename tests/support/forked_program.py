"""What runs in a forked process; imports little, as every such process imports it anew."""

import importlib
import os
import sys
from multiprocessing.connection import Connection


def run_program(package: str, arguments: list[str], output: Connection) -> None:
    """Run a program of this project as its console script does, with its output into a pipe."""
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    output.close()
    os.environ["NO_PROXY"] = "*"
    sys.argv = [package, *arguments]
    importlib.import_module(f"{package}.__main__").main()
