"""What must be the same on every rank before a run starts, compared by its text.

Ranks with another model, optimizer or setting would train without an error, each its own model, or wait for a message that
never comes. So each rank describes its part in words, the ranks compare a hash, and where it differs all of them raise the
same error with the first differences. What is equal in form is then made equal in value: parameters and buffers are those of
rank 0.
"""

from __future__ import annotations

import hashlib
import json
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from halfstep.backends.ranks import ProcessRanks, Ranks
from halfstep.errors import SettingError
from halfstep.hardware.units import few
from halfstep.optim.exchange import Exchanging

__all__ = [
    "broadcast_tensors",
    "check_experts",
    "check_together",
    "compare_ranks",
    "describe_model",
    "describe_optimizers",
    "is_plain",
]

_MOST_SHOWN = 3  # differences between ranks in an error
_CHUNK_BYTES = 25 * 2**20  # of a broadcast, as DistributedDataParallel's buckets


# --- the form -------------------------------------------------------------------------------------------------------


def describe_model(module: nn.Module) -> dict[str, str]:
    """Every parameter and buffer of a module, in words."""
    params = {
        f"parameter {name}": _form(p) + ("" if p.requires_grad else ", frozen") for name, p in module.named_parameters()
    }
    return params | {f"buffer {name}": _form(buffer) for name, buffer in module.named_buffers()}


def describe_optimizers(optimizers: Sequence[torch.optim.Optimizer], module: nn.Module) -> dict[str, str]:
    """Class, groups and, where there is one, the state of every optimizer, in words."""
    names = {id(p): name for name, p in module.named_parameters()}
    described = {}
    for number, optimizer in enumerate(optimizers):
        title = f"optimizer {number}"
        described[title] = type(optimizer).__name__
        for index, group in enumerate(optimizer.param_groups):
            values = {key: _value(value) for key, value in sorted(group.items()) if key != "params"}
            members = [names.get(id(p), "?") for p in group["params"]]
            known = {key: value for key, value in values.items() if value is not None}
            described[f"{title}, group {index}"] = f"{few(members)}; " + ", ".join(f"{k}={v}" for k, v in known.items())
        for param, state in optimizer.state.items():
            if isinstance(state, dict) and state:
                name = names.get(id(param), "?")
                differs = optimizer.rank_states if isinstance(optimizer, Exchanging) else ()
                described[f"{title}, state of {name}"] = ", ".join(
                    f"{k} {_content(v)}" for k, v in sorted(state.items()) if k not in differs
                )
    return described


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _value(value: Any) -> str | None:
    """A setting in words; None for objects that have none."""
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, list | tuple):
        parts = [_value(part) for part in value]
        return None if None in parts else f"({', '.join(map(str, parts))})"
    return repr(value) if value is None or isinstance(value, numbers.Number | str) else None


def _content(value: Any) -> str:
    if not isinstance(value, Tensor):
        return str(_value(value))
    data = value.detach().cpu().contiguous().flatten().view(torch.uint8)
    return f"{_form(value)} with hash {hashlib.sha256(data.numpy().tobytes()).hexdigest()[:8]}"


def check_experts(module: nn.Module, backend: str) -> None:
    """Raise for experts that differ between ranks: they would get rank 0's values, and the mean of different gradients."""
    # The mark of DeepSpeed's and Megatron's expert layers, which exchange tokens and not gradients.
    experts = [name for name, p in module.named_parameters() if getattr(p, "allreduce", True) is False]
    if experts:
        raise SettingError(
            f'{few(experts)} are marked as experts of this rank (allreduce=False), and backend="{backend}" trains the same parameters on '
            "every rank: it would overwrite them with those of rank 0 and average their gradients. Use an expert layer whose parameters "
            "are the same on every rank, without that mark."
        )


# --- between ranks --------------------------------------------------------------------------------------------------


def check_together(model: nn.Module, checks: Callable[[], None], group: Any = None) -> None:
    """Run the checks of a set-up on every rank; where they raise on one, the others raise too and do not wait for it."""
    if not (dist.is_available() and dist.is_initialized()):
        checks()
        return
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    ProcessRanks(group, device=device).together(checks)


def compare_ranks(description: Mapping[str, str], ranks: Ranks) -> None:
    """Raise on every rank, with the same differences, unless all ranks have the same description."""
    # A hash first: the description of a large model is long.
    if len(set(ranks.gather(hashlib.sha256(json.dumps(description).encode()).hexdigest()))) == 1:
        return
    descriptions = ranks.gather(dict(description))
    differences = []
    for name in dict.fromkeys(name for each in descriptions for name in each):
        values: dict[str, list[str]] = {}
        for rank, each in enumerate(descriptions):
            values.setdefault(each.get(name, "missing"), []).append(str(rank))
        if len(values) > 1:
            shown = ", ".join(f"{value} on rank {few(members)}" for value, members in values.items())
            differences.append(f"{name}: {shown}")
    text = "; ".join(differences[:_MOST_SHOWN]) or "the order of the parameters"
    more = f"; and {len(differences) - _MOST_SHOWN} more" if len(differences) > _MOST_SHOWN else ""
    raise SettingError(
        f"The ranks of this run differ, and would not train the same model: {text}{more}. Run the same command with the same code, versions "
        "and data on every rank, build the model, its optimizers and the Engine in the same way, and load a state on all of them."
    )


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[Tensor], group: Any) -> None:
    """Give every rank the values of rank 0, in few messages; not of quantised tensors and other special ones."""
    source = dist.get_global_rank(group, 0) if group is not None else 0
    chunks: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        is_wrapper: bool = is_traceable_wrapper_subclass(tensor)
        if is_wrapper or not is_plain(tensor) or not tensor.numel():
            continue
        chunk = chunks.setdefault((tensor.device, tensor.dtype), [])
        chunk.append(tensor)
        if sum(t.nbytes for t in chunk) >= _CHUNK_BYTES:
            _broadcast(chunk, source, group)
            chunk.clear()
    for chunk in chunks.values():
        if chunk:
            _broadcast(chunk, source, group)


def _broadcast(tensors: list[Tensor], source: int, group: Any) -> None:
    flat = torch.cat([t.detach().reshape(-1) for t in tensors])
    dist.broadcast(flat.view(torch.uint8), source, group=group)  # as bytes: not every process group carries every dtype
    for tensor, part in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))


def is_plain(buffer: Tensor) -> bool:
    """Whether a tensor has one number per place in memory: not sparse, not expanded, not on the meta device."""
    if buffer.layout is not torch.strided or buffer.device.type == "meta":
        return False
    return not any(size > 1 and stride == 0 for size, stride in zip(buffer.shape, buffer.stride(), strict=True))
