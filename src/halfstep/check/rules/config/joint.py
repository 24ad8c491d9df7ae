"""Rules for scripts that contradict the DeepSpeed configuration they run with."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from halfstep.check.config.config import Config
from halfstep.check.config.deepspeed_facts import DeepSpeed
from halfstep.check.config.joint import JointRule, Use, uses_name
from halfstep.check.finding import Finding, Severity
from halfstep.check.rule import Rule
from halfstep.check.script.names import key_of
from halfstep.precision.node import Entry, Scalar

__all__ = ["RULES"]

_TRAINING = "https://www.deepspeed.ai/getting-started/"
_HEAD = "import deepspeed\nimport torch\n\n"
_LOOP = (
    "engine, optimizer, _, _ = deepspeed.initialize(model=model, config=ds_config)\n"
    "for x, y in loader:\n    loss = loss_fn(engine(x), y)\n"
)


def _script(mode: str, stage: int, body: str, more: str = "", loop: str = _LOOP) -> str:
    config = (
        f"ds_config = {{\n    'train_batch_size': 8,\n    'zero_optimization': {{'stage': {stage}{more}}},\n{mode}}}\n"
    )
    return f"{_HEAD}{config}{loop}{body}"


_FP16 = "    'fp16': {'enabled': True},\n"
_BF16 = "    'bf16': {'enabled': True},\n"
_RIGHT = "    engine.backward(loss)\n    engine.step()\n"
_CLIPPED = _RIGHT.replace("    engine.s", "    torch.nn.utils.clip_grad_norm_(engine.parameters(), 1.0)\n    engine.s")


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
    bad = (_script(_FP16, 2, _CLIPPED),)
    good = (_script(_FP16 + "    'gradient_clipping': 1.0,\n", 2, _RIGHT),)
    references = ("https://www.deepspeed.ai/docs/config-json/#gradient-clipping", _TRAINING)

    def inspect(self, use: Use, config: Config) -> Iterator[Finding]:
        """Report clipping calls on the engine's parameters; without a known configuration, as advice."""
        deepspeed = DeepSpeed(config)
        undecided = deepspeed.fp16 is None and deepspeed.stage is None
        if not use.engine or not (deepspeed.fp16 or deepspeed.stage or undecided):
            return
        state = "still scaled" if deepspeed.fp16 else f"sharded (ZeRO stage {deepspeed.stage})"
        state = "scaled in fp16 and sharded with ZeRO" if undecided else state
        for node in use.nodes:
            if not isinstance(node, ast.Call) or not node.args or not uses_name(node.args[0], use.engine):
                continue
            if use.names.full(node.func).startswith("torch.nn.utils.clip_grad_"):
                yield self.finding(
                    use.where(node),
                    f"The gradients of `{use.engine}` are {state} here; this call does not clip at the requested norm.",
                    instead='Remove it and set `"gradient_clipping"` in the configuration.',
                    severity="advice" if undecided else None,
                )


class ScalerWithEngine(JointRule):
    """The script scales the loss before passing it to DeepSpeed's engine."""

    code = "HS292"
    name = "scaler-with-engine"
    severity = "error"
    reason = (
        "`engine.backward` multiplies the loss by DeepSpeed's loss scale, and `engine.step` divides by that scale "
        "only. If a GradScaler has already scaled the loss, every gradient is 65536 times too large."
    )
    bad = (_script(_FP16, 2, "    engine.backward(scaler.scale(loss))\n    engine.step()\n"),)
    good = (_script(_FP16, 2, _RIGHT),)
    references = (_TRAINING,)

    def inspect(self, use: Use, config: Config) -> Iterator[Finding]:
        """Report `engine.backward(scaler.scale(loss))`."""
        for call in use.calls("backward", use.engine) if use.engine else ():
            loss = call.args[0] if call.args else None
            if isinstance(loss, ast.Call) and isinstance(loss.func, ast.Attribute) and loss.func.attr == "scale":
                # engine.scale(loss) is DeepSpeed's API for a manual backward pass.
                if uses_name(loss.func, use.engine):
                    continue
                message = "Both a GradScaler and DeepSpeed scale the loss, but DeepSpeed divides by its own scale only."
                yield self.finding(use.where(call), message, instead=f"Use `{use.engine}.backward(loss)`.")


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
        _script(
            "",
            2,
            _RIGHT,
            loop=_LOOP.replace(
                "    loss = loss_fn(engine(x), y)\n",
                "    with torch.autocast('cuda', dtype=torch.bfloat16):\n        loss = loss_fn(engine(x), y)\n",
            ),
        ),
    )
    good = (
        _script("    'torch_autocast': {'enabled': True, 'dtype': 'bfloat16'},\n", 2, _RIGHT),
        _script(_BF16, 2, _RIGHT),
    )
    references = (
        "https://www.deepspeed.ai/docs/config-json/",
        "measured: source code of DeepSpeed 0.19.8, torch_autocast.py",
    )

    def inspect(self, use: Use, config: Config) -> Iterator[Finding]:
        """Report an enabled autocast whose body calls the engine."""
        deepspeed = DeepSpeed(config)
        if not use.engine or deepspeed.autocast is not False or deepspeed.weights is None:
            return
        for node in use.nodes:
            if not isinstance(node, ast.With):
                continue
            casts = [i.context_expr for i in node.items if isinstance(i.context_expr, ast.Call)]
            names = [use.names.full(c.func) for c in casts]
            inside = any(isinstance(n, ast.Call) and key_of(n.func) == use.engine for n in ast.walk(node))
            if inside and any(n in {"torch.amp.autocast", "torch.cuda.amp.autocast"} for n in names):
                mode = deepspeed.weights
                severity: Severity | None = None if mode == "fp32" else "advice"
                message = f"DeepSpeed disables this autocast inside `{use.engine}`, which runs in {mode}."
                instead = 'Add `"torch_autocast": {"enabled": true, "dtype": "bfloat16"}` to the configuration.'
                yield self.finding(use.where(casts[0]), message, instead=instead, severity=severity)


