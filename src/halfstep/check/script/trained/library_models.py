"""Models that a library creates with 16-bit weights although the call names no dtype."""

from __future__ import annotations

import ast

from halfstep.check.script.objects.values import argument, constant
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function, Outline

__all__ = ["library_formats"]

_CLIP = {"clip.load", "clip.clip.load", "CLIP.clip.load"}  # OpenAI's: float16 on a GPU, float32 on the CPU
_OPEN_CLIP = {
    "open_clip.create_model",
    "open_clip.create_model_and_transforms",
    "open_clip.create_model_from_pretrained",
}
_FLAGS = {"rudalle.get_rudalle_model": "fp16", "rudalle.dalle.get_rudalle_model": "fp16"}  # that make weights float16
_PRECISIONS = {"fp16": "float16", "pure_fp16": "float16", "bf16": "bfloat16", "pure_bf16": "bfloat16"}


def library_formats(outline: Outline, call: ast.Call, function: Function) -> frozenset[str]:
    """The format of the weights of such a model; empty for any other call."""
    full = outline.names.full(call.func)
    if full in _CLIP:
        device = argument(call, 1, "device")
        values = outline.values(key_of(device), function) if key_of(device) else [device]
        is_on_cpu = any(constant(value) == "cpu" for value in values)
        is_traced = constant(argument(call, 2, "jit")) is True
        return frozenset() if is_on_cpu or is_traced else frozenset({"float16"})
    if full in _OPEN_CLIP:
        precision = constant(argument(call, 2, "precision"))
        return frozenset({_PRECISIONS[precision]}) if precision in _PRECISIONS else frozenset()
    flag = argument(call, 2, _FLAGS[full]) if full in _FLAGS else None
    return frozenset({"float16"}) if constant(flag) is True else frozenset()
