"""Scripts that contradict the DeepSpeed configuration they run with."""

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


class ClipsBehindEngine(JointRule):
    """The script clips gradients that DeepSpeed holds scaled or in shards."""

    code = "HS291"
    name = "clips-behind-engine"
    severity = "warning"
    reason = (
        "Between engine.backward and engine.step the gradients are DeepSpeed's: in fp16 they are still multiplied by the loss "
        "scale (65536 at the start), and under ZeRO the parameters' own .grad is empty or partial. Clipping them at 1.0 does "
        "nothing, or clips the true gradient at 1/65536. The engine clips in step, on the true norm, by gradient_clipping."
    )
    bad = (
        _script(
            _FP16,
            2,
            "    engine.backward(loss)\n    torch.nn.utils.clip_grad_norm_(engine.parameters(), 1.0)\n    engine.step()\n",
        ),
    )
    good = (_script(_FP16 + "    'gradient_clipping': 1.0,\n", 2, _RIGHT),)
    references = ("https://www.deepspeed.ai/docs/config-json/#gradient-clipping", _TRAINING)

    def inspect(self, use: Use, config: Config) -> Iterator[Finding]:
        """Clipping calls on the engine's parameters; without a configuration to look at, only a word of advice."""
        deepspeed = DeepSpeed(config)
        undecided = deepspeed.fp16 is None and deepspeed.stage is None
        if not use.engine or not (deepspeed.fp16 or deepspeed.stage or undecided):
            return
        held = "scaled" if deepspeed.fp16 else f"in shards (ZeRO stage {deepspeed.stage})"
        held = "scaled in fp16 and in shards under ZeRO" if undecided else held
        for node in use.nodes:
            if not isinstance(node, ast.Call) or not node.args or not uses_name(node.args[0], use.engine):
                continue
            if use.names.full(node.func).startswith("torch.nn.utils.clip_grad_"):
                yield self.finding(
                    use.where(node),
                    f"The gradients of {use.engine} are {held} here, so this does not clip them at the norm it names.",
                    instead='Remove it and set "gradient_clipping" in the configuration.',
                    severity="advice" if undecided else None,
                )


class ScalerWithEngine(JointRule):
    """The script scales the loss that it gives to DeepSpeed's engine."""

    code = "HS292"
    name = "scaler-with-engine"
    severity = "error"
    reason = (
        "engine.backward multiplies the loss by DeepSpeed's own scale and engine.step divides by that alone. A loss that a "
        "GradScaler has scaled before leaves every gradient 65536 times too large."
    )
    bad = (_script(_FP16, 2, "    engine.backward(scaler.scale(loss))\n    engine.step()\n"),)
    good = (_script(_FP16, 2, _RIGHT),)
    references = (_TRAINING,)

    def inspect(self, use: Use, config: Config) -> Iterator[Finding]:
        """`engine.backward(scaler.scale(loss))`."""
        for call in use.calls("backward", use.engine) if use.engine else ():
            given = call.args[0] if call.args else None
            if isinstance(given, ast.Call) and isinstance(given.func, ast.Attribute) and given.func.attr == "scale":
                # engine.scale(loss) is DeepSpeed's own, for a backward of one's own.
                if uses_name(given.func, use.engine):
                    continue
                message = (
                    "The loss is scaled by a GradScaler and then by DeepSpeed; only one of the two is divided out."
                )
                yield self.finding(use.where(call), message, instead=f"Write {use.engine}.backward(loss).")


