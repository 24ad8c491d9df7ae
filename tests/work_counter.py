"""Bounds on work that are the same on any machine and under any load: executed lines, and a guard against hanging."""

import contextlib
import math
import signal
import sys

HANG_SECONDS = 600  # what is done in a second or two takes as long only if it hangs


def num_lines(function, *args, limit=None):
    """How many lines of Python `function(*args)` executes; past `limit` it is stopped with an AssertionError.

    Work inside C functions (a regular expression, a slice) is not counted; `no_hang` guards against that.
    """
    count, most = 0, math.inf if limit is None else limit

    def trace(_frame, event, _arg):
        nonlocal count
        if event == "line":
            count += 1
            if count > most:
                raise AssertionError(f"more than {limit:,} lines of Python executed")
        return trace

    before = sys.gettrace()  # coverage's, where it is measured
    sys.settrace(trace)
    try:
        function(*args)
    finally:
        sys.settrace(before)
    assert count <= most, f"{count:,} lines of Python executed, more than {limit:,}"
    return count


@contextlib.contextmanager
def no_hang():
    """Fail a block that does not end, instead of waiting for hours; not a measurement of time."""

    def stop(_number, _frame):
        raise AssertionError(f"not done after {HANG_SECONDS} seconds: does its work grow with the square of its input?")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(HANG_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