class BareBackward(JointRule):
    """The script calls `loss.backward()` although the engine has to scale the loss."""

    code = "HS294"
    name = "bare-backward"
    severity = "error"
    reason = (
        "In fp16 `engine.backward` multiplies the loss by the scale and `engine.step` divides by it. A plain "
        "`loss.backward()` raises an error with ZeRO and a dynamic scale; with a static scale the gradients are "
        "1/scale of the true ones (measured: 1/128 with scale 128)."
    )
    bad = (_script(_FP16, 2, "    loss.backward()\n    engine.step()\n"),)
    good = (_script(_FP16, 2, _RIGHT),)
    references = (_TRAINING, "measured: DeepSpeed 0.19.8, static and dynamic scale")

    def inspect(self, use: Use, config: Config) -> Iterator[Finding]:
        """Report loss.backward() with engine.step() and no engine.backward()."""
        if not use.engine or not DeepSpeed(config).fp16 or use.calls("backward", use.engine):
            return
        if not use.calls("step", use.engine):
            return
        for call in use.calls("backward"):
            if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name) and not call.args:
                message = f"The loss is not scaled here, but `{use.engine}.step()` divides by the loss scale."
                instead = f"Use `{use.engine}.backward({call.func.value.id})`."
                yield self.finding(use.where(call), message, instead=instead)


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
    bad = (_script(_BF16, 2, "    engine.backward(loss)\n    optimizer.step()\n"),)
    good = (_script(_BF16, 2, _RIGHT),)
    references = (_TRAINING,)

    def inspect(self, use: Use, config: Config) -> Iterator[Finding]:
        """Report optimizer.step() without engine.step()."""
        if not use.engine or not use.optimizer or use.calls("step", use.engine):
            return
        if not use.calls("backward", use.engine):
            return
        for call in use.calls("step", use.optimizer):
            message = f"`{use.optimizer}.step()` bypasses the engine's gradient accumulation, clipping and scheduler."
            yield self.finding(use.where(call), message, instead=f"Use `{use.engine}.step()`.")


