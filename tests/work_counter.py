"""Counts the lines of Python that a call executes: how work grows with its input, on any machine and under any load."""

import sys


def num_lines(function, *args):
    """The number of lines executed by `function(*args)`, exceptions of type ValueError included.

    Work inside C functions (a regular expression, a slice) is not counted.
    """
    count = 0

    def trace(_frame, event, _arg):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function(*args)
    finally:
        sys.settrace(before)
    return count
