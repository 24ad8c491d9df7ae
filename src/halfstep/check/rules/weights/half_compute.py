"""HS168: adapters whose gradients pass through a float16 model without a loss scale."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

from halfstep.check.finding import Finding
from halfstep.check.regex import regex
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.rules.weights.masters import choices_of
from halfstep.check.rules.weights.quantized import quantizations
from halfstep.check.script.exercise import is_exercise
from halfstep.check.script.flow.guard import Guard
from halfstep.check.script.objects.adapters import adapted_casts, attachments
from halfstep.check.script.objects.chosen import float16_ways
from halfstep.check.script.objects.formats import formats_of, keyword_of
from halfstep.check.script.objects.trainers import PARSES, arguments_of, is_sharded, is_trainer, model_of
from halfstep.check.script.objects.values import constant, text_of
from halfstep.check.script.objects.weights import Cast, Lineage, casts_in, conditions_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function, Outline
from halfstep.check.script.syntax.scope import default_of
from halfstep.check.script.trained.idle_flags import is_idle

__all__ = ["RULES"]

_LOOP = """\
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained(name, dtype=torch.{dtype})
model = get_peft_model(base, LoraConfig()).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for batch in loader:
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
_TRAINER = """\
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

model = AutoModelForCausalLM.from_pretrained(name, torch_dtype=torch.float16)
model = get_peft_model(model, LoraConfig())
args = TrainingArguments("out", learning_rate=1e-4{flags})
Trainer(model=model, args=args, train_dataset=data).train()
"""
# These cast the float16 parts of the model to float32.
_RAISES = regex(r"prepare_model_for_(kbit|int8)|prepare_for_(kbit|int8)|upcast|convert_fp16_to_fp32")
_QUERY = regex(r"^(?!not )(?!.* or )(?!.* if ).*(is_bf16_supported\(|is_bfloat16_supported\(|get_device_capability\()")
_QUANTIZED = ("quantization_config", "load_in_8bit", "load_in_4bit")


class _Base(NamedTuple):
    """A model in float16 that gets adapters."""

    cast: Cast
    lineage: Lineage


_QUANTIZED_TRAINER = """\
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments

bnb = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.{dtype})
base = AutoModelForCausalLM.from_pretrained(name, quantization_config=bnb)
model = get_peft_model(prepare_model_for_kbit_training(base), LoraConfig())
args = TrainingArguments(output_dir='out')
Trainer(model=model, args=args, train_dataset=data).train()
"""


class _Choice(NamedTuple):
    """A dtype that is float16 where a flag is off."""

    dtype: ast.expr
    flag: str
    cast: Cast


