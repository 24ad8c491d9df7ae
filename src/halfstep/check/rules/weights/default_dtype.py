"""HS162: a 16-bit default dtype under which trained weights are created."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.script.exercise import is_exercise
from halfstep.check.script.flow.guard import possible
from halfstep.check.script.objects.formats import SIXTEEN_BIT, formats_of
from halfstep.check.script.objects.parameters import owners_of
from halfstep.check.script.objects.trainers import PARSES, arguments_of, is_sharded
from halfstep.check.script.objects.values import argument, constant, text_of
from halfstep.check.script.objects.weights import conditions_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.outline import Function, Outline

__all__ = ["RULES", "defaults_of", "trains_under_default"]

_ELSEWHERE = (
    "import torch\nfrom loops import train\nfrom models import Net\n\ntorch.set_default_dtype(torch.{dtype})\nnet = Net()\n"
    "optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)\ntrain(net, optimizer)\n"
)


class DefaultDtypeHalf(ScriptRule):
    """A training script sets the default dtype to 16 bits."""

    code = "HS162"
    name = "default-dtype-half"
    severity = "warning"
    reason = (
        "Every parameter, buffer and constant created afterwards has 16 bits: small updates are lost for lack of float32 weights, and "
        "batch-norm statistics and losses are computed in 16 bits too."
    )
    bad = (
        "import torch\ntorch.set_default_dtype(torch.float16)\nfor x in loader:\n    loss = model(x)\n    loss.backward()\n    optimizer.step()\n",
        "import torch\ntorch.set_default_tensor_type(torch.cuda.HalfTensor)\nfor x in loader:\n    loss = model(x)\n    loss.backward()\n    optimizer.step()\n",
        _ELSEWHERE.format(dtype="bfloat16"),
    )
    good = (
        "import torch\ntorch.set_default_dtype(torch.float32)\nfor x in loader:\n    loss = model(x)\n    loss.backward()\n    optimizer.step()\n",
        _ELSEWHERE.format(dtype="float32"),
    )
    references = ("https://docs.pytorch.org/docs/stable/generated/torch.set_default_dtype.html",)

    def check(self, script: Script) -> Iterator[Finding]:
        """Calls that set a 16-bit default, in scripts that train what is created under it."""
        outline = script.outline
        is_updated = script.has("backward", "owned_backward") and _names_optimizer(outline)
        is_updated = is_updated or _has_plain_trainer(outline)
        if is_exercise(script) or not (is_updated or script.training.optimizers):
            return
        defaults = defaults_of(script)
        for call, function, low in defaults:
            if not low & SIXTEEN_BIT or not trains_under_default(script, call, function, defaults):
                continue
            if not is_updated and not _creates_trained(script, function, range(call.lineno, 1 << 30)):
                continue  # the loop is in another file
            here = conditions_of(outline, call)
            later = [
                c.lineno
                for c, f, formats in defaults
                if f is function and not formats & SIXTEEN_BIT and possible(here, conditions_of(outline, c))
            ]
            end = min((line for line in later if line > call.lineno), default=None)
            if end and any(call.lineno < t.cast.node.lineno < end for t in script.training.by_optimizers):
                continue  # the model is cast as well: HS151 or HS161 reports it
            name = " or ".join(sorted(low & SIXTEEN_BIT))
            value = argument(call, 0, "d") or argument(call, 0, "t")
            when_low = "" if low <= SIXTEEN_BIT else f"when `{text_of(value)}` is {name}, "
            yield self.finding(
                script.where(call),
                f"{when_low}every tensor created {f'before line {end}' if end else 'after this line'} is {name}, including the trained weights, which have no float32 master copy",
                instead="keep the default dtype at float32 and use autocast",
                severity=None if low <= SIXTEEN_BIT else "advice",
            )


def _names_optimizer(outline: Outline) -> bool:
    """Whether a file mentions an optimizer or a step: the benchmark of a kernel runs backward and updates nothing."""
    names = (*outline.loads, *outline.bindings, *outline.calls, *outline.names.table.values())
    return any("optim" in name.lower() or name == "step" for name in names)


def _has_plain_trainer(outline: Outline) -> bool:
    """Whether a Trainer updates the weights in their own dtype: without DeepSpeed or FSDP, as far as the text shows."""
    sites = [site for name, calls in outline.calls.items() if name.endswith("Trainer") for site in calls]
    arguments = [
        (arguments_of(outline, call, function), function) for call, function in sites if "train" in outline.calls
    ]
    own = [(a, f) for a, f in arguments if a is not None and not PARSES.search(text_of(a.func))]
    return any(not is_sharded(outline, a, f) for a, f in own)


def defaults_of(script: Script) -> list[tuple[ast.Call, Function, frozenset[str]]]:
    """The calls that set the default dtype, each with its function and the formats it may set."""
    return [
        (call, function, formats)
        for name in ("set_default_dtype", "set_default_tensor_type")
        for call, function in script.outline.calls.get(name, ())
        for formats in _default_formats(script, call, function)
    ]


def _default_formats(script: Script, call: ast.Call, function: Function) -> Iterator[frozenset[str]]:
    value = argument(call, 0, "d") or argument(call, 0, "t")
    full = script.outline.names.full(value) if value is not None else ""
    if (full or str(constant(value))).endswith(("HalfTensor", "BFloat16Tensor")):
        yield frozenset({"bfloat16" if "BFloat" in (full or str(constant(value))) else "float16"})
    else:
        yield formats_of(script.outline, value, function)


def trains_under_default(
    script: Script, call: ast.Call, function: Function, defaults: list[tuple[ast.Call, Function, frozenset[str]]]
) -> bool:
    """Whether trained weights are created under a default dtype: until it is reset, or in the whole script."""
    training = script.training
    if training.has_masters or training.adapters == "yes":
        return False
    here = conditions_of(script.outline, call)
    resets = [
        c.lineno
        for c, f, low in defaults
        if f is function and c.lineno > call.lineno and not low & SIXTEEN_BIT
        # Not the other branch of the condition that chooses the default.
        if possible(here, conditions_of(script.outline, c))
    ]
    return not resets or _creates_trained(script, function, range(call.lineno, resets[0]))


def _creates_trained(script: Script, function: Function, lines: range) -> bool:
    """Whether a model is created in these lines of a function whose parameters an optimizer of this file gets."""
    for optimizer, scope in script.training.optimizers:
        params = argument(optimizer, 0, "params")
        for owner, inner in owners_of(script.outline, params, scope) if params is not None else ():
            for creation in script.training.model(owner, inner).creations:
                if creation.function is function and creation.node.lineno in lines:
                    return True
    return False


RULES: tuple[type[Rule], ...] = (DefaultDtypeHalf,)
