"""Rules for DeepSpeed's loss scale: settings that fail at startup, keep the scale from falling or have no effect."""

from __future__ import annotations

import math
from collections.abc import Iterator

from halfstep.check.config.config import Config
from halfstep.check.config.deepspeed_facts import DeepSpeed, DeepSpeedRule
from halfstep.check.config.edits import replace_value
from halfstep.check.finding import Finding
from halfstep.check.rule import Rule
from halfstep.precision.deepspeed_keys import BLOCKS
from halfstep.precision.node import Scalar

__all__ = ["RULES"]

_DOCS = "https://www.deepspeed.ai/docs/config-json/#fp16-training-options"
_INTEGER_KEYS = ("initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")
# DeepSpeed's defaults; setting a key to its default is harmless.
_DEFAULTS = {
    "initial_scale_power": 16,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "min_loss_scale": 1,
    "consecutive_hysteresis": False,
}
_MAX_POWER = 24


class ModeWithoutSwitch(DeepSpeedRule):
    """A precision block has settings but no `enabled`, so the mode is off."""

    code = "HS210"
    name = "mode-without-switch"
    severity = "warning"
    reason = (
        "`enabled` is false by default in `fp16`, `bf16` and `torch_autocast`: a block with a loss scale or a dtype alone "
        "does not enable the mode, and the run trains in fp32. Transformers and Accelerate fill in the switch only if it is "
        '"auto".'
    )
    bad = (
        '{"zero_optimization": {"stage": 2}, "fp16": {"initial_scale_power": 10}}',
        '{"zero_optimization": {"stage": 2}, "torch_autocast": {"dtype": "bfloat16"}}',
    )
    good = (
        '{"zero_optimization": {"stage": 2}, "fp16": {"enabled": true, "initial_scale_power": 10}}',
        '{"zero_optimization": {"stage": 2}, "fp16": {"enabled": false, "initial_scale_power": 10}}',
        '{"zero_optimization": {"stage": 2}, "fp16": {}}',
    )
    references = (_DOCS, "measured: DeepSpeed 0.19.8, DeepSpeedConfig has fp16.enabled false")

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Report a block with known settings and without a switch."""
        for name in ("fp16", deepspeed.bf16_name, "torch_autocast"):
            block = config.block(name) if config.strict else None
            if block is None or block.open or "enabled" in block or not set(block.keys()) & set(BLOCKS[name]):
                continue
            message = f"`{name}` has settings but no `enabled`, which is false by default; the mode is off."
            yield self.at(
                config,
                (name,),
                message,
                instead=f'Set `"{name}": {{"enabled": true}}` in addition, or remove the block.',
            )


class InvalidLossScale(DeepSpeedRule):
    """A loss-scale setting has a value that DeepSpeed rejects."""

    code = "HS211"
    name = "invalid-loss-scale"
    severity = "error"
    reason = (
        '`loss_scale` must be a finite number >= 0, where 0 means dynamic; the string "dynamic" is Apex syntax. With '
        "a dynamic scale, `loss_scale_window` and `min_loss_scale` must be positive. Other values raise a validation "
        "error at startup."
    )
    bad = (
        '{"zero_optimization": {"stage": 1}, "fp16": {"enabled": true, "loss_scale": -1}}',
        '{"zero_optimization": {"stage": 1}, "fp16": {"enabled": true, "loss_scale": "dynamic"}}',
        '{"zero_optimization": {"stage": 1}, "fp16": {"enabled": true, "loss_scale_window": 0}}',
        '{"zero_optimization": {"stage": 1}, "fp16": {"enabled": true, "min_loss_scale": 0}}',
        '{"zero_optimization": {"stage": 1}, "fp16": {"enabled": true, "loss_scale": true}}',
        '{"zero_optimization": {"stage": 0}, "fp16": {"enabled": "auto", "loss_scale": 0, "min_loss_scale": 0}}',
    )
    good = (
        '{"zero_optimization": {"stage": 1}, "fp16": {"enabled": true, "loss_scale": 0}}',
        '{"zero_optimization": {"stage": 1}, "fp16": {"enabled": true, "loss_scale": 0, "min_loss_scale": 1}}',
        '{"zero_optimization": {"stage": 1}, "fp16": {"enabled": "auto", "loss_scale": "auto"}}',
        '{"zero_optimization": {"stage": 1}, "fp16": {"enabled": "auto", "loss_scale": 0, "min_loss_scale": 1}}',
    )
    references = (_DOCS, "measured: DeepSpeed 0.19.8, DeepSpeedConfig raises ValidationError")

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Check loss_scale, loss_scale_window and min_loss_scale."""
        scale = config.value("fp16", "loss_scale")
        number = config.number("fp16", "loss_scale")
        not_a_number = isinstance(scale, bool) or (isinstance(scale, str) and not _is_number(scale))
        if not_a_number or (number is not None and (not math.isfinite(number) or number < 0)):
            message = f"`fp16.loss_scale` is {scale!r}; DeepSpeed requires a finite number >= 0 (0 = dynamic)."
            fix = None
            entry = config.entry("fp16", "loss_scale")
            if entry and (scale == "dynamic" or number == -1):
                # "dynamic" is the word for 0; -1 may as well be a typing mistake for a static scale of 1.
                fix = replace_value(config, entry.value, 0, "Replace with 0 (dynamic)", safe=scale == "dynamic")
            yield self.at(config, ("fp16", "loss_scale"), message, instead='Set `"loss_scale": 0`.', fix=fix)
        # "auto" is for the Trainer or Accelerate to decide: the file fails in the runs that ask for fp16.
        switch = config.entry("fp16", "enabled")
        is_auto = switch is not None and isinstance(switch.value, Scalar) and switch.value.value == "auto"
        if not (deepspeed.fp16 or is_auto) or not deepspeed.is_dynamic:
            return
        for key, default in (("loss_scale_window", 1000), ("min_loss_scale", 1)):
            value = config.number("fp16", key)
            if value is not None and value <= 0:
                when = "where `enabled` becomes true, " if is_auto else ""
                message = (
                    f"`fp16.{key}` is {value:g}; {when}with a dynamic loss scale DeepSpeed requires a positive value."
                )
                yield self.at(
                    config,
                    ("fp16", key),
                    message,
                    instead=f'Set `"{key}": {default}`.',
                    severity="warning" if is_auto else None,
                )


