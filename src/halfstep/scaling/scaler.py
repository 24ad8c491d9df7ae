"""Loss scalers: keep fp16 gradients inside fp16's range, count what was skipped, stop loudly when stuck.

How it works. fp16 stores nothing smaller than 2^-24, and many gradients are. Multiplying the loss by S makes
every gradient S times larger on its way through the network; dividing by S in fp32 before the update undoes
it. S should be as large as possible without overflow, and the largest safe S changes during a run, so it is
found by trial:

    after each step:
        if any gradient is inf or NaN:  skip the step; count it; once hysteresis is used up, S *= backoff
        else:                           after growth_interval clean steps, S *= growth
        S stays within [min_scale, max_scale]

A scaler that meets NaN in every step would lower S for ever, so `max_skips` skipped steps in a row stop the
run with an error that names the parameters whose gradients were not finite.

`NoScaler` and `StaticScaler` have the same methods, so a loop needs no branches; they skip, count and stop
too, because a non-finite gradient ruins a bf16 or fp32 model just as well. The state lives on the device and
nothing in a step waits for it: the count that stops the run arrives through `readback`, on a GPU one step late.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import OverflowStop, SettingError
from halfstep.events import warn
from halfstep.kernels.scale_update import COUNTERS, new_counters, scale_update
from halfstep.precision.formats import DTYPES_16_BIT
from halfstep.precision.loss_scale import LossScale
from halfstep.scaling.readback import Readback
from halfstep.scaling.state import STATE_VERSION, clean_tracker, read_state, write_state

__all__ = ["LossScaler", "NoScaler", "Scaler", "ScalerCounts", "StaticScaler", "make_scaler", "stop_if_stuck"]

NamedParams = Iterable[tuple[str, Tensor]]


@dataclass(frozen=True)
class ScalerCounts:
    """How many steps a scaler has seen and how many it skipped."""

    updates: int
    skips: int
    consecutive_skips: int


class Scaler:
    """What every scaler does; use `LossScaler`, `StaticScaler` or `NoScaler`."""

    def __init__(self, settings: LossScale) -> None:
        self.settings = settings
        self._scale = torch.tensor(settings.init_scale, dtype=torch.float32)
        self._counters = new_counters(settings)
        self._readback = Readback()
        self._placed = False

    def scale(self, loss: Tensor) -> Tensor:
        """The loss multiplied by the current scale, in fp32 if it came in 16 bits."""
        if not isinstance(loss, Tensor) or not loss.is_floating_point():
            what = loss.dtype if isinstance(loss, Tensor) else type(loss).__name__
            raise SettingError(
                f"scale() takes a floating-point loss tensor, not {what}; pass the loss you call backward on."
            )
        self._place(loss.device)
        if loss.dtype in DTYPES_16_BIT:
            self._warn_about_16_bit_loss(loss.dtype)
            loss = loss.float()
        return loss * self.scale_on(loss.device)

    def scale_on(self, device: torch.device) -> Tensor:
        """The current scale as a 0-dim tensor on `device`, without reading it back."""
        return self._scale.to(device, non_blocking=True)

    def update(self, found_inf: Tensor | float, named_params: NamedParams | None = None) -> None:
        """Tell the scaler whether the step had a non-finite gradient (anything but 0 means yes).

        `named_params` is looked at only when the run has to stop, to name the gradients that overflowed.
        """
        self.advance(found_inf)
        self._readback.push(self._counters[COUNTERS.index("consecutive_skips")].reshape(1))
        for _, (consecutive,) in self._readback.deliver(wait=False):
            stop_if_stuck(int(consecutive), self.settings, self.get_scale, named_params)

    def advance(self, found_inf: Tensor | float) -> None:
        """`update` without the check that stops the run, for callers that read the counters back themselves."""
        if isinstance(found_inf, Tensor):
            if found_inf.numel() != 1:
                raise SettingError(
                    f"update() takes one flag, not a tensor of shape {tuple(found_inf.shape)}; reduce it first, e.g. flags.amax()."
                )
            self._place(found_inf.device)
        else:
            found_inf = torch.full((), float(found_inf), device=self._scale.device)
        scale_update(self._scale, self._counters, found_inf.to(self._scale.device, non_blocking=True), self.settings)

    def get_scale(self) -> float:
        """The current scale; on a GPU this waits for the device."""
        return float(self._scale)

    def counts(self) -> ScalerCounts:
        """Steps seen and skipped so far; on a GPU this waits for the device."""
        values = self._values()
        return ScalerCounts(values["updates"], values["skips"], values["consecutive_skips"])

    @property
    def counters(self) -> Tensor:
        """The device vector of counters, in the order of `kernels.scale_update.COUNTERS`."""
        return self._counters

    def state_dict(self, layout: str = "halfstep") -> dict[str, Any]:
        """Plain values that `load_state_dict` restores; `layout` may be "halfstep", "torch" or "deepspeed".

        Halfstep's own layout contains torch's five keys, so torch.amp.GradScaler loads it as it is.
        """
        rule, values = self.settings, self._values()
        tracker = values.pop("growth_tracker")
        if rule.semantics.startswith("deepspeed"):
            tracker = clean_tracker(values["updates"], values["last_overflow"], rule.growth_interval)
        settings = dataclasses.asdict(rule)
        settings.pop("init_scale")
        own = {"scale": self.get_scale(), "_growth_tracker": tracker, "version": STATE_VERSION, **settings, **values}
        return write_state(own, layout)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the state of a Halfstep, torch or DeepSpeed scaler, counters in mid-window included.

        Settings that the state carries replace this scaler's, as in torch, and each replacement is said.
        """
        found = read_state(state)
        rule = self._settings_from(found)
        scale = self._scale_from(found, rule)
        changed = [
            f"{f.name} {getattr(self.settings, f.name)!r} -> {getattr(rule, f.name)!r}"
            for f in dataclasses.fields(rule)
            if f.name != "init_scale" and getattr(self.settings, f.name) != getattr(rule, f.name)
        ]
        if changed:
            warn(f"The loaded scaler state replaced these settings: {', '.join(changed)}.")
        values = {name: found.get(name, 0) for name in COUNTERS}
        values["hysteresis_left"] = min(found.get("hysteresis_left", rule.hysteresis), rule.hysteresis)
        values["last_overflow"] = found.get("last_overflow", -1)
        values["growth_tracker"] = min(values["growth_tracker"], rule.growth_interval - 1)
        self.settings = rule
        self._scale.fill_(scale)
        self._counters.copy_(torch.tensor([values[name] for name in COUNTERS]))
        self._readback = Readback()

    def _settings_from(self, found: dict[str, Any]) -> LossScale:
        given = {f.name: found[f.name] for f in dataclasses.fields(LossScale) if f.name in found}
        if self.settings.semantics == "torch" and "version" not in found:  # a foreign state: keep our rule
            given.pop("hysteresis", None)
            given.pop("semantics", None)
        elif not self.settings.semantics.startswith("deepspeed") and "version" not in found:
            given.pop("semantics", None)
        mode = given.pop("mode", self.settings.mode)
        if mode != self.settings.mode:
            raise SettingError(
                f"The state is that of a {mode} loss scale and this is a {self.settings.mode} one "
                f"({type(self).__name__}). Build the matching scaler, or do not load a state for it."
            )
        settings = {f.name: getattr(self.settings, f.name) for f in dataclasses.fields(LossScale)} | given
        if mode == "dynamic":  # the loaded scale is held against the borders below; this only keeps the rule valid
            settings["init_scale"] = min(max(settings["init_scale"], settings["min_scale"]), settings["max_scale"])
        return LossScale(**settings)

    def _scale_from(self, found: dict[str, Any], rule: LossScale) -> float:
        scale: float = found["scale"]
        held = min(max(scale, rule.min_scale), rule.max_scale)
        if held != scale:
            warn(
                f"The loaded scale {scale!r} lies outside [{rule.min_scale!r}, {rule.max_scale!r}]; it starts at {held!r}."
            )
        return held

    def _values(self) -> dict[str, int]:
        return dict(zip(COUNTERS, self._counters.tolist(), strict=True))

    def _place(self, device: torch.device) -> None:
        """Move the state to the device of the first tensor seen, so that later steps need no copies."""
        if not self._placed and device.type != "meta":
            self._scale, self._counters = self._scale.to(device), self._counters.to(device)
            self._placed = True

    def _warn_about_16_bit_loss(self, dtype: torch.dtype) -> None:
        # The gradient of a 16-bit loss is the scale, cast to the loss's dtype: 65536 is inf in fp16.
        if dtype is torch.float16 and self.settings.mode != "none" and not getattr(self, "_warned", False):
            self._warned = True
            warn(
                "The loss is float16: its own gradient is the scale, and fp16 ends at 65504. Compute the loss in fp32."
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.settings})"