class HalfComputeWithoutScale(ScriptRule):
    """Adapters of a float16 model are trained without a loss scale."""

    code = "HS168"
    name = "half-compute-without-scale"
    severity = "warning"
    reason = (
        "PEFT keeps adapters in float32, but the model around them computes in the dtype it was loaded in. In a float16 model the "
        "gradients of all activations are float16 on their way to the adapters: without a loss scale those below 6e-8 become zero, and "
        "the adapters of early layers learn little. Load the model in bfloat16, or train with a loss scale (fp16=True, or autocast with a "
        "GradScaler)."
    )
    bad = (
        _LOOP.format(dtype="float16"),
        _TRAINER.format(flags=""),
        _TRAINER.format(flags="")
        .replace("model = get_peft_model(model, LoraConfig())\n", "")
        .replace("train_dataset=data", "train_dataset=data, peft_config=LoraConfig()"),
        _QUANTIZED_TRAINER.format(dtype="float16"),
    )
    good = (
        _LOOP.format(dtype="bfloat16"),
        _TRAINER.format(flags=", fp16=True"),
        _TRAINER.format(flags=", bf16=True"),
        _QUANTIZED_TRAINER.format(dtype="bfloat16"),
        _QUANTIZED_TRAINER.format(dtype="float16").replace("output_dir='out'", "output_dir='out', fp16=True"),
    )
    references = (
        "https://arxiv.org/abs/1710.03740",
        "https://huggingface.co/docs/peft/developer_guides/troubleshooting",
    )

    def check(self, script: Script) -> Iterator[Finding]:
        """Unscaled training of adapters on a model that is certainly float16."""
        training = script.training
        is_scaled = any(scaler.enabled != "no" for scaler in script.scalers)
        if is_exercise(script) or training.adapters == "no" or training.has_masters or is_scaled:
            return
        if script.outline.names.uses("unsloth"):
            return  # it chooses the dtype of the computation itself
        if training.adapters == "yes":
            yield from self._quantized(script)
        if any(_RAISES.search(name) for name in script.outline.calls):
            return
        bases = list(_bases(script))
        cast_later = {c.node for c in adapted_casts(script.outline, tuple(casts_in(script.outline)))}
        ties = (*training.by_optimizers, *training.by_trainers) if training.adapters == "optional" else ()
        trained = {tie.cast.node for tie in ties}  # where no adapter is attached
        bases = [base for base in bases if base.cast.node not in cast_later | trained]  # HS161 reports those
        yield from self._loops(script, bases)
        yield from self._trainers(script, bases)

    def _loops(self, script: Script, bases: list[_Base]) -> Iterator[Finding]:
        backs = list(script.events("backward"))
        if any(a.enabled != "no" for a in script.autocasts) or script.has(
            "apex_initialize", "owned_backward", "owned_step"
        ):
            return
        if script.has("scaler_step") and not script.scalers:
            return  # of another file
        if (
            any((back.scaled != "no" and not script.scalers) or _is_multiplied(back.node) for back in backs)
            or not script.training.optimizers
        ):
            return
        stepped = [e for e in script.events("opt_step", "scaler_step") if not e.inside("no_grad")]
        for base in bases:
            back = next((b for b in backs if not conditions_of(script.outline, b.node)), None)
            if back is not None and stepped and _is_optimized(script, base):
                yield self._report(script, back.node, base, "`backward` has no loss scale")
                return

    def _quantized(self, script: Script) -> Iterator[Finding]:
        """The finding for 4-bit layers that compute in float16, whatever the dtype of the others."""
        compute = _compute_dtype(script)
        sites = [site for n, calls in script.outline.calls.items() if is_trainer(script.outline, n) for site in calls]
        if compute is None or not sites or "train" not in script.outline.calls:
            return
        arguments = [(arguments_of(script.outline, call, function), function) for call, function in sites]
        if all(a is not None and _is_unscaled(script, a, function) for a, function in arguments):
            yield self.finding(
                script.where(compute),
                "the 4-bit layers compute in float16, and the Trainer's arguments set neither fp16 nor bf16 (unless the launcher sets mixed "
                "precision): gradients below 6e-8 become zero on their way to the adapters",
                instead="bnb_4bit_compute_dtype=torch.bfloat16, or fp16=True in the arguments",
            )

    def _trainers(self, script: Script, bases: list[_Base]) -> Iterator[Finding]:
        outline = script.outline
        for name, sites in outline.calls.items():
            for call, function in sites if is_trainer(outline, name) and "train" in outline.calls else ():
                arguments = arguments_of(outline, call, function)
                model = model_of(outline, call, function)
                if arguments is None or model is None:
                    continue
                if (choice := _shared_choice(script, arguments, function)) is not None:
                    yield self._report_choice(script, arguments, choice)
                    continue
                unless = _unscaled_unless(script, arguments, function)
                if unless is None:
                    continue
                own = script.training.model(model, function)
                base = next((b for b in bases if _is_made_from(script, b, own)), None)
                base = base or next(iter(_float16(script, own)), None)
                if base is not None:
                    where = arguments if outline.parents.get(arguments) is not None else call
                    set_by = (
                        f"unless `{'` or `'.join(unless)}` is"
                        if unless
                        else "(unless the launcher sets mixed precision)"
                    )
                    yield self._report(script, where, base, f"neither fp16 nor bf16 is set {set_by}")

    def _report_choice(self, script: Script, arguments: ast.Call, choice: _Choice) -> Finding:
        model = f"`{choice.cast.key}`" if choice.cast.key else "the model"
        return self.finding(
            script.where(choice.dtype),
            f"when not `{choice.flag}`, {model} computes in float16 and {script.at(arguments)} sets neither fp16 nor bf16: gradients below 6e-8 "
            "become zero on their way to the adapters",
            instead=f"add fp16=not {choice.flag} to `{text_of(arguments.func)}`, or load the model in bfloat16",
        )

    def _report(self, script: Script, where: ast.AST, base: _Base, why: str) -> Finding:
        model = f"`{base.cast.key}`" if base.cast.key else "the model"
        return self.finding(
            script.where(where),
            f"{model} computes in float16 ({script.at(base.cast.node)}) and {why}: gradients below 6e-8 become zero on their way to "
            "the adapters",
            instead="load the model in bfloat16, or train with a loss scale: fp16=True, or autocast with a GradScaler",
        )


def _is_multiplied(node: ast.AST) -> bool:
    """Whether a loss is multiplied by a constant scale: `(loss * 1024).backward()`."""
    loss = node.func.value if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else None
    return isinstance(loss, ast.BinOp) and isinstance(loss.op, ast.Mult)


def _bases(script: Script) -> Iterator[_Base]:
    """The float16 models that adapters are attached to."""
    for site in attachments(script.outline):
        yield from _float16(script, script.training.model(site.base, site.function))


def _float16(script: Script, lineage: Lineage) -> Iterator[_Base]:
    """The cast that certainly makes a model float16; none if it is quantized or returned to float32."""
    outline = script.outline
    casts = [c for c in lineage.casts if c.form in {"cast", "load"}]
    if lineage.is_restored or not casts or not all(_is_float16(outline, c) for c in casts):
        return
    loads = [c for c in lineage.casts if c.form in {"load", "checkpoint"}]
    for load in loads:
        options = [keyword_of(outline, load.node, load.function, name) for name in _QUANTIZED]
        if any(not is_idle(outline, o, load.function) and not _may_be_off(load.function, o) for o in options):
            return
    for cast in casts:
        if all(is_true and re.search("cuda|gpu", text) for text, is_true in conditions_of(outline, cast.node)):
            yield _Base(cast, lineage)
            return


