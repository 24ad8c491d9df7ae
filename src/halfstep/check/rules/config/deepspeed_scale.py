"""DeepSpeed's loss scale: settings that do not start, never lower the scale, or have no effect."""

from __future__ import annotations

import math
from collections.abc import Iterator

from halfstep.check.config.config import Config
from halfstep.check.config.deepspeed_facts import DeepSpeed, DeepSpeedRule
from halfstep.check.config.edits import replace_value
from halfstep.check.finding import Finding
from halfstep.check.rule import Rule

__all__ = ["RULES"]

_DOCS = "https://www.deepspeed.ai/docs/config-json/#fp16-training-options"
_WHOLE = ("initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")
# DeepSpeed's own defaults; written out they say nothing.
_DEFAULTS = {
    "initial_scale_power": 16,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "min_loss_scale": 1,
    "consecutive_hysteresis": False,
}
_MAX_POWER = 24


class InvalidLossScale(DeepSpeedRule):
    """A loss-scale setting has a value that DeepSpeed refuses."""

    code = "HS211"
    name = "invalid-loss-scale"
    severity = "error"
    reason = (
        'loss_scale must be a finite number of at least 0, where 0 means dynamic; a word such as "dynamic" is Apex\'s. Under a '
        "dynamic scale the window is a divisor and the minimum a floor, so neither may be 0 or less. DeepSpeed stops with a "
        "validation error before the first step."
    )
    bad = (
        '{"zero_optimization": {"stage": 1}, "fp16": {"enabled": true, "loss_scale": -1}}',
        '{"zero_optimization": {"stage": 1}, "fp16": {"enabled": true, "loss_scale": "dynamic"}}',
        '{"zero_optimization": {"stage": 1}, "fp16": {"enabled": true, "loss_scale_window": 0}}',
        '{"zero_optimization": {"stage": 1}, "fp16": {"enabled": true, "min_loss_scale": 0}}',
        '{"zero_optimization": {"stage": 1}, "fp16": {"enabled": true, "loss_scale": true}}',
    )
    good = (
        '{"zero_optimization": {"stage": 1}, "fp16": {"enabled": true, "loss_scale": 0, "min_loss_scale": 1}}',
        '{"zero_optimization": {"stage": 1}, "fp16": {"enabled": "auto", "loss_scale": "auto"}}',
    )
    references = (_DOCS, "measured: DeepSpeedConfig of 0.19.8 raises ValidationError")

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Each of the three settings."""
        scale = config.value("fp16", "loss_scale")
        number = config.number("fp16", "loss_scale")
        word = isinstance(scale, bool) or (isinstance(scale, str) and not _is_number(scale))
        if word or (number is not None and (not math.isfinite(number) or number < 0)):
            message = f"fp16.loss_scale is {scale!r}; DeepSpeed takes a finite number of at least 0, and 0 for a dynamic scale."
            fix = None
            found = config.entry("fp16", "loss_scale")
            if found and (scale == "dynamic" or number == -1):
                fix = replace_value(config, found.value, 0, "Write 0, DeepSpeed's word for a dynamic scale")
            yield self.at(config, ("fp16", "loss_scale"), message, instead='Write "loss_scale": 0.', fix=fix)
        if not deepspeed.fp16 or not deepspeed.is_dynamic:
            return
        for key, usual in (("loss_scale_window", 1000), ("min_loss_scale", 1)):
            value = config.number("fp16", key)
            if value is not None and value <= 0:
                message = f"fp16.{key} is {value:g}, which DeepSpeed refuses under a dynamic scale."
                yield self.at(config, ("fp16", key), message, instead=f'Write "{key}": {usual}.')


class FractionalScaleSetting(DeepSpeedRule):
    """A loss-scale setting that counts is given as a fraction, which DeepSpeed refuses."""

    code = "HS212"
    name = "fractional-scale-setting"
    severity = "error"
    reason = (
        "initial_scale_power, loss_scale_window, hysteresis and min_loss_scale are integers to DeepSpeed, and 0.5 or 1e-5 (both "
        "seen in shared configurations) stop the run with a validation error, even where fp16 is not enabled. A floor below 1 "
        "would only postpone the end: gradients that overflow unscaled will overflow at any scale."
    )
    bad = (
        '{\n  "zero_optimization": {"stage": 2},\n  "fp16": {"enabled": true, "min_loss_scale": 1e-5} // lowered\n}',
        '{"zero_optimization": {"stage": 2}, "fp16": {"enabled": true, "min_loss_scale": 0.5}}',
        '{"zero_optimization": {"stage": 2}, "fp16": {"enabled": true, "initial_scale_power": 12.5}}',
    )
    good = (
        '{"zero_optimization": {"stage": 2}, "fp16": {"enabled": true, "min_loss_scale": 1, "loss_scale_window": 1000.0}}',
    )
    references = (_DOCS, "measured: DeepSpeedConfig of 0.19.8 raises ValidationError, int_from_float")

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Fractions where DeepSpeed wants integers."""
        for key in _WHOLE:
            value = config.number("fp16", key)
            if value is None or not math.isfinite(value) or value == int(value):
                continue
            found = config.entry("fp16", key)
            whole = max(1, round(value))
            fix = replace_value(config, found.value, whole, f"Write {whole}") if found and value < 1 else None
            message = f"fp16.{key} is {value:g}, and DeepSpeed takes integers only: the run does not start."
            yield self.at(config, ("fp16", key), message, instead=f'Write "{key}": {whole}.', fix=fix)


