"""What lean optimizers share: masters beside 16-bit weights, gated steps, states that load from any layout.

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
from halfstep.kernels.split import join, split
from halfstep.optim.convert import master_in, pack, plain, restore
from halfstep.optim.fused import FusedStep
from halfstep.precision.formats import DTYPES_16_BIT, format_name

__all__ = ["LeanOptimizer"]

MASTERS = ("policy", "split", "fp32", "none")
STATES = ("policy", "fp32", "bf16", "8bit")


class LeanOptimizer(torch.optim.Optimizer):
    """Base of the lean optimizers; a subclass says how one tensor is updated."""

    rule: ClassVar[str] = ""  # the kernels' name of the arithmetic
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
        """Step all parameters by kernels, on a GPU; whether it did.

        With `ready` only if nothing has changed since the last such step but the gradients' addresses, so that the usual
        step does not look at every tensor again.
        """
        if not self.rule:
            return False
        fused: FusedStep | None = self.__dict__.get("_fused")
        if fused is None:
            fused = self._fused = FusedStep(self.rule, self.moments[:2])
        settings = [self.settings(g) for g in self.param_groups]
        if not ready:
            active = [(i, p) for i, g in enumerate(self.param_groups) for p in g["params"] if p.grad is not None]
            if not active:
                return True
            fused.prepare([p for _, p in active], self.state, [i for i, _ in active])
        elif not fused.is_ready([p for g in self.param_groups for p in g["params"]], self.state):
            return False
        return fused.step(settings, getattr(self, "grad_scale", None), getattr(self, "found_inf", None))

    def prepare_replay(self) -> None:
        """Before replaying a CUDA graph that holds a step: let it see the groups' settings as they are now."""
        fused = self.__dict__.get("_fused")
        if fused is None:
            raise SettingError(
                "prepare_replay() before any step: capture a step() of this optimizer in a CUDA graph first."
            )
        fused.prepare_replay([self.settings(g) for g in self.param_groups])

    def settings(self, group: dict[str, Any]) -> tuple[float, ...]:
        """A group's row of the kernels' table of settings: seven numbers."""
        raise NotImplementedError

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

    @torch.no_grad()
    def step_tensor(self, group: dict[str, Any], param: Tensor, found_inf: Tensor) -> None:
        """Update one parameter alone, or leave it if the flag is set: for updates inside backward."""
        self._refuse(param)
        self._begin(group, param, self.state[param])
        singles: dict[Tensor, FusedStep] = self.__dict__.setdefault("_singles", {})
        fused = singles.get(param)
        if fused is None or not fused.is_ready([param], self.state):
            fused = singles[param] = FusedStep(self.rule, self.moments[:2])
            fused.prepare([param], self.state, [0])
        if not fused.step([self.settings(group)], None, found_inf):
            self.found_inf = found_inf
            try:
                self._step_one(group, param)
            finally:
                del self.found_inf

    def _step_one(self, group: dict[str, Any], param: Tensor) -> None:
        stored = self.state[param]
        old = self.master_of(param)
        grad = param.grad.float()  # type: ignore[union-attr]
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if scale is not None:
            grad = grad * (1 / scale.to(grad.device, torch.float32, non_blocking=True))  # as the kernels do
        applied = stored["step"] + 1
        working = {name: restore(stored, name) for name in self.moments if name in stored}
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
        return pack(self.states, name, value, step, unsigned=name in self.unsigned)

    def hold_master(self, param: Tensor, master: Tensor | None) -> None:
        """Begin to hold the master of a 16-bit weight; without one given, it is the weight as it is."""
        stored = self.state[param]
        if param.dtype not in DTYPES_16_BIT or self.master == "none" or {"low", "master"} & stored.keys():
            return
        master = param.detach().float() if master is None else master
        if self.master == "fp32":
            stored["master"] = master.clone()
        else:
            stored["low"] = split(master, param.dtype)[1]

    @torch.no_grad()
    def take_master(self, param: Tensor, master: Tensor) -> None:
        """Set a parameter to this fp32 value: its weight, and what is held beside it."""
        stored = self.state[param]
        for name in ("low", "master"):
            stored.pop(name, None)
        param.copy_(split(master, param.dtype)[0] if param.dtype in DTYPES_16_BIT else master)
        self.hold_master(param, master)

    def master_of(self, param: Tensor) -> Tensor:
        """The fp32 value the optimizer works on for `param`."""
        stored = self.state.get(param, {})
        if "master" in stored:
            return stored["master"]  # type: ignore[no-any-return]
        if "low" in stored:
            return join(param.detach(), stored["low"])
        return param.detach().float()

    def _store(self, param: Tensor, stored: dict[str, Tensor], master: Tensor, keep: Tensor | None) -> None:
        weight = master
        if param.dtype in DTYPES_16_BIT:
            # A finite master past the dtype's end would make an infinite weight, and no later step could undo that.
            largest = torch.finfo(param.dtype).max
            weight, low = split(master, param.dtype)
            beyond = weight.isinf() & master.isfinite()
            weight = torch.where(beyond, weight.clamp(-largest, largest), weight)
            if "low" in stored:
                stored["low"].copy_(_unless(keep, stored["low"], torch.where(beyond, torch.zeros_like(low), low)))
        if "master" in stored:
            held = torch.where(master.isfinite(), master.clamp(-largest, largest), master)
            stored["master"].copy_(_unless(keep, stored["master"], held))
        param.copy_(_unless(keep, param, weight))

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
            if index in saved:
                self.state[param] = self._converted(saved[index], param)

    def _converted(self, saved: dict[str, Any], param: Tensor) -> dict[str, Any]:
        """A saved state in this optimizer's layout: bit for bit if it is the same one."""
        own = {
            name: value.detach().clone().to(param.device) if isinstance(value, Tensor) else value
            for name, value in saved.items()
            if value is not None
        }
        if "step" in own:
            own["step"] = torch.as_tensor(own["step"], dtype=torch.float32, device=param.device)
        elif any(
            name in own for name in self.moments
        ):  # torch's SGD counts no steps; what matters: it is not the first
            own["step"] = torch.ones((), dtype=torch.float32, device=param.device)
        for name in [n for n in self.moments if n in own]:
            scaled = f"{name}_scale" in own
            held = "8bit" if scaled else format_name(own[name].dtype)
            if held != ("fp32" if self.states == "policy" else self.states):
                value = restore(own, name)
                own.pop(f"{name}_scale", None)
                own |= self._packed(name, value, own["step"])
        return self._convert_master(own, param)

    def _convert_master(self, own: dict[str, Any], param: Tensor) -> dict[str, Any]:
        wanted = None
        if param.dtype in DTYPES_16_BIT and self.master != "none":
            wanted = "master" if self.master == "fp32" else "low"
        if wanted in own or not {"low", "master"} & own.keys():
            return own
        if "low" in own and param.dtype not in DTYPES_16_BIT:
            raise SettingError(
                f"The state holds the lower halves of 16-bit weights, and the parameter of shape {tuple(param.shape)} is "
                f"{str(param.dtype).removeprefix('torch.')}. Load it through an Engine, which has both halves."
            )
        master = master_in(own, param.detach())
        assert master is not None
        own = {name: value for name, value in own.items() if name not in {"low", "master"}}
        with torch.no_grad():
            param.copy_(split(master, param.dtype)[0] if param.dtype in DTYPES_16_BIT else master)
        if wanted == "master":
            own["master"] = master.clone()
        elif wanted == "low":
            own["low"] = split(master, param.dtype)[1]
        return own

    def torch_state_dict(self) -> dict[str, Any]:
        """The state as torch's class of the same name saves and loads it: fp32 moments, no masters.

        The masters are the weights to load with it: `master_of(param)`, or `halfstep export`.
        """
        state = self.state_dict()
        return state | {"state": {index: plain(stored, self.moments) for index, stored in state["state"].items()}}

    def __repr__(self) -> str:
        return super().__repr__().replace(" (", f" (master={self.master}, states={self.states}", 1)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"master": self.master, "states": self.states}


def _unless(keep: Tensor | None, old: Tensor, new: Tensor) -> Tensor:
    return new if keep is None else torch.where(keep, old.to(new.dtype), new)
