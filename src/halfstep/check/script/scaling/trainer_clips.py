"""Clips that a transformers Trainer runs once per micro-batch: in its `training_step`, or in a method that this calls.

The Trainer itself clips once per step. How many micro-batches a step has is in the arguments, here or in another file.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.check.regex import regex
from halfstep.check.script.objects.command_line import Options
from halfstep.check.script.objects.engines import loop_class
from halfstep.check.script.objects.expressions import conditions_of
from halfstep.check.script.objects.formats import keyword_of
from halfstep.check.script.objects.values import argument, constant, text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function

__all__ = ["micro_batches_of", "trainer_clips"]

_CLIPS = {"clip_grad_norm_", "clip_grad_norm", "clip_grad_value_"}
_STEPS = "gradient_accumulation_steps"
_WINDOW_END = regex(r"sync|accum|step|batch|%")
_CLEARS = regex(r"\.zero_grad\(|\.step\(")


def trainer_clips(script: Script) -> Iterator[ast.Call]:
    """The clips in `training_step` of a Trainer and in the methods that it calls, unless a test of the window is around them."""
    for cls, methods in script.outline.classes.items() if "training_step" in script.source.text else ():
        owner = loop_class(script, cls) if "training_step" in methods else None
        if owner is None or owner.base != "trainer":
            continue
        # A method that steps itself has windows of its own.
        step = methods["training_step"]
        for function in (step, *_called(script, step, methods)):
            if _CLEARS.search(ast.unparse(function.node)):
                continue
            for node in ast.walk(function.node):
                guards = [g.text.lower() for g in conditions_of(script.outline, node)] if _clips(node) else ["step"]
                if isinstance(node, ast.Call) and not any(map(_WINDOW_END.search, guards)):
                    yield node


def _called(script: Script, step: Function, methods: dict[str, Function]) -> Iterator[Function]:
    """The methods that another calls without a test of the window."""
    for node in ast.walk(step.node):
        key = key_of(node.func) if isinstance(node, ast.Call) else ""
        guards = [g.text.lower() for g in conditions_of(script.outline, node)] if key.startswith("self.") else []
        if key.removeprefix("self.") in methods and not any(map(_WINDOW_END.search, guards)):
            yield methods[key.removeprefix("self.")]


def _clips(node: ast.AST) -> bool:
    """Whether a node is a clip that has a limit; an infinite one only measures."""
    if not isinstance(node, ast.Call) or key_of(node.func).rpartition(".")[2] not in _CLIPS:
        return False
    limit = argument(node, 1, "max_norm")
    return limit is not None and "inf" not in text_of(limit)


def micro_batches_of(script: Script) -> tuple[int | None, str]:
    """How many micro-batches a step of the Trainers has, and the setting; (None, setting) if the text leaves the number open, (1, "") if none."""
    sites = [s for name, calls in script.outline.calls.items() if name.endswith("TrainingArguments") for s in calls]
    nodes = [keyword_of(script.outline, site.call, site.function, _STEPS) for site in sites]
    if not sites and script.outline.loads[_STEPS]:
        return None, _STEPS  # arguments of another file
    numbers = [_default(script, node) if node is not None else 1 for node in nodes]
    if not numbers or any(number is None or (isinstance(number, int) and number < 2) for number in numbers):
        return 1, ""
    known = [number for number in numbers if isinstance(number, int)]
    return (known[0] if len(known) == len(numbers) else None), text_of(nodes[0])


def _default(script: Script, node: ast.expr) -> object:
    """The number that an expression is, or that is the default of the option or entry which it reads; `...` if neither."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
        default = constant(argument(node, 1, "default"))
        return default if isinstance(default, int) else ...
    if not isinstance(node, ast.Attribute):
        return constant(node)
    declared = [call for call, _, name in Options(script).declared if name == node.attr]
    return constant(argument(declared[0], None, "default")) if len(declared) == 1 else ...
