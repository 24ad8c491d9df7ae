"""HS614: precision flags of a Trainer's arguments that are assigned after the arguments have been created."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.regex import regex
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.script.objects.expressions import conditions_of
from halfstep.check.script.objects.formats import keyword_of
from halfstep.check.script.objects.trainers import PARSES, arguments_of, is_trainer
from halfstep.check.script.objects.values import argument, constant, text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of, last_name
from halfstep.check.script.syntax.outline import Function
from halfstep.check.script.syntax.scope import Binding

__all__ = ["RULES"]

_TRAIN = """\
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

model = AutoModelForCausalLM.from_pretrained("gpt2")
args = TrainingArguments("out"{flags})
{late}
Trainer(model=model, args=args, train_dataset=data).train()
"""
_FLAGS = ("fp16", "bf16")
_DEVICE = regex(r"cuda|cpu|mps|gpu|device|tpu|xpu|npu")
_FIRST = (4, 30)  # earlier Trainers read the flag themselves
_OTHER_MEANS = regex(r"ACCELERATE_MIXED_PRECISION|\w\.__post_init__\(")  # set the precision after all


class LateFlag(ScriptRule):
    """A precision flag of TrainingArguments is assigned after they have been created."""

    code = "HS614"
    name = "late-precision-flag"
    severity = "warning"
    reason = (
        "TrainingArguments chooses the precision when it is created: `__post_init__` turns `fp16` and `bf16` into the `mixed_precision` of "
        "the Accelerator, and the Trainer looks at the flags no more. `args.fp16 = True` on the next line changes what is printed and "
        "logged, and the run keeps the precision of the creation."
    )
    bad = (
        _TRAIN.format(flags="", late="args.fp16 = True"),
        _TRAIN.format(flags=", bf16=use_bf16", late="if no_amp:\n    args.bf16 = False"),
    )
    good = (
        _TRAIN.format(flags=", fp16=True", late="args.logging_steps = 10"),
        _TRAIN.format(flags=", fp16=True", late="args.fp16 = True"),
        _TRAIN.format(flags="", late="args.bf16 = False"),
        _TRAIN.format(flags="", late="import dataclasses\nargs = dataclasses.replace(args, fp16=True)"),
    )
    references = (
        "https://huggingface.co/docs/transformers/main_classes/trainer#transformers.TrainingArguments",
        "measured: transformers 5.23, args.fp16 = True leaves args.mixed_precision at 'no'",
    )

    words = (".fp16 = ", ".bf16 = ")

    def check(self, script: Script) -> Iterator[Finding]:
        """The first such assignment to the arguments of each Trainer; Unsloth's Trainers set the precision themselves."""
        outline, version = script.outline, script.settings.transformers
        is_old = version is not None and version < _FIRST
        if is_old or not _has_assignments(script) or outline.names.uses("unsloth"):
            return
        if _OTHER_MEANS.search(script.source.text):
            return
        reported: set[ast.AST] = set()
        for name, sites in outline.calls.items():
            for call, function in sites if is_trainer(outline, name) else ():
                created = arguments_of(outline, call, function)
                if created is None or _is_converted(script, call, created):
                    continue
                for key, scope in _variables(script, call, function, created):
                    bound = [b for flag in _FLAGS for b in outline.bindings.get(f"{key}.{flag}", ())]
                    if not bound or outline.bindings.get(f"{key}.mixed_precision"):
                        continue
                    late = [b for b in bound if _is_late(script, b, key, created, scope)]
                    for binding in sorted(late, key=lambda b: getattr(b.node, "lineno", 0))[:1]:
                        if binding.node not in reported:
                            reported.add(binding.node)
                            yield self._report(script, binding, key, created)

    def _report(self, script: Script, binding: Binding, key: str, created: ast.Call) -> Finding:
        flag = _flag_of(script, binding, key)
        is_parsed = bool(PARSES.search(text_of(created.func)))
        where = f"`{key}` has been parsed" if is_parsed else f"`{last_name(text_of(created.func))}` has been created"
        return self.finding(
            script.where(binding.node),
            f"`{key}.{flag}` is assigned after {where} ({script.at(created)}): the Trainer keeps the precision that was chosen there",
            instead=f"{key} = dataclasses.replace({key}, {flag}=...)"
            if is_parsed
            else f"pass {flag}= to {text_of(created.func)}",
        )