class AutocastAroundEngine(JointRule):
    """The script's autocast surrounds an engine whose configuration has none, and DeepSpeed switches it off inside."""

    code = "HS293"
    name = "autocast-around-engine"
    severity = "warning"
    reason = (
        "Current DeepSpeed runs the model under its own torch_autocast setting. Without one it disables an autocast that it finds "
        "around it, with one warning, so the model runs in the configuration's mode: in fp32 where no mode is on."
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
    references = ("https://www.deepspeed.ai/docs/config-json/", "measured: read in DeepSpeed 0.19.8, torch_autocast.py")

    def inspect(self, use: Use, config: Config) -> Iterator[Finding]:
        """An enabled autocast whose body calls the engine."""
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
                message = f"DeepSpeed switches this autocast off inside {use.engine}, which then runs in {mode}."
                instead = 'Add "torch_autocast": {"enabled": true, "dtype": "bfloat16"} to the configuration.'
                yield self.finding(use.where(casts[0]), message, instead=instead, severity=severity)


class BareBackward(JointRule):
    """The script calls loss.backward() where the engine scales the loss."""

    code = "HS294"
    name = "bare-backward"
    severity = "error"
    reason = (
        "In fp16 engine.backward multiplies the loss by the scale and engine.step divides by it. A bare loss.backward() raises "
        "under a dynamic scale with ZeRO, and under a static one gives gradients of 1/scale (measured: 1/128 with scale 128)."
    )
    bad = (_script(_FP16, 2, "    loss.backward()\n    engine.step()\n"),)
    good = (_script(_FP16, 2, _RIGHT),)
    references = (_TRAINING, "measured: DeepSpeed 0.19.8, static and dynamic scale")

    def inspect(self, use: Use, config: Config) -> Iterator[Finding]:
        """loss.backward() with engine.step() and no engine.backward()."""
        if not use.engine or not DeepSpeed(config).fp16 or use.calls("backward", use.engine):
            return
        if not use.calls("step", use.engine):
            return
        for call in use.calls("backward"):
            if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name) and not call.args:
                message = f"The loss is not scaled here, and {use.engine}.step() divides by the loss scale."
                yield self.finding(
                    use.where(call), message, instead=f"Write {use.engine}.backward({call.func.value.id})."
                )


class OptimizerInsteadOfEngine(JointRule):
    """The script steps DeepSpeed's optimizer itself instead of the engine."""

    code = "HS295"
    name = "optimizer-instead-of-engine"
    severity = "warning"
    reason = (
        "engine.step counts micro-batches, reduces and clips, steps the optimizer and the scheduler, and clears the gradients. "
        "optimizer.step alone does the middle part on every micro-batch, whatever gradient_accumulation_steps says."
    )
    bad = (_script(_BF16, 2, "    engine.backward(loss)\n    optimizer.step()\n"),)
    good = (_script(_BF16, 2, _RIGHT),)
    references = (_TRAINING,)

    def inspect(self, use: Use, config: Config) -> Iterator[Finding]:
        """optimizer.step() with no engine.step()."""
        if not use.engine or not use.optimizer or use.calls("step", use.engine):
            return
        if not use.calls("backward", use.engine):
            return
        for call in use.calls("step", use.optimizer):
            message = f"{use.optimizer} is the engine's, and this goes past its accumulation, clipping and scheduler."
            yield self.finding(use.where(call), message, instead=f"Write {use.engine}.step().")


