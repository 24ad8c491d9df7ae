"""Casting: which weights are 16-bit, and which modules compute in fp32.

Presets with fp32 weights leave the weights alone, and accept a frozen base in 16 bits (LoRA) next to them. Lean presets
round them to 16 bits in place and return the exact fp32 values to the caller, which passes them to the optimizer as
masters. Parameters stay the same objects, so optimizers, schedulers and hooks that refer to them keep working. The
modules that the policy names stay in fp32, and so does batch-norm, whose running averages move by steps that 16 bits
would lose.

An fp32 module gets its inputs in fp32 and runs with autocast off. One of `compute_fp32` does so on fp32 copies of its 16-bit
weights (`region/copies.py`). What else stays in fp32 is decided by operation, not by module: `region/`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.utils import _pytree as pytree

from halfstep.engine.members import Members
from halfstep.engine.region import fp32_weights, upcast
from halfstep.engine.region.forwards import bind_forward, unbind_forward
from halfstep.errors import SettingError
from halfstep.events import log_info
from halfstep.hardware.units import few
from halfstep.kernels.split import split
from halfstep.optim.shards import local, set_data
from halfstep.optim.trainable import unsupported_kind
from halfstep.precision.formats import COMPUTE_DTYPES, DTYPES_16_BIT
from halfstep.precision.policy import PATTERN_KEYS, Policy

__all__ = [
    "cast_model",
    "check_castable",
    "check_patterns",
    "check_range",
    "fp32_buffers",
    "fp32_row",
    "fp32_units",
    "sum_gradients_in_fp32",
    "uncast_forwards",
    "wrap_forwards",
]

_BATCH_NORMS = (nn.modules.batchnorm._BatchNorm,)  # noqa: SLF001 - the public classes' common base
_WRAPPED = "_halfstep_wrapped"  # the attribute of a module whose forward is wrapped
_UNCAST = (nn.RNNBase, nn.RNNCellBase, nn.Bilinear)  # layers with matrices that autocast does not cast on every device


def cast_model(model: nn.Module, policy: Policy) -> dict[Tensor, Tensor]:
    """Cast the model's weights to the policy's dtype in place; returns the fp32 values that were rounded, by parameter."""
    fp32 = _fp32_parameters(model, policy)
    wide = _frozen_to_upcast(model, policy, fp32)
    if policy.params == "fp32":
        _reject_16_bit_weights(model, policy)
        _upcast_in_place(model, wide, policy)
        return {}
    new: dict[Tensor, tuple[Tensor, Tensor]] = {}
    for name, param in model.named_parameters():
        if param not in wide and _is_to_be_rounded(name, param, policy, fp32):
            new[param] = _rounded(name, param, policy)
    for target, (weight, _) in new.items():
        set_data(target, weight)
    _upcast_in_place(model, wide, policy)
    for module in model.modules():
        if isinstance(module, nn.RNNBase) and any(param in new for param in module.parameters()):
            module.flatten_parameters()  # one buffer for cuDNN, which would copy separate weights at every call
    return {param: master for param, (_, master) in new.items()}


def check_castable(model: nn.Module, policy: Policy) -> None:
    """Raise for weights that `cast_model` cannot cast; changes nothing."""
    if policy.params == "fp32":
        _reject_16_bit_weights(model, policy)
        return
    fp32 = _fp32_parameters(model, policy)
    wide = _frozen_to_upcast(model, policy, fp32)
    for name, param in model.named_parameters():
        if param not in wide and _is_to_be_rounded(name, param, policy, fp32):
            _rounded(name, param, policy)


def _is_to_be_rounded(name: str, param: Tensor, policy: Policy, fp32: set[Tensor]) -> bool:
    """Whether a lean preset stores this parameter in 16 bits and it is not yet; raises where it should and cannot."""
    dtype = COMPUTE_DTYPES[policy.params]
    frozen = not param.requires_grad
    if (
        unsupported_kind(local(param)) is not None or not param.is_floating_point()
    ):  # frozen, or set-up would have raised
        return False
    if param in fp32:
        if param.dtype in DTYPES_16_BIT:
            raise SettingError(
                f"Parameter {name} stays fp32 under {policy}, but it is already {param.dtype}; the rounded-off bits "
                "are lost. Build the model in fp32 and let the Engine cast it."
            )
        return False
    if param.dtype is dtype or (frozen and param.dtype in DTYPES_16_BIT):
        return False
    if param.dtype is not torch.float32:
        raise SettingError(
            f"Parameter {name} is {param.dtype}, but the policy {policy} stores {policy.params} weights rounded from fp32. "
            "Build the model in fp32 and let the Engine cast it."
        )
    return True


def _rounded(name: str, param: Tensor, policy: Policy) -> tuple[Tensor, Tensor]:
    """The 16-bit weight of a parameter and its fp32 value; raises for a value that would become inf."""
    master = param.detach().clone()
    weight, _ = split(local(master), COMPUTE_DTYPES[policy.params])
    check_range(name, weight, local(master), policy)
    return weight, master


def check_range(name: str, weight: Tensor, master: Tensor, policy: Policy) -> None:
    """Raise where the rounding of an fp32 value to 16 bits became inf."""
    if _has_numbers(master) and bool((weight.isinf() & master.isfinite()).any()):
        raise SettingError(
            f"Parameter {name} has a value of {master.abs().max().item():.4g}, outside the range of {policy.params}; keep its module in fp32 "
            f"(keep_fp32={name.rpartition('.')[0] or name}) or use a preset with fp32 weights."
        )


def _frozen_to_upcast(model: nn.Module, policy: Policy, fp32: set[Tensor]) -> dict[Tensor, str]:
    """Frozen 16-bit weights that the model can compute with only in fp32, with their names.

    Autocast casts the matrices of a 16-bit base next to adapters of another dtype. It does not cast for normalisation,
    recurrent and bilinear layers, whose kernels raise a dtype mismatch, and where compute is fp32 it casts nothing.
    """
    by_torch = {p for m in model.modules() if isinstance(m, _UNCAST) for p in m.parameters()}
    return {
        param: name
        for name, param in model.named_parameters()
        if param.dtype in DTYPES_16_BIT
        and not param.requires_grad
        and unsupported_kind(local(param)) is None
        and (
            param in fp32
            or policy.compute not in COMPUTE_DTYPES
            or ((param.dim() < 2 or param in by_torch) and param.dtype is not COMPUTE_DTYPES.get(policy.params))
        )
    }


def _upcast_in_place(model: nn.Module, params: dict[Tensor, str], policy: Policy) -> None:
    for param in params:
        set_data(param, local(param.detach()).float())
    for module in model.modules():
        if policy.compute not in COMPUTE_DTYPES or isinstance(module, _BATCH_NORMS):
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.dtype in DTYPES_16_BIT and unsupported_kind(buffer) is None:
                    setattr(module, name, buffer.float())
    if params:
        log_info(
            f"Frozen 16-bit weights that {policy} computes with in fp32 were cast to fp32, which is exact: {few(list(params.values()))}."
        )


def fp32_buffers(model: nn.Module, policy: Policy) -> dict[str, Tensor]:
    """The fp32 buffers by name that 16-bit activations may meet: not the statistics of batch norms, nor in fp32 modules."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules()
        if not isinstance(module, _BATCH_NORMS) and not policy.computes_fp32(prefix)
        for name, buffer in module.named_buffers(recurse=False)
        if buffer.dtype is torch.float32 and buffer.dim() > 0
    }