class LossScaler(Scaler):
    """A dynamic loss scale; the defaults are DeepSpeed's tuned setting.

    `semantics` is one of "torch", "apex", "megatron", "deepspeed", "deepspeed-consecutive", and reproduces that
    system's trajectory. `hysteresis` is 2, or 1 under "torch", which has none. `max_skips` skipped steps in a row
    stop the run; None never stops it.
    """

    def __init__(
        self,
        semantics: str = "deepspeed",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int | None = None,
        min_scale: float = 1.0,
        max_scale: float = 2.0**24,
        max_skips: int | None = 100,
    ) -> None:
        settings = {
            "semantics": semantics,
            "init_scale": init_scale,
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "growth_interval": growth_interval,
            "min_scale": min_scale,
            "max_scale": max_scale,
            "max_skips": max_skips,
        }
        if hysteresis is not None:
            settings["hysteresis"] = hysteresis
        super().__init__(LossScale.dynamic(**settings))


class StaticScaler(Scaler):
    """A constant loss scale that still skips, counts and stops on non-finite gradients."""

    def __init__(self, scale: float = 2.0**16, max_skips: int | None = 100) -> None:
        super().__init__(LossScale(mode="static", init_scale=scale, max_skips=max_skips))

    def _scale_from(self, found: dict[str, Any], rule: LossScale) -> float:
        scale: float = found["scale"]
        if scale != self.settings.init_scale:
            warn(f"The loaded state has the static scale {scale!r}; it replaces {self.settings.init_scale!r}.")
        return scale


