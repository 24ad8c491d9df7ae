"""Loss scalers: keep fp16 gradients in fp16's range, count skipped steps, raise OverflowStop when stuck.

How it works. fp16 cannot represent anything smaller than 2^-24, and many gradients are smaller. Multiplying the loss
by S makes every gradient in the backward pass S times larger; dividing by S in fp32 before the update undoes it. S
should be as large as possible without overflow, and the largest safe S changes during a run, so it is adjusted by
trial and error:

    after each step:
        if any gradient is inf or NaN:  skip the step; count it; once hysteresis is used up, S *= backoff
        else:                           after growth_interval clean steps, S *= growth
        S stays within [min_scale, max_scale]

If every step has NaN gradients, S would be lowered for ever, so `max_skips` skipped steps in a row stop the run with
an error that names the parameters whose gradients were not finite.

`NoScaler` and `StaticScaler` have the same methods, so a loop needs no branches; they skip, count and stop too,
because a non-finite gradient also ruins a bf16 or fp32 model. The state is on the device and nothing in a step waits
for it: the count that stops the run arrives through `readback`, on a GPU one step late.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import OverflowStop, SettingError
from halfstep.events import log_warning
from halfstep.kernels.scale_update import COUNTERS, new_counters, scale_update
from halfstep.kernels.table import copied_to
from halfstep.precision.formats import DTYPES_16_BIT
from halfstep.precision.loss_scale import LossScale
from halfstep.scaling.readback import Readback
from halfstep.scaling.state import STATE_VERSION, clean_tracker, read_state, write_state

__all__ = [
    "LossScaler",
    "NoScaler",
    "Scaler",
    "ScalerCounts",
    "StaticScaler",
    "make_scaler",
    "named_parameters_of",
    "nonfinite_gradients",
    "stop_if_stuck",
]

NamedParams = Iterable[tuple[str, Tensor]]


@dataclass(frozen=True)
class ScalerCounts:
    """How many updates a scaler has made and how many steps it skipped."""

    updates: int
    skips: int
    consecutive_skips: int


class Scaler:
    """The base class of all scalers; use `LossScaler`, `StaticScaler` or `NoScaler`."""

    def __init__(self, settings: LossScale) -> None:
        self.settings = settings
        self._scale = torch.tensor(settings.init_scale, dtype=torch.float32)
        self._counters = new_counters(settings)
        self._readback = Readback()
        self._placed = False

    def scale(self, loss: Tensor) -> Tensor:
        """The loss multiplied by the current scale; a 16-bit loss is converted to fp32 first."""
        if not isinstance(loss, Tensor) or not loss.is_floating_point():
            kind = loss.dtype if isinstance(loss, Tensor) else type(loss).__name__
            raise SettingError(
                f"scale() takes a floating-point loss tensor, not {kind}; pass the loss you call backward on."
            )
        self._place(loss.device)
        if loss.dtype in DTYPES_16_BIT:
            self._warn_about_16_bit_loss(loss.dtype)
            loss = loss.float()
        return loss * self.scale_on(loss.device)

    def scale_on(self, device: torch.device) -> Tensor:
        """The current scale as a 0-dim tensor on `device`, without reading it back."""
        return copied_to(self._scale, device)

    def update(self, found_inf: Tensor | float, named_params: NamedParams | None = None) -> None:
        """Adjust the scale after a step; `found_inf` other than 0 means that a gradient was not finite.

        `named_params` is used only when the run has to stop, to name the gradients that overflowed.
        """
        self.advance(found_inf)
        self._readback.push(self._counters[COUNTERS.index("consecutive_skips")].reshape(1))
        for _, (consecutive,) in self._readback.deliver(wait=False):
            stop_if_stuck(int(consecutive), self.settings, self.get_scale, named_params)

    def advance(self, found_inf: Tensor | float, *, unless: Tensor | None = None) -> None:
        """`update` without the check that stops the run, for callers that read the counters back themselves.

        Where the flag `unless` is set, scale and counters stay as they are.
        """
        if isinstance(found_inf, Tensor):
            if found_inf.numel() != 1:
                raise SettingError(
                    f"update() takes one flag, not a tensor of shape {tuple(found_inf.shape)}; reduce it first, e.g. flags.amax()."
                )
            self._place(found_inf.device)
        else:
            found_inf = torch.full((), float(found_inf), device=self._scale.device)
        before = None if unless is None else (self._scale.clone(), self._counters.clone())
        scale_update(self._scale, self._counters, copied_to(found_inf, self._scale.device), self.settings)
        if unless is not None and before is not None:
            unless = copied_to(unless, self._scale.device, torch.bool)
            for value, old in zip((self._scale, self._counters), before, strict=True):
                value.copy_(torch.where(unless, old, value))

    def get_scale(self) -> float:
        """The current scale; on a GPU this waits for the device."""
        return float(self._scale)

    def counts(self) -> ScalerCounts:
        """Updates made and steps skipped so far; on a GPU this waits for the device."""
        values = self._values()
        return ScalerCounts(values["updates"], values["skips"], values["consecutive_skips"])

    @property
    def counters(self) -> Tensor:
        """The device vector of counters, in the order of `kernels.scale_update.COUNTERS`."""
        return self._counters

    def state_dict(self, layout: str = "halfstep") -> dict[str, Any]:
        """Plain values that `load_state_dict` restores; `layout` may be "halfstep", "torch" or "deepspeed".

        Halfstep's layout contains torch's five keys, so torch.amp.GradScaler can load it unchanged.
        """
        rule, values = self.settings, self._values()
        tracker = values.pop("growth_tracker")
        if rule.semantics.startswith("deepspeed"):
            tracker = clean_tracker(values["updates"], values["last_overflow"], rule.growth_interval)
        settings = dataclasses.asdict(rule)
        settings.pop("init_scale")
        state = {"scale": self.get_scale(), "_growth_tracker": tracker, "version": STATE_VERSION, **settings, **values}
        return write_state(state, layout)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of a Halfstep, torch or DeepSpeed scaler, counters within a growth interval included.

        Settings in the state replace this scaler's, as in torch; a warning lists the replaced ones.
        """
        state = read_state(state)
        rule = self._settings_from(state)
        scale = self._scale_from(state, rule)
        changed = [
            f"{f.name} {getattr(self.settings, f.name)!r} -> {getattr(rule, f.name)!r}"
            for f in dataclasses.fields(rule)
            if f.name != "init_scale" and getattr(self.settings, f.name) != getattr(rule, f.name)
        ]
        if changed:
            log_warning(f"The loaded scaler state replaced these settings: {', '.join(changed)}.")
        values = {name: state.get(name, 0) for name in COUNTERS}
        values["hysteresis_left"] = min(state.get("hysteresis_left", rule.hysteresis), rule.hysteresis)
        values["last_overflow"] = state.get("last_overflow", -1)
        values["growth_tracker"] = min(values["growth_tracker"], rule.growth_interval - 1)
        self.settings = rule
        self._scale.fill_(scale)
        self._counters.copy_(torch.tensor([values[name] for name in COUNTERS]))
        self._readback = Readback()

    def _settings_from(self, state: dict[str, Any]) -> LossScale:
        loaded = {f.name: state[f.name] for f in dataclasses.fields(LossScale) if f.name in state}
        if self.settings.semantics == "torch" and "version" not in state:  # another system's state: keep our rule
            loaded.pop("hysteresis", None)
            loaded.pop("semantics", None)
        elif not self.settings.semantics.startswith("deepspeed") and "version" not in state:
            loaded.pop("semantics", None)
        mode = loaded.pop("mode", self.settings.mode)
        if mode != self.settings.mode:
            raise SettingError(
                f"The state belongs to a {mode} loss scale and this is a {self.settings.mode} one "
                f"({type(self).__name__}). Build the matching scaler, or do not load a state into it."
            )
        settings = {f.name: getattr(self.settings, f.name) for f in dataclasses.fields(LossScale)} | loaded
        if mode == "dynamic":  # the loaded scale is clamped in _scale_from; this only keeps the rule valid
            settings["init_scale"] = min(max(settings["init_scale"], settings["min_scale"]), settings["max_scale"])
        return LossScale(**settings)

    def _scale_from(self, state: dict[str, Any], rule: LossScale) -> float:
        scale: float = state["scale"]
        clamped = min(max(scale, rule.min_scale), rule.max_scale)
        if clamped != scale:
            log_warning(
                f"The loaded scale {scale!r} is outside [{rule.min_scale!r}, {rule.max_scale!r}]; it was set to {clamped!r}."
            )
        return clamped

    def _values(self) -> dict[str, int]:
        return dict(zip(COUNTERS, self._counters.tolist(), strict=True))

    def _place(self, device: torch.device) -> None:
        """Move the state to the device of the first tensor, so that later steps need no copies."""
        if not self._placed and device.type != "meta":
            self._scale, self._counters = self._scale.to(device), self._counters.to(device)
            self._placed = True

    def _warn_about_16_bit_loss(self, dtype: torch.dtype) -> None:
        # The gradient of a 16-bit loss is the scale, cast to the loss's dtype: 65536 is inf in fp16.
        if dtype is torch.float16 and self.settings.mode != "none" and not getattr(self, "_warned", False):
            self._warned = True
            log_warning(
                "The loss is float16: its gradient is the loss scale, and the largest fp16 number is 65504. "
                "Compute the loss in fp32."
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.settings})"


