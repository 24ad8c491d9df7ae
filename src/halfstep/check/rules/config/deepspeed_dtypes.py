"""The formats in which DeepSpeed accumulates, reduces and stores: those it refuses, and those that lose digits quietly."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.check.config.config import Config
from halfstep.check.config.deepspeed_facts import DeepSpeed, DeepSpeedRule
from halfstep.check.config.edits import replace_value
from halfstep.check.finding import Finding
from halfstep.check.rule import Rule

__all__ = ["RULES"]

_DOCS = "https://www.deepspeed.ai/docs/config-json/"
_MATRIX = "https://github.com/deepspeedai/DeepSpeed/blob/master/tests/unit/runtime/test_ds_initialize.py"


class UnknownFormat(DeepSpeedRule):
    """A number format is named in a way DeepSpeed does not understand."""

    code = "HS221"
    name = "unknown-format"
    severity = "error"
    reason = (
        "communication_data_type and seq_parallel_communication_data_type take fp16, bf16 and fp32 and no other spelling: "
        '"float16" raises a ValueError. torch_autocast.dtype and data_types also take torch\'s names.'
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
    references = (_DOCS + "#communication-options", "measured: DeepSpeedConfig of 0.19.8 raises ValueError")

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Every key that names a format."""
        for path in (
            ("communication_data_type",),
            ("seq_parallel_communication_data_type",),
            ("torch_autocast", "dtype"),
            ("data_types", "grad_accum_dtype"),
        ):
            value = config.value(*path)
            short = len(path) == 1
            if not isinstance(value, str) or (value.casefold() in {"fp32", "fp16", "bf16"} if short else False):
                continue
            meant = deepspeed.dtype(*path)
            if not short and meant is not None:
                continue
            found = config.entry(*path)
            fix = replace_value(config, found.value, meant, f"Write {meant}") if found and meant else None
            message = f"{'.'.join(path)} is {value!r}, which DeepSpeed does not know."
            yield self.at(config, path, message, instead=f"Write {meant or 'bf16, fp16 or fp32'}.", fix=fix)


