"""HS613: quantized models that a Trainer gets without adapters."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.check.finding import Finding, Severity
from halfstep.check.regex import regex
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.script.exercise import is_exercise
from halfstep.check.script.objects.expressions import conditions_of
from halfstep.check.script.objects.formats import keyword_of
from halfstep.check.script.objects.loading import initial_options
from halfstep.check.script.objects.trainers import arguments_of, is_trainer, model_of
from halfstep.check.script.objects.values import constant
from halfstep.check.script.quantized_loads import is_always_set, is_trained
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.children import all_nodes
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function
from halfstep.check.script.syntax.scope import CallSite
from halfstep.check.script.trained.optional_adapters import left_out_when
from halfstep.check.script.trained.optional_quantization import quantized_when

__all__ = ["RULES"]

_TRAINED = """\
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments

quantized = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
model = AutoModelForCausalLM.from_pretrained(name, quantization_config=quantized, dtype=torch.bfloat16)
{adapt}trainer = Trainer(model=model, args=TrainingArguments("out", bf16=True), train_dataset=data)
trainer.train()
"""
_TRL = """\
from trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser, get_quantization_config{names}

args, options = TrlParser((GRPOConfig, ModelConfig)).parse_args_and_config()
quantized = get_quantization_config(options)
if quantized is not None:
    args.model_init_kwargs["quantization_config"] = quantized
GRPOTrainer(options.model_name_or_path, args=args, reward_funcs=[reward], train_dataset=data{adapt}).train()
"""
# What may attach adapters, in this file or in another one that is named so; or quantizes for training in 8 bits.
_ADAPTS = regex(r"peft|lora|adapter|unsloth|\bia3|qat\b", re.IGNORECASE)
_BITS = ("load_in_4bit", "load_in_8bit")


class QuantizedWithoutAdapter(ScriptRule):
    """A Trainer gets a model whose weights are quantized, and no adapters."""

    code = "HS613"
    name = "quantized-without-adapter"
    severity = "error"
    reason = (
        "Weights that bitsandbytes stores in 4 or 8 bits have no gradients. The Trainer of transformers, and those of TRL, raise ValueError "
        "when they are created with such a model, unless it has trainable adapters: pass `peft_config=`, or wrap the model with "
        "`get_peft_model`."
    )
    bad = (_TRAINED.format(adapt=""), _TRL.format(names="", adapt=""))
    good = (
        _TRAINED.format(adapt="model = get_peft_model(model, LoraConfig(r=8))\n"),
        _TRL.format(names=", get_peft_config", adapt=", peft_config=get_peft_config(options)"),
    )
    references = (
        "https://huggingface.co/docs/transformers/peft",
        "measured: source code of transformers 5.17, trainer_utils.py",
    )
    words = ("BitsAndBytesConfig", "get_quantization_config", "load_in_8bit", "load_in_4bit")

    def check(self, script: Script) -> Iterator[Finding]:
        """Quantizations of a model that a Trainer trains, in files that mention no adapters but in comments."""
        outline = script.outline
        trainers = [site for name, sites in outline.calls.items() if is_trainer(outline, name) for site in sites]
        if is_exercise(script) or not trainers or "train" not in outline.calls:
            return
        if _mentions_adapters(script):
            yield from self._optional(script, trainers)
            return
        if any(keyword.arg is None for site in trainers for keyword in site.call.keywords):
            return  # `Trainer(**options)`
        for call, function in outline.calls.get("BitsAndBytesConfig", ()):
            is_own = is_trained(script, call, function) or _is_initial(script, call, trainers)
            if _quantizes(script, call, function) and is_own:
                yield self._report(script, call, "")
        for call, _ in outline.calls.get("get_quantization_config", ()):
            yield self._report(script, call, "when an option quantizes the model, ")

    def _optional(self, script: Script, trainers: list[CallSite]) -> Iterator[Finding]:
        """Models that every run quantizes, and only some give adapters."""
        outline = script.outline
        if outline.names.uses("unsloth") or len(trainers) > 1:
            return
        yield from self._by_options(script, trainers[0])
        for call, function in outline.calls.get("BitsAndBytesConfig", ()):
            is_certain = _quantizes(script, call, function) and not conditions_of(outline, call)
            is_certain = is_certain and is_always_set(script, call, function)
            if not is_certain or not is_trained(script, call, function):
                continue
            left_out = left_out_when(outline, *trainers[0])
            if left_out is not None:
                text = f"`{left_out.text}`" if left_out.is_true else f"not `{left_out.text}`"
                yield self._report(script, trainers[0].call, f"when {text}, ")

    def _by_options(self, script: Script, trainer: CallSite) -> Iterator[Finding]:
        """Models that one option quantizes, and that get adapters only if another asks for them."""
        outline = script.outline
        model, left_out = model_of(outline, *trainer), left_out_when(outline, *trainer)
        if model is None or left_out is None or left_out.text in outline.bindings:
            return
        lineage = script.training.model(model, trainer.function)
        for load, function in outline.calls.get("from_pretrained", ()):
            asked = quantized_when(outline, load, function, left_out) if load in lineage.loads else None
            if asked is not None:
                text = f"`{left_out.text}`" if left_out.is_true else f"not `{left_out.text}`"
                yield self._report(script, trainer.call, f"when `{asked.text}` and {text}, ", "warning")
                return

    def _report(self, script: Script, call: ast.Call, when: str, severity: Severity | None = None) -> Finding:
        return self.finding(
            script.where(call),
            f"{when}the Trainer raises ValueError: the model is quantized and has no adapters",
            instead="peft_config=LoraConfig(...) for TRL's Trainers, or model = get_peft_model(model, LoraConfig(...))",
            severity=severity,
        )


def _quantizes(script: Script, call: ast.Call, function: Function) -> bool:
    return any(constant(keyword_of(script.outline, call, function, name)) is True for name in _BITS)


def _is_initial(script: Script, call: ast.Call, trainers: list[CallSite]) -> bool:
    """Whether a Trainer of TRL quantizes the model that it loads itself: `model_init_kwargs={"quantization_config": ...}`."""
    outline = script.outline
    for trainer, function in trainers:
        made = arguments_of(outline, trainer, function)
        options = initial_options(outline, made, function) if made is not None else None
        if made is None or options is None:
            continue
        spread = ast.Call(made.func, [], [ast.keyword(None, options)])
        value = keyword_of(outline, spread, function, "quantization_config")
        values = outline.values(key_of(value), function) if key_of(value) else [value]
        if len(values) == 1 and values[0] is call:
            return True
    return False


def _mentions_adapters(script: Script) -> bool:
    """Whether a name or a string of the code may be about adapters."""
    for node in all_nodes(script.tree):
        names: list[str] = []
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.keyword(arg=str(name)) | ast.arg(arg=name):
                names = [name]
            case ast.Constant(value=str(text)):
                names = [text]
            case ast.ImportFrom(module=module, names=aliases):
                names = [module or "", *(alias.name for alias in aliases)]
            case ast.Import(names=aliases):
                names = [alias.name for alias in aliases]
        if any(map(_ADAPTS.search, names)):
            return True
    return False


RULES: tuple[type[Rule], ...] = (QuantizedWithoutAdapter,)
