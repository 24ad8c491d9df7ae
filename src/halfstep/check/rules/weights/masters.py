"""HS151, HS152, HS277: 16-bit weights that are trained without float32 master weights."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.check.finding import Finding, Severity
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.script.exercise import is_exercise
from halfstep.check.script.flow.guard import possible
from halfstep.check.script.flow.order import is_amp
from halfstep.check.script.objects.chosen import dtype_values
from halfstep.check.script.objects.expressions import arms_of, decides_adapters
from halfstep.check.script.objects.formats import AUTO, formats_of, keyword_of, passed_for
from halfstep.check.script.objects.freezing import restoring_loop
from halfstep.check.script.objects.lifted import lifted_in_float16
from halfstep.check.script.objects.loading import is_language_model, stored_low
from halfstep.check.script.objects.trainers import has_plugin, is_without_bf16, names_engine, places_without_engine
from halfstep.check.script.objects.training import Trained
from halfstep.check.script.objects.values import argument, constant, text_of
from halfstep.check.script.objects.weights import Cast, Lineage, conditions_of
from halfstep.check.script.scaling.stepped import steps_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.scope import default_of
from halfstep.check.script.syntax.unstepped import never_steps, trains_nothing
from halfstep.check.script.trained.variable_casts import conditions_of_cast
from halfstep.check.settings import Settings

__all__ = ["RULES", "TRAINER", "anchor", "choices_of", "is_stepped", "remedy", "subject", "when"]

_LOOP = """\
import torch
model = Net().cuda(){cast}
optimizer = {optimizer}(model.parameters(), lr=1e-5)
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = loss_fn(model(x), y)
    loss.backward()
    optimizer.step()
