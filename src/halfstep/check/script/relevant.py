"""Which functions of a script can matter, told from their text before their syntax trees are walked.

A file of models has thousands of expressions that no rule asks about. A function whose lines hold none of the words
below, and call no function that does, makes no event, binds no scaler and divides no loss: it is named in the outline
and not entered. On real projects this leaves out more than half of the work.
"""

from __future__ import annotations

import ast
import bisect
import re

__all__ = ["relevant_functions"]

_WORDS = (
    "backward", ".step(", "zero_grad", "scal", "Scal", "amp", "autocast", "half", "float16", "fp16", "bf16", "precision",
    "mixed", "clip_grad", "state_dict", "optim", ".grad", "no_grad", "inference_mode", "set_default", "masked_fill",
    "DataParallel", "FSDP", "accum", "acc_", "_acc", "micro", "dtype", "Trainer", "apex", "Sharded", "virtual",
    "subdivision", "update_freq",
)  # fmt: skip
_LOSSES = ("loss", "crit", "Loss", "bce", "BCE")  # matter only where a banned loss is about

_BREAK = re.compile(r"\r\n|\r|\n")

Def = ast.FunctionDef | ast.AsyncFunctionDef


def relevant_functions(tree: ast.Module, text: str) -> set[ast.AST]:
    """The function definitions to walk: those with a word that matters, and those that call them by name."""
    starts = [0, *(m.end() for m in _BREAK.finditer(text))]
    words = (*_WORDS, *_LOSSES) if "BCELoss" in text or "binary_cross" in text else _WORDS
    hits = _lines_with(text, starts, words)
    functions = _definitions(tree)
    found = {f for f in functions if _any_between(hits, _first_line(f), f.end_lineno or f.lineno)}
    left = [f for f in functions if f not in found]
    fresh = found
    while left and fresh:
        calls = tuple({f"{f.name}(" for f in fresh if not f.name.startswith("__")})
        lines = _lines_with(text, starts, calls)
        fresh = {f for f in left if _any_between(lines, f.lineno + 1, f.end_lineno or f.lineno)}
        found = found | fresh
        left = [f for f in left if f not in fresh]
    return set(found)


def _lines_with(text: str, starts: list[int], words: tuple[str, ...]) -> list[int]:
    """The lines, from 1, that hold any of the words; plain searches are several times faster than one pattern."""
    found = set()
    for word in words:
        at = text.find(word)
        while at >= 0:
            line = bisect.bisect_right(starts, at)
            found.add(line)
            at = text.find(word, starts[line]) if line < len(starts) else -1
    return sorted(found)


def _any_between(numbers: list[int], first: int, last: int) -> bool:
    at = bisect.bisect_left(numbers, first)
    return at < len(numbers) and numbers[at] <= last


def _definitions(tree: ast.Module) -> list[Def]:
    """Every function definition, found among statements alone."""
    found: list[Def] = []
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found.append(node)
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(node, name, None)
            if isinstance(inner, list):
                stack.extend(inner)
    return found


def _first_line(function: Def) -> int:
    return min((function.lineno, *(d.lineno for d in function.decorator_list)))
