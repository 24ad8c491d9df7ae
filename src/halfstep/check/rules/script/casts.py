"""HS160-HS162, HS166: trained weights put into 16 bits by hand."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.script.event import Event, compatible
from halfstep.check.script.names import key_of
from halfstep.check.script.order import implied, is_amp, switched_off, without_amp
from halfstep.check.script.outline import Function
from halfstep.check.script.script import Script
from halfstep.check.script.values import DTYPES, argument, constant, dtypes_of

__all__ = ["RULES"]

_TRAIN = """\
import torch
model = Net().cuda(){cast}
optimizer = torch.optim.{optimizer}(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
_PLAIN = """\
import torch
model = Net().cuda()
{cast}optimizer = torch.optim.{optimizer}(model.parameters(), lr=1e-3)
for x, y in loader:
    optimizer.zero_grad()
    loss = loss_fn(model(x.half()), y)
    loss.backward()
    optimizer.step()
"""
_MASTERS = re.compile(
    r"master|FP16_Optimizer|FP16Optimizer|amp_C|Kahan|StochasticRound|optimi|AnyPrecision", re.IGNORECASE
)
_LOADS = re.compile(
    r"load_model|build_model|create_model|make_model|get_model|init|setup|prepare_model|^_?(load|build)$"
)
_ADAPTERS = ("peft", "bitsandbytes", "unsloth", "loralib")


def _casts(script: Script, dtype: str, kind: str) -> Iterator[Event]:
    """Casts of a model that an optimizer of this script trains, where a step of this kind follows from them."""
    seen = set()
    for trace in script.traces:
        for index, event in enumerate(trace):
            if event.kind != "cast" or event.scaled != dtype or event.node in seen or event.inside("no_grad"):
                continue
            # A cast after the training loop is for saving or serving, and one that is taken back does no harm.
            if event.loops or any(e.kind == "backward" for e in trace[:index]):
                continue
            if any(
                e.kind == "cast" and e.subject == event.subject and e.scaled == "float32" for e in trace[index + 1 :]
            ):
                continue
            near = [e for t in script.traces for e in t if t is trace or _same_class(e, event)]
            steps = [e for e in near if e.kind == kind and _meets(event, e) and not switched_off(script, e)]
            if any(_trained(script, event, [e for e in near if _takes(script, e, step)]) for step in steps):
                seen.add(event.node)
                yield event


def _meets(cast: Event, step: Event) -> bool:
    """Whether a step is taken on weights that were cast: always, or whenever a flag such as `args.fp16` is on.

    A scaler has flags of its own, and two flags may exclude each other, so for its step only "always" will do.
    """
    if implied(cast, step):
        return True
    flags = set(cast.guards) - set(step.guards)
    asked = all(holds and is_amp((text, holds)) for text, holds in flags) and not without_amp(cast)
    return step.kind == "opt_step" and asked and compatible(cast, step) and not without_amp(step)


def _same_class(other: Event, cast: Event) -> bool:
    """Whether two events of one class are about one object: an attribute, or the model a loader makes."""
    shared = cast.subject.startswith("self.") or _LOADS.search(cast.function.name)
    return bool(shared) and bool(cast.function.cls) and other.function.cls == cast.function.cls


def _takes(script: Script, made: Event, step: Event) -> bool:
    """Whether an optimizer that is made may be the one that steps: it is kept under that name, or handed on unnamed."""
    if made.kind != "make_optimizer" or not made.subject:
        return False
    statement = script.statement(made.node)
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    names = {key_of(t).rsplit(".", 1)[-1] for t in targets} - {""}
    if statement is not None and getattr(statement, "value", None) is not made.node:
        names = {name for name in names if "opt" in name.lower()}  # wrapped in another optimizer
    return not names or not step.optimizer or step.optimizer.rsplit(".", 1)[-1] in names


def _trained(script: Script, cast: Event, made: list[Event]) -> bool:
    """Whether an optimizer takes the parameters of the model that is cast, or none is made here and a loader casts it."""
    if made:
        return any(cast.subject in m.subject.split("|") and compatible(m, cast) for m in made)
    if script.has("make_optimizer"):
        return False
    return cast.subject == "model" and bool(_LOADS.search(cast.function.name)) and not cast.guards


def _holds_masters(name: str) -> bool:
    """Whether a name speaks of float32 copies of the weights, or of an optimizer that keeps some."""
    return bool(_MASTERS.search(name)) and ("optimizer" not in name.lower() or "16" in name)


class HalfModelWithScaler(ScriptRule):
    """The weights are float16 and a GradScaler steps them."""

    code = "HS160"
    name = "half-model-with-scaler"
    severity = "error"
    reason = (
        "Float16 weights have float16 gradients, and the scaler refuses them: ValueError: Attempting to unscale FP16 gradients. "
        "Under autocast the weights stay float32; autocast makes the 16-bit copies."
    )
    bad = (
        _TRAIN.format(cast=".half()", optimizer="SGD"),
        _TRAIN.format(cast="\nmodel.to(torch.float16)", optimizer="AdamW"),
    )
    good = (_TRAIN.format(cast="", optimizer="SGD"), _TRAIN.format(cast="", optimizer="SGD") + "model.half()\n")
    references = (
        "https://github.com/Lightning-AI/pytorch-lightning/issues/5140",
        "https://github.com/yk7333/d3po/issues/6",
    )

    def check(self, script: Script) -> Iterator[Finding]:
        """Float16 casts of trained models in scripts whose scaler steps their optimizer."""
        if any("Sharded" in s.api for s in script.scalers):
            return
        for event in _casts(script, "float16", "scaler_step"):
            yield self.finding(
                script.where(event.node),
                f"`{event.subject}` is cast to float16 here, so the scaler raises: Attempting to unscale FP16 gradients",
                instead=f"leave `{event.subject}` in float32 and let autocast choose",
            )


class HalfWeightsPlainOptimizer(ScriptRule):
    """Float16 weights are trained by a plain optimizer, without master weights."""

    code = "HS161"
    name = "half-weights-plain-optimizer"
    severity = "warning"
    reason = (
        "A float16 weight near 1 moves in steps of 0.001, so updates below 0.0005 are rounded away and the weight stands still. "
        "Gradients below 6e-8 are zero for want of a loss scale, and Adam's eps of 1e-8 is zero in float16, so it divides by zero."
    )
    bad = (
        _PLAIN.format(cast="model.half()\n", optimizer="Adam"),
        _PLAIN.format(cast="model = model.half()\n", optimizer="SGD"),
        _PLAIN.format(cast="if args.fp16:\n    model.half()\n", optimizer="SGD"),
    )
    good = (
        _PLAIN.format(cast="", optimizer="Adam").replace(".half()", ""),
        _PLAIN.format(cast="if args.fp16:\n    export(model.half())\n    raise SystemExit\n", optimizer="SGD"),
    )
    references = ("https://arxiv.org/abs/1710.03740", "https://github.com/pytorch/pytorch/issues/147437")

    def check(self, script: Script) -> Iterator[Finding]:
        """Float16 casts of trained models in scripts that step a torch optimizer directly."""
        if script.scalers or script.has("scaler_step", "owned_backward", "owned_step", "apex_initialize"):
            return
        if any(map(_holds_masters, script.outline.loads)):
            return
        backs = list(script.events("backward"))
        if not backs or any(b.scaled != "no" for b in backs):
            return
        for event in _casts(script, "float16", "opt_step"):
            flags = " and ".join(f"`{text}`" for text, holds in event.guards if holds and is_amp((text, holds)))
            yield self.finding(
                script.where(event.node),
                f"{f'where {flags} holds, ' if flags else ''}`{event.subject}` is trained in float16 with no float32 master weights and no loss scale: small updates are lost",
                instead=f"keep `{event.subject}` in float32 and train under autocast with a GradScaler, or under bfloat16 autocast",
            )


class DefaultDtypeHalf(ScriptRule):
    """The default type of a training script is set to 16 bits."""

    code = "HS162"
    name = "default-dtype-half"
    severity = "warning"
    reason = (
        "Every parameter, buffer and constant made afterwards is 16 bits wide: there are no float32 weights left for small updates, "
        "and batch-norm statistics and losses are kept in 16 bits too."
    )
    bad = (
        "import torch\ntorch.set_default_dtype(torch.float16)\nfor x in loader:\n    loss = model(x)\n    loss.backward()\n    optimizer.step()\n",
        "import torch\ntorch.set_default_tensor_type(torch.cuda.HalfTensor)\nfor x in loader:\n    loss = model(x)\n    loss.backward()\n    optimizer.step()\n",
    )
    good = (
        "import torch\ntorch.set_default_dtype(torch.float32)\nfor x in loader:\n    loss = model(x)\n    loss.backward()\n    optimizer.step()\n",
    )
    references = ("https://docs.pytorch.org/docs/stable/generated/torch.set_default_dtype.html",)

    def check(self, script: Script) -> Iterator[Finding]:
        """Calls that set a 16-bit default, in scripts that train."""
        if not script.has("backward"):
            return
        names = script.outline.names
        for call, _ in (
            *script.outline.calls.get("set_default_dtype", ()),
            *script.outline.calls.get("set_default_tensor_type", ()),
        ):
            value = argument(call, 0, "d") or argument(call, 0, "t")
            full = names.full(value) if value is not None else ""
            text = full or str(constant(value))
            if DTYPES.get(full) == "float16" or text.endswith(".HalfTensor"):
                yield self.finding(
                    script.where(call),
                    "everything made after this is float16, the weights that are trained included",
                    instead="leave the default at float32 and use autocast",
                )


class HalfLoadWithFp16Training(ScriptRule):
    """A model is loaded in float16 and trained by a Trainer with fp16=True."""

    code = "HS166"
    name = "half-load-with-fp16-training"
    severity = "error"
    reason = (
        "`fp16=True` means float32 weights under float16 autocast with a scaler. With weights loaded in float16 the first step raises "
        "ValueError: Attempting to unscale FP16 gradients."
    )
    bad = (
        "import torch\nfrom transformers import AutoModelForCausalLM, Trainer, TrainingArguments\n"
        "model = AutoModelForCausalLM.from_pretrained('gpt2', torch_dtype=torch.float16)\n"
        "args = TrainingArguments(output_dir='out', fp16=True)\ntrainer = Trainer(model=model, args=args)\ntrainer.train()\n",
    )
    good = (
        "import torch\nfrom transformers import AutoModelForCausalLM, Trainer, TrainingArguments\n"
        "model = AutoModelForCausalLM.from_pretrained('gpt2')\n"
        "args = TrainingArguments(output_dir='out', fp16=True)\ntrainer = Trainer(model=model, args=args)\ntrainer.train()\n",
    )
    references = (
        "https://github.com/huggingface/transformers/issues/23165",
        "https://github.com/bitsandbytes-foundation/bitsandbytes/issues/945",
    )

    def check(self, script: Script) -> Iterator[Finding]:
        """Float16 loads that go whole into a Trainer with fp16=True."""
        outline = script.outline
        if outline.names.uses(*_ADAPTERS) or "deepspeed" in outline.loads:
            return
        on = [
            call
            for name, pairs in outline.calls.items()
            if name.endswith("TrainingArguments")
            for call, _ in pairs
            if constant(argument(call, None, "fp16")) is True and argument(call, None, "deepspeed") is None
        ]
        trained = [
            (key_of(argument(call, 0, "model")), function)
            for name, pairs in outline.calls.items()
            if name.endswith("Trainer")
            for call, function in pairs
        ]
        for key, function in trained if on else ():
            for value in outline.values(key, function) if key else ():
                if isinstance(value, ast.Call) and _half_load(script, value, function):
                    yield self.finding(
                        script.where(value),
                        f"`{key}` is loaded in float16 and trained with fp16=True: the scaler raises on float16 gradients",
                        instead="load in float32, or use bf16=True",
                    )


def _half_load(script: Script, call: ast.Call, function: Function) -> bool:
    """Whether a call loads a whole model in float16."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr != "from_pretrained":
        return False
    if any(k.arg in {"quantization_config", "load_in_8bit", "load_in_4bit"} for k in call.keywords):
        return False
    dtype = argument(call, None, "torch_dtype") or argument(call, None, "dtype")
    return dtype is not None and dtypes_of(script.outline, dtype, function) == {"float16"}


RULES: tuple[type[Rule], ...] = (
    HalfModelWithScaler,
    HalfWeightsPlainOptimizer,
    DefaultDtypeHalf,
    HalfLoadWithFp16Training,
)
