"""Which functions of a script can matter, decided from their text before their syntax trees are walked.

A file of models has thousands of expressions that no rule looks at. A function whose lines contain none of the words
below, and call no function that does, has no event, binds no scaler and divides no loss: the outline names it without
walking it. On real projects this avoids more than half of the work.
"""

from __future__ import annotations

import ast
import bisect
import re
from dataclasses import dataclass
from itertools import accumulate

__all__ = ["NO_WORDS", "RuleWords", "relevant_functions"]

_WORDS = (
    "backward", ".step(", "zero_grad", "scale", "Scale", "scalar", "autocast", "half", "float16", "fp16", "bf16", "precision",
    "mixed", "clip_grad", "state_dict", "optim", ".grad", "no_grad", "inference_mode", "set_default", "masked_fill",
    "DataParallel", "FSDP", "accum", "acc_", "_acc", "micro", "dtype", "Trainer", "apex", "Sharded", "virtual",
    "subdivision", "update_freq", "parameters(", "from_pretrained", "cross_entropy", "requires_grad",
    "peft", "Lora", "lora_",
    # A constructor that stores the settings: `self.cfg.dtype` of another method leads to it.
    "self.cfg =", "self.config =", "self.conf =", "self.args =", "self.hparams =", "self.opt =",
)  # fmt: skip
# `amp` as a word or part of a name with underscores; not `sample`, `example` or `clamp`.
_AMP = re.compile(r"amp(?<![A-Za-z]amp)")
_CRITERION = re.compile(r"(\w+)\s*=\s*[\w.]*(?:BCE|CrossEntropy)Loss\(")  # a loss under any name
_LOSSES = ("loss", "crit", "Loss", "bce", "BCE")  # matter only if a loss that autocast forbids is mentioned

_FORWARDS = ("model(", "net(", "policy(", ".eval()")  # matter only where a region can be around the call

_BREAK = re.compile(r"\r\n|\r|\n")

Def = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class RuleWords:
    """The words that single rules declare, in addition to the common ones."""

    words: tuple[str, ...] = ()  # a script that contains one is read
    lines: tuple[str, ...] = ()  # the same, if the script also mentions precision


NO_WORDS = RuleWords()


def relevant_functions(tree: ast.Module, text: str, words: tuple[str, ...] = ()) -> set[ast.AST]:
    """The function definitions to walk: those with a word that matters, and those that call them by name.

    `words` are those that single rules declare, in addition to the common ones.
    """
    starts = _line_starts(text)
    losses: tuple[str, ...] = _LOSSES if "BCELoss" in text or "binary_cross" in text else ()
    losses += tuple(f"{name}(" for name in dict.fromkeys(_CRITERION.findall(text)))
    amp = {bisect.bisect_right(starts, match.start()) for match in _AMP.finditer(text)}
    forwards = _FORWARDS if "autocast" in text else ()
    hits = sorted(amp.union(_lines_with(text, starts, (*_WORDS, *losses, *forwards, *words))))
    functions = _definitions(tree)
    relevant = {f for f in functions if _any_between(hits, _first_line(f), f.end_lineno or f.lineno)}
    remaining = [f for f in functions if f not in relevant]
    added = relevant
    while remaining and added:
        calls = tuple({f"{f.name}(" for f in added if not f.name.startswith("__")})
        lines = _lines_with(text, starts, calls)
        added = {f for f in remaining if _any_between(lines, f.lineno + 1, f.end_lineno or f.lineno)}
        relevant = relevant | added
        remaining = [f for f in remaining if f not in added]
    # The attributes that a method reads are set where the object is created.
    return {*relevant, *(init for init, methods in _constructors(tree) if not relevant.isdisjoint(methods))}


def _line_starts(text: str) -> list[int]:
    if "\r" in text:
        return [0, *(m.end() for m in _BREAK.finditer(text))]
    return [0, *accumulate(len(line) + 1 for line in text.split("\n")[:-1])]


def _lines_with(text: str, starts: list[int], words: tuple[str, ...]) -> list[int]:
    """The lines, from 1, that contain any of the words; plain searches are several times faster than one pattern."""
    lines = set()
    for word in words:
        at = text.find(word)
        while at >= 0:
            line = bisect.bisect_right(starts, at)
            lines.add(line)
            at = text.find(word, starts[line]) if line < len(starts) else -1
    return sorted(lines)


def _any_between(numbers: list[int], first: int, last: int) -> bool:
    at = bisect.bisect_left(numbers, first)
    return at < len(numbers) and numbers[at] <= last


def _definitions(tree: ast.Module) -> list[Def]:
    """Every function definition; only statements are visited."""
    functions: list[Def] = []
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            functions.append(node)
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(node, name, None)
            if isinstance(inner, list):
                stack.extend(inner)
    return functions


def _constructors(tree: ast.Module) -> list[tuple[Def, list[ast.stmt]]]:
    """The `__init__` of each class at the top of the file, with all statements of the class."""
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return [
        (statement, node.body)
        for node in classes
        for statement in node.body
        if isinstance(statement, ast.FunctionDef) and statement.name == "__init__"
    ]


def _first_line(function: Def) -> int:
    return min((function.lineno, *(d.lineno for d in function.decorator_list)))
