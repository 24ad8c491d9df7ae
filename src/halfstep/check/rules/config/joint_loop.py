"""Rules for training loops around DeepSpeed's engine, with the configuration it runs with, if that is known."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.check.config.config import Config
from halfstep.check.config.deepspeed_facts import DeepSpeed
from halfstep.check.config.engine_settings import casts_entered, is_engine_at, is_engine_if_asked
from halfstep.check.config.joint import JointRule, Use, uses_name
from halfstep.check.finding import Finding, Severity
from halfstep.check.rule import Rule
from halfstep.check.rules.config.joint import BF16, FP16, LOOP, script_with
from halfstep.check.script.syntax.names import key_of

__all__ = ["RULES"]

_TRAINING = "https://www.deepspeed.ai/getting-started/"
_RIGHT = "    engine.backward(loss)\n    engine.step()\n"
_UNKNOWN = (
    "import deepspeed\n\nengine, optimizer, _, _ = deepspeed.initialize(args=args, model=model)\n"
    "for x, y in loader:\n    loss = loss_fn(engine(x), y)\n"
)
_CLIPPED = _RIGHT.replace("    engine.s", "    torch.nn.utils.clip_grad_norm_(engine.parameters(), 1.0)\n    engine.s")


_ENGINE = "from transformers import Trainer\nengine, *_ = deepspeed.initialize(model=model, optimizer=opt, config=ds_config)\n"


class ClipsBehindEngine(JointRule):
    """The script clips gradients that DeepSpeed stores scaled or sharded."""

    code = "HS291"
    name = "clips-behind-engine"
    severity = "warning"
    reason = (
        "Between `engine.backward` and `engine.step` DeepSpeed manages the gradients: in fp16 they are still "
        "multiplied by the loss scale (65536 initially), and with ZeRO the parameters' `.grad` is empty or partial. "
        "Clipping at 1.0 there has no effect, or clips the true gradient at 1/65536. `engine.step` clips the unscaled "
        "global norm at `gradient_clipping`."
    )
    bad = (script_with(FP16, 2, _CLIPPED),)
    good = (script_with(FP16 + "    'gradient_clipping': 1.0,\n", 2, _RIGHT),)
    references = ("https://www.deepspeed.ai/docs/config-json/#gradient-clipping", _TRAINING)

    def inspect(self, use: Use, config: Config) -> Iterator[Finding]:
        """Report clipping calls on the engine's parameters; without a known configuration, as advice."""
        deepspeed = DeepSpeed(config)
        undecided = deepspeed.fp16 is None and deepspeed.stage is None
        runs = use.initialize is not None or (use.engine and use.calls("backward", use.engine))
        if not runs or not use.engine or not (deepspeed.fp16 or deepspeed.stage or undecided):
            return
        state = "still scaled" if deepspeed.fp16 else f"sharded (ZeRO stage {deepspeed.stage})"
        state = "scaled in fp16 and sharded with ZeRO" if undecided else state
        # The model that was passed to the engine has the same parameters.
        keywords = use.initialize.keywords if use.initialize is not None else []
        owners = [use.engine, key_of(next((k.value for k in keywords if k.arg == "model"), None))]
        for node in use.nodes:
            if not isinstance(node, ast.Call) or not node.args:
                continue
            if use.engines is not None and use.engines.is_without(node):
                continue
            if not any(name and uses_name(node.args[0], name) and not _is_own(use, name, node) for name in owners):
                continue
            if use.names.full(node.func).startswith("torch.nn.utils.clip_grad_"):
                yield self.finding(
                    use.where(node),
                    f"The gradients of `{use.engine}` are {state} here; this call does not clip at the requested norm.",
                    instead='Remove it and set `"gradient_clipping"` in the configuration.',
                    severity="advice" if undecided else None,
                )


def _is_own(use: Use, name: str, node: ast.AST) -> bool:
    """Whether the function around a node assigns a variable itself and creates no engine: a model of its own."""
    scope = use.engines.scope(node) if use.engines is not None else None
    inner = set(ast.walk(scope)) if scope is not None else set()
    assigned = [n for n in inner if isinstance(n, ast.Assign) and not uses_name(n.value, use.engine)]
    targets = [t for n in assigned for t in n.targets]
    return use.initialize is not None and use.initialize not in inner and name in map(key_of, targets)


