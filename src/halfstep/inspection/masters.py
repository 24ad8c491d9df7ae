"""Where the fp32 value of each trained weight is: the weight itself, a master of whatever kind, or nowhere.

A 16-bit weight needs a master, and there is no convention for it. Places that are looked at, in this order:

    a state of the optimizer     `low`: halfstep.optim's split master; a name with `master` in it (halfstep.optim, Transformer
                                 Engine, hand-written ones); a Kahan compensation
    DeepSpeed                    the flat fp32 tensors of its partitions
    the groups of the optimizer  wider tensors that are no parameters of the model (Megatron, Apex O2, hand-written loops)
    its attributes               lists of tensors with `master` or `fp32` in their name (Apex's `param_groups_master`, fairseq)

A copy belongs to the weight of the same shape, in order; one flat copy belongs to all weights that it is large enough for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from halfstep.backends.deepspeed.partition import numel_of, partition_of
from halfstep.inspection.facts import NONE, Fact, fact_of, unknown_fact
from halfstep.inspection.storage import bytes_of, tensors_in
from halfstep.inspection.wrappers import Parts, optimizer_chain
from halfstep.kernels.layout import MASTER_ENTRIES
from halfstep.optim.lean import LeanOptimizer
from halfstep.precision.formats import format_name

__all__ = ["is_master_entry", "master_fact", "trained_params"]

_WIDE = {"fp32", "fp64"}
_KAHAN = ("kahan_comp", "kahan_sum", "compensation")
_ATTRIBUTES = ("master", "fp32")


@dataclass(frozen=True)
class _Master:
    kind: str  # "fp32", "split", "kahan", "none", or another format
    num_bytes: int = 0


def is_master_entry(name: str) -> bool:
    """Whether a state of an optimizer is a master, or a part of one, by its name."""
    return name in MASTER_ENTRIES or name in _KAHAN or "master" in name.lower()


def trained_params(parts: Parts) -> dict[str, Tensor]:
    """The parameters that are trained: those that require gradients, and that an optimizer has or has copies of."""
    trainable = {name: param for name, param in parts.params.items() if param.requires_grad}
    direct = _direct(parts)
    own = {name: param for name, param in trainable.items() if id(param) in direct}
    if not own or parts.deepspeed is not None:  # no optimizer, or one that has only copies
        return trainable
    rest = {name: param for name, param in trainable.items() if name not in own}
    return {name: param for name, param in trainable.items() if name in own or name in _among_copies(parts, rest)}


def master_fact(parts: Parts) -> Fact:
    """The fp32 value of each trained weight."""
    params = trained_params(parts)
    narrow = {name: p for name, p in params.items() if format_name(p.dtype) not in _WIDE}
    if narrow and not parts.optimizers:
        return unknown_fact(
            "master", f"the weights are {_formats(narrow)}; pass the optimizer, which may have masters."
        )
    masters = {name: _Master(format_name(p.dtype)) for name, p in params.items() if name not in narrow}
    masters |= _in_states(parts, narrow)
    masters |= _in_partitions(parts, {name: p for name, p in narrow.items() if name not in masters})
    masters |= _among_copies(parts, {name: p for name, p in narrow.items() if name not in masters})
    without = [name for name in narrow if name not in masters]
    if without and not all(map(_is_started, parts.optimizers)):
        return unknown_fact(
            "master",
            f"the weights are {_formats(narrow)}, and {_class(parts)} has no state yet, in which it may store masters. Inspect after the first "
            "step, or put one step inside the block.",
        )
    entries = [(name, masters.get(name, _Master(NONE)).kind, numel_of(params[name])) for name in params]
    notes = [] if narrow else ["the weights themselves"] if params else []
    notes += ["stochastic rounding"] if without and _rounds_stochastically(parts) else []
    size = sum(master.num_bytes for master in masters.values())
    return fact_of("master", entries, note=", ".join(notes), num_bytes=size)


def _in_states(parts: Parts, params: Mapping[str, Tensor]) -> dict[str, _Master]:
    masters: dict[str, _Master] = {}
    for optimizer in (each for outer in parts.optimizers for each in optimizer_chain(outer)):
        own = {id(p) for p in _grouped(optimizer)}
        for name, param in params.items():
            state = _state_of(optimizer, param)
            master = _of_state(state)
            if master is None and id(param) in own and isinstance(optimizer, LeanOptimizer) and "step" not in state:
                entry = optimizer.layout.master_entry(param.dtype)  # it makes its masters at the first step
                master = {"low": _Master("split"), "master": _Master("fp32")}.get(entry or "")
            if master is not None:
                masters[name] = master
    return masters


def _of_state(state: Mapping[str, Any]) -> _Master | None:
    for name, value in state.items():
        if not isinstance(value, Tensor) or not is_master_entry(str(name)):
            continue
        if name == "low":
            return _Master("split", bytes_of(value))
        if name in _KAHAN:
            return _Master("kahan", bytes_of(value))
        return _Master(format_name(value.dtype), bytes_of(value))
    return None


def _in_partitions(parts: Parts, params: Mapping[str, Tensor]) -> dict[str, _Master]:
    """Of a DeepSpeed engine: the flat tensors of its partitions, whose bytes are counted with one parameter each."""
    partition = None if parts.deepspeed is None or not params else partition_of(parts.deepspeed, params)
    if partition is None:
        return {}
    masters: dict[str, _Master] = {}
    counted: set[int] = set()
    for name, index in partition.groups.items():
        flat = partition.flats[index]
        masters[name] = _Master(format_name(flat.dtype), 0 if index in counted else bytes_of(flat))
        counted.add(index)
    return masters


def _among_copies(parts: Parts, params: Mapping[str, Tensor]) -> dict[str, _Master]:
    """Copies by shape, in order; or flat ones, if they are large enough for the parameters that no copy has the shape of.

    A tensor in the groups of an optimizer is no copy of a parameter that an optimizer has itself: it belongs to another model.
    """
    direct = _direct(parts)
    masters: dict[str, _Master] = {}
    for sources, names in (
        ((_grouped, _attributes), [name for name, p in params.items() if id(p) not in direct]),
        ((_attributes,), [name for name, p in params.items() if id(p) in direct]),
    ):
        masters |= _match(_copies(parts, sources) if names else [], {name: params[name] for name in names})
    return masters


def _match(copies: list[Tensor], params: Mapping[str, Tensor]) -> dict[str, _Master]:
    masters: dict[str, _Master] = {}
    for name, param in params.items():
        match = next((copy for copy in copies if copy.shape == param.shape), None)
        if match is not None:
            copies = [copy for copy in copies if copy is not match]
            masters[name] = _Master(format_name(match.dtype), bytes_of(match))
    rest = {name: param for name, param in params.items() if name not in masters}
    flat = [copy for copy in copies if copy.dim() == 1]
    if rest and flat and sum(copy.numel() for copy in flat) >= sum(map(numel_of, rest.values())):
        size = sum(map(bytes_of, flat))
        first = next(iter(rest))
        masters |= {name: _Master(format_name(flat[0].dtype), size if name == first else 0) for name in rest}
    return masters


def _direct(parts: Parts) -> set[int]:
    """The tensors that the optimizers step, by identity."""
    return {id(p) for optimizer in parts.optimizers for p in _grouped(optimizer)}


def _copies(parts: Parts, sources: Iterable[Callable[[Any], Iterator[Tensor]]]) -> list[Tensor]:
    """Wide tensors in groups or attributes of the optimizers that are no parameters of the model."""
    known = set(map(id, parts.params.values()))
    copies: dict[int, Tensor] = {}
    for optimizer in (each for outer in parts.optimizers for each in optimizer_chain(outer)):
        for tensor in (tensor for source in sources for tensor in source(optimizer)):
            if id(tensor) not in known and format_name(tensor.dtype) in _WIDE and tensor.dim() > 0:
                copies.setdefault(id(tensor), tensor)
    return list(copies.values())


def _attributes(optimizer: Any) -> Iterator[Tensor]:
    stash = getattr(optimizer, "_amp_stash", None)  # Apex amp
    for owner in (optimizer, stash):
        for name, value in vars(owner).items() if owner is not None else ():
            if any(part in name for part in _ATTRIBUTES):
                yield from tensors_in(value)


def _grouped(optimizer: Any) -> Iterator[Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])


def _state_of(optimizer: Any, param: Tensor) -> Mapping[str, Any]:
    states = getattr(optimizer, "state", None)
    if not isinstance(states, Mapping) or param not in states:
        return {}
    state = states[param]
    return state if isinstance(state, Mapping) else {}


def _is_started(optimizer: Any) -> bool:
    """Whether masters would exist by now: a step was made, or the class is torch's or ours, whose masters are known."""
    chain = list(optimizer_chain(optimizer))
    known = any(type(each).__module__.startswith(("torch.optim", "halfstep.optim")) for each in chain)
    return known or any(bool(getattr(each, "state", None)) for each in chain)


def _rounds_stochastically(parts: Parts) -> bool:
    chains = [each for outer in parts.optimizers for each in optimizer_chain(outer)]
    return any(getattr(each, "bf16_stochastic_round", False) for each in chains)  # torchao


def _formats(params: Mapping[str, Tensor]) -> str:
    return ", ".join(_unique(format_name(p.dtype) for p in params.values()))


def _class(parts: Parts) -> str:
    return ", ".join(_unique(type(optimizer).__name__ for optimizer in parts.optimizers))


def _unique(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
