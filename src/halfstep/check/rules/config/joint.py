"""Rules for scripts that contradict the DeepSpeed configuration they run with."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from halfstep.check.config.config import Config
from halfstep.check.config.deepspeed_facts import DeepSpeed
from halfstep.check.config.joint import JointConfig, JointRule, Use
from halfstep.check.finding import Finding
from halfstep.check.regex import regex
from halfstep.check.rule import Rule
from halfstep.check.script.syntax.names import key_of
from halfstep.precision.node import Entry, Items, Scalar

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


_PER_DEVICE = regex(r"/\s*\(?[\w.]*(?:world_size|n(?:um)?_?gpus?|num_devices|device_count|gpu_count)\b")
FP16 = "    'fp16': {'enabled': True},\n"
BF16 = "    'bf16': {'enabled': True},\n"


_SIZES = (
    "from transformers import Trainer, TrainingArguments\n\nargs = TrainingArguments(\n    'out',\n    per_device_train_batch_size={size},\n"
    "    gradient_accumulation_steps={steps},\n    bf16=True,\n    deepspeed={{\n        'train_batch_size': {total},\n"
    "        'gradient_accumulation_steps': {steps},\n        'gradient_clipping': 1.0,\n        'zero_optimization': {{'stage': 2}},\n"
    "        'bf16': {{'enabled': True}},\n        'data_types': {{'grad_accum_dtype': 'fp32'}},\n    }},\n)\nTrainer(model, args).train()\n"
)


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


# Configurations of TRL, and the arguments whose defaults they leave as they are (read in trl 1.10.0.dev0, base_config.py).
_OF_TRL = frozenset({"SFTConfig", "DPOConfig", "GRPOConfig", "KTOConfig", "RewardConfig"})
_INHERITED = frozenset({"max_grad_norm", "adam_beta1", "adam_beta2", "adam_epsilon"})


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
        _SIZES.format(total="64 // num_devices", size="size", steps="steps"),
        _SIZES.format(total=8, size=16, steps=1),
        _SIZES.format(total="args.batch", size="args.batch", steps=4),
    )
    good = (
        "from transformers import TrainingArguments\n\nargs = TrainingArguments(\n    'out',\n    bf16=True,\n"
        "    deepspeed={'zero_optimization': {'stage': 2}, 'bf16': {'enabled': True}},\n)\n",
        "from transformers import TrainingArguments\n\nargs = TrainingArguments(\n    'out',\n    bf16=True,\n"
        "    deepspeed={'zero_optimization': {'stage': 2}, 'bf16': {'enabled': 'auto'}},\n)\n",
        _SIZES.format(total=64, size=8, steps=2),
        _SIZES.format(total="size * steps * world_size", size="size", steps="steps"),
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
        (("scheduler", "params", "warmup_max_lr"), "learning_rate", 5e-5),
        (("scheduler", "params", "warmup_num_steps"), "warmup_steps", 0),
    )
    _BETAS = ("optimizer", "params", "betas")

    def inspect(self, use: Use, config: Config) -> Iterator[Finding]:
        """Compare every pair of values that both sides set."""
        for trainer in use.trainers:
            named = trainer.entry("deepspeed")
            if named is None or not _names(named.value, config, use):
                continue
            yield from self._batch(config, trainer)
            mismatches: dict[Entry | None, list[str]] = {}  # by the argument that is set; None: a default
            for path, deepspeed_value, argument, default in self._compared(config, trainer):
                trainer_value, entry = trainer.value(argument), trainer.entry(argument)
                if entry is None:
                    standard = trainer.origin in {"TrainingArguments", "Seq2SeqTrainingArguments"}
                    inherited = trainer.origin in _OF_TRL and argument in _INHERITED
                    is_default = (
                        (standard or inherited)
                        and not trainer.root.open
                        and trainer.value(f"{argument}_full_eval") is None
                    )
                    trainer_value = default if is_default else None
                known = all(isinstance(value, int | float) for value in (deepspeed_value, trainer_value))
                if not known or trainer_value == deepspeed_value:
                    continue
                ours = f"{argument} is {trainer_value}" + ("" if entry else " by default")
                theirs = f"{path} of the DeepSpeed configuration is {deepspeed_value}"
                mismatches.setdefault(entry, []).append(f"{ours}, and {theirs}")
            # Without a Trainer in the script, the arguments may be for something else.
            trains = any(isinstance(n, ast.Call) and key_of(n.func).endswith("Trainer") for n in use.nodes)
            for entry, parts in mismatches.items():
                place = trainer.where(entry or named.key_span)
                message = f"{'; '.join(parts)}. The Trainer raises a ValueError."
                instead = 'Make them equal, or set "auto" in the configuration.'
                yield self.finding(place, message, instead=instead, severity=None if trains else "warning")

    def _batch(self, config: Config, trainer: Config) -> Iterator[Finding]:
        """A `train_batch_size` that is not the product of the Trainer's size per device, its steps and the number of devices."""
        entry = config.entry("train_batch_size")
        if entry is None or not isinstance(entry.value, Scalar) or trainer.entry("auto_find_batch_size") is not None:
            return
        total = config.number("train_batch_size")
        micro, steps = trainer.entry("per_device_train_batch_size"), trainer.entry("gradient_accumulation_steps")
        size = trainer.number("per_device_train_batch_size") if micro else None
        factor = trainer.number("gradient_accumulation_steps") if steps else 1
        same = micro is not None and isinstance(micro.value, Scalar) and micro.value.text == entry.value.text != ""
        problem = ""
        if total is not None and size is not None and factor is not None and size * factor > 0:
            problem = (
                f"is no multiple of {size:g} per device x {factor:g} accumulation steps"
                if total % (size * factor)
                else ""
            )
        elif total is None and _PER_DEVICE.search(entry.value.text):
            problem = "is divided by the number of devices, but it is the size of all devices together"
        elif total is None and same and factor is not None and factor > 1:
            problem = f"is also the size per device, without the {factor:g} accumulation steps"
        if problem:
            message = (
                f"`train_batch_size` {entry.value.text or total} {problem}. The Trainer compares it with per device x "
                "accumulation x devices and raises a ValueError."
            )
            yield self.finding(config.where(entry), message, instead='Set it to "auto".')

    def _compared(self, config: Config, trainer: Config) -> Iterator[tuple[str, object, str, float]]:
        """What the Trainer compares: the DeepSpeed key and its value, the argument, and the default of that."""
        finds_size = trainer.entry("auto_find_batch_size") is not None
        scales_warmup = trainer.entry("warmup_ratio") is not None or 0 < (trainer.number("warmup_steps") or 0) < 1
        for path, argument, default in self._PAIRS:
            if (finds_size and "batch_size" in argument) or (scales_warmup and argument == "warmup_steps"):
                continue  # the Trainer does not compare the size, and computes the steps
            yield ".".join(path), config.value(*path), argument, default
        betas = config.entry(*self._BETAS)
        items = betas.value.items if betas is not None and isinstance(betas.value, Items) else ()
        for item, (argument, default) in zip(items, (("adam_beta1", 0.9), ("adam_beta2", 0.999)), strict=False):
            if isinstance(item, Scalar):
                yield ".".join(self._BETAS), item.value, argument, default


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