class HysteresisBelowOne(DeepSpeedRule):
    """A hysteresis below 1 never lets the loss scale fall."""

    code = "HS213"
    name = "hysteresis-below-one"
    severity = "error"
    reason = (
        "DeepSpeed lowers the scale when its count of tolerated overflows has come down to exactly 1. Started at 0 the count "
        "goes 0, -1, -2 and never meets 1: after the first overflow every step overflows at the same scale and is skipped, "
        "without an exception."
    )
    bad = ('{"zero_optimization": {"stage": 2}, "fp16": {"enabled": true, "hysteresis": 0}}',)
    good = ('{"zero_optimization": {"stage": 2}, "fp16": {"enabled": true, "hysteresis": 1}}',)
    references = (_DOCS, "measured: DeepSpeed 0.19.8, hysteresis 0: the scale stays while every step is skipped")

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """Hysteresis of 0 or less where it is read: under ZeRO."""
        value = config.number("fp16", "hysteresis")
        if value is not None and value <= 0 and deepspeed.fp16 is not False and deepspeed.stage != 0:
            yield self.at(
                config,
                ("fp16", "hysteresis"),
                f"fp16.hysteresis is {value:g}: the loss scale never falls, and after one overflow every step is skipped.",
                instead='Write "hysteresis": 2, or 1 to lower the scale at every overflow.',
            )


class InitialScaleBelowMinimum(DeepSpeedRule):
    """The loss scale starts below its own minimum."""

    code = "HS214"
    name = "initial-scale-below-minimum"
    severity = "error"
    reason = (
        "On an overflow DeepSpeed sets the scale to the larger of half of it and the minimum, so a start below the minimum jumps "
        "up instead of down (measured: 16 to 1024), overflows again, and ends the run with 'Current loss scale already at "
        "minimum'. It takes two overflows."
    )
    bad = (
        '{"zero_optimization": {"stage": 2},\n "fp16": {"enabled": true, "initial_scale_power": 4, "min_loss_scale": 1024}}',
    )
    good = (
        '{"zero_optimization": {"stage": 2}, "fp16": {"enabled": true, "initial_scale_power": 16, "min_loss_scale": 1}}',
    )
    references = (_DOCS, "measured: DeepSpeed 0.19.8, scale 16 with minimum 1024")

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """2^power against the floor."""
        floor = config.number("fp16", "min_loss_scale")
        value = config.value("fp16", "initial_scale_power")
        power = 16.0 if value is None else config.number("fp16", "initial_scale_power")
        if floor is None or power is None or not deepspeed.is_dynamic or deepspeed.fp16 is False:
            return
        if math.isfinite(power) and power < 1000 and 2.0**power < floor:
            yield self.at(
                config,
                ("fp16", "min_loss_scale"),
                f"The loss scale starts at 2^{power:g} = {2.0**power:g}, below min_loss_scale {floor:g}: the first overflow "
                "raises it, and the second ends the run.",
                instead="Raise initial_scale_power or lower min_loss_scale.",
            )


class InitialScaleTooHigh(DeepSpeedRule):
    """The loss scale starts so high that the first steps are all skipped."""

    code = "HS215"
    name = "initial-scale-too-high"
    severity = "warning"
    reason = (
        "fp16 ends at 65504, so a scale of 2^32 overflows with any gradient above 1.5e-5, and each power of two too many costs "
        "one skipped step, and a hysteresis of 2 one more at the start: from 2^40 the first 6 of 6 steps were lost. Warm-up "
        "schedules count those steps or do not, depending on who steps them. 2^16 is DeepSpeed's default."
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
        """A power above 24."""
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
                f"The loss scale starts at 2^{power:g}; every power of two above what the model bears costs a skipped step.",
                instead='Write "initial_scale_power": 16.',
            )