class ScalerWithEngine(JointRule):
    """The script scales the loss before passing it to DeepSpeed's engine."""

    code = "HS292"
    name = "scaler-with-engine"
    severity = "error"
    reason = (
        "`engine.backward` multiplies the loss by DeepSpeed's loss scale, and `engine.step` divides by that scale "
        "only. If a GradScaler has already scaled the loss, every gradient is 65536 times too large."
    )
    bad = (script_with(FP16, 2, "    engine.backward(scaler.scale(loss))\n    engine.step()\n"),)
    good = (script_with(FP16, 2, _RIGHT),)
    references = (_TRAINING,)

    def inspect(self, use: Use, config: Config) -> Iterator[Finding]:
        """Report `engine.backward(scaler.scale(loss))`."""
        for call in use.calls("backward", use.engine) if use.initialize is not None and use.engine else ():
            loss = call.args[0] if call.args else None
            if isinstance(loss, ast.Name):
                loss = _scaled_before(use, loss)
            if isinstance(loss, ast.Call) and isinstance(loss.func, ast.Attribute) and loss.func.attr == "scale":
                # engine.scale(loss) is DeepSpeed's API for a manual backward pass.
                if uses_name(loss.func, use.engine):
                    continue
                message = "Both a GradScaler and DeepSpeed scale the loss, but DeepSpeed divides by its own scale only."
                yield self.finding(use.where(call), message, instead=f"Use `{use.engine}.backward(loss)`.")


