"""HS268, HS289: 4-bit layers that compute in another format than the run trains in, and quantization without effect."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.regex import regex
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.script.flow.run_format import (
    ON,
    bf16_run,
    bf16_weights,
    engine_run,
    fp16_training,
    is_in_own_run,
)
from halfstep.check.script.objects.command_line import Options, stays_here
from halfstep.check.script.objects.expressions import arms_of, conditions_of
from halfstep.check.script.objects.formats import formats_of, keyword_of
from halfstep.check.script.objects.values import argument, constant, text_of
from halfstep.check.script.quantized_loads import is_adapted, is_of_untrained
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.children import all_nodes
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function, Outline
from halfstep.check.script.syntax.unread import reads_by_name

__all__ = ["RULES", "is_of", "quantizations"]

_BNB = "https://huggingface.co/docs/transformers/quantization/bitsandbytes"
_LOADED = """\
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TrainingArguments

quantized = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype={dtype})
model = AutoModelForCausalLM.from_pretrained(name, quantization_config=quantized)
args = TrainingArguments("out", bf16=True)
"""
_METHOD = """\
import argparse
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
parser = argparse.ArgumentParser()
parser.add_argument("--method", choices=["lora", "qlora"], default="qlora")
args = parser.parse_args()
quantized = None
if {test}:
    quantized = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