class IdleDynamicSettings(DeepSpeedRule):
    """Settings of the dynamic loss scale are given beside a static one, and have no effect."""

    code = "HS216"
    name = "idle-dynamic-settings"
    severity = "warning"
    reason = (
        "Any loss_scale but 0 is static: initial_scale_power, loss_scale_window, hysteresis and min_loss_scale are then read by "
        "nobody. A static scale never adapts: when gradients outgrow it, every step overflows and is skipped until someone looks."
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
        """Dynamic keys under a static scale; those at their defaults are only worth a word."""
        if deepspeed.is_dynamic is not False or not deepspeed.fp16:
            return
        given = [key for key in _DEFAULTS if config.entry("fp16", key) is not None]
        changed = [key for key in given if config.value("fp16", key) != _DEFAULTS[key]]
        if given:
            named = changed or given
            yield self.at(
                config,
                ("fp16", named[0]),
                f"{', '.join(named)} {'has' if len(named) == 1 else 'have'} no effect: fp16.loss_scale is "
                f"{config.value('fp16', 'loss_scale')}, a static scale.",
                instead='Write "loss_scale": 0 for a dynamic scale, or remove the other settings.',
                severity=None if changed else "advice",
            )


class HysteresisWithoutZero(DeepSpeedRule):
    """A hysteresis is set without ZeRO, where DeepSpeed does not read it."""

    code = "HS217"
    name = "hysteresis-without-zero"
    severity = "advice"
    reason = (
        "Only ZeRO's optimizers use DeepSpeed's dynamic loss scaler with its hysteresis. The stage-0 fp16 optimizers halve the "
        "scale at every overflow, whatever hysteresis and consecutive_hysteresis say."
    )
    bad = ('{"train_batch_size": 8, "zero_optimization": {"stage": 0}, "fp16": {"enabled": true, "hysteresis": 4}}',)
    good = ('{"zero_optimization": {"stage": 1}, "fp16": {"enabled": true, "hysteresis": 4}}',)
    references = (_DOCS, "measured: DeepSpeed 0.19.8, stage 0, the scale halves at every overflow")

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """hysteresis at stage 0."""
        value = config.number("fp16", "hysteresis")
        if deepspeed.fp16 and deepspeed.stage == 0 and deepspeed.is_dynamic and value is not None and value != 1:
            message = f"fp16.hysteresis {value:g} is not read without ZeRO: the scale halves at every overflow."
            yield self.at(config, ("fp16", "hysteresis"), message, instead="Use ZeRO stage 1, or remove the key.")


class StaticScaleOfOne(DeepSpeedRule):
    """The loss scale is static and 1: fp16 trains without loss scaling."""

    code = "HS218"
    name = "static-scale-of-one"
    severity = "warning"
    reason = (
        "A loss_scale other than 0 is static, and 1 multiplies by nothing. fp16 keeps no value below 6e-8, and in many networks a "
        "large part of the activation gradients lies there: they become 0 and the layers behind them stop learning. 0 means dynamic."
    )
    bad = ('{"zero_optimization": {"stage": 2}, "fp16": {"enabled": true, "loss_scale": 1.0}}',)
    good = (
        '{"zero_optimization": {"stage": 2}, "fp16": {"enabled": true, "loss_scale": 0}}',
        '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}, "fp16": {"enabled": false, "loss_scale": 1}}',
    )
    references = (_DOCS, "https://arxiv.org/abs/1710.03740")

    def inspect(self, deepspeed: DeepSpeed, config: Config) -> Iterator[Finding]:
        """loss_scale 1 in an fp16 run."""
        found = config.entry("fp16", "loss_scale")
        if deepspeed.fp16 and found and config.number("fp16", "loss_scale") == 1:
            fix = replace_value(config, found.value, 0, "Write 0, a dynamic scale")
            message = "fp16.loss_scale is 1: the loss is not scaled, and gradients below 6e-8 become 0."
            yield self.at(config, ("fp16", "loss_scale"), message, instead='Write "loss_scale": 0.', fix=fix)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


RULES: tuple[type[Rule], ...] = (
    InvalidLossScale,
    FractionalScaleSetting,
    HysteresisBelowOne,
    InitialScaleBelowMinimum,
    InitialScaleTooHigh,
    IdleDynamicSettings,
    HysteresisWithoutZero,
    StaticScaleOfOne,
)
