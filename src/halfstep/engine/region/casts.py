"""What a region does with the inputs of one operation: a function for each kind, for autocast presets and lean ones.

Each function runs the operation, given its arguments, with autocast already excluded.

fp16 and cubes. `x ** 3` passes 65504 from |x| = 40 on, but cubes in models are those of the tanh form of GELU, on tensors
four times as wide as the model: with fp32 results GPT-2 loses most of what 16-bit weights gain. There an inf is right: the
tanh of it is 1, as of any number above 9. Only torch's gradient is not, `0 * 3 * x**2`, because x**2 is inf from 256 on.
So a cube in fp16 gives fp16, with a gradient that multiplies from the left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from halfstep.engine.region.rule import is_observed, record_16_bits
from halfstep.kernels.cross_entropy import cross_entropy
from halfstep.precision.formats import DTYPES_16_BIT
from halfstep.precision.operations import BROADCAST_BACK, FP16_RANGE, LEAN_16_BIT, LEAN_FP32, SCALED_NORMS

__all__ = ["Run", "run_in_autocast", "run_in_lean", "upcast"]

Run = Callable[[Any, Any, Any, str], Any]  # the operation, its args and kwargs, the device type
_CASTABLE = (torch.float32, *DTYPES_16_BIT)  # autocast leaves fp64 alone
_CUBE = 3
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
}
_NORMS = ("norm", "linalg_vector_norm")  # as large as the largest element times the root of their number, not a sum


def upcast(tree: Any) -> Any:
    """The same tree with 16-bit floating tensors in fp32."""
    return pytree.tree_map(_upcast_one, tree)


def _upcast_one(value: Any) -> Any:
    is_16_bit = isinstance(value, Tensor) and value.dtype in DTYPES_16_BIT
    return value.float() if is_16_bit else value


def run_in_autocast(kind: str) -> Run:
    """How operations of a kind run in the autocast presets."""
    return _RUNS[kind]


def run_in_lean(base: str) -> Run | None:
    """How an operation runs in the lean presets, if not as in the autocast presets."""
    if base in SCALED_NORMS:
        return _scaled_norm
    if base in BROADCAST_BACK:
        return _broadcast_back(fp16=base in _NORMS)
    if base in LEAN_FP32:
        return _reduced
    if base in FP16_RANGE:
        return _in_range
    return _as_it_is if base in LEAN_16_BIT else None


# --- autocast presets -----------------------------------------------------------------------------------------------


def _fp32(operation: Any, args: Any, kwargs: Any, device_type: str) -> Any:  # noqa: ARG001 - the signature of all
    if kwargs.get("dtype") in DTYPES_16_BIT:  # requested, as in sum(dtype=...), and a norm would reject a wider input
        return operation(*args, **kwargs)
    return operation(*upcast(args), **upcast(kwargs))


def _lower(operation: Any, args: Any, kwargs: Any, device_type: str) -> Any:
    args, kwargs = _to((args, kwargs), torch.get_autocast_dtype(device_type))
    return operation(*args, **kwargs)


def _widest(operation: Any, args: Any, kwargs: Any, device_type: str) -> Any:
    if _is_mixed(args, kwargs):
        return _fp32(operation, args, kwargs, device_type)
    return operation(*args, **kwargs)


def _first(operation: Any, args: Any, kwargs: Any, device_type: str) -> Any:  # noqa: ARG001 - the signature of all
    if args[0].dtype in _CASTABLE and _is_mixed(args, kwargs):
        args, kwargs = _to((args, kwargs), args[0].dtype)
    return operation(*args, **kwargs)


def _norm(operation: Any, args: Any, kwargs: Any, device_type: str) -> Any:
    if (
        operation is torch.ops.aten.rms_norm.default
    ):  # its kernels do not mix dtypes; torch 2.11 lacks it on CUDA's list
        return (_scaled_norm if device_type == "cpu" else _fp32)(operation, args, kwargs, device_type)
    if _is_mixed(args, kwargs):
        args, kwargs = (args[0], *upcast(args[1:])), upcast(kwargs)
    return operation(*args, **kwargs)


def _loss(operation: Any, args: Any, kwargs: Any, device_type: str) -> Any:  # noqa: ARG001 - the signature of all
    return cross_entropy(*args, **kwargs)


_RUNS: dict[str, Run] = {
    "fp32": _fp32,
    "lower": _lower,
    "widest": _widest,
    "first": _first,
    "norm": _norm,
    "loss": _loss,
}


# --- lean presets ---------------------------------------------------------------------------------------------------


def _as_it_is(operation: Any, args: Any, kwargs: Any, device_type: str) -> Any:  # noqa: ARG001 - the signature of all
    if is_observed() and any(isinstance(a, Tensor) and a.dtype in DTYPES_16_BIT for a in args):
        record_16_bits(operation.overloadpacket.__name__)
    return _BINDINGS.get(operation, operation)(*args, **kwargs)


def _in_range(operation: Any, args: Any, kwargs: Any, device_type: str) -> Any:
    if torch.get_autocast_dtype(device_type) is not torch.float16:
        return _as_it_is(operation, args, kwargs, device_type)
    if operation is torch.ops.aten.pow.Tensor_Scalar and args[1] == _CUBE and args[0].dtype is torch.float16:
        if torch._C._functorch.peek_interpreter_stack() is not None:  # noqa: SLF001 - torch.func has no public test
            return _as_it_is(operation, args, kwargs, device_type)  # it cannot transform a function from in here
        record_16_bits("pow")
        return _Cube.apply(args[0])  # type: ignore[no-untyped-call]
    return _fp32(operation, args, kwargs, device_type)


def _reduced(operation: Any, args: Any, kwargs: Any, device_type: str) -> Any:
    """An fp32 result, without an fp32 copy of the input where the operation has an argument for it."""
    names = [a.name for a in operation._schema.arguments]  # noqa: SLF001 - the public name is newer
    x, dtype = args[0], kwargs.get("dtype")
    if "dtype" not in names or not isinstance(x, Tensor) or x.dtype not in DTYPES_16_BIT:
        return _fp32(operation, args, kwargs, device_type)
    return operation(*args, **kwargs | {"dtype": dtype or torch.float32})


def _broadcast_back(*, fp16: bool) -> Run:
    dtypes = DTYPES_16_BIT if fp16 else (torch.bfloat16,)

    def run(operation: Any, args: Any, kwargs: Any, device_type: str) -> Any:
        if _keeps_dimension(operation, args, kwargs) and torch.get_autocast_dtype(device_type) in dtypes:
            return _as_it_is(operation, args, kwargs, device_type)
        return _reduced(operation, args, kwargs, device_type)

    return run


def _keeps_dimension(operation: Any, args: Any, kwargs: Any) -> bool:
    if "keepdim" in kwargs:
        return bool(kwargs["keepdim"])
    names = [a.name for a in operation._schema.arguments]  # noqa: SLF001 - the public name is newer
    return "keepdim" in names[: len(args)] and bool(args[names.index("keepdim")])


def _scaled_norm(operation: Any, args: Any, kwargs: Any, device_type: str) -> Any:
    dtypes = _dtypes(args) if not kwargs else _dtypes((*args, *kwargs.values()))
    if len(dtypes) <= 1:
        return _as_it_is(operation, args, kwargs, device_type)
    # An fp32 input (a residual stream in fp32, an fp32 buffer added) or fp32 weights (of a frozen base): inside in fp32,
    # and 16 bits for the layer that follows, which would round them anyway, often once for each of three products.
    dtype = args[0].dtype if args[0].dtype in DTYPES_16_BIT else min(dtypes - {torch.float32}, key=str)
    result = operation(*upcast(args), **upcast(kwargs))
    return (result[0].to(dtype), *result[1:]) if isinstance(result, tuple) else result.to(dtype)


class _Cube(torch.autograd.Function):
    """x ** 3 whose gradient has no power of x in it that could be inf where the gradient is 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**_CUBE

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x: Tensor = ctx.saved_tensors[0]
        return grad * x * x * _CUBE


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