class Fp16ReductionUnscaled(DeepSpeedRule):
    """Gradients that no loss scale protects are summed or sent between ranks in fp16."""

    code = "HS222"
    name = "fp16-reduction-unscaled"
    severity = "error"
    reason = (
        "bf16 and fp32 gradients are not scaled, because those formats reach down to 1e-38. fp16 ends at 6e-8 below and 65504 "
        "above: small gradients become 0 on the way and a sum over ranks becomes inf. DeepSpeed accepts the setting."
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
        """fp16 on the wire outside the fp16 mode."""
        named = deepspeed.dtype("communication_data_type")
        outside = deepspeed.weights in {"bf16", "fp32"} and deepspeed.autocast is False and deepspeed.amp is False
        if named == "fp16" and outside:
            yield self.at(
                config,
                ("communication_data_type",),
                f"{deepspeed.weights} gradients are not scaled, and communication_data_type fp16 sends them through fp16's range.",
                instead='Write "communication_data_type": "fp32", or "bf16".',
            )
        if deepspeed.dtype("data_types", "grad_accum_dtype") == "fp16" and deepspeed.weights == "bf16":
            yield self.at(
                config,
                ("data_types", "grad_accum_dtype"),
                "bf16 gradients are not scaled, and grad_accum_dtype fp16 sums them in fp16's range.",
                instead='Write "grad_accum_dtype": "fp32".',
            )


class Fp32GradientsIn16Bits(DeepSpeedRule):
    """Gradients of an fp32 model are accumulated in 16 bits."""

    code = "HS223"
    name = "fp32-gradients-in-16-bits"
    severity = "error"
    reason = (
        "With no 16-bit mode on, the model computes fp32 gradients and grad_accum_dtype rounds each sum to 8 or 11 bits: "
        "additions below half a unit in the last place vanish, and in fp16 small gradients do too, since nothing scales the "
        "loss. It saves no computation. DeepSpeed accepts it under ZeRO."
    )
    bad = ('{"zero_optimization": {"stage": 1}, "train_batch_size": 8, "data_types": {"grad_accum_dtype": "bf16"}}',)
    good = (
        '{"zero_optimization": {"stage": 1}, "bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"}}',
    )
    references = (_DOCS + "#data-type-options", _MATRIX)

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """fp32 weights and 16-bit sums under ZeRO."""
        summed = deepspeed.dtype("data_types", "grad_accum_dtype")
        plain = deepspeed.weights == "fp32" and deepspeed.autocast is False and deepspeed.amp is False
        if plain and summed in {"fp16", "bf16"} and deepspeed.stage:
            yield self.at(
                config,
                ("data_types", "grad_accum_dtype"),
                f"No 16-bit mode is on, so gradients are fp32, and grad_accum_dtype rounds their sums to {summed}.",
                instead='Write "grad_accum_dtype": "fp32", or enable bf16.',
            )


class AccumulationFormatWithoutZero(DeepSpeedRule):
    """Without ZeRO, gradients are to be accumulated in another format than the weights', which DeepSpeed cannot do."""

    code = "HS224"
    name = "accumulation-format-without-zero"
    severity = "error"
    reason = (
        "Only ZeRO's optimizers keep gradients in a format of their own. At stage 0 DeepSpeed raises NotImplementedError "
        "('unsupported mix') unless grad_accum_dtype equals the model's."
    )
    bad = ('{"train_batch_size": 8, "bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"}}',)
    good = (
        '{"zero_optimization": {"stage": 1}, "bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"}}',
        '{"train_batch_size": 8, "bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "bf16"}}',
    )
    references = (_DOCS + "#data-type-options", _MATRIX)

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Unequal formats at stage 0."""
        summed = deepspeed.dtype("data_types", "grad_accum_dtype")
        if summed and deepspeed.weights and summed != deepspeed.weights and deepspeed.stage == 0:
            yield self.at(
                config,
                ("data_types", "grad_accum_dtype"),
                f"grad_accum_dtype is {summed} and the weights are {deepspeed.weights}: DeepSpeed has no such mix without ZeRO.",
                instead='Use "zero_optimization": {"stage": 1}.',
            )


class ParameterFormatContradicts(DeepSpeedRule):
    """data_types.param_dtype contradicts the precision mode."""

    code = "HS225"
    name = "parameter-format-contradicts"
    severity = "error"
    reason = (
        "The mode decides the weights' format: fp16, bf16, or fp32 with neither. A param_dtype that says otherwise stops the run "
        "with an assertion. The key adds nothing where it agrees."
    )
    bad = ('{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}, "data_types": {"param_dtype": "fp32"}}',)
    good = ('{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}, "data_types": {"param_dtype": "bf16"}}',)
    references = (_DOCS + "#data-type-options", "measured: DeepSpeed 0.19.8 raises AssertionError")

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """param_dtype against the mode."""
        named = deepspeed.dtype("data_types", "param_dtype")
        if named and deepspeed.weights and named != deepspeed.weights:
            yield self.at(
                config,
                ("data_types", "param_dtype"),
                f"param_dtype is {named}, but the enabled mode stores weights in {deepspeed.weights}.",
                instead="Remove param_dtype.",
            )


class AccumulationIn16Bits(DeepSpeedRule):
    """Micro-batches are summed in the weights' 16-bit format."""

    code = "HS226"
    name = "accumulation-in-16-bits"
    severity = "advice"
    reason = (
        "With grad_accum_dtype unset DeepSpeed adds micro-batches in the weights' format. bf16 has 8 significant bits, so once the "
        "sum is 256 times a contribution, additions vanish: with 1024 micro-batches of gradient 1.0 the mean came out as 0.25 at "
        "every stage, and as 1.0 with fp32 sums. It costs 2 more bytes per parameter."
    )
    bad = (
        '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}, "gradient_accumulation_steps": 64, "gradient_clipping": 1}',
    )
    good = (
        '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}, "gradient_accumulation_steps": 64,\n'
        ' "data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32", "gradient_clipping": 1}',
        '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}, "gradient_accumulation_steps": 1}',
    )
    references = (
        "https://github.com/deepspeedai/DeepSpeed/issues/1800",
        "https://github.com/deepspeedai/DeepSpeed/issues/2352",
        "measured: DeepSpeed 0.19.8, 1024 micro-batches, mean 0.25 instead of 1.0 at stages 0 to 3",
    )

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """More than one micro-batch and no fp32 sum."""
        steps = config.number("gradient_accumulation_steps")
        unset = config.value("data_types", "grad_accum_dtype") is None
        if deepspeed.weights in {"bf16", "fp16"} and steps is not None and steps >= 4 and unset:
            yield self.at(
                config,
                ("gradient_accumulation_steps",),
                f"{steps:g} micro-batches are summed in {deepspeed.weights}, where small contributions to a large sum vanish.",
                instead='Add "data_types": {"grad_accum_dtype": "fp32"} (with ZeRO).',
            )


class ReductionIn16Bits(DeepSpeedRule):
    """Gradients are summed in fp32 and then rounded to 16 bits to cross ranks."""

    code = "HS227"
    name = "reduction-in-16-bits"
    severity = "advice"
    reason = (
        "communication_data_type follows the mode, not grad_accum_dtype: fp32 sums are cast to bf16 or fp16 before the reduction, "
        "which throws away the digits that were just paid for."
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
        """fp32 accumulation with the default reduction."""
        summed = deepspeed.dtype("data_types", "grad_accum_dtype")
        unset = config.value("communication_data_type") is None
        if summed == "fp32" and unset and deepspeed.weights in {"bf16", "fp16"} and deepspeed.stage:
            yield self.at(
                config,
                ("data_types", "grad_accum_dtype"),
                f"Gradients are summed in fp32, but cross ranks in {deepspeed.weights}, the default of communication_data_type.",
                instead='Add "communication_data_type": "fp32".',
            )


class SixteenBitMasters(DeepSpeedRule):
    """Master weights in 16 bits are asked for where DeepSpeed does not support them."""

    code = "HS228"
    name = "sixteen-bit-masters"
    severity = "error"
    reason = (
        "fp16_master_weights_and_grads needs ZeRO and optimizer offload with DeepSpeedCPUAdam; bf16_master_weights_and_grads the "
        "same, or bf16_optimizer_states beside it; and bf16_optimizer_states needs the bf16 masters. Anything else is an "
        "assertion at start. And without an fp32 master, updates below half a unit in a weight's last place vanish."
    )
    bad = (
        '{"train_batch_size": 8, "zero_optimization": {"stage": 0},\n'
        ' "bf16": {"enabled": true, "bf16_master_weights_and_grads": true}}',
        '{"zero_optimization": {"stage": 2}, "fp16": {"enabled": true, "fp16_master_weights_and_grads": true}}',
        '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true, "bf16_optimizer_states": true}}',
    )
    good = (
        '{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},\n'
        ' "fp16": {"enabled": true, "fp16_master_weights_and_grads": true}}',
        '{"zero_optimization": {"stage": 2},\n'
        ' "bf16": {"enabled": true, "bf16_master_weights_and_grads": true, "bf16_optimizer_states": true}}',
    )
    references = (_DOCS + "#fp16-training-options", "measured: DeepSpeed 0.19.8, each combination")

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Each flag with what it needs."""
        bf16 = deepspeed.bf16_name
        masters = config.is_on(bf16, "bf16_master_weights_and_grads")
        states = config.value(bf16, "bf16_optimizer_states")
        for path, on, needs_offload in (
            (("fp16", "fp16_master_weights_and_grads"), config.is_on("fp16", "fp16_master_weights_and_grads"), True),
            ((bf16, "bf16_master_weights_and_grads"), masters, states in {None, False}),
        ):
            if on and deepspeed.stage == 0:
                yield self.at(
                    config, path, f"{path[1]} needs ZeRO, and the stage is 0.", instead="Use stage 1, 2 or 3."
                )
            elif on and needs_offload and deepspeed.stage and deepspeed.offloads_optimizer is False:
                instead = 'Add "offload_optimizer": {"device": "cpu"}' + (
                    ", or bf16_optimizer_states." if path[0] == bf16 else "."
                )
                yield self.at(config, path, f"{path[1]} needs the optimizer offloaded to the CPU.", instead=instead)
        if masters and config.is_on("fp16", "fp16_master_weights_and_grads"):
            message = "fp16 and bf16 master weights are both asked for, and DeepSpeed refuses that."
            yield self.at(config, (bf16, "bf16_master_weights_and_grads"), message, instead="Keep one.")
        if states is True and config.value(bf16, "bf16_master_weights_and_grads") in {None, False}:
            message = "bf16_optimizer_states is refused without bf16_master_weights_and_grads."
            yield self.at(config, (bf16, "bf16_optimizer_states"), message, instead="Add it, or remove this key.")


class SequenceParallelReduction(DeepSpeedRule):
    """communication_data_type is set under sequence parallelism, which reduces in a format of its own."""

    code = "HS229"
    name = "sequence-parallel-reduction"
    severity = "advice"
    reason = (
        "With sequence_parallel_size above 1 DeepSpeed replaces communication_data_type by "
        "seq_parallel_communication_data_type, fp32 by default: twice the traffic that a bf16 setting asks for, without a word."
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
        "measured: read in DeepSpeed 0.19.6, engine.py and stage_1_and_2.py",
    )

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """The plain key without the one that counts."""
        size = config.number("sequence_parallel_size")
        unset = config.value("seq_parallel_communication_data_type") is None
        if size is not None and size > 1 and unset and config.entry("communication_data_type"):
            message = "With sequence parallelism communication_data_type is replaced by the default fp32."
            instead = "Set seq_parallel_communication_data_type."
            yield self.at(config, ("communication_data_type",), message, instead=instead)


RULES: tuple[type[Rule], ...] = (
    UnknownFormat,
    Fp16ReductionUnscaled,
    Fp32GradientsIn16Bits,
    AccumulationFormatWithoutZero,
    ParameterFormatContradicts,
    AccumulationIn16Bits,
    ReductionIn16Bits,
    SixteenBitMasters,
    SequenceParallelReduction,
)
