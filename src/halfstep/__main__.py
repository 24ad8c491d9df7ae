"""Runs the command line, as `halfstep` and as `python -m halfstep`.

Ctrl-C ends a command with one line and exit code 130 from the first import on. Python's own start-up, some 30 ms, is before
this file and ends with Python's traceback.
"""

import atexit
import os
import signal
import sys
from types import FrameType
from typing import NoReturn

_INTERRUPTED = 130
_signals: list[int] = []  # received by the handler below
_endings: list[int] = []  # the exit code, once the command has ended


def main() -> None:
    """Run the command line and exit with its code."""
    # Registered before anything else, so run after everything else.
    atexit.register(_exit)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # nohup and `&` in a script ignore it
        signal.signal(signal.SIGINT, _interrupt)
    try:
        from halfstep.cli import main as run

        run()
    except KeyboardInterrupt:
        _end()
    except Exception:
        if not _signals:
            raise
        _end()  # an import that Ctrl-C hit in C code can fail with another exception
    except SystemExit as end:
        if isinstance(end.code, int):
            _endings.append(end.code)
        raise


def _end() -> NoReturn:
    sys.stderr.write("halfstep: interrupted.\n")
    _endings.append(_INTERRUPTED)
    sys.exit(_INTERRUPTED)


def _interrupt(number: int, _frame: FrameType | None) -> None:
    _signals.append(number)
    raise KeyboardInterrupt


def _exit() -> None:
    """Exit at once with the code of the command.

    Python would first free every object one by one: 30 ms of the 240 that a check of one file takes. And after Ctrl-C it ends
    by the signal instead of with 130, if C code of an import had reported the interrupt.
    """
    if not _endings or (_endings[0] != _INTERRUPTED and "torch" in sys.modules):
        return  # libraries of torch may have work to end
    try:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except (AttributeError, OSError, ValueError):
        return  # Python reports a stream that cannot be written, and closes the others
    os._exit(_endings[0])


if __name__ == "__main__":
    main()