class EnginePassedToTrainer(JointRule):
    """A DeepSpeed engine is passed to a Trainer as its model."""

    code = "HS220"
    name = "engine-passed-to-trainer"
    severity = "error"
    reason = (
        "The Trainer calls `backward` on the loss and steps an optimizer of its own: `engine.backward` and `engine.step` never run, so the loss "
        "scale, the ZeRO partitions and the master weights of the engine are bypassed. Pass the plain model, and the configuration as "
        "`TrainingArguments(deepspeed=...)`."
    )
    bad = (script_with(BF16, 2, "", loop=f"{_ENGINE}Trainer(model=engine, args=args, train_dataset=data).train()\n"),)
    good = (
        script_with(BF16, 2, "", loop=f"{_ENGINE}Trainer(model=model, args=args, train_dataset=data).train()\n"),
        script_with(BF16, 2, "", loop=f"{_ENGINE}Trainer(model=engine, optimizer=opt).train(data)\n").replace(
            "from transformers", "from engine_loop"
        ),
    )
    references = ("https://huggingface.co/docs/transformers/deepspeed",)

    def inspect(self, use: Use, config: Config) -> Iterator[Finding]:
        """Report `Trainer(model=engine)`, of a Trainer of transformers or TRL or a class of the script that extends one."""
        own = [n for n in use.nodes if isinstance(n, ast.ClassDef) and any(_is_library(use, b) for b in n.bases)]
        extended = {n.name for n in own}
        for node in use.nodes if use.initialize is not None and use.engine else ():
            name = key_of(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
            if not isinstance(node, ast.Call) or not (name in extended or _is_library(use, node.func)):
                continue  # a project's own Trainer may run the engine
            model = next((k.value for k in node.keywords if k.arg == "model"), node.args[0] if node.args else None)
            if model is not None and (key_of(model) == use.engine or (use.engines and use.engines.is_made(model))):
                yield self.finding(
                    use.where(node),
                    f"`{name}` trains `{key_of(model)}` with an optimizer of its own; the engine's backward and step never run.",
                    instead="Pass the model itself, and the configuration as TrainingArguments(deepspeed=...).",
                )


def _is_library(use: Use, node: ast.expr) -> bool:
    full = use.names.full(node)
    return full.startswith(("transformers.", "trl.")) and full.endswith("Trainer")


def _scaled_before(use: Use, loss: ast.Name) -> ast.expr:
    """What a variable is assigned just before, if that is `scaler.scale(loss)`; otherwise the variable."""
    assigned = [n for n in use.nodes if isinstance(n, ast.Assign) and key_of(n.targets[0]) == loss.id]
    before = max((n for n in assigned if n.lineno < loss.lineno), key=lambda n: n.lineno, default=None)
    value = before.value if before is not None else loss
    is_scaled = isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and "scaler" in key_of(value.func)
    return value if is_scaled else loss


_BY_SETTING = """\
import deepspeed
import torch
from contextlib import nullcontext

def make(args, model):
    if args.engine == "deepspeed":
        model, *_ = deepspeed.initialize(args=args, model=model)
    return model

def forward(args, model, x):
    if args.engine == "ddp":
        context = nullcontext()
    else:
        context = torch.autocast('cuda', dtype=torch.bfloat16)
    with context:
        return model(x)

def backward(args, model, loss):
    if args.engine == "deepspeed":
        model.backward(loss)
        model.step()
    else:
        loss.backward()
"""


_IF_ASKED = """\
import deepspeed
import torch

def train():
    with context:
        loss = model(x)
    if use_deepspeed:
        model.backward(loss)
        model.step()

context = torch.autocast("cuda", dtype=torch.bfloat16) if args.bf16 else nullcontext()
if use_deepspeed:
    model, *_ = deepspeed.initialize(model=model, config=args.deepspeed)
train()
"""


class AutocastAroundEngine(JointRule):
    """The script runs the engine under autocast, which DeepSpeed disables inside the engine."""

    code = "HS293"
    name = "autocast-around-engine"
    severity = "warning"
    reason = (
        "Current DeepSpeed runs the model under its own `torch_autocast` setting. If that is not enabled, it disables "
        "an outer autocast and warns once, so the model runs in the configured mode: in fp32 if no 16-bit mode is "
        "enabled."
    )
    bad = (
        script_with(
            "",
            2,
            _RIGHT,
            loop=LOOP.replace(
                "    loss = loss_fn(engine(x), y)\n",
                "    with torch.autocast('cuda', dtype=torch.bfloat16):\n        loss = loss_fn(engine(x), y)\n",
            ),
        ),
        _BY_SETTING,
        _IF_ASKED,
    )
    good = (
        script_with("    'torch_autocast': {'enabled': True, 'dtype': 'bfloat16'},\n", 2, _RIGHT),
        script_with(BF16, 2, _RIGHT),
        _BY_SETTING.replace("torch.autocast('cuda', dtype=torch.bfloat16)", "nullcontext()"),
        _IF_ASKED.replace("    with context:\n        loss", "    if True:\n        loss"),
    )
    references = (
        "https://www.deepspeed.ai/docs/config-json/",
        "measured: source code of DeepSpeed 0.19.8, torch_autocast.py",
    )

    def inspect(self, use: Use, config: Config) -> Iterator[Finding]:
        """Report an enabled autocast whose body calls the engine."""
        deepspeed = DeepSpeed(config)
        if not (use.engine or use.engines) or not (deepspeed.autocast is False or not config.root.entries):
            return
        for node in use.nodes:
            if not isinstance(node, ast.With):
                continue
            called = {key_of(n.func).removesuffix(".forward") for n in ast.walk(node) if isinstance(n, ast.Call)} - {""}
            for cast in (c for item in node.items for c in casts_entered(use, item.context_expr, node)):
                engines = [n for n in sorted(called) if n == use.engine or is_engine_at(use, cast, n)]
                engines += [n for n in sorted(called) if is_engine_if_asked(use, cast, node, n)]
                named = next(iter(engines), "")
                if not named:
                    continue
                mode = use.prepared.mode(deepspeed.weights)
                severity: Severity | None = None if mode == "fp32" else "advice"
                runs = f"which runs in {mode or 'the mode of its configuration'}"
                effect = runs if config.root.entries else "unless its configuration enables `torch_autocast`"
                message = f"DeepSpeed disables this autocast inside `{named}`, {effect}."
                instead = 'Add `"torch_autocast": {"enabled": true, "dtype": "bfloat16"}` to the configuration.'
                yield self.finding(use.where(cast), message, instead=instead, severity=severity)


class BareBackward(JointRule):
    """The script calls `loss.backward()` although the engine has to scale the loss and reduce the gradients."""

    code = "HS294"
    name = "bare-backward"
    severity = "error"
    reason = (
        "In fp16 `engine.backward` multiplies the loss by the scale and `engine.step` divides by it. A plain "
        "`loss.backward()` raises an error with ZeRO and a dynamic scale; with a static scale the gradients are "
        "1/scale of the true ones (measured: 1/128 with scale 128). Up to DeepSpeed 0.18.2 it also leaves the "
        "gradients of each rank as they are, so the ranks train different models. Later releases support it with ZeRO "
        "in bf16 and fp32, and raise RuntimeError at stage 0."
    )
    bad = (
        script_with(FP16, 2, "    loss.backward()\n    engine.step()\n"),
        script_with(BF16, 0, "    loss.backward()\n    engine.step()\n"),
        _UNKNOWN + "    loss.backward()\n    engine.step()\n",
    )
    good = (
        script_with(FP16, 2, _RIGHT),
        script_with(BF16, 0, _RIGHT),
        _UNKNOWN + _RIGHT,
    )
    references = (
        _TRAINING,
        "https://github.com/deepspeedai/DeepSpeed/issues/329",
        "https://github.com/deepspeedai/DeepSpeed/pull/7665",
        "measured: DeepSpeed 0.19.8, static and dynamic scale",
    )

    def inspect(self, use: Use, config: Config) -> Iterator[Finding]:
        """Report loss.backward() where an engine runs the forward or steps, and no engine runs backward."""
        if use.optimizer and use.calls("backward", use.optimizer):
            return  # the fp16 branch of scripts for old releases
        if use.engine and use.calls("backward", use.engine):
            pairs = [(call, use.engine) for call in _scaler_calls(use, "backward")]
        else:
            pairs = [*self._single(use), *self._all(use)]
        pairs += use.engines.handled_backwards() if use.engines is not None else ()
        bare = {id(call): (call, engine) for call, engine in pairs}
        for call, engine in bare.values():
            effect, severity = self._effect(DeepSpeed(config), engine)
            loss = call.args[0] if call.args else call.func.value if isinstance(call.func, ast.Attribute) else None
            if not effect or loss is None:
                continue
            if isinstance(loss, ast.Call) and isinstance(loss.func, ast.Attribute) and loss.func.attr == "scale":
                effect = f"This bypasses `{engine}`, which applies its own loss scale and averages over the ranks."
                loss = loss.args[0] if loss.args else loss
            text = ast.unparse(loss)
            instead = f"Use `{engine}.backward({text if len(text) <= 40 else 'loss'})`."
            yield self.finding(use.where(call), effect, instead=instead, severity=severity)

    @staticmethod
    def _all(use: Use) -> Iterator[tuple[ast.Call, str]]:
        yield from use.engines.bare_backwards() if use.engines is not None else ()

    @staticmethod
    def _single(use: Use) -> Iterator[tuple[ast.Call, str]]:
        """The calls anywhere in a script with one engine that always exists."""
        if use.initialize is None or not use.engine:
            return
        steps = use.calls("step", use.engine) or (use.calls("step", use.optimizer) if use.optimizer else [])
        forwards = any(isinstance(n, ast.Call) and key_of(n.func) == use.engine for n in use.nodes)
        if not steps or not (forwards or use.calls("step", use.engine)):
            return
        for call in use.calls("backward"):
            loss = key_of(call.func.value) if isinstance(call.func, ast.Attribute) else ""
            if not call.args and loss and (loss.isidentifier() or "loss" in loss.lower()):
                yield call, use.engine

    @staticmethod
    def _effect(deepspeed: DeepSpeed, engine: str) -> tuple[str, Severity | None]:
        """What goes wrong under a configuration; "" if this release supports the call there."""
        old = "up to DeepSpeed 0.18.2 the gradients are not averaged over the ranks"
        if deepspeed.fp16:
            return f"The loss is not scaled here, but `{engine}.step()` divides by the loss scale.", None
        if deepspeed.stage == 0:
            return f"At stage 0 DeepSpeed raises RuntimeError here; {old}.", None
        if deepspeed.fp16 is None:
            return f"In fp16 the loss is not scaled here, and {old}.", "warning"
        return ("" if deepspeed.since(0, 18, 3) else f"This bypasses `{engine}`: {old}.", "advice")


def _scaler_calls(use: Use, method: str) -> list[ast.Call]:
    """The calls of a GradScaler where the one engine, which always exists, should run backward or step."""
    is_single = use.engines is not None and use.initialize is not None and use.engine
    return use.engines.scaler_calls(method, use.engine) if use.engines is not None and is_single else []


class OptimizerInsteadOfEngine(JointRule):
    """The script steps DeepSpeed's optimizer instead of the engine."""

    code = "HS295"
    name = "optimizer-instead-of-engine"
    severity = "warning"
    reason = (
        "`engine.step` counts micro-batches, reduces and clips gradients, steps the optimizer and the scheduler, and "
        "zeroes the gradients. `optimizer.step` alone updates the weights on every micro-batch, regardless of "
        "`gradient_accumulation_steps`."
    )
    bad = (script_with(BF16, 2, "    engine.backward(loss)\n    optimizer.step()\n"),)
    good = (script_with(BF16, 2, _RIGHT),)
    references = (_TRAINING,)

    def inspect(self, use: Use, config: Config) -> Iterator[Finding]:
        """Report optimizer.step() without engine.step(), and the step of a scaler instead of it."""
        if use.engines is not None and use.initialize is None:
            for call, engine in use.engines.optimizer_steps():
                yield self._bypass(use, call, engine)
        if use.initialize is None or not use.engine or not use.optimizer:
            return
        forwards = any(isinstance(n, ast.Call) and key_of(n.func) == use.engine for n in use.nodes)
        if not forwards and not use.calls("backward", use.engine):
            return
        bare = use.calls("step", use.optimizer) if not use.calls("step", use.engine) else []
        for call in (*bare, *_scaler_calls(use, "step")):
            yield self._bypass(use, call, use.engine)

    def _bypass(self, use: Use, call: ast.Call, engine: str) -> Finding:
        message = f"`{ast.unparse(call)}` bypasses the engine's gradient accumulation, clipping and scheduler."
        return self.finding(use.where(call), message, instead=f"Use `{engine}.step()`.")


RULES: tuple[type[Rule], ...] = (
    ClipsBehindEngine,
    ScalerWithEngine,
    EnginePassedToTrainer,
    AutocastAroundEngine,
    BareBackward,
    OptimizerInsteadOfEngine,
)
