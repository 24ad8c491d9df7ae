"""The option with which a script quantizes the model that it trains, in 4 or 8 bits.

load_in_4bit=args.load_in_4bit                                      `args.load_in_4bit`
if args.load_in_8bit: quantized = {"load_in_8bit": True}            `args.load_in_8bit`
if args.quantize: quantized = BitsAndBytesConfig(load_in_4bit=True) `args.quantize`
"""

from __future__ import annotations

import ast

from halfstep.check.regex import regex
from halfstep.check.script.flow.guard import Guard, possible
from halfstep.check.script.objects.expressions import arms_of, conditions_of
from halfstep.check.script.objects.formats import keyword_of, passed_for
from halfstep.check.script.objects.values import argument, constant
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function, Outline, last_name_of

__all__ = ["quantized_when"]

BITS = ("load_in_4bit", "load_in_8bit")
_OPTION = regex(r"^(?!self\.)\w+\.\w*(4_?bit|8_?bit|quant\w*|qlora)$")


def quantized_when(outline: Outline, load: ast.Call, function: Function, left_out: Guard) -> Guard | None:
    """The option that quantizes a model where an option leaves the adapters out; None if the text shows no such run."""
    if not possible(conditions_of(outline, load), (left_out,)):
        return None
    for name in BITS:
        switch = keyword_of(outline, load, function, name)
        if switch is not None and _OPTION.search(key_of(switch)):
            return Guard(key_of(switch), True)
    config = keyword_of(outline, load, function, "quantization_config")
    for value in (arm for v in _values(outline, config, function) for arm in arms_of(v)):
        guards = conditions_of(outline, value)
        asked = [g for g in guards if g.is_true and _OPTION.search(g.text)]
        if asked and guards[-1] == asked[-1] and _quantizes(value) and possible(guards, (left_out,)):
            return asked[-1] if not any(conflict.text == left_out.text for conflict in guards) else None
    return None


def _values(outline: Outline, config: ast.expr | None, function: Function) -> list[ast.expr]:
    """What an argument may be, in this function or in those that pass it."""
    key = key_of(config)
    values = outline.values(key, function) if key else []
    if not values and key in function.params:
        passed = list(passed_for(outline, key, function))
        values = [v for value, caller in passed if key_of(value) for v in outline.values(key_of(value), caller)]
    return values


def _quantizes(value: ast.expr) -> bool:
    """Whether a configuration stores a model in 4 or 8 bits."""
    if isinstance(value, ast.Dict):
        items = zip(value.keys, value.values, strict=True)
        return any(constant(k) in BITS and constant(v) is True for k, v in items if k is not None)
    is_config = isinstance(value, ast.Call) and last_name_of(value.func) in {"BitsAndBytesConfig", "dict"}
    return isinstance(value, ast.Call) and is_config and any(constant(argument(value, None, n)) is True for n in BITS)
