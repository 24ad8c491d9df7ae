"""Which steps are only timed: those of benchmarks, which learn nothing from their random batches."""

from __future__ import annotations

import ast
import re

from halfstep.check.regex import regex
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of, last_name

__all__ = ["only_measures"]

_BENCHMARK = regex(r"bench|throughput|latency", re.IGNORECASE)
_TIMES = regex(r"(^|_)(timed?|timeit|measure|bench\w*|profile)(_|$)", re.IGNORECASE)
_DATA = regex(r"loader|data_?set|data_?module", re.IGNORECASE)


def only_measures(script: Script, line: int) -> bool:
    """Whether a line is in a function that others time, or in a benchmark, by its name, that reads no data."""
    functions = [
        f
        for f in script.outline.functions
        if not isinstance(f.node, ast.Module) and f.node.lineno <= line <= (f.node.end_lineno or 0)
    ]
    named = [f for f in functions if _BENCHMARK.search(f.name) or _BENCHMARK.search(f.cls)]
    is_timed = any(_is_timed(script, f.name) for f in functions)
    if not functions or not (named or is_timed):
        return False
    return not any(_DATA.search(text) for f in functions for text in _names(f.node))


def _is_timed(script: Script, name: str) -> bool:
    """Whether a function is passed to one that takes its time: `timed_call(step, device)`."""
    calls = (site.call for last, sites in script.outline.calls.items() if _TIMES.search(last) for site in sites)
    return any(key_of(value) == name for call in calls for value in call.args)


def _names(function: ast.AST) -> set[str]:
    """The last names that a function uses."""
    nodes = list(ast.walk(function))
    passed = {n.arg for n in nodes if isinstance(n, ast.arg)}
    return passed | {last_name(key_of(n)) for n in nodes if isinstance(n, ast.Name | ast.Attribute)}