def _is_float16(outline: Outline, cast: Cast) -> bool:
    """Whether a cast is float16 in every run on a GPU."""
    if cast.formats == {"float16"}:
        return True
    return cast.formats == {"float16", "float32"} and () in float16_ways(outline, cast)


def _compute_dtype(script: Script) -> ast.expr | None:
    """The compute dtype of the quantized model of a script, if it is certainly float16."""
    outline = script.outline
    loads = outline.calls.get("from_pretrained", ())
    used = [not is_idle(outline, keyword_of(outline, c, f, "quantization_config"), f) for c, f in loads]
    sites = list(quantizations(script)) if any(used) else []
    values = [(keyword_of(outline, call, function, "bnb_4bit_compute_dtype"), function) for call, function in sites]
    is_float16 = [v is not None and formats_of(outline, v, f) == {"float16"} for v, f in values]
    return values[0][0] if values and all(is_float16) else None


def _may_be_off(function: Function, option: ast.expr | None) -> bool:
    """Whether an option is a parameter, which callers may leave out."""
    default = default_of(function, option.id) if isinstance(option, ast.Name) else None
    return default is not None and constant(default) is None


def _is_optimized(script: Script, base: _Base) -> bool:
    """Whether an optimizer of this file gets the parameters of the model, or of what was made from it."""
    training = script.training
    owners = [pair for call, function in training.optimizers for pair in training.owners(call, function)]
    return any(_is_made_from(script, base, training.model(owner, scope)) for owner, scope in owners)


def _is_made_from(script: Script, base: _Base, model: Lineage) -> bool:
    """Whether a model is the float16 model, or the result of attaching adapters to it."""
    places = set(base.lineage.places)
    if places & set(model.places):
        return True
    for site in attachments(script.outline):
        attached = script.training.model(site.base, site.function)
        same = places & set(attached.places) or any(c.node is base.cast.node for c in attached.casts)
        if same and any(model.has(key, site.function) for key in site.targets):
            return True
    return False


def _shared_choice(script: Script, arguments: ast.Call, function: Function) -> _Choice | None:
    """The flag of `bf16=flag` next to `bfloat16 if flag else float16`, where nothing turns fp16 on for the other case."""
    outline = script.outline
    flag = keyword_of(outline, arguments, function, "bf16")
    if flag is None or not key_of(flag) or is_sharded(outline, arguments, function):
        return None
    fp16 = keyword_of(outline, arguments, function, "fp16")
    if fp16 is not None and constant(fp16) not in {False, None}:
        return None
    if any(k.arg is None for k in arguments.keywords) or "deepspeed" in script.source.text.lower():
        return None
    test = Guard(text_of(flag), False)
    for site in attachments(outline):
        for cast in script.training.model(site.base, site.function).casts:
            for choice in choices_of(script, cast):
                if formats_of(outline, choice, cast.function) == {"float16"} and test in conditions_of(outline, choice):
                    return _Choice(choice, text_of(flag), cast)
    return None


def _is_unscaled(script: Script, arguments: ast.Call, function: Function) -> bool:
    """Whether arguments of transformers leave fp16 and bf16 off in every run."""
    return _unscaled_unless(script, arguments, function) == []


def _unscaled_unless(script: Script, arguments: ast.Call, function: Function) -> list[str] | None:
    """The flags for fp16 and bf16 that are off by default or on older GPUs; none if nothing sets either, None if each run has one.

    The configurations of TRL turn bf16 on by themselves, unless they get it.
    """
    outline = script.outline
    flags = [keyword_of(outline, arguments, function, name) for name in ("fp16", "bf16", "half_precision_backend")]
    is_own = text_of(arguments.func).endswith("TrainingArguments")
    if (not is_own and (flags[1] is None or constant(flags[1]) is None)) or is_sharded(outline, arguments, function):
        return None
    if PARSES.search(text_of(arguments.func)) or any(k.arg is None for k in arguments.keywords):
        return None
    if "deepspeed" in script.source.text.lower():
        return None
    # `bf16=torch.cuda.is_bf16_supported()`: older GPUs compute in float16.
    is_query = flags[1] is not None and _QUERY.search(text_of(_settled(outline, flags[1], function))) is not None
    if not all(is_idle(outline, flag, function) for flag in flags if flag is not flags[1] or not is_query):
        return None
    return [text_of(flag) for flag in flags if flag is not None and constant(flag) is ...]


def _settled(outline: Outline, flag: ast.expr, function: Function) -> ast.expr:
    """The only value of a variable, or the expression itself."""
    values = outline.values(key_of(flag), function) if isinstance(flag, ast.Name) else []
    return values[0] if len(values) == 1 else flag


RULES: tuple[type[Rule], ...] = (HalfComputeWithoutScale,)
