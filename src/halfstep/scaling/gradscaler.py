"""A drop-in replacement for torch.amp.GradScaler with a minimum scale, skip counts and a hard stop.

Constructor, methods, scale trajectories and state dict are torch's: replacing

    scaler = torch.amp.GradScaler("cuda")        by        scaler = halfstep.GradScaler("cuda")

changes nothing in a healthy run. In an unhealthy one, it fixes three faults of torch's class (shown in
tests/scaling/test_gradscaler.py):

* Without a minimum the scale can back off to exactly 0. Then 1/scale is inf, 0 * inf is NaN, the overflow check is
  already done, and NaN is written to the weights. Here the scale never drops below `min_scale`.
* Fused optimizers skip only if `found_inf` is exactly 1, but torch's class passes them the sum over devices: with
  overflows on two devices that is 2, and the bad step is applied. Here it is 0 or 1.
* A run in which every step overflows looks busy and trains nothing. Here `max_skips` skipped updates in a row raise
  `OverflowStop`, which names the parameters whose gradients were not finite.

`counts()` returns how many updates were skipped, which torch's class does not report.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor

from halfstep.errors import SettingError
from halfstep.events import log_warning
from halfstep.precision.loss_scale import FP32_MAX, LossScale
from halfstep.scaling.readback import Readback
from halfstep.scaling.scaler import ScalerCounts, named_parameters_of, stop_if_stuck
from halfstep.scaling.skip_counts import count_step, flag_of_all
from halfstep.scaling.state import read_state

__all__ = ["GradScaler"]


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler with a minimum scale, skip counts and a hard stop.

    The scale never drops below `min_scale`. `max_skips` skipped updates in a row raise `OverflowStop` (None: never);
    `named_parameters`, as from `model.named_parameters()`, provides the names in that error.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float = 1.0,
        max_skips: int | None = 100,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    ) -> None:
        settings = (init_scale, growth_factor, backoff_factor, growth_interval)
        # A disabled scaler has no settings; torch does not check them either.
        self._rule = _rule(*settings, min_scale, max_skips) if enabled else LossScale(mode="none", init_scale=1.0)
        super().__init__(device, *settings, enabled)
        self._names = {id(p): name for name, p in named_parameters or ()}
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        self._init_counts = (0, 0, 0)  # updates, skips, consecutive skips
        self._counts: Tensor | None = None
        self._readback = Readback()

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """As torch's `step`: unscale and check unless already done, and step if every gradient is finite."""
        if not self._enabled:
            return super().step(optimizer, *args, **kwargs)
        if args and callable(args[0]):  # torch rejects only the keyword, and runs a positional closure unscaled
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        self._optimizers[id(optimizer)] = optimizer
        if not getattr(optimizer, "_step_supports_amp_scaling", False):
            return super().step(optimizer, *args, **kwargs)
        handle = optimizer.register_step_pre_hook(_make_flags_usable)
        try:
            return super().step(optimizer, *args, **kwargs)
        finally:
            handle.remove()

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """As torch's `update`, but never below `min_scale`; counts skipped steps and stops the run after too many."""
        if not self._enabled:
            return
        if isinstance(new_scale, int | float):
            new_scale = _usable_scale(float(new_scale), self._rule)
        flags = [f for s in self._per_optimizer_states.values() for f in s["found_inf_per_device"].values()]
        skipped = None
        if new_scale is None and flags and self._scale is not None:
            # Before super().update, which adds the flags up in place.
            skipped = flag_of_all(flags, self._scale.device).reshape(()).ne(0)
        super().update(new_scale)
        if self._scale is not None:
            self._scale.clamp_(min=self._rule.min_scale)
        if skipped is not None:
            self._count(skipped)
            self._stop_if_stuck()
        self._optimizers = {}

    def counts(self) -> ScalerCounts:
        """Updates made and skipped so far; on a GPU this waits for the device."""
        return ScalerCounts(*(self._init_counts if self._counts is None else self._counts.tolist()))

    def set_growth_factor(self, new_factor: float) -> None:
        """As torch's; rejects a factor that would never raise the scale."""
        self._set(growth_factor=new_factor)

    def set_backoff_factor(self, new_factor: float) -> None:
        """As torch's; rejects a factor that would make the scale zero or never lower it."""
        self._set(backoff_factor=new_factor)

    def set_growth_interval(self, new_interval: int) -> None:
        """As torch's, but growth continues if the new interval is shorter than the steps already counted."""
        self._set(growth_interval=new_interval)

    def state_dict(self) -> dict[str, Any]:
        """Torch's five keys and the skip counts; torch.amp.GradScaler can load it unchanged."""
        state = super().state_dict()
        if self._enabled:
            counts = self.counts()
            state |= {"updates": counts.updates, "skips": counts.skips, "consecutive_skips": counts.consecutive_skips}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; also accepts the states of Halfstep's `LossScaler` and of DeepSpeed's scaler."""
        if not self._enabled or not state_dict:
            super().load_state_dict(state_dict)  # a no-op, or torch's own error for an empty state
            return
        state = read_state(state_dict)
        if state.get("mode", "dynamic") == "none":
            raise SettingError(
                "The state belongs to a NoScaler and has no loss scale; do not load it into a GradScaler."
            )
        settings = {
            "growth_factor": state.get("growth_factor", self._growth_factor),
            "backoff_factor": state.get("backoff_factor", self._backoff_factor),
            "growth_interval": state.get("growth_interval", self._growth_interval),
        }
        rule = _rule(self._rule.min_scale, min_scale=self._rule.min_scale, max_skips=self._rule.max_skips, **settings)
        scale = max(state["scale"], rule.min_scale)
        if scale != state["scale"]:
            log_warning(
                f"The loaded scale {state['scale']!r} is below min_scale={rule.min_scale!r}; it was raised to {scale!r}."
            )
        # torch waits for tracker == interval: a tracker at or past the interval would stop growth for good.
        tracker = min(state.get("growth_tracker", 0), settings["growth_interval"] - 1)
        super().load_state_dict({"scale": scale, "_growth_tracker": tracker, **settings})
        self._rule = rule
        names = ("updates", "skips", "consecutive_skips")
        self._init_counts = cast("tuple[int, int, int]", tuple(int(state_dict.get(n, 0)) for n in names))
        self._counts = None
        self._readback = Readback()

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if self._enabled:
            counts = self.counts()
            state["_init_counts"] = (counts.updates, counts.skips, counts.consecutive_skips)
        # Names are stored by id(), and a live optimizer does not belong in a pickle.
        return state | {"_counts": None, "_names": {}, "_optimizers": {}}

    def _set(self, **changed: Any) -> None:
        now = {
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
        }
        self._rule = _rule(
            self._rule.min_scale, min_scale=self._rule.min_scale, max_skips=self._rule.max_skips, **now | changed
        )
        for name, value in changed.items():
            setattr(self, f"_{name}", value)
        if "growth_interval" in changed:
            self._init_growth_tracker = min(self._init_growth_tracker, self._growth_interval - 1)
            if self._growth_tracker is not None:
                self._growth_tracker.clamp_(max=self._growth_interval - 1)

    def _count(self, skipped: Tensor) -> None:
        if self._counts is None:
            # fill_ on the device rather than torch.tensor(...): a copy from the host cannot be captured in a graph.
            self._counts = torch.zeros(3, dtype=torch.int64, device=skipped.device)
            for i, value in enumerate(self._init_counts):
                self._counts[i].fill_(value)
        count_step(self._counts, skipped)

    def _stop_if_stuck(self) -> None:
        assert self._counts is not None
        if self._rule.max_skips is None:
            return
        # Ranks that share parameters must stop together: on a GPU they read the count of the update before, arrived or not.
        together = self._counts.device.type != "cpu" and self._is_sharded()
        arrived = self._readback.deliver(wait=True) if together else []
        self._readback.push(self._counts[2:])
        for _, (consecutive,) in arrived if together else self._readback.deliver(wait=False):
            stop_if_stuck(int(consecutive), self._rule, self.get_scale, self._named())

    def _is_sharded(self) -> bool:
        """Whether a parameter of this step's optimizers is a DTensor."""
        groups = [group for optimizer in self._optimizers.values() for group in optimizer.param_groups]
        kinds = {type(param) for group in groups for param in group["params"]}  # a few: it is asked in every step
        return any(hasattr(kind, "_local_tensor") for kind in kinds)

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        """The parameters of this step's optimizers, each under the best available name."""
        for optimizer in self._optimizers.values():
            yield from named_parameters_of(optimizer, self._names)


