"""HS606: models that are prepared for training in 4 or 8 bits and may not be quantized."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.regex import regex
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.script.exercise import is_exercise
from halfstep.check.script.objects.expressions import conditions_of, may_be_none
from halfstep.check.script.objects.formats import keyword_of
from halfstep.check.script.objects.values import constant, text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.children import statements_in
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function
from halfstep.check.script.trained.idle_flags import is_idle

__all__ = ["RULES"]

_PREPARED = """\
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

quantized = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16){optional}
model = AutoModelForCausalLM.from_pretrained(args.name, quantization_config=quantized, dtype=torch.bfloat16)
{prepare}
model = get_peft_model(model, LoraConfig(r=8))
"""
_PREPARE = "model = prepare_model_for_kbit_training(model)"
_OPTIONS = """\
import torch
from peft import prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

def load(config):
    options = {{"torch_dtype": torch.bfloat16}}
    if config.load_in_4bit:
        options["quantization_config"] = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(config.name, **options)
    {prepare}
    return model
"""
_NAMES = ("prepare_model_for_kbit_training", "prepare_model_for_int8_training")
_QUANTIZATION = ("quantization_config", "load_in_4bit", "load_in_8bit")
# A test, or the name of a function, that may choose quantization; a checkpoint that may be quantized already.
_ASKS = regex(
    r"quant|q_?lora|bnb|bits?\b|_bit|int[48]|kbit|precision|\bfp8|gptq|awq|method|mode|strategy", re.IGNORECASE
)
_STORED = regex(r"gptq|awq|bnb|[48]-?bit|int[48]|nf4|fp8|aqlm|eetq|hqq|gpt-oss", re.IGNORECASE)


class KbitWithoutQuantization(ScriptRule):
    """A model is prepared for training in 4 or 8 bits where it is not quantized."""

    code = "HS606"
    name = "kbit-without-quantization"
    severity = "advice"
    reason = (
        "`prepare_model_for_kbit_training` casts every parameter that is not quantized to float32: the norms and the head of a 4-bit model, "
        "but all weights of one that was loaded in 16 bits. A LoRA run without quantization then needs twice the memory for its frozen weights "
        "and computes in float32 unless autocast is on, whatever dtype it was loaded in. It does not switch gradient checkpointing on either: it "
        "does that for quantized models only."
    )
    bad = (
        _PREPARED.format(optional=" if args.quantize else None", prepare=_PREPARE),
        _OPTIONS.format(prepare=_PREPARE),
        re.sub(r"quantized = .*\n|, quantization_config=quantized|, BitsAndBytesConfig", "", _PREPARED).format(
            prepare=_PREPARE
        ),
    )
    good = (
        _PREPARED.format(optional="", prepare=_PREPARE),
        _PREPARED.format(optional=" if args.quantize else None", prepare=f"if args.quantize:\n    {_PREPARE}"),
        _OPTIONS.format(prepare=f"if config.load_in_4bit:\n        {_PREPARE}"),
    )
    references = (
        "https://huggingface.co/docs/peft/developer_guides/quantization",
        "measured: source code of peft, utils/other.py",
    )
    words = _NAMES

    def check(self, script: Script) -> Iterator[Finding]:
        """Calls of the preparation that no test of quantization guards, of a model whose load in this file may not quantize."""
        outline = script.outline
        for call, function in (site for name in _NAMES for site in outline.calls.get(name, ())):
            if is_exercise(script) or not call.args or self._is_asked(script, call, function):
                continue
            loads = [site for site in outline.calls.get("from_pretrained", ()) if _is_model(script, site.call)]
            key = key_of(call.args[0])  # `self.model`; another load may be for merging
            loads = [site for site in loads if key in _targets(script, site.call)] or loads
            if len(loads) != 1 or not _is_low(script, *loads[0]) or _asks_for_option(script, call, *loads[0]):
                continue
            effect = _unquantized(script, *loads[0])
            if effect:
                yield self.finding(
                    script.where(call),
                    f"{effect}, and this casts all of its 16-bit weights to float32",
                    instead="prepare only a model that is quantized; freeze the others with get_peft_model",
                )

    def _is_asked(self, script: Script, call: ast.Call, function: Function, depth: int = 2) -> bool:
        """Whether a test around the call, or around every call of its function, may be about quantization."""
        if any(_ASKS.search(guard.text) for guard in conditions_of(script.outline, call)) or _ASKS.search(
            function.name
        ):
            return True
        # An earlier return: `if not config.quantized: return model`.
        inner = {n for f in script.outline.functions if f.parent is function for n in statements_in(f.node)}
        leaves = [n for n in statements_in(function.node) if isinstance(n, ast.If) and n not in inner]
        leaves = [n for n in leaves if n.lineno < call.lineno and isinstance(n.body[-1], (ast.Return, ast.Raise))]
        if any(_ASKS.search(text_of(n.test)) for n in leaves):
            return True
        sites = script.outline.calls.get(function.name, ()) if depth else ()
        return bool(sites) and all(self._is_asked(script, s.call, s.function, depth - 1) for s in sites)


def _is_model(script: Script, call: ast.Call) -> bool:
    name = script.outline.names.full(call.func) or text_of(call.func)
    return re.search(r"(Model|ForConditionalGeneration|ForCausalLM|LMHead)\w*\.from_pretrained$", name) is not None


def _asks_for_option(script: Script, prepare: ast.Call, load: ast.Call, function: Function) -> bool:
    """Whether a test around the preparation asks for what the load gets: `if config is not None:`."""
    keys = {key_of(keyword_of(script.outline, load, function, name)) for name in _QUANTIZATION} - {""}
    texts = [guard.text for guard in conditions_of(script.outline, prepare)]
    return any(re.search(rf"(?<![\w.]){re.escape(key)}(?!\w)", text) for key in keys for text in texts)


def _targets(script: Script, call: ast.Call) -> set[str]:
    parent = script.outline.parents.get(call)
    return {key_of(target) for target in parent.targets} if isinstance(parent, ast.Assign) else set()


def _is_low(script: Script, call: ast.Call, function: Function) -> bool:
    """Whether a load names a dtype that may have 16 bits, of a checkpoint that is not quantized by its name."""
    dtype = keyword_of(script.outline, call, function, "torch_dtype", "dtype")
    name = call.args[0] if call.args else keyword_of(script.outline, call, function, "pretrained_model_name_or_path")
    names = [name, *script.outline.values(key_of(name), function)] if name is not None else []
    stored = any(isinstance(constant(n), str) and _STORED.search(str(constant(n))) for n in names if n is not None)
    return dtype is not None and not stored and "float32" not in text_of(dtype)


def _unquantized(script: Script, call: ast.Call, function: Function) -> str:
    """When a load does not quantize its model, as the beginning of a message; "" if it always does, or that is not clear."""
    outline = script.outline
    value = keyword_of(outline, call, function, *_QUANTIZATION)
    spread = [key_of(k.value) for k in call.keywords if k.arg is None]
    if value is None:
        is_shown = all(key and outline.values(key, function) for key in spread)
        text = re.sub(r"kbit", "", script.source.text)
        return "the model is loaded without quantization" if is_shown and not _mentions(text) else ""
    options = [keyword_of(outline, call, function, name) for name in _QUANTIZATION]
    if all(option is None or constant(option) in (None, False) for option in options):
        return "the model is loaded without quantization"
    added = [b for key in spread for name in _QUANTIZATION for b in outline.bindings.get(f"{key}[{name!r}]", ())]
    here = set(conditions_of(outline, call))
    if added and all(set(conditions_of(outline, b.node)) - here for b in added):
        tests = [t for b in added for t in conditions_of(outline, b.node) if t not in here]
        return (
            f"where not `{tests[0].text}`, the model is not quantized" if len(added) == 1 and tests[0].is_true else ""
        )
    values = [value, *(v for v in outline.values(key_of(value), function) if key_of(value))]
    for option in values:
        if isinstance(option, ast.IfExp) and any(
            constant(arm) in (None, False) for arm in (option.body, option.orelse)
        ):
            is_body = constant(option.orelse) in (None, False)
            test = text_of(option.test)
            return f"where {'not ' if is_body else ''}`{test}`, the model is not quantized"
    if any(constant(v) is None for v in values[1:]) and len(values) > 2:
        return f"where `{key_of(value)}` is None, the model is not quantized"
    if constant(value) is ... and is_idle(outline, value, function):
        return f"`{text_of(value)}` is off by default, and the model is not quantized then"
    made = next((v for v in values if isinstance(v, ast.Call) and may_be_none(outline, v, function)), None)
    return f"where `{text_of(made.func)}` returns None, the model is not quantized" if made is not None else ""


def _mentions(text: str) -> bool:
    """Whether a file has quantization of some kind, which a load may get from elsewhere."""
    return re.search(r"quantization_config|load_in_[48]bit|BitsAndBytes|GPTQ|quanto|unsloth", text) is not None


RULES: tuple[type[Rule], ...] = (KbitWithoutQuantization,)