class NoScaler(Scaler):
    """No loss scale, for bf16 and fp32; it still skips, counts and stops on non-finite gradients."""

    def __init__(self, max_skips: int | None = 100) -> None:
        super().__init__(LossScale(mode="none", init_scale=1.0, max_skips=max_skips))

    def scale(self, loss: Tensor) -> Tensor:
        """The loss as it is."""
        self._place(loss.device)
        return loss


def make_scaler(settings: LossScale) -> Scaler:
    """The scaler that does what `settings` say."""
    if settings.mode == "none":
        return NoScaler(max_skips=settings.max_skips)
    if settings.mode == "static":
        return StaticScaler(settings.init_scale, max_skips=settings.max_skips)
    fields = dataclasses.asdict(settings)
    fields.pop("mode")
    return LossScaler(**fields)


def stop_if_stuck(
    consecutive: int,
    settings: LossScale,
    scale: Callable[[], float],
    named_params: NamedParams | None,
) -> None:
    """Raise OverflowStop once `consecutive` reaches the limit, naming the gradients that are not finite."""
    if settings.max_skips is None or consecutive < settings.max_skips:
        return
    raise OverflowStop(
        f"{consecutive} steps in a row were skipped because of non-finite gradients (max_skips={settings.max_skips}); "
        f"the loss scale is {scale():g}{_floor_note(settings, scale())}. {_offenders(named_params)} "
        "Usual causes: NaN or inf in the data or the loss, a learning rate that is too high, or weights trained in bf16 "
        "whose activations pass fp16's 65504 (use bf16). max_skips=None never stops."
    )


def _floor_note(settings: LossScale, scale: float) -> str:
    return ", its floor" if settings.mode == "dynamic" and scale <= settings.min_scale else ""


def _offenders(named_params: NamedParams | None, most: int = 8) -> str:
    """One sentence with the parameters whose gradients hold inf or NaN right now."""
    if named_params is None:
        return "Pass named_params= (or use halfstep.Engine) to have the parameters named."
    bad = []
    for name, param in named_params:
        grad = param.grad
        if grad is None:
            continue
        values = grad.coalesce().values() if grad.is_sparse else grad
        num_bad = int(values.numel() - values.isfinite().sum())
        if num_bad:
            bad.append(f"{name} ({num_bad} of {values.numel()})")
    if not bad:
        return "No parameter holds a non-finite gradient at this moment; the gradients were cleared or replaced."
    more = f" and {len(bad) - most} more" if len(bad) > most else ""
    return f"Parameters with non-finite gradients: {', '.join(bad[:most])}{more}."