def _make_flags_usable(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Optimizer pre-hook: fused kernels compare the flag with exactly 1, and torch passes them a sum.

    For parameters on the CPU torch copies the flag and the scale from the GPU without a wait, and computes with what has not
    arrived. So they are on the CPU already if one of the parameters is.
    """
    found_inf = getattr(optimizer, "found_inf", None)
    if isinstance(found_inf, Tensor):
        found_inf.clamp_(max=1)
    if any(p.is_cpu for group in optimizer.param_groups for p in group["params"]):
        for name in ("found_inf", "grad_scale"):
            value = getattr(optimizer, name, None)
            if isinstance(value, Tensor):
                setattr(optimizer, name, value.cpu())


def _usable_scale(scale: float, rule: LossScale) -> float:
    if not math.isfinite(scale) or scale < rule.min_scale:
        raise SettingError(
            f"update(new_scale={scale!r}) is outside the usable range: min_scale is {rule.min_scale!r}. "
            "Build the GradScaler with a smaller min_scale if you need this scale."
        )
    return scale


def _rule(
    init_scale: float,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    min_scale: float,
    max_skips: int | None,
) -> LossScale:
    """Torch's rule as a checked value: torch itself accepts a backoff of -1 and an interval of 0."""
    with contextlib.suppress(TypeError):  # LossScale reports what is wrong with it
        growth_interval = operator.index(growth_interval)
    return LossScale.dynamic(
        semantics="torch",
        init_scale=init_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        min_scale=min_scale,
        max_scale=FP32_MAX,  # torch's only maximum
        max_skips=max_skips,
    )
