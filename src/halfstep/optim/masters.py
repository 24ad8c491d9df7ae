"""fp32 masters around any torch optimizer, for 16-bit weights.

`Fp32Masters` steps an optimizer that knows nothing of masters (Muon, LARS, LAMB, Lookahead, your own). For the time of a
step each 16-bit parameter has its fp32 master as `data` and its gradient in fp32, divided by the loss scale, as `grad`; the
optimizer steps as it would step an fp32 model; then the parameter gets its 16-bit storage back, with the rounding of the new
master. The optimizer's state is its own and in fp32, its groups stay the same dictionaries, and so its schedulers and hooks
work as before. Loading goes the same way, because `load_state_dict` casts states to the dtype of the parameters.

The master is stored apart from `optimizer.state`, which many optimizers expect to be empty before their first step, and
survives in the optimizer, so that a second Engine over it continues from the exact values. Where the weight was changed
from outside (it is no longer the master's rounding), the weight is what counts.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import SettingError
from halfstep.events import log_info
from halfstep.kernels.lean import read_master, write_master
from halfstep.optim.adopt import adopt, adopts, check_adoptable
from halfstep.optim.lean import LeanOptimizer
from halfstep.optim.shards import is_sharded, local, placed_as, set_data, share_of
from halfstep.optim.slabs import gather
from halfstep.precision.formats import DTYPES_16_BIT

__all__ = ["Fp32Masters", "WithMasters", "add_masters", "check_masters", "start_masters"]

_MASTERS = "_halfstep_masters"  # on the optimizer: its masters by parameter
_STEPPING = "_halfstep_over_masters"  # on the optimizer: whether it is stepped over its masters now


class Fp32Masters(torch.optim.Optimizer):
    """Steps `inner` over fp32 masters of its 16-bit parameters; groups and state are those of `inner`."""

    inner: torch.optim.Optimizer
    _masters: dict[Tensor, Tensor]

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        # Not super().__init__, which would build groups again: this is how torch prepares an unpickled optimizer.
        self.__setstate__({"inner": inner, "defaults": inner.defaults, "_masters": vars(inner).get(_MASTERS, {})})

    def __getstate__(self) -> dict[str, Any]:
        return {"inner": self.inner, "defaults": self.defaults, "_masters": self._masters}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if _MASTERS not in vars(self.inner):
            setattr(self.inner, _MASTERS, self._masters)
            self.inner.register_step_pre_hook(_reject_direct_step)
        _forward_loading(self)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # always the inner ones: loading replaces them
        """The groups of the inner optimizer."""
        return self.inner.param_groups

    @property
    def state(self) -> Mapping[Tensor, dict[str, Any]]:  # type: ignore[override]  # a view: the states are the inner ones
        """Each parameter's state in the inner optimizer, and its `master`."""
        return _States(self)

    # --- the step ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step the inner optimizer on the masters, with gradients divided by `grad_scale` if that attribute is set."""
        if closure is not None:
            raise SettingError(
                "A closure would run the model again inside step(); call backward first and step() without arguments."
            )
        with self._on_masters(getattr(self, "grad_scale", None)):
            setattr(self.inner, _STEPPING, True)
            try:
                self.inner.step()
            finally:
                delattr(self.inner, _STEPPING)

    @contextlib.contextmanager
    def _on_masters(self, divisor: Tensor | None = None) -> Iterator[None]:
        """Inside this block parameters are their masters and gradients are fp32; afterwards weights are rounded again."""
        params = [p for p in self._params() if p.requires_grad]
        stored = [(p, p.data, p.grad, getattr(p, "grad_dtype", None) if is_sharded(p) else None) for p in params]
        try:
            for param, weight, grad, _ in stored:
                param.grad = None  # away while the dtype changes: a gradient has that of its parameter
                if weight.dtype in DTYPES_16_BIT:
                    self.start_master(param, None)
                    self._masters[param].copy_(self.master_of(param))
                    set_data(param, self._masters[param])
                param.grad = None if grad is None else _unscaled(grad, divisor)
            yield
        finally:
            for param, weight, grad, grad_dtype in stored:
                if param.dtype is not weight.dtype:
                    master = param.data  # the optimizer may have replaced it
                    param.grad = None
                    set_data(param, weight)
                    self.set_master(param, master)
                    if grad_dtype is not None:
                        param.grad_dtype = grad_dtype  # a new DTensor has that of its weight
                param.grad = grad

    def _params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    # --- masters ----------------------------------------------------------------------------------------------------

    def start_master(self, param: Tensor, master: Tensor | None) -> None:
        """Store the master of a 16-bit weight that was rounded from it just now; None: the weight, if there is none yet."""
        if param.dtype not in DTYPES_16_BIT or (master is None and param in self._masters):
            return
        if master is None:  # the weight was 16-bit when the optimizer was built, and so may be states made then
            for _, optimizer in _nested(self.inner):
                _widen(optimizer.state.get(param, {}))
        self._masters[param] = param.detach().float() if master is None else master

    @torch.no_grad()
    def set_master(self, param: Tensor, master: Tensor) -> None:
        """Set a parameter to this fp32 value: its master, and its weight to the rounding of that."""
        if param.dtype in DTYPES_16_BIT and param not in self._masters:
            self._masters[param] = torch.empty_like(param, dtype=torch.float32)
        write_master(local(param), self._stored(param), share_of(param, master))

    def master_of(self, param: Tensor) -> Tensor:
        """The fp32 value that the optimizer works on for `param`: the master, or the weight where that was changed."""
        master = read_master(local(param), self._stored(param))
        return placed_as(param, master) if is_sharded(param) else master

    def _stored(self, param: Tensor) -> dict[str, Tensor]:
        """The master as an entry of a lean state."""
        return {"master": local(self._masters[param])} if param in self._masters else {}

    # --- saving and loading -----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state with each parameter's `master` in it.

        A state of another form than torch's (Lookahead's) is stored as it is under `inner`.
        """
        saved: dict[str, Any] = self.inner.state_dict()
        if not saved.keys() >= {"state", "param_groups"}:
            saved = {"state": {}, "param_groups": _numbered(self.param_groups), "inner": saved}
        states = _copied(saved["state"])
        for index, param in zip(_order(saved), self._params(), strict=True):
            if param not in self._masters:
                continue
            entries = states.setdefault(index, {})
            if "master" in entries:
                raise SettingError(
                    f"{type(self.inner).__name__} has a state called 'master' itself, which the fp32 master would replace. Use it with a "
                    "preset with fp32 weights such as bf16 or fp16."
                )
            entries["master"] = self.master_of(param)
            if "inner" in saved:
                entries["position"] = index  # in the inner state, which only its optimizer can read
        return saved | {"state": states}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, or the state of the same optimizer over fp32 weights."""
        states, masters, moved = _copied(state_dict["state"]), {}, []
        for place, index in enumerate(_order(state_dict)):
            entries = states.get(index, {})
            masters[index] = entries.pop("master", None)
            moved += [index] if entries.pop("position", place) != place else []
            if not entries:
                states.pop(index, None)  # a state that is empty but there would look like one that was begun
        inner = state_dict.get("inner")
        if inner is None:
            inner = state_dict | {"state": states}
        elif moved:
            raise SettingError(
                f"The state of {type(self.inner).__name__} has a form of its own, which refers to parameters by their order, and "
                f"{len(moved)} of them are in another place now. Build the optimizer with the parameters in the order of the saved run."
            )
        self._load_inner(inner)
        for index, param in zip(_order(state_dict), self._params(), strict=True):
            master = masters.get(index)
            if master is not None and param.dtype in DTYPES_16_BIT:
                self._masters[param] = master.to(param.device, torch.float32, copy=True)

    def _load_inner(self, saved: dict[str, Any]) -> None:
        """Load a state of the inner optimizer on the masters, because states are cast to the dtype of the parameters."""
        load = type(self.inner).load_state_dict  # not that of the object, which is forwarded to here
        with self._on_masters():
            load(self.inner, saved)
        if load is not torch.optim.Optimizer.load_state_dict:
            return
        for index, param in zip(_order(saved), self._params(), strict=True):
            for name, value in saved["state"].get(index, {}).items():
                # torch casts integers and 16-bit states, too, to the dtype of the parameters.
                if (
                    name != "step"
                    and isinstance(value, Tensor)
                    and value.dtype is not self.inner.state[param][name].dtype
                ):
                    self.inner.state[param][name] = value.to(param.device, copy=True)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the inner optimizer."""
        self.inner.add_param_group(param_group)

    def __repr__(self) -> str:
        return f"Fp32Masters({self.inner!r})"


WithMasters = LeanOptimizer | Fp32Masters  # every optimizer that has `start_master`, `set_master` and `master_of`


def start_masters(optimizer: WithMasters, value_of: Callable[[Tensor], Tensor | None]) -> None:
    """Store the masters of all trainable parameters; `value_of` is that of one, or None: the weight as it is."""
    params = (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad)
    if isinstance(optimizer, Fp32Masters):
        for param in params:
            optimizer.start_master(param, value_of(param))
        return

    def started() -> Iterator[dict[str, Any]]:
        for param in params:
            optimizer.start_master(param, value_of(param))
            yield optimizer.state[param]

    gather(started())


class _States(Mapping[Tensor, dict[str, Any]]):
    """Per parameter what an optimizer, and any optimizer inside it, has stored, and the master."""

    def __init__(self, owner: Fp32Masters) -> None:
        self._owner = owner

    def __getitem__(self, param: Tensor) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        for prefix, optimizer in _nested(self._owner.inner):
            if param in optimizer.state:
                entries |= {f"{prefix}{name}": value for name, value in optimizer.state[param].items()}
        master = getattr(self._owner.inner, _MASTERS).get(param)
        if master is not None:
            entries["master"] = master
        if not entries:
            raise KeyError(param)
        return entries

    def __iter__(self) -> Iterator[Tensor]:
        params = [p for group in self._owner.param_groups for p in group["params"]]
        return (p for p in params if p in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _nested(optimizer: torch.optim.Optimizer, prefix: str = "") -> Iterator[tuple[str, torch.optim.Optimizer]]:
    """An optimizer and those that it wraps, with a prefix for the names of their states."""
    yield prefix, optimizer
    for name, value in vars(optimizer).items():
        if isinstance(value, torch.optim.Optimizer):
            yield from _nested(value, f"{prefix}{name}.")


def _copied(states: Mapping[Any, Any]) -> dict[Any, Any]:
    """A state that can be changed; some optimizers have entries of the whole run next to those of the parameters."""
    return {key: dict(value) if isinstance(value, Mapping) else value for key, value in states.items()}


def _order(saved: Mapping[str, Any]) -> list[int]:
    return [index for group in saved["param_groups"] for index in group["params"]]


def _numbered(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups as torch saves them, with numbers in place of parameters."""
    start, numbered = 0, []
    for group in groups:
        end = start + len(group["params"])
        numbered.append(group | {"params": list(range(start, end))})
        start = end
    return numbered