"""
TRAINER = """\
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
model = AutoModelForCausalLM.from_pretrained("{name}"{dtype})
args = TrainingArguments("out", learning_rate=1e-5{flags})
Trainer(model=model, args=args, train_dataset=data).train()
"""
_QWEN = "Qwen/Qwen3-0.6B"
_MASTER = 'use an optimizer with master weights, such as halfstep.optim.AdamW(..., master="split")'
_FAR = 5  # lines


def when(script: Script, cast: Cast, lineage: Lineage | None = None) -> str:
    """The condition under which a cast happens and its model is trained, as the beginning of a message."""
    conditions = conditions_of_cast(script.outline, cast.node)
    if cast.dtype is not None:  # `options["dtype"] = ...` of `**options` may have conditions of its own
        conditions = tuple(dict.fromkeys((*conditions, *conditions_of(script.outline, cast.dtype))))
    conditions = tuple(guard for guard in conditions if not guard.text.startswith("__name__"))
    equal = {text.partition(" == ")[0] for text, is_true in conditions if is_true and " == " in text}
    decisive = [g for g in conditions if g.is_true or g.text.partition(" == ")[0] not in equal]
    flags = [text if is_true else _negated(text) for text, is_true in decisive if len(text) < 60]
    low = " or ".join(sorted(cast.low))
    names = (v for v in dtype_values(cast) if key_of(v))
    variable = next((text_of(v) for v in names if formats_of(script.outline, v, cast.function) & cast.low), "")
    lineage = lineage or Lineage(script.outline)
    # An option may choose both the cast and what is frozen.
    parts = [f"`{flag}`" for flag in dict.fromkeys((*flags, *map(_negated, lineage.frozen_when)))]
    if script.training.adapters == "optional" and not lineage.is_adapted and not decides_adapters(conditions):
        parts.append("no adapter is used")
    if cast.form == "factory":
        parts.append(f"`{text_of(cast.node.func)}` creates {low} weights")
    elif not cast.is_certain and cast.low:
        parts.append(f"`{variable}` is {low}" if variable else f"the dtype is {low}")
    return f"when {' and '.join(parts)}, " if parts else ""


def _negated(text: str) -> str:
    return f"not ({text})" if re.search(r" (and|or) ", text) else f"not {text}"


def choices_of(script: Script, cast: Cast) -> list[ast.expr]:
    """Each dtype that a cast or a load may name, as written."""
    choices = []
    for dtype in dtype_values(cast):
        values = script.outline.values(key_of(dtype), cast.function) if key_of(dtype) else []
        choices += [arm for value in values or [dtype] for arm in arms_of(value)]
    return choices


def subject(cast: Cast) -> str:
    """The model in a message."""
    return f"`{cast.key}`" if cast.key else "the model"


def anchor(script: Script, cast: Cast) -> ast.AST:
    """Where to report a cast: the call, the dtype in it if that stands far below, or where the only caller chooses it."""
    dtype = next(dtype_values(cast), None)
    around = {n for n in script.above(cast.dtype) if isinstance(n, ast.FunctionDef)} if cast.dtype is not None else ()
    if around and cast.function.node not in around and cast.dtype is not None:
        return cast.dtype  # in `**make_options()`
    dtype = dtype if dtype is not cast.dtype or any(k.value is dtype for k in cast.node.keywords) else None
    if dtype is not None and cast.form == "load" and (name := key_of(dtype)) in cast.function.params:
        passed = list(passed_for(script.outline, name, cast.function))
        if len(passed) == 1 and default_of(cast.function, name) is None:
            value, caller = passed[0]
            chosen = script.outline.lookup(key_of(value), caller) if key_of(value) else []
            return chosen[0].node if len(chosen) == 1 and chosen[0].index is None else value
    return dtype if dtype is not None and dtype.lineno > cast.node.lineno + _FAR else cast.node


def remedy(script: Script, cast: Cast) -> str:
    """What to write so that the weights are float32."""
    if cast.form in {"load", "checkpoint"} and isinstance(cast.node.func, ast.Attribute):
        if script.outline.names.full(cast.node.func).startswith("diffusers"):
            return "load it with torch_dtype=torch.float32"
        version = script.settings.transformers
        if version is not None and version < (4, 56):
            return "load it with torch_dtype=torch.float32"
        return "load it with dtype=torch.float32"
    return f"keep {subject(cast)} in float32"


def is_launched_elsewhere(script: Script, tie: Trained) -> bool:
    """Whether the command line sets the arguments of a Trainer, and the file mentions that it names DeepSpeed or FSDP."""
    if not tie.is_parsed or not names_engine(script.outline, script.source.text):
        return False
    return not places_without_engine(script.outline, tie.cast.node, tie.cast.function)


def is_stepped(script: Script, tie: Trained) -> bool:
    """Whether the optimizer of a tie may step on the weights that were cast: no branch of AMP excludes it."""
    guards = conditions_of(script.outline, tie.cast.node)
    if any(is_amp(guard) and not guard.is_true for guard in guards) or never_steps(script.outline, tie.by):
        return False
    steps = steps_of(script, tie.by, "opt_step", "scaler_step")
    opposite = {(text, not is_true) for text, is_true in guards}
    return not steps or any(not opposite & set(e.guards) for e in steps)


def _lost(low: frozenset[str]) -> str:
    return f"updates below {'1/512' if 'bfloat16' in low else '1/4096'} of a weight are lost"


def _severity(script: Script, tie: Trained, *, always: bool) -> Severity | None:
    """An error where most updates are lost: bfloat16 weights in every run, at a learning rate of at most 2e-5."""
    if not tie.cast.is_certain:
        return "advice"
    rate = argument(tie.by, 1, "lr")
    values = script.outline.values(key_of(rate), tie.cast.function) if rate is not None and key_of(rate) else [rate]
    rates = [constant(value) for value in values if value is not None]
    small = bool(rates) and all(isinstance(r, float) and 0 < r <= 2e-5 for r in rates)
    return "error" if always and small else None


class WeightsWithoutMaster(ScriptRule):
    """16-bit weights are updated by an optimizer without float32 master weights."""

    code = "HS151"
    name = "weights-without-master"
    severity = "warning"
    reason = (
        "bfloat16 has 8 significant bits: an update below half a unit in the last place, 1/512 to 1/256 of the weight, changes nothing. At a "
        "learning rate of 1e-5, 14.7 % of the weights moved at all in 20 steps of AdamW; with master weights 50.9 % did. The moments of the "
        "optimizer have 16 bits too. Keep the weights in float32 and compute in bfloat16 with autocast (with FSDP2: MixedPrecisionPolicy), "
        "or use an optimizer that keeps master weights or rounds stochastically."
    )
    bad = (
        _LOOP.format(cast=".bfloat16()", optimizer="torch.optim.AdamW"),
        _LOOP.format(cast="\nmodel.to(torch.bfloat16)\nfully_shard(model)", optimizer="torch.optim.AdamW"),
        _LOOP.format(cast="\nmodel = model.to('cuda', dtype=torch.bfloat16)", optimizer="torch.optim.SGD"),
    )
    good = (
        _LOOP.format(cast="", optimizer="torch.optim.AdamW"),
        _LOOP.format(cast=".bfloat16()", optimizer="halfstep.optim.AdamW").replace("torch\n", "torch, halfstep\n", 1),
        _LOOP.format(
            cast="\nfully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16))", optimizer="torch.optim.AdamW"
        ),
    )
    references = (
        "https://github.com/areal-project/AReaL/issues/1292",
        "https://github.com/NVIDIA-NeMo/Automodel/issues/2419",
        "https://arxiv.org/abs/2010.06192",
        "measured: transformers 5.22.2, bf16 checkpoint, AdamW, lr 1e-5, 20 steps",
    )

    def check(self, script: Script) -> Iterator[Finding]:
        """bfloat16 weights of models that a plain optimizer updates."""
        if is_exercise(script):
            return
        for tie in script.training.by_optimizers:
            cast = tie.cast
            if "bfloat16" not in cast.low or not is_stepped(script, tie):
                continue
            launched = script.outline.names.uses("accelerate") or "accelerator" in script.outline.loads
            if launched and has_plugin(script.outline):
                continue  # with a plugin, Accelerate trains float32 copies
            is_hook = tie.function.name == "configure_optimizers" and "Trainer" not in script.outline.calls
            is_for_engine = cast.function.name in {"configure_model", "configure_sharded_model"} and cast.form != "cast"
            if is_hook and is_for_engine:
                continue  # a hook of Lightning: large models are loaded in it, which DeepSpeed or FSDP shards
            launched |= is_hook  # the Trainer of another file chooses the strategy
            choices = [c for c in choices_of(script, cast) if formats_of(script.outline, c, cast.function) & cast.low]
            guards = [guard for choice in choices for guard in conditions_of(script.outline, choice)]
            is_beside = any("deepspeed" in text and not is_true for text, is_true in guards)
            if launched and tie.is_assumed and "deepspeed" in script.source.text.lower() and not is_beside:
                continue
            unless = "without DeepSpeed or FSDP, " if launched else ""
            restored = restoring_loop(tie.lineage)
            but = f", except the layers of line {restored[0].lineno}," if restored is not None else ""
            adds = f"without float32 master weights unless `{text_of(tie.by.func)}` adds them"
            no_master = adds if tie.is_assumed else "which keeps no float32 master weights"
            yield self.finding(
                script.where(anchor(script, cast)),
                f"{when(script, cast, tie.lineage)}{unless}{subject(cast)}{but} is trained in {' or '.join(sorted(cast.low))} by `{text_of(tie.by.func)}` "
                f"({script.at(tie.by)}), {no_master}: {_lost(cast.low)}",
                instead=f"{remedy(script, cast)} and compute under bfloat16 autocast, or {_MASTER}",
                severity="advice"
                if restored is not None and restored[1] == "matrices"
                else _severity(script, tie, always=not (launched or when(script, cast, tie.lineage))),
            )
        for lift in lifted_in_float16(script):
            yield self.finding(
                script.where(lift.cast.call),
                f"without DeepSpeed or FSDP, {lift.describe(script)}: updates below 1/512 of a weight are lost",
                instead="cast the trained weights to float32 with bf16 as well",
                severity="advice",
            )
        is_idle = trains_nothing(script.outline, script.training.optimizers)
        for cast in () if is_idle else script.training.cast_parameters:
            yield self.finding(
                script.where(cast.node),
                f"the trained parameters `{cast.key}` are cast to {' or '.join(sorted(cast.low))}, and the optimizer keeps no float32 master weights: {_lost(cast.low)}",
                instead="leave trained parameters in float32; autocast computes in 16 bits",
                severity=None if cast.is_certain else "advice",
            )


_BEFORE_FIVE = {"transformers.AdamW", "transformers.optimization.AdamW"}  # removed before transformers 5


class CheckpointDtypeTrained(ScriptRule):
    """A model is trained in the dtype of its checkpoint, which has 16 bits for most language models."""

    code = "HS152"
    name = "checkpoint-dtype-trained"
    severity = "warning"
    reason = (
        'Since transformers 5, `from_pretrained` without a dtype loads the checkpoint\'s own dtype, as `dtype="auto"` always did; before, it '
        "loaded float32. Nearly all language models are stored in bfloat16, and `bf16=True` is autocast: it adds no float32 copy. The weights "
        "and the moments of Adam then have 16 bits, and at a learning rate of 1e-5 only 14.7 % of the weights moved at all in 20 steps."
    )
    bad = (
        TRAINER.format(name=_QWEN, dtype="", flags=", bf16=True"),
        TRAINER.format(name=_QWEN, dtype=', dtype="auto"', flags=", bf16=True"),
    )
    good = (
        TRAINER.format(name=_QWEN, dtype=", dtype=torch.float32", flags=", bf16=True"),
        TRAINER.format(name="gpt2", dtype="", flags=", bf16=True"),
    )
    references = (
        "https://github.com/huggingface/trl/issues/5457",
        "https://github.com/huggingface/sentence-transformers/issues/3773",
        "measured: transformers 5.22.2, bf16 checkpoint, Trainer(bf16=True), lr 1e-5, 20 steps",
    )
    settings = Settings(transformers=(5, 22, 2))
    words = ("bf16=True", 'dtype="auto"', "dtype='auto'", "AutoModelForCausalLM.from_pretrained(")

    def check(self, script: Script) -> Iterator[Finding]:
        """Loads without a dtype, or with "auto", of models that are trained in full."""
        if is_exercise(script):
            return
        is_old = bool(_BEFORE_FIVE & set(script.outline.names.table.values()))
        version = (4,) if is_old else script.settings.transformers
        for tie in (*script.training.by_trainers, *script.training.by_optimizers):
            cast = tie.cast
            if (
                AUTO not in cast.formats
                or tie.is_assumed
                or is_launched_elsewhere(script, tie)
                or cast.low
                or _is_cast_too(tie)
                or (cast.form == "checkpoint" and version is not None and version < (5,))
            ):
                continue
            stored = stored_low(script.outline, cast)
            if stored is False or (stored is None and not is_language_model(cast)):
                continue
            # A checkpoint that only a run knows: reported where bf16=True shows that a model of today is meant.
            is_older = "ForConditionalGeneration" in text_of(cast.node.func)  # T5, BART, Whisper: mostly float32
            asks_bf16 = _may_be_set(script, tie, "bf16", always=is_older)
            if stored is None and cast.form == "checkpoint" and not asks_bf16:
                continue
            before = "on transformers 5, " if cast.form == "checkpoint" and version is None else ""
            which = "16 bits" if stored else "16 bits for most language models"
            how = 'dtype="auto"' if cast.form == "load" else "no dtype"
            yield self.finding(
                script.where(anchor(script, cast)),
                f"{when(script, cast, tie.lineage)}{before}{subject(cast)} is loaded with {how} and so has its checkpoint's dtype, {which}, and is trained "
                "without float32 master weights (unless launched with DeepSpeed or FSDP): updates below 1/512 of a weight are lost",
                instead=f"{remedy(script, cast)} (bf16=True still computes in bfloat16), or {_MASTER}",
                severity=None if stored else "advice",
            )


def _is_cast_too(tie: Trained) -> bool:
    """Whether a cast sets the dtype of the model after all, in the branch that loads it or in every one: HS151 reports that cast."""
    load = conditions_of(tie.lineage.outline, tie.cast.node)
    casts = [c for c in tie.lineage.casts if c.form == "cast" and c.is_certain]
    return any(possible(load, conditions_of(tie.lineage.outline, c.node)) for c in casts)


def _may_be_set(script: Script, tie: Trained, name: str, *, always: bool = False) -> bool:
    """Whether a Trainer's flag is True, or unless `always` an expression that may be."""
    value = keyword_of(script.outline, tie.arguments, tie.function, name) if tie.arguments is not None else None
    return constant(value) is True or (value is not None and not always and constant(value) not in {False, None})


