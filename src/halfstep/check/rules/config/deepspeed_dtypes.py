"""Rules for the dtypes in which DeepSpeed accumulates, reduces and stores: unsupported ones and lossy ones."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.check.config.config import Config
from halfstep.check.config.deepspeed_facts import DeepSpeed, DeepSpeedRule
from halfstep.check.config.edits import replace_value
from halfstep.check.finding import Finding
from halfstep.check.rule import Rule

__all__ = ["RULES", "reduced_alike"]

_DOCS = "https://www.deepspeed.ai/docs/config-json/"
_FP32_MASTERS = "Remove it: the masters are fp32 then."
_MATRIX = "https://github.com/deepspeedai/DeepSpeed/blob/master/tests/unit/runtime/test_ds_initialize.py"


class UnknownFormat(DeepSpeedRule):
    """A dtype setting has a name that DeepSpeed does not recognize."""

    code = "HS221"
    name = "unknown-format"
    severity = "error"
    reason = (
        "`communication_data_type` and `seq_parallel_communication_data_type` accept only `fp16`, `bf16` and `fp32`; "
        '"float16" raises a ValueError. `torch_autocast.dtype` and `data_types` also accept torch\'s dtype names.'
    )
    bad = (
        '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}, "communication_data_type": "bfloat16"}',
        '{"zero_optimization": {"stage": 2}, "torch_autocast": {"enabled": true, "dtype": "tf32"}}',
        '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp64"}}',
    )
    good = (
        '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}, "communication_data_type": "bf16"}',
        '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "float32"}}',
    )
    references = (_DOCS + "#communication-options", "measured: DeepSpeed 0.19.8, DeepSpeedConfig raises ValueError")

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Check every key that names a dtype."""
        for path in (
            ("communication_data_type",),
            ("seq_parallel_communication_data_type",),
            ("torch_autocast", "dtype"),
            ("data_types", "grad_accum_dtype"),
        ):
            value = config.value(*path)
            short_names_only = len(path) == 1
            if not isinstance(value, str) or (short_names_only and value.casefold() in {"fp32", "fp16", "bf16"}):
                continue
            dtype = deepspeed.dtype(*path)
            if not short_names_only and dtype is not None:
                continue
            entry = config.entry(*path)
            fix = replace_value(config, entry.value, dtype, f"Replace with {dtype}") if entry and dtype else None
            message = f"`{'.'.join(path)}` is {value!r}, which DeepSpeed does not recognize."
            yield self.at(config, path, message, instead=f"Use {dtype or 'bf16, fp16 or fp32'}.", fix=fix)


class Fp16ReductionUnscaled(DeepSpeedRule):
    """Unscaled gradients are accumulated or reduced in fp16."""

    code = "HS222"
    name = "fp16-reduction-unscaled"
    severity = "error"
    reason = (
        "DeepSpeed does not scale bf16 and fp32 gradients, because those formats represent values down to 1e-38. fp16 "
        "covers only 6e-8 to 65504: small gradients underflow to 0 and a sum over ranks can overflow to inf. "
        "DeepSpeed accepts the setting."
    )
    bad = (
        '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}, "communication_data_type": "fp16"}',
        '{"train_batch_size": 8, "zero_optimization": {"stage": 1}, "communication_data_type": "fp16"}',
        '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp16"}}',
    )
    good = (
        '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}, "communication_data_type": "fp32"}',
        '{"zero_optimization": {"stage": 2}, "fp16": {"enabled": true}, "communication_data_type": "fp16"}',
    )
    references = (_DOCS + "#communication-options", "measured: DeepSpeed 0.19.8 accepts bf16 with fp16 communication")

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Report fp16 accumulation or communication outside fp16 mode."""
        comm_dtype = deepspeed.dtype("communication_data_type")
        unscaled = deepspeed.weights in {"bf16", "fp32"} and deepspeed.autocast is False and deepspeed.amp is False
        if comm_dtype == "fp16" and unscaled:
            yield self.at(
                config,
                ("communication_data_type",),
                f"`communication_data_type` is fp16, but {deepspeed.weights} gradients are not scaled and can "
                "underflow or overflow in fp16.",
                instead='Set `"communication_data_type": "fp32"` or `"bf16"`.',
            )
        if deepspeed.dtype("data_types", "grad_accum_dtype") == "fp16" and deepspeed.weights == "bf16":
            yield self.at(
                config,
                ("data_types", "grad_accum_dtype"),
                "`grad_accum_dtype` is fp16, but bf16 gradients are not scaled and can underflow or overflow in fp16.",
                instead=f'Set `"grad_accum_dtype": "fp32"`{reduced_alike(config)}.',
            )


class Fp32GradientsIn16Bits(DeepSpeedRule):
    """Gradients of an fp32 model are accumulated in 16 bits."""

    code = "HS223"
    name = "fp32-gradients-in-16-bits"
    severity = "error"
    reason = (
        "Without a 16-bit mode the model computes fp32 gradients, and `grad_accum_dtype` rounds each partial sum to 8 "
        "(bf16) or 11 (fp16) significant bits: contributions below half a ULP of the sum are lost, and in fp16 small "
        "gradients underflow because the loss is not scaled. Compute cost does not change. DeepSpeed accepts it with "
        "ZeRO."
    )
    bad = ('{"zero_optimization": {"stage": 1}, "train_batch_size": 8, "data_types": {"grad_accum_dtype": "bf16"}}',)
    good = (
        '{"zero_optimization": {"stage": 1}, "train_batch_size": 8, "data_types": {"grad_accum_dtype": "fp32"}}',
        '{"zero_optimization": {"stage": 1}, "bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"}}',
    )
    references = (_DOCS + "#data-type-options", _MATRIX)

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Report fp32 weights with 16-bit accumulation and ZeRO."""
        accum_dtype = deepspeed.dtype("data_types", "grad_accum_dtype")
        is_fp32 = deepspeed.weights == "fp32" and deepspeed.autocast is False and deepspeed.amp is False
        if is_fp32 and accum_dtype in {"fp16", "bf16"} and deepspeed.stage:
            yield self.at(
                config,
                ("data_types", "grad_accum_dtype"),
                "Gradients are fp32 because no 16-bit mode is enabled, but `grad_accum_dtype` rounds their sums to "
                f"{accum_dtype}.",
                instead='Set `"grad_accum_dtype": "fp32"`, or enable bf16.',
            )