def _widen(entries: dict[str, Any]) -> None:
    for name, value in entries.items():
        if isinstance(value, Tensor) and value.dtype in DTYPES_16_BIT:
            entries[name] = value.float()


def _unscaled(grad: Tensor, divisor: Tensor | None) -> Tensor:
    wide = grad.float() if grad.dtype in DTYPES_16_BIT else grad
    return wide if divisor is None else wide / divisor.to(wide.device, torch.float32)


def _forward_loading(owner: Fp32Masters) -> None:
    """Make `load_state_dict` of the inner optimizer load on the masters: on 16-bit weights it would round the states."""
    # Weak references, because the inner optimizer has this function and the owner has the inner optimizer.
    owner_ref, inner_ref = weakref.ref(owner), weakref.ref(owner.inner)

    def load_state_dict(state_dict: dict[str, Any]) -> None:
        owner, inner = owner_ref(), inner_ref()
        assert inner is not None
        if owner is None:
            type(inner).load_state_dict(inner, state_dict)
        elif state_dict.keys() >= {"state", "param_groups"}:
            owner.load_state_dict(state_dict)
        else:
            owner._load_inner(state_dict)  # noqa: SLF001 - of this file

    owner.inner.load_state_dict = load_state_dict  # type: ignore[method-assign]