class LossScaler(Scaler):
    """A dynamic loss scale; the defaults are DeepSpeed's tuned settings.

    `semantics` is "torch", "apex", "megatron", "deepspeed" or "deepspeed-consecutive" and reproduces that system's
    scale trajectory. `hysteresis` defaults to 2, and to 1 for "torch", which has none. `max_skips` skipped steps in a
    row stop the run; None never stops it.
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

    def _scale_from(self, state: dict[str, Any], rule: LossScale) -> float:
        scale: float = state["scale"]
        if scale != self.settings.init_scale:
            log_warning(f"The loaded state has the static scale {scale!r}; it replaces {self.settings.init_scale!r}.")
        return scale


class NoScaler(Scaler):
    """No loss scale, for bf16 and fp32; it still skips, counts and stops on non-finite gradients."""

    def __init__(self, max_skips: int | None = 100) -> None:
        super().__init__(LossScale(mode="none", init_scale=1.0, max_skips=max_skips))

    def scale(self, loss: Tensor) -> Tensor:
        """The loss, unchanged."""
        self._place(loss.device)
        return loss


def make_scaler(settings: LossScale) -> Scaler:
    """Build the scaler for `settings`."""
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
        f"the loss scale is {scale():g}{_minimum_note(settings, scale())}. {nonfinite_gradients(named_params)} "
        "Usual causes: NaN or inf in the data or the loss, a learning rate that is too high, or weights trained in bf16 "
        "whose activations exceed fp16's 65504 (use bf16). max_skips=None never stops."
    )


def named_parameters_of(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> Iterator[tuple[str, Tensor]]:
    """The parameters of an optimizer, each under the best available name; `names` is by id()."""
    for g, group in enumerate(optimizer.param_groups):
        param_names = group.get("param_names")  # present if the optimizer was built from named_parameters()
        for i, param in enumerate(group["params"]):
            fallback = param_names[i] if param_names else f"parameter {i} of group {g}, shape {tuple(param.shape)}"
            yield names.get(id(param), fallback), param


def _minimum_note(settings: LossScale, scale: float) -> str:
    return ", its minimum" if settings.mode == "dynamic" and scale <= settings.min_scale else ""


def nonfinite_gradients(named_params: NamedParams | None, most: int = 8) -> str:
    """One sentence that lists the parameters whose gradients currently contain inf or NaN."""
    if named_params is None:
        return "Pass named_params= (or use halfstep.Engine) to see the names of the parameters."
    bad, is_sharded = [], False
    for name, param in named_params:
        grad = param.grad
        if grad is None:
            continue
        # Of a DTensor the part of this rank: reading the whole would wait for ranks that may not ask for it.
        part = getattr(grad, "_local_tensor", grad)
        is_sharded |= part is not grad
        values = part.coalesce().values() if part.is_sparse else part
        num_bad = int(values.numel() - values.isfinite().sum())
        if num_bad:
            bad.append(f"{name} ({num_bad} of {values.numel()}{'' if part is grad else ' on this rank'})")
    if not bad and is_sharded:
        return "This rank's parts of the gradients are finite now; those of another rank are not, or they were cleared."
    if not bad:
        return "No parameter has a non-finite gradient now; the gradients were cleared or replaced."
    more = f" and {len(bad) - most} more" if len(bad) > most else ""
    return f"Parameters with non-finite gradients: {', '.join(bad[:most])}{more}."