class AccumulationFormatWithoutZero(DeepSpeedRule):
    """`grad_accum_dtype` differs from the weight dtype without ZeRO, which DeepSpeed does not support."""

    code = "HS224"
    name = "accumulation-format-without-zero"
    severity = "error"
    reason = (
        "Only the ZeRO optimizers can store gradients in a dtype other than the model's. At stage 0 DeepSpeed raises "
        "NotImplementedError ('unsupported mix') unless `grad_accum_dtype` matches the model dtype."
    )
    bad = ('{"train_batch_size": 8, "bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"}}',)
    good = (
        '{"zero_optimization": {"stage": 1}, "bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"}}',
        '{"train_batch_size": 8, "bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "bf16"}}',
    )
    references = (_DOCS + "#data-type-options", _MATRIX)

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Report differing dtypes at stage 0."""
        accum_dtype = deepspeed.dtype("data_types", "grad_accum_dtype")
        if accum_dtype and deepspeed.weights and accum_dtype != deepspeed.weights and deepspeed.stage == 0:
            yield self.at(
                config,
                ("data_types", "grad_accum_dtype"),
                f"`grad_accum_dtype` is {accum_dtype} but the weights are {deepspeed.weights}; without ZeRO, "
                "DeepSpeed raises NotImplementedError.",
                instead=f'Set `"zero_optimization": {{"stage": 1}}`{reduced_alike(config)}.',
            )


class ParameterFormatContradicts(DeepSpeedRule):
    """`data_types.param_dtype` contradicts the precision mode."""

    code = "HS225"
    name = "parameter-format-contradicts"
    severity = "error"
    reason = (
        "The mode determines the weight dtype: fp16, bf16, or fp32 if neither is enabled. A different `param_dtype` "
        "raises an AssertionError; a matching one is redundant."
    )
    bad = ('{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}, "data_types": {"param_dtype": "fp32"}}',)
    good = ('{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}, "data_types": {"param_dtype": "bf16"}}',)
    references = (_DOCS + "#data-type-options", "measured: DeepSpeed 0.19.8 raises AssertionError")

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Compare param_dtype with the mode."""
        param_dtype = deepspeed.dtype("data_types", "param_dtype")
        if param_dtype and deepspeed.weights and param_dtype != deepspeed.weights:
            yield self.at(
                config,
                ("data_types", "param_dtype"),
                f"`param_dtype` is {param_dtype}, but this configuration trains {deepspeed.weights} weights; "
                "DeepSpeed raises an AssertionError.",
                instead="Remove `param_dtype`.",
            )