def _scales_gradients(script: Script, tie: Trained) -> bool:
    """Whether fp16=True on every GPU, or for float16 weights an expression that may be true: then HS166 decides."""
    flag = keyword_of(script.outline, tie.arguments, tie.function, "fp16") if tie.arguments is not None else None
    if constant(flag) is True or text_of(flag) == "torch.cuda.is_available()":
        return True
    is_option = tie.is_parsed and tie.cast.formats != {"float16"}  # most likely --fp16
    if tie.cast.formats == {"float16"} and flag is not None and is_without_bf16(flag):
        return False  # on every other GPU nothing scales them
    return tie.cast.low == {"float16"} and (is_option or _may_be_set(script, tie, "fp16"))


class Bf16WeightsTrained(ScriptRule):
    """A Trainer updates bfloat16 weights without a float32 copy."""

    code = "HS277"
    name = "bf16-weights-trained"
    severity = "warning"
    reason = (
        "`bf16=True` is autocast: the weights keep the dtype they were loaded in. bf16 has 8 significant bits, so an update below 1/512 of a "
        "weight has no effect: at a learning rate of 1e-5 that is most updates (14.7 % of the weights moved at all in 20 steps). Loaded in "
        "float32, the same flag trains float32 weights; DeepSpeed and FSDP through Accelerate keep float32 copies themselves."
    )
    bad = (
        TRAINER.format(name=_QWEN, dtype=", dtype=torch.bfloat16", flags=", bf16=True"),
        TRAINER.format(name=_QWEN, dtype=', torch_dtype="bfloat16"', flags=""),
        TRAINER.format(name=_QWEN, dtype=", dtype=torch.bfloat16", flags=", bf16=True").replace(
            "Trainer(", "SFTTrainer("
        ),
    )
    good = (
        TRAINER.format(name=_QWEN, dtype=", dtype=torch.float32", flags=", bf16=True"),
        TRAINER.format(name=_QWEN, dtype=", dtype=torch.bfloat16", flags=", bf16=True, deepspeed='ds.json'"),
        TRAINER.format(name=_QWEN, dtype=", dtype=torch.bfloat16", flags=", bf16=True").replace(
            "data)", "data, peft_config=lora)"
        ),
    )
    references = (
        "https://huggingface.co/docs/transformers/main_classes/trainer#transformers.TrainingArguments",
        "https://arxiv.org/abs/2010.06192",
        "https://github.com/huggingface/transformers/issues/36567",
    )
    lines = ("rainer.train(",)

    def check(self, script: Script) -> Iterator[Finding]:
        """bfloat16 weights that are passed to a Trainer without DeepSpeed, FSDP or an adapter."""
        if is_exercise(script):
            return
        for tie in script.training.by_trainers:
            cast = tie.cast
            if not cast.low or _scales_gradients(script, tie) or is_launched_elsewhere(script, tie):
                continue
            severity: Severity | None = None if cast.is_certain and not tie.is_parsed else "advice"
            yield self.finding(
                script.where(anchor(script, cast)),
                f"{when(script, cast, tie.lineage)}{subject(cast)} has {' or '.join(sorted(cast.low))} weights and `{text_of(tie.by.func)}` trains them "
                f"without a float32 copy (unless launched with DeepSpeed or FSDP): {_lost(cast.low)}",
                instead=f'{remedy(script, cast)} with bf16=True, or pass optimizers=(halfstep.optim.AdamW(..., master="split"), None)',
                severity=severity,
            )


RULES: tuple[type[Rule], ...] = (
    WeightsWithoutMaster,
    CheckpointDtypeTrained,
    Bf16WeightsTrained,
)