def is_named(node: object, config: JointConfig) -> bool:
    """Whether the `deepspeed=` of a Trainer's arguments is this configuration."""
    return _names(node, config, config.use)


def _names(node: object, config: Config, use: Use) -> bool:
    """Whether the value of `deepspeed=` is this configuration: its file name, or a dictionary in the script."""
    if config.source.path == use.source.path and config.origin == "a dictionary":
        return _is_written(use)
    if isinstance(node, Scalar) and isinstance(node.value, str):
        return Path(node.value).name == Path(config.source.path).name
    return config.source.path == use.source.path and re.search(r"TrainingArguments|Config$", config.origin) is not None


def _is_written(use: Use) -> bool:
    """Whether the script writes its dictionary to the file it names: `json.dump(ds_config, open(path, "w"))`, `deepspeed=path`."""
    calls = [n for n in use.nodes if isinstance(n, ast.Call)]
    passed = {ast.unparse(k.value) for c in calls for k in c.keywords if k.arg == "deepspeed"}
    opened = {ast.unparse(c.args[0]) for c in calls if key_of(c.func) == "open" and len(c.args) > 1}
    dumped = {key_of(c.args[0]) for c in calls if use.names.full(c.func) == "json.dump" and c.args}
    written = [n for n in use.nodes if isinstance(n, ast.Assign) and key_of(n.targets[0]) in dumped - {""}]
    return bool(passed & opened) and any("zero_optimization" in ast.unparse(n.value) for n in written)


RULES: tuple[type[Rule], ...] = (
    PipelineWithZero,
    TrainerMismatch,
    ZeroInitWithoutConfig,
)
