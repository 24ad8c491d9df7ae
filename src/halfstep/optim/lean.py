"""What lean optimizers share: masters beside 16-bit weights, gated steps, adoption of stock optimizers.

A 16-bit weight cannot take an update smaller than half its ulp, so the optimizer keeps the full fp32 number. With
`master="split"` it keeps only the 16 bits that the weight lacks (`halfstep.kernels.split`): weight and master together
take 4 bytes instead of 6. With `master="fp32"` it keeps a whole fp32 copy, and with `master="none"` nothing: updates
below half a ulp are then lost, which must be asked for by name. Weights that are fp32 themselves are their own master.

A step follows the protocol of torch's fused optimizers: if the attributes `grad_scale` and `found_inf` are set, every
gradient is divided by the first, and if the second is not 0 the step changes nothing, step counts included. The flag
stays on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from halfstep.errors import SettingError, unknown
from halfstep.events import say
from halfstep.kernels.moments8 import decode, encode_signed, encode_unsigned
from halfstep.kernels.split import join, split

__all__ = ["ADOPTS", "LeanOptimizer", "adopt", "adopts"]

MASTERS = ("policy", "split", "fp32", "none")
STATES = ("policy", "fp32", "bf16", "8bit")
_16_BIT = (torch.float16, torch.bfloat16)
ADOPTS: dict[type, Callable[..., LeanOptimizer]] = {}  # stock class -> the class that takes it over


class LeanOptimizer(torch.optim.Optimizer):
    """Base of the lean optimizers; a subclass says how one tensor is updated."""

    moments: ClassVar[tuple[str, ...]] = ()  # state entries stored in `states`
    unsigned: ClassVar[frozenset[str]] = frozenset()  # those that are never negative
    _step_supports_amp_scaling = True  # torch.amp.GradScaler leaves unscaling and skipping to step()
    _stock: torch.optim.Optimizer | None = None  # the optimizer this one took over, which shares groups and state

    def __init__(
        self, params: Iterable[Any], defaults: dict[str, Any], *, master: str = "policy", states: str = "policy"
    ) -> None:
        if master not in MASTERS:
            raise unknown("master", master, MASTERS)
        if states not in STATES:
            raise unknown("states", states, STATES)
        self.master, self.states = master, states
        super().__init__(params, defaults)

    def update(self, group: dict[str, Any], state: dict[str, Tensor], master: Tensor, grad: Tensor) -> Tensor:
        """The new master; new moments are put into `state`, which holds fp32 here."""
        raise NotImplementedError

    def names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """The moments that a parameter of this group has."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient, or none at all if `found_inf` is set."""
        if closure is not None:
            raise SettingError(
                "A closure would run the model again inside step(); call backward first and step() without arguments."
            )
        if self.step_together(ready=True):
            return
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._refuse(param)
                    self._begin(group, param, self.state[param])
        if self.step_together(ready=False):
            return
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._step_one(group, param)

    def step_together(self, *, ready: bool) -> bool:
        """Step all parameters by kernels, where a subclass has them; whether it did.

        With `ready` only if nothing has changed since the last such step but the gradients' addresses, so that the usual
        step does not look at every tensor again.
        """
        return False

    def _refuse(self, param: Tensor) -> None:
        if param.grad.is_sparse or param.is_complex():  # type: ignore[union-attr]
            kind = "sparse gradient" if param.grad.is_sparse else "complex parameter"  # type: ignore[union-attr]
            raise SettingError(
                f"{type(self).__name__} was given a {kind} of shape {tuple(param.shape)}; keep such a module in "
                "an fp32 preset with torch's own optimizer."
            )
        if param.dtype is torch.float64:
            raise SettingError(
                f"{type(self).__name__} works in fp32 and was given an fp64 parameter of shape {tuple(param.shape)}; "
                "use torch's own optimizer for it."
            )

    def _step_one(self, group: dict[str, Any], param: Tensor) -> None:
        stored = self.state[param]
        old = self.master_of(param)
        grad = param.grad.float()  # type: ignore[union-attr]
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if scale is not None:
            grad = grad * (1 / scale.to(grad.device, torch.float32, non_blocking=True))  # as the kernels do
        applied = stored["step"] + 1
        working = {name: _restore(stored, name) for name in self.moments if name in stored}
        working["step"] = applied
        new = self.update(group, working, old, grad)
        keep = None if found is None else found.to(param.device, non_blocking=True) != 0
        for name in self.moments:
            if name in stored:
                for key, value in self._packed(name, working[name], applied).items():
                    stored[key].copy_(_unless(keep, stored[key], value))
        self._store(param, stored, new, keep)
        stored["step"].copy_(_unless(keep, stored["step"], applied))

    def _begin(self, group: dict[str, Any], param: Tensor, stored: dict[str, Tensor]) -> None:
        if "step" not in stored:
            stored["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
        if self.states == "8bit" and group.get("amsgrad"):
            raise SettingError(
                "amsgrad keeps the largest second moment, which 8 bits cannot; use states=fp32 or bf16 with it."
            )
        for name in self.names(group):
            if name not in stored:
                stored |= self._packed(name, torch.zeros_like(param, dtype=torch.float32), stored["step"])
        self.hold_master(param, None)

    def _packed(self, name: str, value: Tensor, step: Tensor) -> dict[str, Tensor]:
        """A moment as it is stored: in fp32, in bf16, or as 8-bit codes and the scales of their blocks."""
        if self.states == "bf16":
            return {name: value.to(torch.bfloat16)}
        if self.states != "8bit":
            return {name: value}
        codes, scales = encode_unsigned(value, step) if name in self.unsigned else encode_signed(value)
        return {name: codes, f"{name}_scale": scales}

    def hold_master(self, param: Tensor, master: Tensor | None) -> None:
        """Begin to hold the master of a 16-bit weight; without one given, it is the weight as it is."""
        stored = self.state[param]
        if param.dtype not in _16_BIT or self.master == "none" or {"low", "master"} & stored.keys():
            return
        master = param.detach().float() if master is None else master
        if self.master == "fp32":
            stored["master"] = master.clone()
        else:
            stored["low"] = split(master, param.dtype)[1]

    def master_of(self, param: Tensor) -> Tensor:
        """The fp32 value the optimizer works on for `param`."""
        stored = self.state.get(param, {})
        if "master" in stored:
            return stored["master"]  # type: ignore[no-any-return]
        if "low" in stored:
            return join(param.detach(), stored["low"])
        return param.detach().float()

    def _store(self, param: Tensor, stored: dict[str, Tensor], master: Tensor, keep: Tensor | None) -> None:
        if param.dtype in _16_BIT:
            # A finite master past the dtype's end would make an infinite weight, and no later step could undo that.
            largest = torch.finfo(param.dtype).max
            master = torch.where(master.isfinite(), master.clamp(-largest, largest), master)
        if "low" in stored:
            weight, low = split(master, param.dtype)
            stored["low"].copy_(_unless(keep, stored["low"], low))
            param.copy_(_unless(keep, param, weight))
            return
        if "master" in stored:
            stored["master"].copy_(_unless(keep, stored["master"], master))
        param.copy_(_unless(keep, param, split(master, param.dtype)[0] if param.dtype in _16_BIT else master))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but moments, masters and residuals keep their own dtype instead of the weight's."""
        groups = self.param_groups
        super().load_state_dict(state_dict)
        for mine, loaded in zip(groups, self.param_groups, strict=True):
            mine.clear()
            mine.update(loaded)  # schedulers of an adopted optimizer hold these very dictionaries
        self.param_groups = groups
        if self._stock is not None:
            self._stock.state = self.state
        saved = state_dict["state"]
        order = [p for group in self.param_groups for p in group["params"]]
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        for index, param in zip(ids, order, strict=True):
            for name, value in saved.get(index, {}).items():
                if isinstance(value, Tensor):
                    self.state[param][name] = value.detach().clone().to(param.device)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"master": self.master, "states": self.states}