def _has_assignments(script: Script) -> bool:
    """Whether the file assigns a precision flag of any object."""
    return any(key.endswith((".fp16", ".bf16")) for key in script.outline.bindings)


def _variables(
    script: Script, trainer: ast.Call, function: Function, created: ast.Call
) -> Iterator[tuple[str, Function]]:
    """The variables with the arguments of a Trainer, each with its function: here, where they are created, and in the Trainer itself."""
    outline = script.outline
    if key := key_of(argument(trainer, 1, "args")):
        yield key, function
    assign = outline.parents.get(created)
    if isinstance(assign, ast.Assign) and (own := key_of(assign.targets[0])):
        scopes = {b.function for b in outline.bindings.get(own, ()) if b.value is created}
        yield from ((own, scope) for scope in scopes if (own, scope) != (key, function))
    assign = outline.parents.get(trainer)
    if isinstance(assign, ast.Assign) and (own := key_of(assign.targets[0])):
        yield f"{own}.args", function


def _value_of(binding: Binding) -> ast.expr | None:
    """What an assignment gives its target, also as one of several: `args.fp16, args.bf16 = False, True`."""
    if binding.index is None:
        return binding.value
    elements = binding.value.elts if isinstance(binding.value, ast.Tuple) else []
    return elements[binding.index] if binding.index < len(elements) else None


def _flag_of(script: Script, binding: Binding, key: str) -> str:
    """The flag that a binding assigns."""
    return next(flag for flag in _FLAGS if binding in script.outline.bindings.get(f"{key}.{flag}", ()))


def _is_converted(script: Script, trainer: ast.Call, created: ast.Call) -> bool:
    """Whether TRL creates its own arguments from plain TrainingArguments, with the flags as they are then."""
    full = script.outline.names.full(trainer.func)
    made = text_of(created.func)
    is_config = made.endswith("Config") or (bool(PARSES.search(made)) and "SFTConfig" in script.outline.names.table)
    return full.startswith("trl.") and full.endswith("SFTTrainer") and not is_config


def _is_late(script: Script, binding: Binding, key: str, created: ast.Call, function: Function) -> bool:
    """Whether a flag gets another value than at the creation, in the function of the Trainer, and nothing creates the arguments again."""
    line = getattr(binding.node, "lineno", 0)
    own = [b for b in script.outline.lookup(key, function) if b.function is binding.function]
    flag, value = _flag_of(script, binding, key), _value_of(binding)
    if binding.function is not function or value is None:
        return False
    is_of_trainer = key.endswith(".args") and script.outline.bindings.get(key.removesuffix(".args"))
    if not own and key not in function.params and not is_of_trainer:
        return False
    if any(getattr(b.node, "lineno", 0) >= line for b in own):
        return False
    before = keyword_of(script.outline, created, function, flag)
    is_parsed = bool(PARSES.search(text_of(created.func)))
    is_spread = any(k.arg is None for k in created.keywords) and before is None
    if before is not None and (constant(before) is constant(value) is not ... or text_of(before) == text_of(value)):
        return False
    if constant(value) is False:
        is_open = is_parsed or (before is not None and constant(before) is not False)
        return is_open and not any(_DEVICE.search(text) for text, _ in conditions_of(script.outline, binding.node))
    # TRL computes in bfloat16 unless it is told otherwise.
    is_default = flag == "bf16" and text_of(created.func).endswith("Config") and before is None
    return constant(value) is not None and not is_spread and not is_default


RULES: tuple[type[Rule], ...] = (LateFlag,)
