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
_endings: list[int] = []  # [130] once the command ends because of one


def main() -> None:
    """Run the command line and exit with its code."""
    # Registered before anything else, so run after everything else.
    atexit.register(_exit_interrupted)
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
        if end.code == _INTERRUPTED:
            _endings.append(_INTERRUPTED)
        raise


def _end() -> NoReturn:
    sys.stderr.write("halfstep: interrupted.\n")
    _endings.append(_INTERRUPTED)
    sys.exit(_INTERRUPTED)


def _interrupt(number: int, _frame: FrameType | None) -> None:
    _signals.append(number)
    raise KeyboardInterrupt


def _exit_interrupted() -> None:
    """Exit with 130: Python ends by the signal instead if C code of an import had reported the interrupt."""
    if _endings:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