def _restore(stored: dict[str, Tensor], name: str) -> Tensor:
    """A stored moment in fp32."""
    scales = stored.get(f"{name}_scale")
    return stored[name].float() if scales is None else decode(stored[name], scales)


def _unless(keep: Tensor | None, old: Tensor, new: Tensor) -> Tensor:
    return new if keep is None else torch.where(keep, old.to(new.dtype), new)


def adopts(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a lean class can take over this optimizer exactly."""
    return type(optimizer) in ADOPTS


def adopt(optimizer: torch.optim.Optimizer, *, master: str, states: str) -> LeanOptimizer:
    """A lean optimizer that takes over a stock one, sharing its group dictionaries and its state.

    Schedulers bound to the stock optimizer go on working, because they change the same dictionaries.
    """
    if isinstance(optimizer, LeanOptimizer):
        for name, wanted in (("master", master), ("states", states)):
            own = getattr(optimizer, name)
            if own not in {"policy", wanted}:
                raise SettingError(
                    f"The optimizer was built with {name}={own!r}, but the policy says {name}={wanted}. Build it with "
                    f"{name}='policy', or write {name}={own} in the precision."
                )
        optimizer.master, optimizer.states = master, states
        return optimizer
    if not adopts(optimizer):
        raise SettingError(
            f"Lean presets need an optimizer that holds masters, and {type(optimizer).__name__} does not. Use torch's Adam, "
            "AdamW or SGD (they are adopted), halfstep.optim, or a preset with fp32 weights such as bf16 or fp16."
        )
    target = ADOPTS[type(optimizer)]
    lean = target(optimizer.param_groups, master=master, states=states)
    lean.param_groups = optimizer.param_groups
    lean.defaults = optimizer.defaults
    for param, stored in optimizer.state.items():
        taken = {
            k: torch.as_tensor(v, dtype=torch.float32, device=param.device) for k, v in stored.items() if v is not None
        }
        if "momentum_buffer" in taken:  # torch's SGD counts no steps; what matters is that this is not the first
            taken.setdefault("step", torch.ones((), device=param.device, dtype=torch.float32))
        for name in [n for n in taken if n in lean.moments]:
            taken |= lean._packed(name, taken[name], taken["step"])  # noqa: SLF001 - our own class
        lean.state[param] = taken
    lean._stock, optimizer.state = optimizer, lean.state  # noqa: SLF001 - our own class
    _refuse_to_step(optimizer, lean)
    say(
        f"{type(optimizer).__name__} was adopted as halfstep.optim.{type(lean).__name__} (master={master}, states={states})."
    )
    return lean


def _refuse_to_step(optimizer: torch.optim.Optimizer, lean: LeanOptimizer) -> None:
    """The stock optimizer no longer owns its weights; stepping it would bypass the masters."""

    def step(*_args: object, **_kwargs: object) -> None:
        raise SettingError(
            f"This {type(optimizer).__name__} was adopted by halfstep.optim.{type(lean).__name__}, which holds the masters; "
            "call engine.step() instead of optimizer.step()."
        )

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # noqa: SLF001 - keeps schedulers from warning
    optimizer.step = step  # type: ignore[method-assign,assignment]

    def mark(*_: object) -> None:
        optimizer._opt_called = True  # type: ignore[attr-defined]  # noqa: SLF001 - what schedulers look at

    lean.register_step_post_hook(mark)