class FractionalScaleSetting(DeepSpeedRule):
    """An integer loss-scale setting has a fractional value."""

    code = "HS212"
    name = "fractional-scale-setting"
    severity = "error"
    reason = (
        "`initial_scale_power`, `loss_scale_window`, `hysteresis` and `min_loss_scale` must be integers: 0.5 and "
        "1e-5, both found in public configurations, raise a validation error even if fp16 is disabled. A minimum "
        "below 1 would not help: gradients that overflow unscaled overflow at any scale."
    )
    bad = (
        '{\n  "zero_optimization": {"stage": 2},\n  "fp16": {"enabled": true, "min_loss_scale": 1e-5} // lowered\n}',
        '{"zero_optimization": {"stage": 2}, "fp16": {"enabled": true, "min_loss_scale": 0.5}}',
        '{"zero_optimization": {"stage": 2}, "fp16": {"enabled": true, "initial_scale_power": 12.5}}',
    )
    good = (
        '{"zero_optimization": {"stage": 2}, "fp16": {"enabled": true, "min_loss_scale": 1, "loss_scale_window": 1000.0}}',
    )
    references = (_DOCS, "measured: DeepSpeed 0.19.8, DeepSpeedConfig raises ValidationError, int_from_float")

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Report fractions where DeepSpeed requires integers."""
        for key in _INTEGER_KEYS:
            value = config.number("fp16", key)
            if value is None or not math.isfinite(value) or value == int(value):
                continue
            message = f"`fp16.{key}` is {value:g}, but DeepSpeed requires an integer and raises a validation error."
            instead = (
                f'Set `"{key}": {round(value)}`.' if value >= 1 else f"Remove it; the default is {_DEFAULTS[key]}."
            )
            yield self.at(config, ("fp16", key), message, instead=instead)


class HysteresisBelowOne(DeepSpeedRule):
    """With a hysteresis below 1 the loss scale never decreases."""

    code = "HS213"
    name = "hysteresis-below-one"
    severity = "error"
    reason = (
        "DeepSpeed lowers the scale when its hysteresis counter equals 1. Starting at 0, the counter runs 0, -1, -2 "
        "and never equals 1: after the first overflow every step overflows at the same scale and is skipped, without "
        "an exception."
    )
    bad = ('{"zero_optimization": {"stage": 2}, "fp16": {"enabled": true, "hysteresis": 0}}',)
    good = ('{"zero_optimization": {"stage": 2}, "fp16": {"enabled": true, "hysteresis": 1}}',)
    references = (
        _DOCS,
        "measured: DeepSpeed 0.19.8, hysteresis 0: the scale stays constant while every step is skipped",
    )

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Report a hysteresis of 0 or less with ZeRO, the only case in which DeepSpeed reads it."""
        value = config.number("fp16", "hysteresis")
        if value is not None and value <= 0 and deepspeed.fp16 is not False and deepspeed.stage != 0:
            yield self.at(
                config,
                ("fp16", "hysteresis"),
                f"`fp16.hysteresis` is {value:g}; the loss scale never decreases, and after one overflow every step "
                "is skipped.",
                instead='Set `"hysteresis": 2`, or 1 to lower the scale at every overflow.',
            )