class ClientOptimizerOffloaded(JointRule):
    """A torch optimizer is passed together with optimizer offload."""

    code = "HS296"
    name = "client-optimizer-offloaded"
    severity = "error"
    reason = (
        "DeepSpeed updates offloaded optimizer states with its own CPU optimizer: any other optimizer raises "
        "ZeRORuntimeException unless `zero_force_ds_cpu_optimizer` is false."
    )
    bad = (
        _script(
            _BF16,
            2,
            "",
            more=", 'offload_optimizer': {'device': 'cpu'}",
            loop="opt = torch.optim.AdamW(model.parameters())\n"
            "engine, *_ = deepspeed.initialize(model=model, optimizer=opt, config=ds_config)\n",
        ),
    )
    good = (
        _script(
            _BF16,
            2,
            "",
            more=", 'offload_optimizer': {'device': 'cpu'}",
            loop="from deepspeed.ops.adam import DeepSpeedCPUAdam\nopt = DeepSpeedCPUAdam(model.parameters())\n"
            "engine, *_ = deepspeed.initialize(model=model, optimizer=opt, config=ds_config)\n",
        ),
    )
    references = ("https://www.deepspeed.ai/docs/config-json/#optimizer-offloading",)

    def inspect(self, use: Use, config: Config) -> Iterator[Finding]:
        """Report a torch optimizer with an offload block."""
        if use.initialize is None or not DeepSpeed(config).offloads_optimizer:
            return
        forced = config.value("zero_force_ds_cpu_optimizer")
        optimizer = next((k.value for k in use.initialize.keywords if k.arg == "optimizer"), None)
        name = key_of(optimizer)
        values = [n.value for n in use.nodes if isinstance(n, ast.Assign) and any(key_of(t) == name for t in n.targets)]
        from_torch = [
            v for v in values if isinstance(v, ast.Call) and use.names.full(v.func).startswith("torch.optim.")
        ]
        if name and forced is None and len(values) == len(from_torch) == 1:
            message = "DeepSpeed raises ZeRORuntimeException for a torch optimizer with `offload_optimizer`."
            instead = "Use `deepspeed.ops.adam.DeepSpeedCPUAdam`, or set the optimizer in the configuration."
            yield self.finding(use.where(use.initialize), message, instead=instead)


class PipelineWithZero(JointRule):
    """A pipeline model is used with ZeRO stage 2 or 3."""

    code = "HS297"
    name = "pipeline-with-zero"
    severity = "error"
    reason = (
        "Pipeline parallelism accumulates gradients over micro-batches, but ZeRO-2 and ZeRO-3 partition and free them "
        "after each one: the pipeline engine asserts a stage below 2."
    )
    bad = (_script(_BF16, 2, "net = deepspeed.pipe.PipelineModule(layers, num_stages=2)\n"),)
    good = (_script(_BF16, 1, "net = deepspeed.pipe.PipelineModule(layers, num_stages=2)\n"),)
    references = ("https://www.deepspeed.ai/tutorials/pipeline/",)

    def inspect(self, use: Use, config: Config) -> Iterator[Finding]:
        """Report PipelineModule with stage 2 or 3."""
        stage = DeepSpeed(config).stage
        if use.initialize is None or stage not in {2, 3}:
            return
        for node in use.nodes:
            if isinstance(node, ast.Call) and use.names.full(node.func).endswith("PipelineModule"):
                message = (
                    f"Pipeline parallelism does not support ZeRO stage {stage}; DeepSpeed raises an AssertionError."
                )
                yield self.finding(use.where(node), message, instead="Use stage 1.")
                return


