"""HS267: dtypes that are named by strings which torch does not have."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.rules.weights.quantized import is_of, quantizations
from halfstep.check.script.names_of_dtypes import possible_strings
from halfstep.check.script.objects.choices import strings_of
from halfstep.check.script.objects.formats import keyword_of
from halfstep.check.script.objects.values import constant, text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.outline import Function

__all__ = ["RULES"]

_BNB = "https://huggingface.co/docs/transformers/quantization/bitsandbytes"
_LOADED = """\
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

quantized = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype={dtype})
model = AutoModelForCausalLM.from_pretrained(name, quantization_config=quantized)
"""
_OPTION = """\
import argparse
import torch
parser = argparse.ArgumentParser()
parser.add_argument("--dtype", choices=[{choices}])
args = parser.parse_args()
with torch.autocast("cuda", dtype=getattr(torch, args.dtype)):
    y = model(x)
"""
_LOADERS = frozenset({"transformers", "peft", "trl"})
# Names that people write for torch's dtypes and that torch does not have as attributes.
_NOT_TORCH = frozenset({"bf16", "fp16", "fp32", "f16", "f32", "bfloat", "float-16", "bfloat-16", "fp8"})
_RIGHT = {"bf16": "bfloat16", "bfloat": "bfloat16", "bfloat-16": "bfloat16", "fp32": "float32", "f32": "float32"}


def _typed_calls(script: Script) -> Iterator[tuple[ast.Call, Function, tuple[str, ...]]]:
    """The calls that look a dtype up by its name, each with the arguments that name one."""
    for call, function in quantizations(script):
        yield call, function, ("bnb_4bit_compute_dtype", "bnb_4bit_quant_storage")
    for last in ("from_pretrained", "from_config", "pipeline"):
        for call, function in script.outline.calls.get(last, ()):
            if is_of(script, call, _LOADERS):
                yield call, function, ("torch_dtype", "dtype")


class UnknownDtypeName(ScriptRule):
    """A dtype is named by a string that torch does not have."""

    code = "HS267"
    name = "unknown-dtype-name"
    severity = "error"
    reason = (
        "Transformers looks a string up as an attribute of torch: 'bfloat16' is torch.bfloat16. 'torch.bfloat16', 'bf16' and 'fp16' are "
        "no attributes of torch: `BitsAndBytesConfig` raises AttributeError and `from_pretrained` ValueError before the model is loaded."
    )
    bad = (
        _LOADED.format(dtype='"torch.bfloat16"'),
        "from transformers import AutoModelForCausalLM\n\nmodel = AutoModelForCausalLM.from_pretrained(name, torch_dtype='bf16')\n",
        _OPTION.format(choices='"fp16", "bf16"'),
        _LOADED.format(dtype='args.dtype if args.dtype in ["auto", None] else getattr(torch, args.dtype)'),
    )
    good = (
        _LOADED.format(dtype='torch.bfloat16 if args.dtype in ["auto", None] else getattr(torch, args.dtype)'),
        _LOADED.format(dtype='"bfloat16"'),
        _OPTION.format(choices='"float16", "bfloat16"'),
        "from transformers import AutoModel\n\nmodel = AutoModel.from_pretrained(name, torch_dtype='auto')\n",
        "from mine import Net\n\nmodel = Net.from_pretrained(name, torch_dtype='bf16')\n",
    )
    references = (_BNB, "measured: source code of transformers 5, quantization_config.py and modeling_utils.py")
    words = ("bnb_4bit_compute_dtype", "dtype='bf16'", 'dtype="bf16"', "dtype='fp16'", 'dtype="fp16"')

    def check(self, script: Script) -> Iterator[Finding]:
        """Strings in the two calls, also those that a variable, an attribute or an option may be."""
        for call, function, names in _typed_calls(script):
            for name in names:
                value = keyword_of(script.outline, call, function, name)
                strings = possible_strings(script.outline, value, function) if value is not None else {}
                unknown = next((s for s in sorted(strings) if _is_unknown(s, name)), None)
                if unknown is not None:
                    yield self._report(script, call, name, unknown, strings[unknown])
        for call, function in script.outline.calls.get("getattr", ()):
            if len(call.args) == 2 and script.outline.names.full(call.args[0]) == "torch":
                yield from self._looked_up(script, call, function)

    def _looked_up(self, script: Script, call: ast.Call, function: Function) -> Iterator[Finding]:
        """`getattr(torch, name)` of a name that torch does not have, by a literal, a default or the choices of an option."""
        name = call.args[1]
        unknown = sorted(s for s in strings_of(script.outline, name, function) if s.casefold() in _NOT_TORCH)
        if unknown:
            when = f"when `{text_of(name)}` is {unknown[0]!r}, " if constant(name) is ... else ""
            yield self.finding(
                script.where(call),
                f"{when}torch has no attribute {unknown[0]!r}: `getattr` raises AttributeError",
                instead=f"{_RIGHT.get(unknown[0].casefold(), 'float16')!r}, or a dictionary of dtypes by name",
            )

    def _report(self, script: Script, call: ast.Call, name: str, value: str, asked: str) -> Finding:
        node = next((k.value for k in call.keywords if k.arg == name), call)
        right = value.removeprefix("torch.")
        right = _RIGHT.get(right.casefold(), "float16" if right.casefold() in _NOT_TORCH else right)
        error = "AttributeError" if name.startswith("bnb_") else "ValueError"
        when = f"when `{asked}` is {value!r}, " if asked else "" if constant(node) is not ... else "in some run "
        is_auto = value == "auto"
        return self.finding(
            script.where(node),
            f"{when}`{name}` raises {error}: torch has no attribute {value!r}",
            instead="torch.bfloat16 for 'auto', which only `from_pretrained` knows"
            if is_auto
            else f"{right!r}, or torch.{right} without quotes",
        )


def _is_unknown(value: str, name: str) -> bool:
    """Whether torch lacks an attribute; `from_pretrained` knows "auto" as well, `BitsAndBytesConfig` does not."""
    return value.startswith("torch.") or value.casefold() in _NOT_TORCH or (value == "auto" and name.startswith("bnb_"))


RULES: tuple[type[Rule], ...] = (UnknownDtypeName,)
