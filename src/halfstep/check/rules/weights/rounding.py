"""HS169: trained weights that are cast to 16 bits and back."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from halfstep.check.finding import Finding
from halfstep.check.regex import regex
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.rules.weights.evaluation import is_copied
from halfstep.check.script.exercise import is_exercise
from halfstep.check.script.objects.formats import SIXTEEN_BIT
from halfstep.check.script.objects.values import argument, text_of
from halfstep.check.script.objects.weights import Lineage, VariableCast, base_of, cast_formats, casts_in, conditions_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function, Outline

__all__ = ["RULES"]

_SAVE = """\
import torch
from safetensors.torch import save_file

model = Net().cuda()
optimizer = torch.optim.AdamW(model.parameters())

def save(step):
{save}
for step, (x, y) in enumerate(loader):
    loss = loss_fn(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 1000 == 0:
        save(step)
"""
_IN_PLACE = "    model.to(torch.float16)\n    save_file(model.state_dict(), f'{step}.safetensors')\n    model.to(torch.float32)\n"
_COPY = "    state = {k: v.to(torch.float16) for k, v in model.state_dict().items()}\n    save_file(state, f'{step}.safetensors')\n"
_WRITES = regex(r"save|state_dict|export|upload|push_to_hub")
_FOR_FILES = regex(r"(^|[._])(save|saving|export|output|ckpt|checkpoint)_\w*(dtype|precision)$")
_DTYPE = regex(r"dtype$")
_TRAINS = frozenset({"parameters", "named_parameters", "train"})


class _Back(NamedTuple):
    """The cast that follows a 16-bit cast of the same model in the same function."""

    node: ast.Call
    unknown: str  # the dtype as written, if the text does not show that it is float32


class SaveRoundsWeights(ScriptRule):
    """A save casts the weights in training to 16 bits and back."""

    code = "HS169"
    name = "save-rounds-weights"
    severity = "warning"
    reason = (
        "A cast of a module changes its parameters in place, and casting back does not restore the bits that were rounded away: after "
        "every save the float32 weights have the precision of float16, 11 bits, or of bfloat16, 8 bits. The updates since the last save "
        "that are smaller than that are lost. Cast a copy of the state dict instead."
    )
    bad = (
        _SAVE.format(save=_IN_PLACE),
        _SAVE.format(save="    model.half()\n    torch.save(model.state_dict(), path)\n    model.float()\n"),
    )
    good = (_SAVE.format(save=_COPY),)
    references = ("https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.half",)
    words = ("save_dtype",)

    def check(self, script: Script) -> Iterator[Finding]:
        """In-place casts around a save, of models that this file trains."""
        if is_exercise(script) or not script.has("backward", "owned_backward"):
            return
        for cast, option in _casts_to_option(script.outline):
            back = _cast_back(script, cast)
            if back is None or back.unknown == option or not _is_saved(script, cast, back):
                continue
            if _is_trained(script, cast):
                yield self.finding(
                    script.where(cast.call),
                    f"when `{option}` is a 16-bit dtype, this casts `{cast.key}` in place, and {script.at(back.node)} casts it back: every save "
                    "rounds the weights in training",
                    instead="save a cast copy: {k: v.to(dtype) for k, v in model.state_dict().items()}",
                    severity="advice",
                )
        for cast in casts_in(script.outline):
            back = _cast_back(script, cast) if cast.formats <= SIXTEEN_BIT else None
            if back is None or not _is_saved(script, cast, back) or not _is_trained(script, cast):
                continue
            low = " or ".join(sorted(cast.formats))
            unless = f" (unless `{back.unknown}` is {low} too)" if back.unknown else ""
            yield self.finding(
                script.where(cast.call),
                f"this casts `{cast.key}` to {low} in place, and {script.at(back.node)} casts it back: every save rounds the weights in "
                f"training to {low}{unless}",
                instead="save a cast copy: {k: v.to(dtype) for k, v in model.state_dict().items()}",
            )


def _casts_to_option(outline: Outline) -> Iterator[tuple[VariableCast, str]]:
    """`model.to(cfg.save_dtype)`, each with that text: a dtype of its own for files, which is chosen to be smaller."""
    for call, function in outline.calls.get("to", ()):
        option = argument(call, 0, "dtype")
        key = key_of(call.func.value) if isinstance(call.func, ast.Attribute) else ""
        if option is None or len(call.args) + len(call.keywords) != 1 or not _FOR_FILES.search(key_of(option)):
            continue
        is_statement = isinstance(outline.parents.get(call), ast.Expr)
        if key and is_statement and not cast_formats(outline, call, function):
            yield VariableCast(call, function, key, frozenset()), text_of(option)


def _cast_back(script: Script, cast: VariableCast) -> _Back | None:
    """The next cast of the same variable in the same function and under the same conditions, if it is not to 16 bits."""
    outline = script.outline
    names = ("float", "to", "type")
    sites = [site for name in names for site in outline.calls.get(name, ()) if site.function is cast.function]
    later = [
        site
        for site in sites
        if site.call.lineno > cast.call.lineno
        and key_of(base_of(site.call)) == cast.key
        and conditions_of(outline, site.call) == conditions_of(outline, cast.call)
    ]
    for call, function in sorted(later, key=lambda site: site.call.lineno):
        formats = cast_formats(outline, call, function)
        dtype = argument(call, None, "dtype") or next((a for a in call.args if _DTYPE.search(key_of(a))), None)
        if formats & SIXTEEN_BIT and (formats <= SIXTEEN_BIT or cast.formats):
            return None
        if formats == {"float32"}:
            return _Back(call, "")
        if dtype is not None:
            return _Back(call, text_of(dtype))
    return None


def _is_saved(script: Script, cast: VariableCast, back: _Back) -> bool:
    """Whether the model, as it is between two casts, is written to a file."""
    first, last = cast.call.lineno, back.node.lineno
    for name, sites in script.outline.calls.items():
        for call, function in sites if _WRITES.search(name) else ():
            names = {key_of(n) for n in ast.walk(call)}
            if function is cast.function and first <= call.lineno < last and cast.key in names:
                return True
    return False


def _is_trained(script: Script, cast: VariableCast) -> bool:
    """Whether this file trains the variable itself, and not a copy of it."""
    outline = script.outline
    if is_copied(cast.function, cast.key):
        return False
    model = script.training.model(ast.parse(cast.key, mode="eval").body, cast.function)
    uses = [site for name in sorted(_TRAINS) for site in outline.calls.get(name, ())]
    return any(_is_part(model, call, function) for call, function in uses)


def _is_part(model: Lineage, call: ast.Call, function: Function) -> bool:
    """Whether `model.parameters()`, `model.decoder.parameters()` or `model.train()` is called on the model or a part of it."""
    key = key_of(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    while key and key != "self":
        if model.has(key, function):
            return True
        key = key.rpartition(".")[0]
    return False


RULES: tuple[type[Rule], ...] = (SaveRoundsWeights,)
