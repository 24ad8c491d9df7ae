"""The user's optimizer as the Engine sees it while DeepSpeed steps it on flat partitions.

DeepSpeed replaces the parameters in the groups of the user's optimizer by flat fp32 tensors. The dictionaries of the groups
stay the same, so schedulers keep working, but names, states and checkpoints are about parameters. `ZeroOptimizer` has the
groups with the model's parameters, and the states and masters of whole parameters, gathered from all ranks when they are
saved. So a checkpoint is the one that a single process writes, and either loads the other's.

`state_dict`, `load_state_dict` and `master_of` exchange messages: every rank calls them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from halfstep.backends.deepspeed.partition import Partition, numel_of
from halfstep.errors import SettingError
from halfstep.optim.masters import Fp32Masters
from halfstep.precision.formats import DTYPES_16_BIT

__all__ = ["ZeroOptimizer"]


class ZeroOptimizer(Fp32Masters):
    """An optimizer that DeepSpeed steps on partitions; `groups` has the parameters of each of its groups by name."""

    def __init__(self, inner: torch.optim.Optimizer, partition: Partition, groups: list[dict[str, Tensor]]) -> None:
        # As torch prepares an unpickled optimizer: groups and states are views, and there is nothing to build.
        torch.optim.Optimizer.__setstate__(self, {"inner": inner, "defaults": inner.defaults, "_masters": {}})
        self._partition, self._members = partition, groups
        self._groups = inner.param_groups  # DeepSpeed replaces the list while it steps one of them
        self._own = {id(p): name for group in groups for name, p in group.items()}
        self._flats = partition.flats  # here as well, so that a load that fails can be reverted
        self.stepping = False
        self.observers: list[Callable[[], None]] = []  # called when the gradients are about to be used
        self._hook = inner.register_step_pre_hook(self._before_step)

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise SettingError("The optimizer of a DeepSpeed run cannot be pickled; save the run with Engine.save.")

    def release(self) -> None:
        """Give the groups of the user's optimizer its parameters back, without states."""
        self._hook.remove()
        self.inner.state.clear()
        self.inner.param_groups = self._groups
        for group, members in zip(self._groups, self._members, strict=True):
            group["params"] = list(members.values())

    # --- views ------------------------------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[Any]:  # type: ignore[override]
        """The groups of the user's optimizer, with the model's parameters."""
        pairs = zip(self._groups, self._members, strict=True)
        return [_Group(group, list(members.values())) for group, members in pairs]

    @property
    def state(self) -> Mapping[Tensor, dict[str, Any]]:  # type: ignore[override]
        """The states of this rank's fragments, and their masters, by parameter."""
        return _States(self._partition, self.inner)

    # --- the step ---------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Raise: the backend calls DeepSpeed's step."""
        raise SettingError("DeepSpeed steps this optimizer; call engine.step().")

    @contextlib.contextmanager
    def own_step(self) -> Iterator[None]:
        """Inside this block DeepSpeed may step the user's optimizer."""
        self.stepping = True
        try:
            yield
        finally:
            self.stepping = False

    def _before_step(self, *_: Any) -> None:
        if not self.stepping:
            raise SettingError(
                f"{type(self.inner).__name__}.step() was called in addition to engine.step(), which steps it on DeepSpeed's partitions. Remove it "
                "from the loop."
            )
        for observer in list(self.observers):
            observer()

    # --- masters ----------------------------------------------------------------------------------------------------

    def start_master(self, param: Tensor, master: Tensor | None) -> None:
        """Use the exact fp32 value: DeepSpeed has started from its 16-bit rounding."""
        if master is not None:
            self._partition.put(self._name(param), self._partition.flats, master)

    @torch.no_grad()
    def set_master(self, param: Tensor, master: Tensor) -> None:
        """Set a whole parameter, inside `Backend.whole_weights(write=True)`: its weight, and this rank's part of its master."""
        self._partition.put(self._name(param), self._partition.flats, master)
        param.copy_(master)

    def master_of(self, param: Tensor) -> Tensor:
        """The fp32 values of a parameter from all ranks."""
        return self._partition.whole(self._name(param), self._partition.flats)

    def _name(self, param: Tensor) -> str:
        return self._own[id(param)]

    # --- saving and loading -----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizer over whole parameters, as one process saves it; 16-bit ones with their `master`."""
        part, numbers = self._partition, self._numbers()
        states: dict[int, dict[str, Any]] = {}
        for name, number in numbers.items():
            if name not in part.groups:
                continue  # frozen
            states[number] = {key: self._whole_state(name, key) for key in self._keys(name)}
            if part.params[name].dtype in DTYPES_16_BIT:
                states[number]["master"] = part.whole(name, part.flats).cpu()
        groups = [
            {**{key: value for key, value in group.items() if key != "params"}, "params": [numbers[n] for n in members]}
            for group, members in zip(self._groups, self._members, strict=True)
        ]
        return {"state": {number: entry for number, entry in states.items() if entry}, "param_groups": groups}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, or the state of the same optimizer over whole parameters.

        The weights are loaded before, and are the masters where the state has none.
        """
        part = self._partition
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        states: dict[int, dict[str, Any]] = {}  # of the flat tensors
        for name, number in zip(self._numbers(), numbers, strict=True):
            if name not in part.groups:
                continue
            entry = dict(state_dict["state"].get(number, {}))
            master = entry.pop("master", None)
            part.put(name, part.flats, part.params[name] if master is None else master)
            self._put_states(name, entry, states.setdefault(part.groups[name], {}))
        self.inner.state.clear()
        for index, flat in enumerate(part.flats):
            if states.get(index):
                self.inner.state[flat] = states[index]
        part.relink()
        for group, loaded in zip(self._groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in loaded.items() if key not in {"params", "param_names"}})

    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(name for members in self._members for name in members)}

    def _keys(self, name: str) -> list[str]:
        flat = self._partition.flats[self._partition.groups[name]]
        return [key for key, value in self.inner.state.get(flat, {}).items() if value is not None]

    def _whole_state(self, name: str, key: str) -> Any:
        part = self._partition
        values = [self.inner.state.get(flat, {}).get(key) for flat in part.flats]
        own, flat = values[part.groups[name]], part.flats[part.groups[name]]
        if isinstance(own, Tensor) and own.shape == flat.shape:
            return part.whole(name, values).cpu()
        return own.detach().cpu().clone() if isinstance(own, Tensor) else own

    def _put_states(self, name: str, entry: Mapping[str, Any], flat_state: dict[str, Any]) -> None:
        part = self._partition
        index, param = part.groups[name], part.params[name]
        flat = part.flats[index]
        for key, value in entry.items():
            if isinstance(value, Tensor) and value.dim() > 0 and value.numel() == numel_of(param):
                wide = value.is_floating_point() and value.dtype is not torch.float32
                target = flat_state.setdefault(
                    key, torch.zeros_like(flat, dtype=torch.float32 if wide else value.dtype, requires_grad=False)
                )
                part.put(name, [target] * len(part.flats), value)
            elif isinstance(value, Tensor):
                flat_state[key] = value.clone() if value.dim() == 0 else value.to(flat.device, copy=True)
            else:
                flat_state[key] = value


class _Group(MutableMapping[str, Any]):
    """A group of the user's optimizer, whose settings are the same dictionary, with other parameters."""

    def __init__(self, group: dict[str, Any], params: list[Tensor]) -> None:
        self._group, self._params = group, params

    def __getitem__(self, key: str) -> Any:
        return self._params if key == "params" else self._group[key]

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "params":
            raise SettingError("DeepSpeed has partitioned these parameters; build the groups before Engine(...).")
        self._group[key] = value

    def __delitem__(self, key: str) -> None:
        del self._group[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._group)

    def __len__(self) -> int:
        return len(self._group)


class _States(Mapping[Tensor, dict[str, Any]]):
    """By parameter, the parts of the flat states that are its fragment here."""

    def __init__(self, partition: Partition, inner: torch.optim.Optimizer) -> None:
        self._partition, self._inner = partition, inner
        self._names = {id(p): name for name, p in partition.params.items() if name in partition.groups}

    def __getitem__(self, param: Tensor) -> dict[str, Any]:
        part, name = self._partition, self._names.get(id(param))
        if name is None:
            raise KeyError(param)
        fragment, flat = part.fragments.get(name), part.flats[part.groups[name]]
        if fragment is None:
            return {}
        entries = {
            key: fragment.of(value) if isinstance(value, Tensor) and value.shape == flat.shape else value
            for key, value in self._inner.state.get(flat, {}).items()
        }
        # DeepSpeed has fp32 copies also of fp32 weights: one more reason to show them.
        return entries | {"master": fragment.of(flat).detach()}

    def __iter__(self) -> Iterator[Tensor]:
        return iter([self._partition.params[name] for name in self._names.values()])

    def __len__(self) -> int:
        return len(self._names)
