"""Schedules of a loop: of the learning rate, or of another number."""

from __future__ import annotations

import ast
import re

from halfstep.check.regex import regex
from halfstep.check.script.objects.choices import text_of

__all__ = ["schedules_value"]

# Arguments of a learning-rate schedule.
_OF_OPTIMIZER = regex(r"opt|(^|[_.])lrs?($|_)|learning_?rate|group", re.IGNORECASE)
_COUNT = regex(r"(^|_)(num_)?(steps?|epochs?|iters?|iterations?|updates|batches)$")  # `total_steps=`, `warmup_epochs=`


def schedules_value(call: ast.Call, name: str) -> bool:
    """Whether a class is a schedule of another number than the learning rate: nothing it receives is about an optimizer."""
    last = name.rsplit(".", 1)[-1]
    if last[:1].islower() or "LR" in last or name.startswith(("torch.", "transformers.", "timm.")):
        return False
    values = [*call.args, *(keyword.value for keyword in call.keywords)]
    counts = {k.value for k in call.keywords if _COUNT.search(k.arg or "")}
    # Any other variable may be the optimizer.
    unknown = [v for v in values if isinstance(v, (ast.Starred, ast.Name)) and v not in counts]
    if not values or any(k.arg is None for k in call.keywords) or unknown:
        return False
    return not any(
        _OF_OPTIMIZER.search(text) for text in (*map(text_of, values), *(k.arg or "" for k in call.keywords))
    )