model = AutoModelForCausalLM.from_pretrained(name, quantization_config=quantized)
"""
_QLORA = regex(r"q-?lora", re.IGNORECASE)
_PACKAGES = frozenset({"transformers", "trl", "peft", "unsloth", "optimum", "diffusers"})
_LOADERS = frozenset({"transformers", "peft", "trl"})
_SWITCHES = {"load_in_4bit", "load_in_8bit"}  # of Unsloth, whose from_pretrained also takes a configuration
# All parameters of BitsAndBytesConfig, which accepts any other name as well and drops it.
_KNOWN = tuple(f"bnb_4bit_{n}" for n in ("compute_dtype", "quant_type", "use_double_quant", "quant_storage")) + tuple(
    f"llm_int8_{n}" for n in ("threshold", "skip_modules", "enable_fp32_cpu_offload", "has_fp16_weight")
)
_SETTING = regex(r"(bnb_|llm_int8_)\w+")
_SIXTEEN = (frozenset({"float16"}), frozenset({"bfloat16"}))
_BF16_FLAG = regex(r"([\w.]+\.)?(use_)?bf16")
_OF_FORMAT = regex(r"bf16|bfloat16|fp16|float16|half|precision|dtype|capability|supported|ampere", re.IGNORECASE)


def is_of(script: Script, call: ast.Call, packages: frozenset[str]) -> bool:
    """Whether a call is of one of these packages."""
    return script.outline.names.full(call.func).split(".")[0] in packages


def quantizations(script: Script) -> Iterator[tuple[ast.Call, Function]]:
    """The calls of BitsAndBytesConfig, also under another name."""
    for full, sites in script.outline.library_calls.items():
        if full.endswith(".BitsAndBytesConfig") and full.split(".")[0] in _PACKAGES:
            yield from ((site.call, site.function) for site in sites)


class ComputeDtypeMismatch(ScriptRule):
    """4-bit layers compute in another 16-bit format than the run trains in."""

    code = "HS268"
    name = "compute-dtype-mismatch"
    severity = "warning"
    reason = (
        "bitsandbytes casts the input of every 4-bit layer to `bnb_4bit_compute_dtype` and the output back. With float16 in a bf16 run "
        "activations above 65504, which bf16 holds, become inf, and gradients below 6e-8 become 0: bf16 training has no loss scale that "
        "would lift them. With bfloat16 in an fp16 run nothing overflows, but every layer converts between the two, and the loss is "
        "scaled, with steps that are skipped, for a format that most of the model does not use: bf16=True needs neither."
    )
    bad = (
        _LOADED.format(dtype="torch.float16"),
        _LOADED.format(dtype="torch.bfloat16").replace("bf16=True", "fp16=True"),
        "import torch\nfrom transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer\n\n"
        "quantized = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float16)\n"
        "model = AutoModelForCausalLM.from_pretrained(name, quantization_config=quantized, dtype=torch.bfloat16)\n"
        "Trainer(model).train()\n",
    )
    good = (
        _LOADED.format(dtype="torch.bfloat16"),
        _LOADED.format(dtype="torch.float16").replace("bf16=True", "fp16=True"),
        _LOADED.format(dtype="torch.float16").replace("bf16=True", "bf16=has_bf16, fp16=not has_bf16"),
        _LOADED.format(dtype="torch.bfloat16").replace("bf16=True", "bf16=has_bf16, fp16=not has_bf16"),
    )
    references = (_BNB, "https://github.com/bitsandbytes-foundation/bitsandbytes/blob/main/bitsandbytes/nn/modules.py")
    words = ("bnb_4bit_compute_dtype",)

    def check(self, script: Script) -> Iterator[Finding]:
        """A compute dtype that is certainly float16, next to a bf16 that is on, or that an option turns on."""
        state, bf16 = bf16_run(script)
        bf16 = bf16 or bf16_weights(script) or _chosen_bf16(script)
        fp16 = None if bf16 else fp16_training(script)
        if fp16 is not None:
            for call, function in quantizations(script):
                value = keyword_of(script.outline, call, function, "bnb_4bit_compute_dtype")
                if value is not None and formats_of(script.outline, value, function) == {"bfloat16"}:
                    yield self.finding(
                        script.where(fp16),
                        f"this run trains in fp16, but its 4-bit layers compute in bfloat16 ({script.at(value)})",
                        instead="bf16=True, without a loss scale; on a GPU without bfloat16, bnb_4bit_compute_dtype=torch.float16",
                        severity="advice",
                    )
        yield from self._under_engine(script) if not bf16 and fp16 is None else ()
        if not bf16:
            return
        for call, function in quantizations(script):
            value = keyword_of(script.outline, call, function, "bnb_4bit_compute_dtype")
            if value is not None and formats_of(script.outline, value, function) == {"float16"}:
                if state not in {ON, ""} and _may_follow(script, call, value, function):
                    continue
                if is_of_untrained(script, call, function) or is_in_own_run(script, function):
                    continue
                yield self.finding(
                    script.where(value),
                    f"the 4-bit layers compute in float16, but {bf16}: values above 65504 become inf",
                    instead="bnb_4bit_compute_dtype=torch.bfloat16",
                )

    def _under_engine(self, script: Script) -> Iterator[Finding]:
        """A compute dtype that is certainly not the format in which an engine, or a training loop, trains adapters of the model."""
        sites = list(quantizations(script))
        computed, run = engine_run(script) if sites else ("", "")
        for call, function in sites if run else ():
            value = keyword_of(script.outline, call, function, "bnb_4bit_compute_dtype")
            formats = formats_of(script.outline, value, function) if value is not None else frozenset()
            if (
                value is None
                or formats not in _SIXTEEN
                or formats == {computed}
                or not is_adapted(script, call, function)
            ):
                continue
            (own,) = formats
            effect = ", with a loss scale" if computed == "float16" else ": values above 65504 become inf"
            yield self.finding(
                script.where(value),
                f"the 4-bit layers compute in {own}, but {run}{effect}",
                instead=f"bnb_4bit_compute_dtype=torch.{computed}{', or train in bf16' if computed == 'float16' else ''}",
                severity="advice" if computed == "float16" else None,
            )


def _chosen_bf16(script: Script) -> str:
    """The quantized model that a script trains, loaded in bfloat16 where a flag asks for it; "" if there is none."""
    outline = script.outline
    for call, function in outline.calls.get("from_pretrained", ()) if "train" in outline.calls else ():
        node = keyword_of(outline, call, function, "torch_dtype", "dtype")
        if node is None or keyword_of(outline, call, function, "quantization_config") is None:
            continue
        values = outline.values(key_of(node), function) if key_of(node) else [node]
        for arm in (arm for value in values for arm in arms_of(value)):
            asked = [text for text, is_true in conditions_of(outline, arm) if is_true and _BF16_FLAG.fullmatch(text)]
            if asked and formats_of(outline, arm, function) == {"bfloat16"}:
                return f"line {arm.lineno} loads the model in bfloat16 with `{asked[0]}`"
    return ""


def _may_follow(script: Script, call: ast.Call, value: ast.expr, function: Function) -> bool:
    """Whether the compute dtype may follow the format of the run: by a parameter, a later change or a branch around it."""
    node: ast.AST | None = call
    while node is not None:
        node = script.outline.parents.get(node)
        if isinstance(node, ast.If | ast.IfExp) and _OF_FORMAT.search(text_of(node.test)):
            return True
    names = {n.id for n in ast.walk(value) if isinstance(n, ast.Name)}
    return not names.isdisjoint(function.params) or any(
        key.endswith(".bnb_4bit_compute_dtype") for key in script.outline.bindings
    )


class QuantizationNotPassed(ScriptRule):
    """A quantization configuration is created and never passed to a model, or switched off, or has settings that do not exist."""

    code = "HS289"
    name = "quantization-not-passed"
    severity = "warning"
    reason = (
        "A `BitsAndBytesConfig` takes effect only as `quantization_config` of `from_pretrained`. Where the argument is missing, or commented "
        "out, the model is loaded in full precision without a message: it needs four times the memory, and the run is not the QLoRA run "
        "that it is reported as. With `load_in_4bit=False` its other 4-bit settings have no effect either. Nor has a setting that it does not "
        "know, such as `bnb_8bit_compute_dtype`: it is dropped with a message at the level `info`, which is not shown."
    )
    bad = (
        _LOADED.format(dtype="torch.bfloat16").replace(", quantization_config=quantized", ""),
        _LOADED.format(dtype="torch.bfloat16").replace("quantization_config=quantized", "dtype=torch.bfloat16"),
        _LOADED.format(dtype="torch.bfloat16").replace("load_in_4bit=True", "load_in_4bit=False"),
        _LOADED.format(dtype="torch.bfloat16").replace("4bit", "8bit"),
        _METHOD.format(test="memory <= 8"),
    )
    good = (
        _LOADED.format(dtype="torch.bfloat16"),
        _LOADED.format(dtype="torch.bfloat16").replace("load_in_4bit=True", "load_in_4bit=False, load_in_8bit=True"),
        _LOADED.format(dtype="6.0").replace("4bit=True, bnb_4bit_compute_dtype", "8bit=True, llm_int8_threshold"),
        _METHOD.format(test='args.method == "qlora"'),
        _METHOD.format(test='args.method.startswith("q") or "qlora" in args.method'),
    )
    references = (_BNB, "https://github.com/huggingface/transformers/issues/35581")
    words = ("bnb_8bit_",)

    def check(self, script: Script) -> Iterator[Finding]:
        """Variables that are assigned a configuration and never read, in files that load a model."""
        outline = script.outline
        loads = [
            site
            for site in outline.calls.get("from_pretrained", ())
            if is_of(script, site.call, _LOADERS | {"unsloth"})
        ]
        loads = [site for site in loads if "Tokenizer" not in text_of(site.call.func)]
        hidden = reads_by_name(outline)
        for call, _ in quantizations(script):
            options = {k.arg: k.value for k in call.keywords}
            if constant(options.get("load_in_4bit")) is not False or not {"load_in_8bit", None}.isdisjoint(options):
                continue
            if set_in_vain := sorted(name for name in options if name and name.startswith("bnb_4bit_")):
                yield self.finding(
                    script.where(call),
                    f"load_in_4bit=False switches the quantization off, and `{set_in_vain[0]}` has no effect",
                    instead="load_in_4bit=True, or no quantization_config",
                )
        yield from self._unknown(script)
        yield from self._unasked(script)
        yield from self._only_named(script) if not hidden else ()
        for call, function in quantizations(script) if loads and not hidden else ():
            target = _assigned(outline, call)
            if target is None or _is_read(target.id, function):
                continue
            if any(site.function is function for site in loads):
                switched = any(k.arg in _SWITCHES for site in loads for k in site.call.keywords)
                effect = "with other settings" if switched else "without quantization"
                yield self.finding(
                    script.where(call),
                    f"`{target.id}` is never used: the model is loaded {effect}",
                    instead=f"pass quantization_config={target.id} to from_pretrained, or remove it",
                )

    def _unknown(self, script: Script) -> Iterator[Finding]:
        """The first setting of each configuration that BitsAndBytesConfig does not have."""
        for call, _ in quantizations(script):
            written = [k for k in call.keywords if k.arg and _SETTING.fullmatch(k.arg) and k.arg not in _KNOWN]
            if written and (name := written[0].arg):
                close = difflib.get_close_matches(name, _KNOWN, 1, 0.9) if "8bit" not in name else []
                yield self.finding(
                    script.where(written[0]),
                    f"BitsAndBytesConfig has no `{name}`{f', and {len(written) - 1} more' if len(written) > 1 else ''}: dropped without effect",
                    instead=close[0]
                    if close
                    else "remove it; 8-bit layers have no such setting"
                    if "8bit" in name
                    else "remove it",
                )

    def _unasked(self, script: Script) -> Iterator[Finding]:
        """Quantization that an option offers as `choices=["lora", "qlora"]`, and that no code compares the option with."""
        calls = [call for call, _ in quantizations(script)]
        options = Options(script) if calls and _QLORA.search(script.source.text) else None
        for option, flag, name in options.declared if options is not None else ():
            choices = getattr(argument(option, None, "choices"), "elts", ())
            named = [c for c in choices if isinstance(constant(c), str) and _QLORA.fullmatch(str(constant(c)))]
            if (
                options is None
                or not named
                or len(choices) < 2
                or not stays_here(options)
                or _is_compared(script, named[0])
            ):
                continue
            yield self.finding(
                script.where(calls[0]),
                f"`{flag} {constant(named[0])}` ({script.at(option)}) does not decide about this quantization: nothing asks whether "
                f"`{name}` is {constant(named[0])!r}",
                instead=f"quantize if {name} == {constant(named[0])!r}",
            )

    def _only_named(self, script: Script) -> Iterator[Finding]:
        """TRL's ModelConfig with quantization, of which the script reads other settings alone, such as the name."""
        outline = script.outline
        if not any(name.endswith("Trainer") for name in outline.calls):
            return
        for call, _ in outline.library_calls.get("trl.ModelConfig", ()):
            switch = next((k for k in call.keywords if k.arg in _SWITCHES and constant(k.value) is True), None)
            target = _assigned(outline, call)
            if switch is None or target is None:
                continue
            reads = [n for n in ast.walk(outline.module.node) if isinstance(n, ast.Name) and n.id == target.id]
            uses = [outline.parents.get(n) for n in reads if isinstance(n.ctx, ast.Load)]
            if all(isinstance(use, ast.Attribute) and use.attr not in _SWITCHES for use in uses):
                yield self.finding(
                    script.where(switch.value),
                    f"nothing reads `{switch.arg}` of `{target.id}`: the model is loaded without quantization",
                    instead=f"load the model with quantization_config=get_quantization_config({target.id})",
                )


