"""Programs that receive Ctrl-C at a chosen point of their start, where a library swallows the KeyboardInterrupt.

Libraries do that while they are being imported; hitting such a moment from outside would be a matter of luck.
"""

import inspect
import os
import signal
import sys
from contextlib import suppress
from types import FrameType

VARIABLE = "INTERRUPT_AT"


def install() -> None:
    """Send this process SIGINT when it first calls the function or runs the file named in INTERRUPT_AT."""
    point = os.environ.pop(VARIABLE, None)
    if point is None:
        return

    def look(frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if event == "call" and (code.co_qualname == point or code.co_filename.endswith(point)):
            sys.setprofile(None)
            with suppress(BaseException):
                signal.raise_signal(signal.SIGINT)

    sys.setprofile(look)


def program(package: str) -> list[str]:
    """Return a command that stands in for the console script of a package."""
    lines = "import os, signal, sys\nfrom contextlib import suppress\nfrom types import FrameType\n"
    call = f"install()\nfrom {package}.__main__ import main\nmain()\n"
    return ["python", "-c", f"{lines}VARIABLE = {VARIABLE!r}\n{inspect.getsource(install)}\n{call}"]