class TrainerMismatch(JointRule):
    """`TrainingArguments` and its DeepSpeed configuration contradict each other."""

    code = "HS298"
    name = "trainer-mismatch"
    severity = "error"
    reason = (
        "The Trainer compares its arguments with the DeepSpeed configuration and raises 'Please correct the following "
        "DeepSpeed config values that mismatch TrainingArguments values'. Defaults count: a `gradient_clipping` of "
        '0.5 contradicts the default `max_grad_norm` of 1.0. "auto" uses the Trainer\'s value.'
    )
    bad = (
        "from transformers import TrainingArguments\n\nargs = TrainingArguments(\n    'out',\n    bf16=True,\n"
        "    deepspeed={'zero_optimization': {'stage': 2}, 'fp16': {'enabled': True}},\n)\n",
        "from transformers import TrainingArguments\n\nargs = TrainingArguments(\n    'out',\n    learning_rate=1e-4,\n"
        "    deepspeed={'zero_optimization': {'stage': 2}, 'optimizer': {'type': 'AdamW', 'params': {'lr': 3e-4}}},\n)\n",
    )
    good = (
        "from transformers import TrainingArguments\n\nargs = TrainingArguments(\n    'out',\n    bf16=True,\n"
        "    deepspeed={'zero_optimization': {'stage': 2}, 'bf16': {'enabled': True}},\n)\n",
        "from transformers import TrainingArguments\n\nargs = TrainingArguments(\n    'out',\n    bf16=True,\n"
        "    deepspeed={'zero_optimization': {'stage': 2}, 'bf16': {'enabled': 'auto'}},\n)\n",
    )
    references = (
        "https://huggingface.co/docs/transformers/deepspeed",
        "measured: source code of transformers 5.22, integrations/deepspeed.py",
    )

    # DeepSpeed key, Trainer argument, default of the argument.
    _PAIRS = (
        (("fp16", "enabled"), "fp16", False),
        (("bf16", "enabled"), "bf16", False),
        (("train_micro_batch_size_per_gpu",), "per_device_train_batch_size", 8),
        (("gradient_accumulation_steps",), "gradient_accumulation_steps", 1),
        (("gradient_clipping",), "max_grad_norm", 1.0),
        (("optimizer", "params", "lr"), "learning_rate", 5e-5),
        (("optimizer", "params", "eps"), "adam_epsilon", 1e-8),
        (("optimizer", "params", "weight_decay"), "weight_decay", 0.0),
    )

    def inspect(self, use: Use, config: Config) -> Iterator[Finding]:
        """Compare every pair of values that both sides set."""
        for trainer in use.trainers:
            named = trainer.entry("deepspeed")
            if named is None or not _names(named.value, config, use):
                continue
            mismatches: dict[Entry | None, list[str]] = {}  # by the argument that is set; None: a default
            for path, argument, default in self._PAIRS:
                deepspeed_value, trainer_value = config.value(*path), trainer.value(argument)
                entry = trainer.entry(argument)
                if entry is None:
                    standard = trainer.origin in {"TrainingArguments", "Seq2SeqTrainingArguments"}
                    is_default = standard and not trainer.root.open and trainer.value(f"{argument}_full_eval") is None
                    trainer_value = default if is_default else None
                known = all(isinstance(value, int | float) for value in (deepspeed_value, trainer_value))
                if not known or trainer_value == deepspeed_value:
                    continue
                ours = f"{argument} is {trainer_value}" + ("" if entry else " by default")
                theirs = f"{'.'.join(path)} of the DeepSpeed configuration is {deepspeed_value}"
                mismatches.setdefault(entry, []).append(f"{ours}, and {theirs}")
            # Without a Trainer in the script, the arguments may be for something else.
            trains = any(isinstance(n, ast.Call) and key_of(n.func).endswith("Trainer") for n in use.nodes)
            for entry, parts in mismatches.items():
                place = trainer.where(entry or named.key_span)
                message = f"{'; '.join(parts)}. The Trainer raises a ValueError."
                instead = 'Make them equal, or set "auto" in the configuration.'
                yield self.finding(place, message, instead=instead, severity=None if trains else "warning")


class ZeroInitWithoutConfig(JointRule):
    """`deepspeed.zero.Init` is used without a configuration or dtype and creates fp16 parameters."""

    code = "HS299"
    name = "zero-init-without-config"
    severity = "warning"
    reason = (
        "`zero.Init` partitions the model's parameters as they are created. It does not know the engine's "
        "configuration; without one it creates fp16 parameters: a bf16 or fp32 model is rounded to fp16, and values "
        "above 65504 become inf, before training starts."
    )
    bad = (_script(_BF16, 3, "with deepspeed.zero.Init():\n    net = Net()\n"),)
    good = (_script(_BF16, 3, "with deepspeed.zero.Init(config_dict_or_path=ds_config):\n    net = Net()\n"),)
    references = (
        "https://deepspeed.readthedocs.io/en/latest/zero3.html",
        "measured: source code of DeepSpeed 0.19.6, zero.Init",
    )

    def inspect(self, use: Use, config: Config) -> Iterator[Finding]:
        """Report the bare call in a bf16 or fp32 run."""
        mode = DeepSpeed(config).weights
        for node in use.nodes if mode in {"bf16", "fp32"} else ():
            if not isinstance(node, ast.Call) or use.names.full(node.func) != "deepspeed.zero.Init" or node.args:
                continue
            if not {k.arg for k in node.keywords} & {"config_dict_or_path", "config", "dtype", None}:
                message = f"`zero.Init` without a configuration creates fp16 parameters, but this run is {mode}."
                yield self.finding(use.where(node), message, instead="Pass `config_dict_or_path=`.")


def _names(node: object, config: Config, use: Use) -> bool:
    """Whether the value of `deepspeed=` is this configuration: its file name, or a dictionary in the script."""
    if isinstance(node, Scalar) and isinstance(node.value, str):
        return Path(node.value).name == Path(config.source.path).name
    return config.source.path == use.source.path and re.search(r"TrainingArguments|Config$", config.origin) is not None


RULES: tuple[type[Rule], ...] = (
    ClipsBehindEngine,
    ScalerWithEngine,
    AutocastAroundEngine,
    BareBackward,
    OptimizerInsteadOfEngine,
    ClientOptimizerOffloaded,
    PipelineWithZero,
    TrainerMismatch,
    ZeroInitWithoutConfig,
)