class ClientOptimizerOffloaded(JointRule):
    """An optimizer object is passed together with optimizer offload."""

    code = "HS296"
    name = "client-optimizer-offloaded"
    severity = "error"
    reason = (
        "Offloaded states are stepped on the CPU, and DeepSpeed insists on its own CPU optimizer for that: with another one it "
        "raises ZeRORuntimeException unless zero_force_ds_cpu_optimizer is false."
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
        """A torch optimizer beside an offload block."""
        if use.initialize is None or not DeepSpeed(config).offloads_optimizer:
            return
        forced = config.value("zero_force_ds_cpu_optimizer")
        given = next((k.value for k in use.initialize.keywords if k.arg == "optimizer"), None)
        name = key_of(given)
        made = [n.value for n in use.nodes if isinstance(n, ast.Assign) and any(key_of(t) == name for t in n.targets)]
        torch_made = [m for m in made if isinstance(m, ast.Call) and use.names.full(m.func).startswith("torch.optim.")]
        if name and forced is None and len(made) == len(torch_made) == 1:
            message = (
                "DeepSpeed refuses a torch optimizer with offload_optimizer: it steps offloaded states with its own."
            )
            instead = "Use deepspeed.ops.adam.DeepSpeedCPUAdam, or name the optimizer in the configuration."
            yield self.finding(use.where(use.initialize), message, instead=instead)


class PipelineWithZero(JointRule):
    """A pipeline model runs with ZeRO-2 or 3."""

    code = "HS297"
    name = "pipeline-with-zero"
    severity = "error"
    reason = (
        "Pipeline parallelism accumulates gradients over micro-batches, which ZeRO-2 and ZeRO-3 have already partitioned and "
        "freed: the pipeline engine asserts a stage below 2."
    )
    bad = (_script(_BF16, 2, "net = deepspeed.pipe.PipelineModule(layers, num_stages=2)\n"),)
    good = (_script(_BF16, 1, "net = deepspeed.pipe.PipelineModule(layers, num_stages=2)\n"),)
    references = ("https://www.deepspeed.ai/tutorials/pipeline/",)

    def inspect(self, use: Use, config: Config) -> Iterator[Finding]:
        """PipelineModule with stage 2 or 3."""
        stage = DeepSpeed(config).stage
        if use.initialize is None or stage not in {2, 3}:
            return
        for node in use.nodes:
            if isinstance(node, ast.Call) and use.names.full(node.func).endswith("PipelineModule"):
                message = f"A pipeline does not run with ZeRO stage {stage}."
                yield self.finding(use.where(node), message, instead="Use stage 1.")
                return


class TrainerMismatch(JointRule):
    """TrainingArguments and the DeepSpeed configuration it names contradict each other."""

    code = "HS298"
    name = "trainer-mismatch"
    severity = "error"
    reason = (
        "The Trainer compares its arguments with the DeepSpeed configuration and stops: 'Please correct the following DeepSpeed "
        "config values that mismatch TrainingArguments values'. Defaults count: a gradient_clipping of 0.5 contradicts a "
        'max_grad_norm that was never written. "auto" takes the Trainer\'s value.'
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
        "measured: read in transformers 5.22, integrations/deepspeed.py",
    )

    # DeepSpeed's path, the Trainer's argument, and the argument's default.
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
        """Every pair of values that both texts decide."""
        for trainer in use.trainers:
            named = trainer.entry("deepspeed")
            if named is None or not _names(named.value, config, use):
                continue
            said: dict[Entry | None, list[str]] = {}  # by the argument that says so; None: by its default
            for path, argument, default in self._PAIRS:
                theirs, ours = config.value(*path), trainer.value(argument)
                given = trainer.entry(argument)
                if given is None:
                    plain = (
                        trainer.origin in {"TrainingArguments", "Seq2SeqTrainingArguments"} and not trainer.root.open
                    )
                    ours = default if plain and trainer.value(f"{argument}_full_eval") is None else None
                plain = isinstance(theirs, bool | int | float) and isinstance(ours, bool | int | float)
                if not plain or ours == theirs:
                    continue
                told = f"{argument} is {ours}" + ("" if given else " by default")
                said.setdefault(given, []).append(
                    f"{told}, and {'.'.join(path)} of the DeepSpeed configuration is {theirs}"
                )
            # Without a Trainer in the script, the arguments may be for something else.
            trains = any(isinstance(n, ast.Call) and key_of(n.func).endswith("Trainer") for n in use.nodes)
            for given, parts in said.items():
                place = trainer.where(given or named.key_span)
                instead = 'Make them equal, or write "auto" in the configuration.'
                severity: Severity | None = None if trains else "warning"
                yield self.finding(place, f"{'; '.join(parts)}: the Trainer stops.", instead=instead, severity=severity)


class ZeroInitWithoutConfig(JointRule):
    """deepspeed.zero.Init is entered without a configuration or dtype, and makes fp16 parameters."""

    code = "HS299"
    name = "zero-init-without-config"
    severity = "warning"
    reason = (
        "zero.Init creates the model's parameters already partitioned. It cannot know the engine's configuration, and without one "
        "it makes them fp16: a bf16 or fp32 model is rounded to fp16, and values above 65504 become inf, before training begins."
    )
    bad = (_script(_BF16, 3, "with deepspeed.zero.Init():\n    net = Net()\n"),)
    good = (_script(_BF16, 3, "with deepspeed.zero.Init(config_dict_or_path=ds_config):\n    net = Net()\n"),)
    references = (
        "https://deepspeed.readthedocs.io/en/latest/zero3.html",
        "measured: read in DeepSpeed 0.19.6, zero.Init",
    )

    def inspect(self, use: Use, config: Config) -> Iterator[Finding]:
        """The bare call beside a configuration that is not fp16."""
        mode = DeepSpeed(config).weights
        for node in use.nodes if mode in {"bf16", "fp32"} else ():
            if not isinstance(node, ast.Call) or use.names.full(node.func) != "deepspeed.zero.Init" or node.args:
                continue
            if not {k.arg for k in node.keywords} & {"config_dict_or_path", "config", "dtype", None}:
                message = f"Without a configuration zero.Init makes fp16 parameters, and this run is {mode}."
                yield self.finding(use.where(node), message, instead="Pass config_dict_or_path=.")


def _names(node: object, config: Config, use: Use) -> bool:
    """Whether the value of `deepspeed=` is this configuration: its file's name, or a dictionary of the script."""
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