class ReductionIn16Bits(DeepSpeedRule):
    """Gradients are accumulated in fp32 but reduced across ranks in 16 bits."""

    code = "HS227"
    name = "reduction-in-16-bits"
    severity = "advice"
    reason = (
        "`communication_data_type` defaults to the mode's dtype, not to `grad_accum_dtype`: fp32 sums are cast to "
        "bf16 or fp16 before the reduction, which discards the precision gained by fp32 accumulation."
    )
    bad = (
        '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"}}',
    )
    good = (
        '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}, "communication_data_type": "fp32",\n'
        ' "data_types": {"grad_accum_dtype": "fp32"}}',
    )
    references = (_DOCS + "#communication-options",)

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Report fp32 accumulation with the default communication dtype."""
        accum_dtype = deepspeed.dtype("data_types", "grad_accum_dtype")
        unset = config.value("communication_data_type") is None
        if accum_dtype == "fp32" and unset and deepspeed.weights in {"bf16", "fp16"} and deepspeed.stage:
            yield self.at(
                config,
                ("data_types", "grad_accum_dtype"),
                f"Gradients are accumulated in fp32 but reduced in {deepspeed.weights}, the default "
                "`communication_data_type`.",
                instead='Add `"communication_data_type": "fp32"`.',
            )


class SixteenBitMasters(DeepSpeedRule):
    """16-bit master weights are requested in an unsupported configuration."""

    code = "HS228"
    name = "sixteen-bit-masters"
    severity = "error"
    reason = (
        "`fp16_master_weights_and_grads` requires ZeRO and optimizer offload with DeepSpeedCPUAdam. "
        "`bf16_master_weights_and_grads` requires the same, or `bf16_optimizer_states`, which in turn requires it. "
        "Other combinations fail an assertion at startup. Where DeepSpeed accepts them, HS219 reports what they lose."
    )
    bad = (
        '{"train_batch_size": 8, "zero_optimization": {"stage": 0},\n'
        ' "bf16": {"enabled": true, "bf16_master_weights_and_grads": true}}',
        '{"zero_optimization": {"stage": 2}, "fp16": {"enabled": true, "fp16_master_weights_and_grads": true}}',
        '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true, "bf16_optimizer_states": true}}',
    )
    good = (
        '{"train_batch_size": 8, "zero_optimization": {"stage": 0}, "bf16": {"enabled": true}}',
        '{"zero_optimization": {"stage": 2}, "fp16": {"enabled": true, "fp16_master_weights_and_grads": false}}',
        '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true, "bf16_optimizer_states": false}}',
    )
    references = (_DOCS + "#fp16-training-options", "measured: DeepSpeed 0.19.8, each combination")

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Check the requirements of each flag."""
        bf16 = deepspeed.bf16_name
        masters = config.is_on(bf16, "bf16_master_weights_and_grads")
        states = config.value(bf16, "bf16_optimizer_states")
        for path, on, needs_offload in (
            (("fp16", "fp16_master_weights_and_grads"), config.is_on("fp16", "fp16_master_weights_and_grads"), True),
            ((bf16, "bf16_master_weights_and_grads"), masters, states in {None, False}),
        ):
            if on and deepspeed.stage == 0:
                message = f"`{path[1]}` requires ZeRO, but the stage is 0."
                yield self.at(config, path, message, instead=_FP32_MASTERS)
            elif on and needs_offload and deepspeed.stage and deepspeed.offloads_optimizer is False:
                message = f"`{path[1]}` requires optimizer offload to the CPU."
                yield self.at(config, path, message, instead=_FP32_MASTERS)
        if masters and config.is_on("fp16", "fp16_master_weights_and_grads"):
            message = "fp16 and bf16 master weights are both enabled; DeepSpeed raises an error."
            yield self.at(
                config,
                (bf16, "bf16_master_weights_and_grads"),
                message,
                instead="Remove both: the masters are fp32 then.",
            )
        if states is True and config.value(bf16, "bf16_master_weights_and_grads") in {None, False}:
            message = (
                "`bf16_optimizer_states` requires `bf16_master_weights_and_grads`; DeepSpeed raises an error without "
                "it."
            )
            yield self.at(
                config, (bf16, "bf16_optimizer_states"), message, instead="Remove it: the states are fp32 then."
            )


class SequenceParallelReduction(DeepSpeedRule):
    """`communication_data_type` is set, but sequence parallelism overrides it."""

    code = "HS229"
    name = "sequence-parallel-reduction"
    severity = "advice"
    reason = (
        "With `sequence_parallel_size` above 1, DeepSpeed uses `seq_parallel_communication_data_type` (fp32 by "
        "default) instead of `communication_data_type`. Compared with bf16, that doubles the traffic, without a "
        "warning."
    )
    bad = (
        '{"zero_optimization": {"stage": 1}, "bf16": {"enabled": true}, "communication_data_type": "bf16",\n'
        ' "sequence_parallel_size": 4}',
    )
    good = (
        '{"zero_optimization": {"stage": 1}, "bf16": {"enabled": true}, "seq_parallel_communication_data_type": "bf16",\n'
        ' "sequence_parallel_size": 4}',
    )
    references = (
        _DOCS + "#communication-options",
        "measured: source code of DeepSpeed 0.19.6, engine.py and stage_1_and_2.py",
    )

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Report the general key without the sequence-parallel one."""
        size = config.number("sequence_parallel_size")
        unset = config.value("seq_parallel_communication_data_type") is None
        if size is not None and size > 1 and unset and config.entry("communication_data_type"):
            message = (
                "DeepSpeed ignores `communication_data_type` with sequence parallelism and reduces in fp32, the "
                "default of `seq_parallel_communication_data_type`."
            )
            instead = "Set `seq_parallel_communication_data_type`."
            yield self.at(config, ("communication_data_type",), message, instead=instead)


def reduced_alike(config: Config) -> str:
    """The rest of advice to accumulate in fp32: sums that are reduced in 16 bits lose what they gained."""
    return "" if config.entry("communication_data_type") else ' and `"communication_data_type": "fp32"`'


RULES: tuple[type[Rule], ...] = (
    UnknownFormat,
    Fp16ReductionUnscaled,
    Fp32GradientsIn16Bits,
    AccumulationFormatWithoutZero,
    ParameterFormatContradicts,
    ReductionIn16Bits,
    SixteenBitMasters,
    SequenceParallelReduction,
)
