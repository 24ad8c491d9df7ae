"""HS226: gradients that DeepSpeed accumulates over micro-batches in 16 bits."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.check.config.config import Config
from halfstep.check.config.deepspeed_facts import DeepSpeed, DeepSpeedRule, uses_another_engine
from halfstep.check.config.joint import JointConfig
from halfstep.check.finding import Finding
from halfstep.check.rule import Rule
from halfstep.check.rules.config.deepspeed_dtypes import reduced_alike
from halfstep.check.rules.config.joint import is_named
from halfstep.precision.node import Scalar

__all__ = ["RULES"]

_TRAINER = (
    "from transformers import TrainingArguments\n\nargs = TrainingArguments(\n    'out',\n    bf16=True,\n    gradient_accumulation_steps={steps},\n"
    "    deepspeed={{'zero_optimization': {{'stage': 2}}, 'bf16': {{'enabled': True}}, 'gradient_accumulation_steps': 'auto', 'gradient_clipping': 1.0{data}}},\n)\n"
)
_ACCELERATE_STEPS = ("deepspeed_config", "gradient_accumulation_steps")


class AccumulationIn16Bits(DeepSpeedRule):
    """Gradients are accumulated over micro-batches in 16 bits."""

    code = "HS226"
    name = "accumulation-in-16-bits"
    severity = "advice"
    reason = (
        "If `grad_accum_dtype` is unset, DeepSpeed accumulates in the weight dtype. bf16 has 8 significant bits, so "
        "contributions are lost once the sum is 256 times larger: with 1024 micro-batches of gradient 1.0 the "
        "measured mean was 0.25 at every stage, and 1.0 with fp32 accumulation. fp32 accumulation costs 2 more bytes "
        "per parameter. It is reported from 4 micro-batches on, whether the configuration, Accelerate's file or the arguments of the "
        'Trainer (with "auto" in the configuration) set their number.'
    )
    bad = (
        _TRAINER.format(steps=16, data=""),
        '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}, "gradient_accumulation_steps": 64, "gradient_clipping": 1}',
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nmixed_precision: bf16\ndeepspeed_config:\n"
        "  zero_stage: 2\n  gradient_accumulation_steps: 64\n  gradient_clipping: 1.0\n",
    )
    good = (
        _TRAINER.format(steps=2, data=""),
        _TRAINER.format(
            steps=16, data=", 'data_types': {'grad_accum_dtype': 'fp32'}, 'communication_data_type': 'fp32'"
        ),
        '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}, "gradient_accumulation_steps": 64,\n'
        ' "data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32", "gradient_clipping": 1}',
        '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}, "gradient_accumulation_steps": 1}',
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nmixed_precision: bf16\ndeepspeed_config:\n"
        "  zero_stage: 2\n  gradient_accumulation_steps: 1\n  gradient_clipping: 1.0\n",
    )
    references = (
        "https://github.com/deepspeedai/DeepSpeed/issues/1800",
        "https://github.com/deepspeedai/DeepSpeed/issues/2352",
        "measured: DeepSpeed 0.19.8, 1024 micro-batches, mean 0.25 instead of 1.0 at stages 0 to 3",
    )

    def check(self, config: Config) -> Iterator[Finding]:
        """The findings in a DeepSpeed configuration, and in the one that Accelerate's file writes out."""
        yield from super().check(config)
        if isinstance(config, JointConfig):
            yield from self._with_trainer(config)
        mode, steps = config.value("mixed_precision"), config.number(*_ACCELERATE_STEPS)
        if config.kind != "accelerate" or mode not in {"bf16", "fp16"} or steps is None or steps < 4:
            return
        if config.entry("deepspeed_config", "deepspeed_config_file") is None and not uses_another_engine(config):
            yield self.at(
                config,
                _ACCELERATE_STEPS,
                f"DeepSpeed accumulates the gradients of {steps:g} micro-batches in {mode}, which loses small contributions.",
                instead='Use a `deepspeed_config_file` with `"data_types": {"grad_accum_dtype": "fp32"}`.',
            )

    def _with_trainer(self, config: JointConfig) -> Iterator[Finding]:
        """Report the micro-batches that the Trainer's arguments set for a configuration with "auto", or without a number."""
        # Without the key DeepSpeed divides the batch, which "auto" sets, by the micro-batch.
        is_missing = config.entry("gradient_accumulation_steps") is None and _is_auto(config, "train_batch_size")
        is_open = is_missing or _is_auto(config, "gradient_accumulation_steps")
        if not is_open or config.value("data_types", "grad_accum_dtype") is not None or not config.root.entries:
            return
        for trainer in config.use.trainers:
            named, entry = trainer.entry("deepspeed"), trainer.entry("gradient_accumulation_steps")
            number = trainer.number("gradient_accumulation_steps")
            if named is None or entry is None or number is None or number < 4 or not is_named(named.value, config):
                continue
            asked = [
                mode for mode in ("bf16", "fp16") if _is_auto(config, mode, "enabled") and trainer.value(mode) is True
            ]
            mode = DeepSpeed(config).weights or next(iter(asked), "")
            if mode in {"bf16", "fp16"}:
                yield self.finding(
                    trainer.where(entry),
                    f"DeepSpeed accumulates the gradients of {number:g} micro-batches in {mode}, which loses small contributions.",
                    instead=f'Add `"data_types": {{"grad_accum_dtype": "fp32"}}`{reduced_alike(config)} to its configuration.',
                )

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Report 4 or more micro-batches without fp32 accumulation."""
        steps = config.number("gradient_accumulation_steps")
        unset = config.value("data_types", "grad_accum_dtype") is None
        if deepspeed.weights in {"bf16", "fp16"} and steps is not None and steps >= 4 and unset:
            advice = f'Add `"data_types": {{"grad_accum_dtype": "fp32"}}`{reduced_alike(config)}.'
            yield self.at(
                config,
                ("gradient_accumulation_steps",),
                f"Gradients of {steps:g} micro-batches are accumulated in {deepspeed.weights}, which loses small "
                "contributions.",
                instead=advice if deepspeed.stage else f"{advice} Both need ZeRO stage 1 or above.",
            )


def _is_auto(config: Config, *path: str) -> bool:
    """Whether the Trainer fills in a value."""
    entry = config.entry(*path)
    return entry is not None and isinstance(entry.value, Scalar) and entry.value.value == "auto"


RULES: tuple[type[Rule], ...] = (AccumulationIn16Bits,)
