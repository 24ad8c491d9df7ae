"""Rules for scripts that contradict the DeepSpeed configuration they run with."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from halfstep.check.config.config import Config
from halfstep.check.config.deepspeed_facts import DeepSpeed
from halfstep.check.config.joint import JointRule, Use
from halfstep.check.config.objects import optimizer_calls
from halfstep.check.finding import Finding
from halfstep.check.rule import Rule
from halfstep.check.script.syntax.names import key_of
from halfstep.precision.node import Entry, Scalar

__all__ = ["BF16", "FP16", "LOOP", "RULES", "script_with"]

_HEAD = "import deepspeed\nimport torch\n\n"
LOOP = (
    "engine, optimizer, _, _ = deepspeed.initialize(model=model, config=ds_config)\n"
    "for x, y in loader:\n    loss = loss_fn(engine(x), y)\n"
)


def script_with(mode: str, stage: int, body: str, more: str = "", loop: str = LOOP) -> str:
    """A script with a DeepSpeed configuration, for the cases of rules."""
    config = (
        f"ds_config = {{\n    'train_batch_size': 8,\n    'zero_optimization': {{'stage': {stage}{more}}},\n{mode}}}\n"
    )
    return f"{_HEAD}{config}{loop}{body}"


FP16 = "    'fp16': {'enabled': True},\n"
BF16 = "    'bf16': {'enabled': True},\n"


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
        script_with(
            BF16,
            2,
            "",
            more=", 'offload_optimizer': {'device': 'cpu'}",
            loop="opt = torch.optim.AdamW(model.parameters())\n"
            "engine, *_ = deepspeed.initialize(model=model, optimizer=opt, config=ds_config)\n",
        ),
    )
    good = (
        script_with(
            BF16,
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
        calls = list(optimizer_calls(use.initialize, use.nodes))
        if forced is None and len(calls) == 1 and use.names.full(calls[0].func).startswith("torch.optim."):
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
    bad = (script_with(BF16, 2, "net = deepspeed.pipe.PipelineModule(layers, num_stages=2)\n"),)
    good = (script_with(BF16, 1, "net = deepspeed.pipe.PipelineModule(layers, num_stages=2)\n"),)
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
    bad = (script_with(BF16, 3, "with deepspeed.zero.Init():\n    net = Net()\n"),)
    good = (script_with(BF16, 3, "with deepspeed.zero.Init(config_dict_or_path=ds_config):\n    net = Net()\n"),)
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
    ClientOptimizerOffloaded,
    PipelineWithZero,
    TrainerMismatch,
    ZeroInitWithoutConfig,
)