def fp32_units(model: nn.Module, policy: Policy) -> tuple[list[nn.Module], set[Tensor]]:
    """The modules that `keep_fp32` names among 16-bit ones, the outermost, and the parameters of batch norms; a sharding backend asks."""
    if policy.params == "fp32":
        return [], set()
    named = _outermost(model, policy.keeps_fp32).values()
    norms: set[Tensor] = {p for m in model.modules() if isinstance(m, _BATCH_NORMS) for p in m.parameters()}
    return [module for module in named if any(True for _ in module.parameters())], norms


def _outermost(model: nn.Module, is_named: Callable[[str], bool]) -> dict[str, nn.Module]:
    """The modules that patterns name, without those inside another one of them."""
    outermost: dict[str, nn.Module] = {}
    covered: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if is_named(name) and not (covered and name.startswith(covered)):
            outermost[name] = module
            covered += (f"{name}.",)
    return outermost


def fp32_row(model: nn.Module, policy: Policy) -> dict[str, str]:
    """The row of the truth table: modules that compute in fp32 by name, first those whose weights are fp32."""
    wide: list[str] = []
    copied: list[str] = []
    for name, module in _outermost(model, policy.computes_fp32).items():
        (copied if _has_16_bit_weights(module) else wide).append(name)
    parts = ([few(wide)] if wide else []) + ([f"{few(copied)} on copies of 16-bit weights"] if copied else [])
    return {"modules in fp32": "; ".join(parts)} if parts else {}


