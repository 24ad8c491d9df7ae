"""What a region does with the inputs of one operation: a maker for each kind, for autocast presets and lean ones.

Each makes a function that runs the operation, given its arguments, with autocast already excluded. Models call them hundreds of
times in a step, between kernels that take less time on a GPU than a line of Python does.

fp16 and cubes. `x ** 3` passes 65504 from |x| = 40 on, but cubes in models are those of the tanh form of GELU, on tensors
four times as wide as the model: with fp32 results GPT-2 loses most of what 16-bit weights gain. There an inf is right: the
tanh of it is 1, as of any number above 9. So a cube in fp16 gives fp16, with a gradient of our own (`gradients.py`).

The square of a ReLU (`relu(x) ** 2`, an activation too) is also as wide as the network, and goes into a product that rounds it to
fp16 anyway: CAFormer in fp16 with fp32 squares has 0.77 of the pure model's speed. It gives fp16 as well. Other squares are
those of variances, which fp32 keeps finite.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from halfstep.engine.region.gradients import Cube, QuotientInPlace, can_differentiate
from halfstep.engine.region.rule import STATE, record_16_bits
from halfstep.kernels.cross_entropy import cross_entropy
from halfstep.precision.formats import DTYPES_16_BIT
from halfstep.precision.operations import (
    BROADCAST_BACK,
    FP16_RANGE,
    LEAN_16_BIT,
    LEAN_FP32,
    LEAN_QUOTIENTS,
    SCALED_NORMS,
)

__all__ = ["DIVISIONS", "Make", "Run", "run_in_autocast", "run_in_lean", "upcast"]

Run = Callable[[Any, Any], Any]  # runs an operation with these args and kwargs
Make = Callable[[Any, str], Run]  # of an operation and a device type; what a call would look up is looked up once
_CASTABLE = (torch.float32, *DTYPES_16_BIT)  # autocast leaves fp64 alone
_SQUARE, _CUBE = 2, 3
_WEIGHTS = 2  # index of the first weight of a normalisation layer
_aten = torch.ops.aten
# The operations that models run hundreds of times in a step, by torch's own bindings: calling an OpOverload takes twice as long.
_BINDINGS: dict[Any, Callable[..., Any]] = {
    _aten.layer_norm.default: torch.layer_norm,
    _aten.group_norm.default: torch.group_norm,
    _aten.rms_norm.default: torch.rms_norm,
    _aten.pow.Tensor_Scalar: torch.pow,
    _aten.rsqrt.default: torch.rsqrt,
    _aten.exp.default: torch.exp,
    _aten.softmax.int: torch.softmax,
    _aten.sum.default: torch.sum,
    _aten.sum.dim_IntList: torch.sum,
    _aten.mean.default: torch.mean,
    _aten.linalg_vector_norm.default: torch.linalg.vector_norm,
}
# Of operations whose arguments may be numbers, which torch passes to a kernel in Python as they are.
DIVISIONS: dict[str, Callable[[Any, Any], Any]] = {"div": operator.truediv, "div_": Tensor.div_}
_NORMS = ("norm", "linalg_vector_norm")  # as large as the largest element times the root of their number, not a sum


def upcast(tree: Any) -> Any:
    """The same tree with 16-bit floating tensors in fp32."""
    return pytree.tree_map(_upcast_one, tree)


def _upcast_one(value: Any) -> Any:
    is_16_bit = isinstance(value, Tensor) and value.dtype in DTYPES_16_BIT
    return value.float() if is_16_bit else value


def run_in_autocast(kind: str) -> Make:
    """How operations of a kind run in the autocast presets."""
    return _MAKERS[kind]


def run_in_lean(base: str) -> Make | None:
    """How an operation runs in the lean presets, if not as in the autocast presets."""
    if base in SCALED_NORMS:
        return _scaled_norm
    if base in BROADCAST_BACK:
        return _broadcast_back
    if base in LEAN_FP32:
        return _reduced
    if base in LEAN_QUOTIENTS:
        return _quotient
    if base in FP16_RANGE:
        return _in_range
    return _as_it_is if base in LEAN_16_BIT else None


# --- autocast presets -----------------------------------------------------------------------------------------------


def _fp32(operation: Any, device_type: str) -> Run:  # noqa: ARG001 - the signature of all
    def run(args: Any, kwargs: Any) -> Any:
        if kwargs.get("dtype") in DTYPES_16_BIT:  # as sum(dtype=...) may request; a norm would reject a wider input
            return operation(*args, **kwargs)
        return operation(*upcast(args), **upcast(kwargs))

    return run


def _lower(operation: Any, device_type: str) -> Run:
    def run(args: Any, kwargs: Any) -> Any:
        args, kwargs = _to((args, kwargs), torch.get_autocast_dtype(device_type))
        return operation(*args, **kwargs)

    return run


def _widest(operation: Any, device_type: str) -> Run:
    in_fp32 = _fp32(operation, device_type)

    def run(args: Any, kwargs: Any) -> Any:
        return in_fp32(args, kwargs) if _is_mixed(args, kwargs) else operation(*args, **kwargs)

    return run


def _first(operation: Any, device_type: str) -> Run:  # noqa: ARG001 - the signature of all
    def run(args: Any, kwargs: Any) -> Any:
        if args[0].dtype in _CASTABLE and _is_mixed(args, kwargs):
            args, kwargs = _to((args, kwargs), args[0].dtype)
        return operation(*args, **kwargs)

    return run


def _norm(operation: Any, device_type: str) -> Run:
    if operation is _aten.rms_norm.default:  # its kernels do not mix dtypes; torch 2.11 lacks it on CUDA's list
        return (_scaled_norm if device_type == "cpu" else _fp32)(operation, device_type)

    def run(args: Any, kwargs: Any) -> Any:
        if _is_mixed(args, kwargs):
            args, kwargs = (args[0], *upcast(args[1:])), upcast(kwargs)
        return operation(*args, **kwargs)

    return run


def _loss(operation: Any, device_type: str) -> Run:  # noqa: ARG001 - the signature of all
    return lambda args, kwargs: cross_entropy(*args, **kwargs)


_MAKERS: dict[str, Make] = {
    "fp32": _fp32,
    "lower": _lower,
    "widest": _widest,
    "first": _first,
    "norm": _norm,
    "loss": _loss,
}


# --- lean presets ---------------------------------------------------------------------------------------------------


def _as_it_is(operation: Any, device_type: str) -> Run:  # noqa: ARG001 - the signature of all
    call, name = _BINDINGS.get(operation, operation), operation.overloadpacket.__name__

    def run(args: Any, kwargs: Any) -> Any:
        if STATE.observed is not None and any(isinstance(a, Tensor) and a.dtype in DTYPES_16_BIT for a in args):
            record_16_bits(name)
        return call(*args, **kwargs)

    return run


def _in_range(operation: Any, device_type: str) -> Run:
    as_it_is, in_fp32 = _as_it_is(operation, device_type), _fp32(operation, device_type)
    is_power = operation is _aten.pow.Tensor_Scalar

    def run(args: Any, kwargs: Any) -> Any:
        if torch.get_autocast_dtype(device_type) is not torch.float16:
            return as_it_is(args, kwargs)
        if is_power and args[1] == _CUBE and args[0].dtype is torch.float16:
            if not can_differentiate():
                return as_it_is(args, kwargs)
            record_16_bits("pow")
            return Cube.apply(args[0])  # type: ignore[no-untyped-call]
        if is_power and args[1] == _SQUARE and _is_relu(args[0]):
            return as_it_is(args, kwargs)
        return in_fp32(args, kwargs)

    return run


def _reduced(operation: Any, device_type: str) -> Run:
    """An fp32 result, without an fp32 copy of the input where the operation has an argument for it."""
    in_fp32, call = _fp32(operation, device_type), _BINDINGS.get(operation, operation)
    takes_dtype = "dtype" in _arguments(operation)

    def run(args: Any, kwargs: Any) -> Any:
        x = args[0]
        if not (takes_dtype and isinstance(x, Tensor) and x.dtype in DTYPES_16_BIT):
            return in_fp32(args, kwargs)
        return call(*args, **kwargs | {"dtype": kwargs.get("dtype") or torch.float32})

    return run


def _broadcast_back(operation: Any, device_type: str) -> Run:
    as_it_is, reduced = _as_it_is(operation, device_type), _reduced(operation, device_type)
    names = _arguments(operation)
    place = names.index("keepdim") if "keepdim" in names else None
    dtypes = DTYPES_16_BIT if operation.overloadpacket.__name__ in _NORMS else (torch.bfloat16,)

    def run(args: Any, kwargs: Any) -> Any:
        keeps = kwargs.get("keepdim", place is not None and place < len(args) and args[place])
        if keeps and torch.get_autocast_dtype(device_type) in dtypes:
            return as_it_is(args, kwargs)
        return reduced(args, kwargs)

    return run


def _quotient(operation: Any, device_type: str) -> Run:  # noqa: ARG001 - the signature of all
    base = operation.overloadpacket.__name__
    call, in_place = DIVISIONS[base], base.endswith("_")

    def run(args: Any, kwargs: Any) -> Any:  # noqa: ARG001 - the signature of all
        x, by = args
        if _is_factor(by) and isinstance(x, Tensor) and x.dtype in DTYPES_16_BIT and _is_smaller(by, x):
            if x.dtype is torch.bfloat16:
                record_16_bits("div by a smaller fp32 tensor")
                by = by.to(torch.bfloat16)
            elif in_place and can_differentiate():
                return QuotientInPlace.apply(x, by)  # type: ignore[no-untyped-call]
        return call(x, by)

    return run


def _is_factor(value: Any) -> bool:
    """Whether this is an fp32 tensor that torch promotes to; one number is not."""
    return isinstance(value, Tensor) and value.dtype is torch.float32 and value.dim() > 0


def _is_smaller(one: Tensor, other: Tensor) -> bool:
    sizes = one.numel(), other.numel()
    return all(type(size) is int for size in sizes) and sizes[0] < sizes[1]  # a symbolic size cannot always be compared


def _scaled_norm(operation: Any, device_type: str) -> Run:
    as_it_is, call = _as_it_is(operation, device_type), _BINDINGS.get(operation, operation)
    weights = slice(_WEIGHTS, _WEIGHTS + sum(name in ("weight", "bias") for name in _arguments(operation)))

    def run(args: Any, kwargs: Any) -> Any:
        own = args[0].dtype
        for weight in args[weights]:
            if weight is not None and weight.dtype is not own:
                break
        else:
            if not kwargs:
                return as_it_is(args, kwargs) if STATE.observed is not None else call(*args)
        dtypes = _dtypes((*args, *kwargs.values()))
        if len(dtypes) <= 1:
            return as_it_is(args, kwargs)
        # An fp32 input (a residual stream in fp32, an fp32 buffer added) or fp32 weights (of a frozen base): inside in fp32,
        # and 16 bits for the layer that follows, which would round them anyway, often once for each of three products.
        dtype = own if own in DTYPES_16_BIT else min(dtypes - {torch.float32}, key=str)
        result = operation(*upcast(args), **upcast(kwargs))
        return (result[0].to(dtype), *result[1:]) if isinstance(result, tuple) else result.to(dtype)

    return run


def _is_relu(x: Tensor) -> bool:
    """Whether autograd knows that this is the result of a ReLU."""
    return x.grad_fn is not None and x.grad_fn.name() == "ReluBackward0"


def _arguments(operation: Any) -> list[str]:
    return [a.name for a in operation._schema.arguments]  # noqa: SLF001 - the public name is newer


# --- dtypes ---------------------------------------------------------------------------------------------------------


def _is_mixed(args: Any, kwargs: Any) -> bool:
    return len(_dtypes((*args, *kwargs.values()))) > 1


def _dtypes(values: Iterable[Any]) -> set[torch.dtype]:
    """The dtypes that a cast may change; a loop, because pytree costs more than many of the operations."""
    dtypes: set[torch.dtype] = set()
    for value in values:
        if isinstance(value, Tensor):
            if value.dtype in _CASTABLE:
                dtypes.add(value.dtype)
        elif isinstance(value, (list, tuple)):
            dtypes |= _dtypes(value)
    return dtypes


def _to(tree: Any, dtype: torch.dtype) -> Any:
    return pytree.tree_map_only(Tensor, lambda t: t.to(dtype) if t.dtype in _CASTABLE else t, tree)
