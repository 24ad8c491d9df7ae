"""Schedules that the Trainer of Lightning advances in each iteration, whether or not its GradScaler has skipped the step.

    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": OneCycleLR(...), "interval": "step"}}

Only such an interval counts iterations: by default a schedule advances once per epoch.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.check.regex import regex
from halfstep.check.script.objects.engines import lightning_methods, loop_class, trains_in_fp16
from halfstep.check.script.objects.values import constant, text_of
from halfstep.check.script.script import Script

__all__ = ["stepwise_schedules"]

_OWN_STEP = ("def lr_scheduler_step", "def optimizer_step", "deepspeed", "DeepSpeed")
_NAMED = regex(r"['\"]16(-mixed)?['\"]")
_PLATEAU = "ReduceLROnPlateau"  # follows a metric, not a number of steps


def stepwise_schedules(script: Script) -> Iterator[ast.AST]:
    """Where `configure_optimizers` asks for a schedule that advances per step, in a file whose Trainers scale the loss."""
    text = script.source.text
    if any(word in text for word in _OWN_STEP) or not trains_in_fp16(script):
        return
    if script.is_assumed and not _NAMED.search(text):
        return  # an option that could be set to any precision
    for method in lightning_methods(script):
        owner = loop_class(script, method.cls) if method.name == "configure_optimizers" else None
        if owner is not None and owner.base == "automatic" and _PLATEAU not in text_of(method.node):
            yield from _per_step(method.node)


def _per_step(function: ast.AST) -> Iterator[ast.AST]:
    """The values of `"interval": "step"`, `dict(interval="step")` and `entry["interval"] = "step"`."""
    for node in ast.walk(function):
        values: list[ast.expr] = []
        if isinstance(node, ast.Dict):
            values = [v for k, v in zip(node.keys, node.values, strict=True) if constant(k) == "interval"]
        elif isinstance(node, ast.Call):
            values = [k.value for k in node.keywords if k.arg == "interval"]
        elif isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Subscript):
            values = [node.value] if constant(target.slice) == "interval" else []
        yield from (value for value in values if constant(value) == "step")
