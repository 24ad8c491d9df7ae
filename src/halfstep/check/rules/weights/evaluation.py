"""HS137: an evaluation that leaves the model it was passed in 16 bits."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.regex import regex
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.rules.weights.masters import is_exercise
from halfstep.check.script.objects.formats import SIXTEEN_BIT
from halfstep.check.script.objects.weights import VariableCast, casts_in
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.outline import Function

__all__ = ["RULES", "is_copied"]

_EVALUATES = regex(r"^_*(run_|do_)?(eval|valid|test|infer)", re.IGNORECASE)
_ENGINE = """\
import torch
def train_one_epoch(model, loader, optimizer):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    {half}
    for x, y in loader:
        metric.update(model(x.half()), y)
{restore}"""


class EvaluationHalvesModel(ScriptRule):
    """An evaluation casts the model to 16 bits in place and does not cast it back."""

    code = "HS137"
    name = "evaluation-halves-model"
    severity = "warning"
    reason = (
        "`model.half()` changes the module itself, not a copy. After an evaluation during training the next epoch trains float16 weights: a "
        "GradScaler raises ValueError: Attempting to unscale FP16 gradients, and a plain optimizer loses small updates. Casting back with "
        "`float()` does not restore the bits that were rounded away."
    )
    bad = (_ENGINE.format(half="model.half()", restore=""),)
    good = (
        _ENGINE.format(half="model = copy.deepcopy(model).half()", restore=""),
        _ENGINE.format(half="model.half()", restore="    model.float()\n"),
    )
    references = ("https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.half",)

    def check(self, script: Script) -> Iterator[Finding]:
        """In-place casts of a parameter `model` of an evaluation, in files that train a `model`."""
        if is_exercise(script) or not script.has("backward", "owned_backward"):
            return
        trains = {f for e in script.events("backward", "owned_backward") for f in (e.function,)}
        casts = [
            c for c in casts_in(script.outline) if _EVALUATES.search(c.function.name) and c.key in c.function.params
        ]
        for cast in casts:
            if not cast.formats & SIXTEEN_BIT or cast.function in trains or _is_restored(cast, casts):
                continue
            if any(cast.key in f.params for f in trains) and not is_copied(cast.function, cast.key):
                yield self.finding(
                    script.where(cast.call),
                    f"this casts the caller's `{cast.key}` to {' or '.join(sorted(cast.formats & SIXTEEN_BIT))} in place, and "
                    f"`{cast.function.name}` does not cast it back: if it is the model in training, its next epoch has 16-bit weights",
                    instead=f"evaluate a copy, copy.deepcopy({cast.key}).half(), or use autocast",
                )


def _is_restored(cast: VariableCast, casts: list[VariableCast]) -> bool:
    """Whether the same function casts the model back to float32."""
    return any(c.function is cast.function and c.key == cast.key and "float32" in c.formats for c in casts)


def is_copied(function: Function, key: str) -> bool:
    """Whether a function replaces its parameter before it casts it: `model = copy.deepcopy(model)`."""
    for node in ast.walk(function.node):
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == key for t in node.targets):
            text = ast.unparse(node.value)
            if "copy" in text or not re.match(rf"{re.escape(key)}\b", text):
                return True
    return False


RULES: tuple[type[Rule], ...] = (EvaluationHalvesModel,)