def _reject_direct_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    masters = getattr(optimizer, _MASTERS)
    if not getattr(optimizer, _STEPPING, False) and any(param.dtype in DTYPES_16_BIT for param in masters):
        raise SettingError(
            f"This {type(optimizer).__name__} is stepped over fp32 masters, and its own step() would bypass them; call engine.step() "
            "instead of optimizer.step()."
        )


# --- set-up -------------------------------------------------------------------------------------------------------------


def check_masters(optimizer: torch.optim.Optimizer, *, master: str, states: str, release: bool = False) -> None:
    """Raise where `add_masters` would, and for gradient release where it could not work; nothing is changed."""
    if isinstance(optimizer, LeanOptimizer) or adopts(optimizer):
        check_adoptable(optimizer, master=master, states=states)
        return
    name = type(optimizer).__name__
    if release:
        raise SettingError(
            f"gradient_release updates a few parameters at a time, and {name} steps all of them together. Use an optimizer of "
            "halfstep.optim, or one of torch's that it adopts."
        )
    if states != "fp32":
        raise SettingError(
            f"states={states} has no effect on {name}, whose states are its own; use states=fp32, or an optimizer of halfstep.optim "
            "or one of torch's that it adopts."
        )
    if master == "none":
        raise SettingError(
            f"master=none: {name} would update 16-bit weights, with states in 16 bits. Omit master=none, and it runs over fp32 masters."
        )


def add_masters(optimizer: torch.optim.Optimizer, *, master: str, states: str) -> LeanOptimizer | Fp32Masters:
    """An optimizer that keeps masters: the lean one that adopts a stock one, or any other over fp32 masters."""
    check_masters(optimizer, master=master, states=states)
    if isinstance(optimizer, LeanOptimizer) or adopts(optimizer):
        return adopt(optimizer, master=master, states=states)
    instead = "" if master == "fp32" else f" instead of master={master}, which needs a class of halfstep.optim"
    log_info(f"{type(optimizer).__name__} runs over fp32 masters (master=fp32{instead}).")
    return Fp32Masters(optimizer)