class InitialScaleBelowMinimum(DeepSpeedRule):
    """The initial loss scale is below `min_loss_scale`."""

    code = "HS214"
    name = "initial-scale-below-minimum"
    severity = "error"
    reason = (
        "On an overflow DeepSpeed sets the scale to max(scale / 2, min_loss_scale), so an initial scale below the "
        "minimum increases (measured: 16 to 1024), overflows again and stops the run with 'Current loss scale already "
        "at minimum' after two overflows."
    )
    bad = (
        '{"zero_optimization": {"stage": 2},\n "fp16": {"enabled": true, "initial_scale_power": 4, "min_loss_scale": 1024}}',
    )
    good = (
        '{"zero_optimization": {"stage": 2}, "fp16": {"enabled": true, "initial_scale_power": 16, "min_loss_scale": 1}}',
    )
    references = (_DOCS, "measured: DeepSpeed 0.19.8, scale 16 with minimum 1024")

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Compare 2^initial_scale_power with the minimum."""
        minimum = config.number("fp16", "min_loss_scale")
        value = config.value("fp16", "initial_scale_power")
        power = 16.0 if value is None else config.number("fp16", "initial_scale_power")
        if minimum is None or power is None or not deepspeed.is_dynamic or deepspeed.fp16 is False:
            return
        if math.isfinite(power) and power < 1000 and 2.0**power < minimum:
            yield self.at(
                config,
                ("fp16", "min_loss_scale"),
                f"The initial loss scale 2^{power:g} = {2.0**power:g} is below `min_loss_scale` {minimum:g}; the "
                "first overflow raises it, the second stops the run.",
                instead="Raise `initial_scale_power` or lower `min_loss_scale`.",
            )


class InitialScaleTooHigh(DeepSpeedRule):
    """The initial loss scale is so high that the first steps are skipped."""

    code = "HS215"
    name = "initial-scale-too-high"
    severity = "warning"
    reason = (
        "fp16's maximum is 65504, so a scale of 2^32 overflows for any gradient above 1.5e-5. Each factor of 2 too "
        "many costs one skipped step, plus one for the default hysteresis of 2: starting at 2^40, all of the first 6 "
        "steps were skipped. Whether a warm-up schedule counts those steps depends on who calls the scheduler. "
        "DeepSpeed's default is 2^16."
    )
    bad = (
        '{"zero_optimization": {"stage": 2}, "fp16": {"enabled": true, "initial_scale_power": 32}}',
        '{"zero_optimization": {"stage": 2}, "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 32}}',
    )
    good = (
        '{"zero_optimization": {"stage": 2}, "fp16": {"enabled": true, "initial_scale_power": 16}}',
        '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}, "fp16": {"enabled": false, "initial_scale_power": 32}}',
    )
    references = (
        _DOCS,
        "https://github.com/zai-org/CogVideo/issues/233",
        "measured: 2^40 skips 6 of the first 6 steps",
    )

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Report a power above 24."""
        power = config.number("fp16", "initial_scale_power")
        static = deepspeed.is_dynamic is False
        if (
            power is not None
            and power > _MAX_POWER
            and deepspeed.fp16 is not False
            and not static
            and not deepspeed.bf16
        ):
            yield self.at(
                config,
                ("fp16", "initial_scale_power"),
                f"The initial loss scale is 2^{power:g}; each factor of 2 above the largest usable scale costs a "
                "skipped step.",
                instead='Set `"initial_scale_power": 16`.',
            )