def check_patterns(model: nn.Module, policy: Policy) -> None:
    """Raise for a pattern of `keep_fp32` or `compute_fp32` that has no effect on a model."""
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    for key in PATTERN_KEYS:
        unused = policy.unused_patterns(names, key)
        if unused:
            raise SettingError(
                f"{key}={'|'.join(unused)} matches no module of {type(model).__name__}; known names start with "
                f"{', '.join(name for name, _ in list(model.named_modules())[1:6])}."
            )
    unused = policy.unused_patterns([name for name in names if not policy.keeps_fp32(name)], "compute_fp32")
    if unused:
        raise SettingError(
            f"compute_fp32={'|'.join(unused)} has no effect: keep_fp32={'|'.join(policy.keep_fp32)} covers the same modules, whose "
            "weights and compute are fp32. Remove one of the two."
        )


def wrap_forwards(model: nn.Module, policy: Policy) -> None:
    """Make the modules of `keep_fp32` and `compute_fp32` compute in fp32; their weights have been cast before."""
    check_patterns(model, policy)
    every = list(model.named_modules(remove_duplicate=False))
    covered: tuple[str, ...] = ()
    fp32_ids = {id(m) for name, m in every if policy.computes_fp32(name)}
    for name, module in every:
        if id(module) not in fp32_ids or _WRAPPED in vars(module):
            continue
        # Of nested modules the outermost is enough, unless weights are copied: backward may run an inner one again, alone
        # (activation checkpointing), and a sharding backend gathers its weights only then.
        copies = _has_16_bit_weights(module)
        if copies or not (covered and name.startswith(covered)):
            bind_forward(module, _forward_on_copies if copies else _forward_in_fp32, _WRAPPED)
            covered += (f"{name}.",)


def uncast_forwards(model: nn.Module) -> None:
    """Undo `wrap_forwards`."""
    for module in model.modules():
        unbind_forward(module, _WRAPPED)


def _reject_16_bit_weights(model: nn.Module, policy: Policy) -> None:
    half = [name for name, p in model.named_parameters() if p.dtype in DTYPES_16_BIT and p.requires_grad]
    if half:
        example = dict(model.named_parameters())[half[0]].dtype
        lean = "bf16-lean" if example is torch.bfloat16 else "fp16-lean"
        raise SettingError(
            f"The model already has 16-bit weights ({len(half)} parameters, e.g. {half[0]} in {example}), but the policy {policy} "
            f"keeps weights in fp32 and casts while computing. Drop .half() / .bfloat16() / torch_dtype=, or use precision={lean!r}."
        )


def _has_numbers(tensor: Tensor) -> bool:
    """Whether a tensor has data to check: those of a plan and of the meta device have none."""
    return not (tensor.is_meta or is_fake(tensor))


def _fp32_parameters(model: nn.Module, policy: Policy) -> set[Tensor]:
    params: set[Tensor] = set(model.loose_parameters if isinstance(model, Members) else ())
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, _BATCH_NORMS) or policy.keeps_fp32(name):
            params.update(module.parameters())  # a tied weight with one fp32 owner stays fp32
    return params


def _call(module: nn.Module, args: Any, kwargs: Any) -> Any:
    own = getattr(module, _WRAPPED)
    return own(*args, **kwargs) if own is not None else type(module).forward(module, *args, **kwargs)


def _device_type(args: Any, kwargs: Any) -> str:
    tensors = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, Tensor)]
    return tensors[0].device.type if tensors else "cpu"


def _forward_in_fp32(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with torch.autocast(_device_type(args, kwargs), enabled=False):
        return _call(self, upcast(args), upcast(kwargs))


def _forward_on_copies(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with torch.autocast(_device_type(args, kwargs), enabled=False), fp32_weights(self):
        return _call(self, upcast(args), upcast(kwargs))


def _has_16_bit_weights(module: nn.Module) -> bool:
    params = (local(p) for p in module.parameters())
    return any(p.dtype in DTYPES_16_BIT and unsupported_kind(p) is None for p in params)


def sum_gradients_in_fp32(params: Iterable[Tensor], policy: Policy) -> None:
    """Let autograd sum the gradients of these 16-bit weights in fp32."""
    for param in params:
        if not hasattr(param, "grad_dtype"):
            raise SettingError(
                f"Accumulating 16-bit weights' gradients in fp32 needs torch 2.10 or later; this is {torch.__version__}. "
                f"Upgrade torch, use accumulate=1, or write grads={policy.params} to insist on 16-bit sums."
            )
        param.grad_dtype = torch.float32
