"""Which functions of a script can matter, decided from their text before their syntax trees are walked.

A file of models has thousands of expressions that no rule looks at. A function whose lines contain none of the words
below, and call no function that does, has no event, binds no scaler and divides no loss: the outline names it without
walking it. On real projects this avoids more than half of the work.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

from halfstep.check.regex import regex
from halfstep.check.script.syntax.children import all_statements
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.words import words_in

__all__ = ["NO_WORDS", "RuleWords", "relevant_functions", "shortest"]

# The words that most relevant functions contain; half of the text remains to be searched for the others.
_FREQUENT = ("dtype", "optim", "no_grad", "from_pretrained", "state_dict", "scale", "self.config =", "parameters(")
_WORDS = (
    *_FREQUENT, "backward", ".step(", "zero_grad", "Scale", "scalar", "autocast", "half", "float16", "fp16", "bf16",
    "precision", "mixed", "clip_grad", ".grad", "inference_mode", "set_default", "masked_fill",
    "DataParallel", "FSDP", "accum", "acc_", "_acc", "micro", "Trainer", "apex", "Sharded", "virtual",
    "subdivision", "update_freq", "cross_entropy", "requires_grad",
    "peft", "Lora", "lora_",
    # Functions that only create the arguments of a Trainer.
    "TrainingArguments", "SFTConfig(", "DPOConfig(", "GRPOConfig(", "ORPOConfig(", "KTOConfig(", "CPOConfig(", "RewardConfig(",
    # What an Accelerator or a Fabric prepares, whatever the variables are called.
    ".prepare(", ".setup(",
    # A constructor that stores the settings: `self.cfg.dtype` of another method, or another object, leads to it.
    "self.cfg =", "self.conf =", "self.args =", "self.hparams =", "self.opt =",
)  # fmt: skip
# `amp` as a word or part of a name with underscores; not `sample`, `example` or `clamp`.
_AMP = regex(r"amp(?<![A-Za-z]amp)")
_CRITERION = regex(r"(\w+)\s*=\s*[\w.]*$")  # what stands before a loss that is assigned to a name
_CREATED = regex(
    r"Loss\((?:(?<=BCELoss\()|(?<=CrossEntropyLoss\())"
)  # the literal first: 12 times as fast on transformers
_LOSSES = ("loss", "crit", "Loss", "bce", "BCE")  # matter only if a loss that autocast forbids is mentioned

_FORWARDS = (
    "model(",
    "net(",
    "policy(",
    ".eval()",
    "sliding_window_inference(",
    "nferer(",
)  # matter only where a region can be around the call

_BREAK = regex(r"\r\n|\r|\n")

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
    starts = [*_line_starts(text), len(text)]
    definitions = [n for n in all_statements(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    functions = {f: text[starts[_first_line(f) - 1] : starts[f.end_lineno or f.lineno]] for f in definitions}
    losses: tuple[str, ...] = _LOSSES if "BCELoss" in text or "binary_cross" in text else ()
    criteria = [f"{name}(" for name in dict.fromkeys(_criteria(text))]
    forwards = _FORWARDS if "autocast" in text else ()
    relevant = {f for f, lines in functions.items() if _AMP.search(lines)}
    # The frequent words first, so that fewer functions are searched for the many others.
    for some in (_FREQUENT, shortest((*_WORDS, *losses, *forwards, *words))):
        searched = {f: lines for f, lines in functions.items() if f not in relevant}
        relevant |= _with_any(searched, words_in("\n".join(searched.values()), some))
    relevant |= _with_words({f: lines for f, lines in functions.items() if f not in relevant}, criteria)
    # Calls are searched below the line of `def`, which has the function's own name.
    remaining = {f: text[starts[f.lineno] : starts[f.end_lineno or f.lineno]] for f in functions if f not in relevant}
    added: Collection[ast.FunctionDef | ast.AsyncFunctionDef] = relevant
    known: set[str] = set()
    while remaining and added:
        calls = {f"{f.name}(" for f in added if not f.name.startswith("__")} - known
        known |= calls
        added = _with_words(remaining, calls)
        relevant |= added
        for function in added:
            del remaining[function]
    return relevant | _constructors(tree, relevant)


def _criteria(text: str) -> Iterator[str]:
    """The names that a binary or other cross-entropy is assigned to; the text is searched for the class, which is rare."""
    for match in _CREATED.finditer(text):
        before = _CRITERION.search(text, text.rfind("\n", 0, match.start()) + 1, match.start())
        if before is not None:
            yield before[1]


@cache
def shortest(words: tuple[str, ...]) -> tuple[str, ...]:
    """The words that contain no other one: a text that contains any of the words contains one of these."""
    return tuple(word for word in dict.fromkeys(words) if not any(w in word for w in words if w != word))


def _with_words(functions: dict[Def, str], words: Iterable[str]) -> set[Def]:
    """The functions whose lines contain any of the words; most words occur in none, which one search shows."""
    together = "\n".join(functions.values())
    return _with_any(functions, [word for word in words if word in together])


def _with_any(functions: dict[Def, str], present: list[str]) -> set[Def]:
    return {f for f, lines in functions.items() if any(word in lines for word in present)}


def _line_starts(text: str) -> list[int]:
    if "\r" in text:
        return [0, *(m.end() for m in _BREAK.finditer(text))]
    return [0, *accumulate(len(line) + 1 for line in text.split("\n")[:-1])]


def _constructors(tree: ast.Module, relevant: set[Def]) -> set[Def]:
    """The `__init__` of each class with a relevant method, and of its bases: the attributes that a method reads are set there."""
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    pending = [name for name, node in classes.items() if not relevant.isdisjoint(node.body)]
    for name in pending:  # grows
        bases = (key_of(base) for base in classes[name].bases)
        pending += [base for base in bases if base in classes and base not in pending]
    return {
        statement
        for name in pending
        for statement in classes[name].body
        if isinstance(statement, ast.FunctionDef) and statement.name == "__init__"
    }


def _first_line(function: Def) -> int:
    return min([function.lineno, *(d.lineno for d in function.decorator_list)])