class IdleDynamicSettings(DeepSpeedRule):
    """Dynamic loss-scale settings have no effect with a static loss scale."""

    code = "HS216"
    name = "idle-dynamic-settings"
    severity = "advice"
    reason = (
        "Any `loss_scale` other than 0 is static; DeepSpeed then ignores `initial_scale_power`, `loss_scale_window`, "
        "`hysteresis` and `min_loss_scale`. The run is not wrong, but a static scale never adapts: once scaled "
        "gradients overflow, every step is skipped."
    )
    bad = (
        '{"zero_optimization": {"stage": 2},\n "fp16": {"enabled": true, "loss_scale": 128, "initial_scale_power": 12}}',
        '{"zero_optimization": {"stage": 2}, "fp16": {"enabled": true, "loss_scale": 1024, "loss_scale_window": 200}}',
    )
    good = (
        '{"zero_optimization": {"stage": 2}, "fp16": {"enabled": true, "loss_scale": 0, "initial_scale_power": 12}}',
        '{"zero_optimization": {"stage": 2}, "fp16": {"enabled": true, "loss_scale": 128}}',
    )
    references = (_DOCS,)

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Report dynamic keys with a static scale, those that differ from their defaults if there are any."""
        if deepspeed.is_dynamic is not False or not deepspeed.fp16:
            return
        ignored = [key for key in _DEFAULTS if config.entry("fp16", key) is not None]
        changed = [key for key in ignored if config.value("fp16", key) != _DEFAULTS[key]]
        if ignored:
            keys = changed or ignored
            yield self.at(
                config,
                ("fp16", keys[0]),
                f"{', '.join(f'`{key}`' for key in keys)} {'has' if len(keys) == 1 else 'have'} no effect, because "
                f"`fp16.loss_scale` is {config.value('fp16', 'loss_scale')} (static).",
                instead='Set `"loss_scale": 0` for a dynamic scale, or remove the other settings.',
            )


class HysteresisWithoutZero(DeepSpeedRule):
    """`hysteresis` is set without ZeRO, where DeepSpeed ignores it."""

    code = "HS217"
    name = "hysteresis-without-zero"
    severity = "advice"
    reason = (
        "Only the ZeRO optimizers use DeepSpeed's dynamic loss scaler with hysteresis. The stage-0 fp16 optimizers "
        'halve the scale at every overflow and ignore `hysteresis` and `consecutive_hysteresis`. With `enabled` "auto" the keys have no '
        "effect in any run: fp16 is off, or it ignores them."
    )
    bad = (
        '{"train_batch_size": 8, "zero_optimization": {"stage": 0}, "fp16": {"enabled": true, "hysteresis": 4}}',
        '{"train_batch_size": "auto", "zero_optimization": {"stage": 0}, "fp16": {"enabled": "auto", "hysteresis": 2}}',
    )
    good = (
        '{"zero_optimization": {"stage": 1}, "fp16": {"enabled": true, "hysteresis": 4}}',
        '{"train_batch_size": "auto", "zero_optimization": {"stage": 2}, "fp16": {"enabled": "auto", "hysteresis": 2}}',
        '{"train_batch_size": "auto", "zero_optimization": {"stage": 0}, "bf16": {"enabled": "auto"}}',
    )
    references = (_DOCS, "measured: DeepSpeed 0.19.8, stage 0, the scale halves at every overflow")

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Report hysteresis at stage 0."""
        value = config.number("fp16", "hysteresis")
        is_on = deepspeed.fp16 or (deepspeed.is_fp16_auto and not deepspeed.bf16)
        if is_on and deepspeed.stage == 0 and deepspeed.is_dynamic and value is not None and value != 1:
            message = f"DeepSpeed ignores `fp16.hysteresis` {value:g} without ZeRO; every overflow halves the scale."
            yield self.at(config, ("fp16", "hysteresis"), message, instead="Use ZeRO stage 1, or remove the key.")


class StaticScaleOfOne(DeepSpeedRule):
    """The loss scale is static and 1: fp16 trains without loss scaling."""

    code = "HS218"
    name = "static-scale-of-one"
    severity = "warning"
    reason = (
        "A `loss_scale` other than 0 is static, and 1 leaves the loss unchanged. fp16 represents no value below 6e-8, "
        "and in many networks a large share of the activation gradients is smaller: they become 0, and the layers "
        "below stop learning. 0 means dynamic."
    )
    bad = ('{"zero_optimization": {"stage": 2}, "fp16": {"enabled": true, "loss_scale": 1.0}}',)
    good = (
        '{"zero_optimization": {"stage": 2}, "fp16": {"enabled": true, "loss_scale": 0}}',
        '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}, "fp16": {"enabled": false, "loss_scale": 1}}',
    )
    references = (_DOCS, "https://arxiv.org/abs/1710.03740")

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Report loss_scale 1 in an fp16 run."""
        entry = config.entry("fp16", "loss_scale")
        if deepspeed.fp16 and entry and config.number("fp16", "loss_scale") == 1:
            fix = replace_value(config, entry.value, 0, "Replace with 0 (dynamic)")
            message = "`fp16.loss_scale` is 1 (static): the loss is not scaled, and gradients below 6e-8 become 0."
            yield self.at(config, ("fp16", "loss_scale"), message, instead='Set `"loss_scale": 0`.', fix=fix)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


RULES: tuple[type[Rule], ...] = (
    ModeWithoutSwitch,
    InvalidLossScale,
    FractionalScaleSetting,
    HysteresisBelowOne,
    InitialScaleBelowMinimum,
    InitialScaleTooHigh,
    IdleDynamicSettings,
    HysteresisWithoutZero,
    StaticScaleOfOne,
)
