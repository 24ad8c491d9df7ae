"""HS166: 16-bit weights that a Trainer with fp16=True rejects."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.regex import regex
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.rules.weights.masters import (
    TRAINER,
    choices_of,
    is_launched_elsewhere,
    remedy,
    subject,
    when,
)
from halfstep.check.script.flow.guard import Guard, possible
from halfstep.check.script.objects.chosen import condition_text, dtype_values, float16_ways, format_ways
from halfstep.check.script.objects.expressions import asks_for_adapters, is_quantized_branch
from halfstep.check.script.objects.formats import formats_of, keyword_of
from halfstep.check.script.objects.loading import loads_bfloat16, stored_float16
from halfstep.check.script.objects.trainers import arguments_of, is_without_bf16
from halfstep.check.script.objects.training import Trained
from halfstep.check.script.objects.values import argument, constant, text_of
from halfstep.check.script.objects.weights import conditions_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function

__all__ = ["RULES"]

_UNSLOTH = """\
import torch
from trl import SFTConfig, SFTTrainer
from unsloth import FastLanguageModel, is_bfloat16_supported

dtype = {dtype}
model, tokenizer = FastLanguageModel.from_pretrained("unsloth/Llama-3.2-1B-bnb-4bit", dtype=dtype, load_in_4bit=True)
model = FastLanguageModel.get_peft_model(model, r=16)
SFTTrainer(model=model, args=SFTConfig("out", fp16={fp16}), train_dataset=data).train()
"""
# Models that Unsloth trains in float32 whatever the arguments say.
_FORCED = regex(r"gemma-?3|gpt[-_]oss|qwen-?3[._]5", re.IGNORECASE)
_CPU = regex(r"(^|[._])(no_cuda|no_gpu|(use_|on_|force_)?cpu)$")  # `fp16=not args.cpu` is set in every run on a GPU
_ON_GPU = (Guard("torch.cuda.is_available()", True),)


class HalfLoadWithFp16Training(ScriptRule):
    """A model with 16-bit weights is trained by a Trainer with fp16=True."""

    code = "HS166"
    name = "half-load-with-fp16-training"
    severity = "error"
    reason = (
        "`fp16=True` means float32 weights with float16 autocast and a scaler. With float16 weights the first step raises "
        "ValueError: Attempting to unscale FP16 gradients, with bfloat16 weights not implemented for 'BFloat16'. Transformers 5 loads the checkpoint's own dtype unless `dtype` names another. "
        "Unsloth loads in bfloat16 where the GPU supports it and has TRL's trainers raise TypeError at once."
    )
    bad = (
        TRAINER.format(name="gpt2", dtype=", dtype=torch.float16", flags=", fp16=True"),
        TRAINER.format(name="gpt2", dtype=", torch_dtype=torch.float16", flags=", fp16=True"),
        TRAINER.format(name="gpt2", dtype=").half(", flags=", fp16=True"),
        TRAINER.format(
            name="gpt2", dtype=", torch_dtype=torch.float16 if opt.fp16 else torch.float32", flags=", fp16=opt.fp16"
        ),
        TRAINER.format(name="gpt2", dtype=", torch_dtype=torch.float16", flags=", fp16=torch.cuda.is_available()"),
        TRAINER.format(name="gpt2", dtype=", torch_dtype=torch.bfloat16", flags=", fp16=True"),
        TRAINER.format(name="gpt2", dtype=", torch_dtype=torch.float16", flags=", fp16=not args.use_cpu"),
        TRAINER.format(name="facebook/opt-1.3b", dtype="", flags=", fp16=args.fp16"),
        _UNSLOTH.format(dtype="None", fp16="True"),
    )
    good = (
        TRAINER.format(name="gpt2", dtype=", dtype=torch.float32", flags=", fp16=True"),
        TRAINER.format(name="facebook/opt-1.3b", dtype=", dtype=torch.float32", flags=", fp16=True"),
        _UNSLOTH.format(dtype="None", fp16="not is_bfloat16_supported(), bf16=is_bfloat16_supported()"),
        _UNSLOTH.format(dtype="torch.float16", fp16="True"),
        "import torch\nfrom peft import LoraConfig, get_peft_model\n"
        "from transformers import AutoModelForCausalLM, Trainer, TrainingArguments\n\n"
        "model = AutoModelForCausalLM.from_pretrained('gpt2', torch_dtype=torch.float16)\n"
        "model = get_peft_model(model, LoraConfig())\nargs = TrainingArguments('out', fp16=True)\nTrainer(model, args).train()\n",
    )
    references = (
        "https://github.com/huggingface/transformers/issues/23165",
        "https://github.com/pytorch/pytorch/issues/127176",
        "https://github.com/bitsandbytes-foundation/bitsandbytes/issues/945",
        "https://huggingface.co/docs/peft/developer_guides/troubleshooting",
    )

    def check(self, script: Script) -> Iterator[Finding]:
        """16-bit weights that are passed to a Trainer with fp16=True."""
        for tie in script.training.by_trainers:
            scaled = _scaled_when(script, tie)
            is_elsewhere = is_launched_elsewhere(script, tie)
            is_quantized = any(map(is_quantized_branch, conditions_of(script.outline, tie.cast.node)))
            if scaled is not None and (is_quantized or not is_elsewhere):  # most quantized models train on one GPU
                is_offered = is_elsewhere or (tie.is_parsed and "deepspeed" in script.outline.bindings)
                engine = "without DeepSpeed, " if is_offered else ""
                yield self.finding(
                    script.where(tie.cast.node),
                    f"{scaled}{engine}{subject(tie.cast)} has float16 weights and is trained with fp16=True: the scaler raises ValueError: Attempting to "
                    "unscale FP16 gradients",
                    instead=f"{remedy(script, tie.cast)}; fp16=True runs the computation in float16",
                )
            flag = _fp16_flag(script, tie)
            stored = _stored_when(script, tie, flag)
            if flag is not None and stored is not None:
                yield self.finding(
                    script.where(flag),
                    f"{stored}{subject(tie.cast)} has its checkpoint's float16 weights ({script.at(tie.cast.node)}) and is trained with fp16=True: "
                    "the scaler raises ValueError: Attempting to unscale FP16 gradients",
                    instead=f"{remedy(script, tie.cast)}; fp16=True runs the computation in float16",
                )
            if scaled is None and tie.cast.formats == {"float16"} and flag is not None and is_without_bf16(flag):
                yield self.finding(
                    script.where(flag),
                    f"{subject(tie.cast)} has float16 weights ({script.at(tie.cast.node)}) and is trained with fp16=True on a GPU without bfloat16: the "
                    "scaler raises ValueError: Attempting to unscale FP16 gradients",
                    instead=f"{remedy(script, tie.cast)}; fp16=True runs the computation in float16",
                )
            rejected = _rejected_when(script, tie, flag)
            if flag is not None and rejected is not None and not is_launched_elsewhere(script, tie):
                # Where the dtype is chosen, its choice is what the message is about.
                yield self.finding(
                    script.where(flag if tie.cast.formats == {"bfloat16"} else tie.cast.node),
                    f"{rejected}{subject(tie.cast)} has bfloat16 weights ({script.at(tie.cast.node)}) and is trained with fp16=True: "
                    "on CUDA the scaler raises: not implemented for 'BFloat16'",
                    instead=f"{remedy(script, tie.cast)}, and bf16=True to compute in bfloat16",
                )
        for flag, is_always in _unsloth_flags(script):
            yield self.finding(
                script.where(flag),
                f"{'' if is_always else 'on a GPU with bfloat16, '}Unsloth loads the model in bfloat16, and its trainer raises TypeError for fp16=True",
                instead="fp16=not is_bfloat16_supported(), bf16=is_bfloat16_supported() of unsloth",
                severity=None if is_always else "warning",
            )


def _unsloth_flags(script: Script) -> Iterator[tuple[ast.expr, bool]]:
    """Each literal fp16=True of a TRL trainer in a file whose models Unsloth loads in bfloat16, and whether it does on every GPU."""
    outline = script.outline
    is_named = loads_bfloat16(outline) if outline.names.uses("unsloth") else False
    if is_named is False or _FORCED.search(script.source.text):
        return
    for name, sites in outline.calls.items():
        for call, function in sites if name.endswith("Trainer") else ():
            made = arguments_of(outline, call, function) if outline.names.full(call.func).startswith("trl.") else None
            flag = keyword_of(outline, made, function, "fp16") if made is not None else None
            if flag is not None and constant(flag) is True:
                yield flag, is_named is True


def _scaled_when(script: Script, tie: Trained) -> str | None:
    """When float16 weights meet fp16=True, as the beginning of a message; None if the text does not show that they do."""
    outline = script.outline
    flag = _fp16_flag(script, tie)
    arguments = key_of(argument(tie.by, 1, "args"))
    if "float16" not in tie.cast.low or (flag is None and not arguments):
        return None
    value, is_true = _assigned(script, flag, tie.function)
    if tie.cast.formats == {"float16"} and is_true:
        if constant(value) is True:
            return when(script, tie.cast)
        if text_of(value) == "torch.cuda.is_available()":
            return when(script, tie.cast) or "on a GPU, "
    if (is_true and _is_set_on_gpu(value)) or (not is_true and _CPU.search(text_of(value))):
        way = next((way for way in float16_ways(outline, tie.cast) if possible(way, _ON_GPU)), None)
        if way is not None:
            return condition_text((*conditions_of(outline, tie.cast.node), *way))
    is_plain = script.training.adapters == "optional" and not tie.lineage.is_adapted
    is_plain &= not asks_for_adapters(conditions_of(outline, tie.cast.node))
    unless = " and no adapter is used" if is_plain else ""
    # `fp16=dtype == torch.float16` next to dtype=dtype.
    compared = _compared(value) if is_true else None
    if compared is not None and outline.names.full(compared[1]) in {"torch.float16", "torch.half"}:
        names = {key_of(dtype) for dtype in dtype_values(tie.cast)} - {""}
        if key_of(compared[0]) in names:
            certain = tie.cast.formats == {"float16"}
            return when(script, tie.cast) if certain else f"when `{text_of(value)}`{unless}, "
    # `float16 if args.fp16 else float32` next to fp16=args.fp16, or of the Trainer's own arguments: one flag decides both.
    tests = {Guard(text_of(value), is_true), Guard(text_of(flag), True), Guard(f"{arguments}.fp16", True)}
    no_bf16 = Guard(f"{arguments}.bf16", False)
    if tie.is_parsed:  # `bfloat16 if args.bf16 else float16`: --fp16 excludes --bf16
        tests.add(no_bf16)
    for choice in choices_of(script, tie.cast):
        if formats_of(outline, choice, tie.cast.function) == {"float16"}:
            guards = [_resolved(script, guard, tie.cast.function) for guard in conditions_of(outline, choice)]
            test = next((own for own, full in guards if own.text and {own, full} & tests), None)
            if test == no_bf16 and tie.is_parsed:
                return f"when `{arguments}.fp16`{unless}, "
            if test is not None:
                return f"when {'' if test.is_true else 'not '}`{test.text}`{unless}, "
    return None


def _stored_when(script: Script, tie: Trained, flag: ast.expr | None) -> str | None:
    """When a checkpoint that is stored in float16 is loaded in its own dtype and meets fp16=True; None if it does not."""
    version = script.settings.transformers
    is_default = tie.cast.form == "checkpoint"  # loaded without a dtype: in float32 before transformers 5
    if tie.cast.low or is_launched_elsewhere(script, tie) or (is_default and version is not None and version < (5,)):
        return None
    value, is_true = _assigned(script, flag, tie.function)
    is_option = isinstance(value, ast.Attribute) and value.attr == "fp16"
    if not is_true or not (is_option or _is_set_on_gpu(value)) or not stored_float16(script.outline, tie.cast):
        return None
    option = f"with `{text_of(value)}`, " if is_option else ""
    return f"{when(script, tie.cast, tie.lineage)}{option}{'on transformers 5, ' if is_default and version is None else ''}"


def _is_set_on_gpu(flag: ast.expr | None) -> bool:
    """Whether a flag is set in every run on a GPU."""
    return constant(flag) is True or text_of(flag) == _ON_GPU[0].text


def _rejected_when(script: Script, tie: Trained, flag: ast.expr | None) -> str | None:
    """When bfloat16 weights meet fp16=True, as the beginning of a message; None if the text does not show that they do."""
    value, is_true = _assigned(script, flag, tie.function)
    if "bfloat16" not in tie.cast.low or not is_true or value is None:
        return None
    own = conditions_of(script.outline, tie.cast.node)
    is_set = _is_set_on_gpu(value)
    if tie.cast.formats == {"bfloat16"}:
        is_met = is_set or Guard(text_of(value), True) in own
        return (
            (when(script, tie.cast, tie.lineage) or ("" if constant(value) is True else "on a GPU, "))
            if is_met
            else None
        )
    ways = format_ways(script.outline, tie.cast, "bfloat16")
    ways = [way for way in ways if possible(way, _ON_GPU) and (is_set or Guard(text_of(value), True) in (*own, *way))]
    return condition_text((*own, *ways[0])) if ways else None


def _fp16_flag(script: Script, tie: Trained) -> ast.expr | None:
    """The value of `fp16`, also where a function of this file passes its `**options` on to the arguments."""
    assert tie.arguments is not None
    flag = keyword_of(script.outline, tie.arguments, tie.function, "fp16")
    key = key_of(argument(tie.by, 1, "args"))
    created = [v for v in script.outline.values(key, tie.function) if isinstance(v, ast.Call)] if key else []
    if flag is None and len(created) == 1 and created[0] is not tie.arguments:
        flag = keyword_of(script.outline, created[0], tie.function, "fp16")
    return flag if not _is_one_of_several(script, tie) else None


def _is_one_of_several(script: Script, tie: Trained) -> bool:
    """Whether `**options` of the arguments is one of several dictionaries with different flags: each value of the setting decides."""
    assert tie.arguments is not None
    keys = [key_of(k.value) for k in tie.arguments.keywords if k.arg is None]
    for key in filter(None, keys):
        tables = [v for v in script.outline.values(key, tie.function) if isinstance(v, (ast.Dict, ast.Call))]
        calls = [ast.Call(tie.arguments.func, [], [ast.keyword(None, table)]) for table in tables]
        flags = [keyword_of(script.outline, call, tie.function, "fp16") for call in calls]
        if len({constant(flag) if flag is not None else False for flag in flags}) > 1:
            return True
    return False


def _assigned(script: Script, node: ast.expr | None, function: Function) -> tuple[ast.expr | None, bool]:
    """What a flag is assigned, without `bool(...)` and `not`, and whether it is true when that is."""
    is_true = True
    for _ in range(4):
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            node, is_true = node.operand, not is_true
        elif isinstance(node, ast.Call) and key_of(node.func) == "bool" and len(node.args) == 1:
            node = node.args[0]
        else:
            options = script.outline.values(key_of(node), function) if key_of(node) else []
            if len(options) != 1:
                break
            node = options[0]
    return node, is_true


def _compared(node: ast.expr | None) -> tuple[ast.expr, ast.expr] | None:
    """The sides of `a == b`."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], (ast.Eq, ast.Is)):
        return node.left, node.comparators[0]
    return None


def _resolved(script: Script, guard: Guard, function: Function) -> tuple[Guard, Guard]:
    """A condition as written, and with the only value of its variable."""
    options = script.outline.values(guard.text, function) if guard.text.isidentifier() else []
    value, is_true = _assigned(script, options[0], function) if len(options) == 1 else (None, True)
    return guard, Guard(text_of(value), guard.is_true is is_true) if value is not None else guard


RULES: tuple[type[Rule], ...] = (HalfLoadWithFp16Training,)