def _assigned(outline: Outline, call: ast.Call) -> ast.Name | None:
    """The one variable that a call is assigned to."""
    statement = outline.parents.get(call)
    target = statement.targets[0] if isinstance(statement, ast.Assign) and len(statement.targets) == 1 else None
    return target if isinstance(target, ast.Name) else None


def _is_read(name: str, function: Function) -> bool:
    """Whether a variable is read in its function, other than for a dictionary of options that is never read itself."""
    nodes = list(ast.walk(function.node))
    loaded = {n.id for n in nodes if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Store)}
    assigned = [n for n in nodes if isinstance(n, ast.Assign) and len(n.targets) == 1 and _is_dictionary(n.value)]
    idle = {n.value for n in assigned if isinstance(n.targets[0], ast.Name) and n.targets[0].id not in loaded}
    stack: list[ast.AST] = [function.node]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Store):
            return True
        # The options of `load(**options)` are written into the call, which then has the same nodes as the dictionary.
        stack.extend(child for child in ast.iter_child_nodes(node) if child not in idle)
    return False


def _is_compared(script: Script, choice: ast.expr) -> bool:
    """Whether a script may ask for a choice: by a literal of the same text that is no default, or by a part of it."""
    text = str(constant(choice)).casefold()
    for node in all_nodes(script.tree):
        value = constant(node) if isinstance(node, ast.Constant) else None
        if not isinstance(value, str) or node is choice or not value or value.casefold() not in text:
            continue
        parent = script.outline.parents.get(node)
        is_default = isinstance(parent, ast.keyword) and parent.arg == "default"
        is_default |= isinstance(parent, ast.Call) and key_of(parent.func).endswith(".get") and node in parent.args[1:]
        is_other = value.casefold() != text and not isinstance(parent, ast.Compare)
        if not is_default and not is_other and script.outline.parents.get(choice) is not parent:
            return True
    return False


def _is_dictionary(value: ast.expr) -> bool:
    return isinstance(value, ast.Dict) or (isinstance(value, ast.Call) and key_of(value.func) == "dict")


RULES: tuple[type[Rule], ...] = (ComputeDtypeMismatch, QuantizationNotPassed)
