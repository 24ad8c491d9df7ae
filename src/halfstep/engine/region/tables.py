"""fp32 buffers of a lean model: a product or sum with one gives 16 bits.

Rotary tables, sinusoidal positions and attention masks are fp32 buffers. torch promotes `x * cos` to fp32, and after
`x + positions` the whole residual stream of a network is fp32. A pure 16-bit model rounds its buffers. Here they stay as
they are, and an element-wise product or sum of a 16-bit activation and a buffer (or a view of one) computes in fp32 inside
one kernel and gives the activation's 16 bits, in the backward pass too. The buffers are recognised by their storage.

Products and sums are frequent, and a kernel in Python costs a few microseconds, so it is registered only while a model
with such buffers trains. Compiled code is traced without it: there the fp32 values stay inside a fused kernel.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from halfstep.engine.region.rule import Rule, current_rule, record_16_bits
from halfstep.precision.formats import DTYPES_16_BIT

__all__ = ["KEYS", "recognise_tables"]

KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}

_PLAIN = (Tensor, nn.Parameter, FakeTensor)  # those of a plan are fake; no other subclass is looked into

_storages: Counter[int] = Counter()  # identities of the tables' storages, by the number of models that use them
_libraries: dict[str, torch.library.Library] = {}


@contextlib.contextmanager
def recognise_tables(buffers: Iterable[Tensor]) -> Iterator[None]:
    """Inside this block, lean regions give 16 bits for products and sums with these fp32 tensors."""
    tables = [b for b in buffers if b.device.type in KEYS]
    identities = {_identity(table) for table in tables}
    _storages.update(identities)
    for device_type in {table.device.type for table in tables} - _libraries.keys():
        _libraries[device_type] = _install(KEYS[device_type])
    try:
        yield
    finally:
        _storages.subtract(identities)
        for identity in [i for i, count in _storages.items() if count <= 0]:
            del _storages[identity]
        if not _storages:
            for library in _libraries.values():
                library._destroy()  # type: ignore[no-untyped-call]  # noqa: SLF001 - the only way to remove them
            _libraries.clear()


def _identity(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]  # noqa: SLF001 - fake tensors have one too


def _install(key: str) -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():  # torch warns where a kernel is replaced
        warnings.simplefilter("ignore", UserWarning)
        for operation, run in ((torch.ops.aten.mul.Tensor, _multiply), (torch.ops.aten.add.Tensor, _add)):
            kernel = _kernel(operation, run, key)
            library.impl(operation, kernel, key, with_keyset=True)  # type: ignore[no-untyped-call]
    return library


def _kernel(operation: Any, run: Callable[[Tensor, Tensor], Tensor], key: str) -> Callable[..., Any]:
    own = getattr(torch._C.DispatchKey, key)  # noqa: SLF001
    after = torch._C._dispatch_keyset_full_after(own)  # noqa: SLF001

    def kernel(keys: Any, a: Any, b: Any, **kwargs: Any) -> Any:
        if not kwargs and isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype is not b.dtype:
            if _is_scaled(a, b):
                record_16_bits(f"{operation.overloadpacket.__name__} with an fp32 buffer")
                return run(a, b)
            if _is_scaled(b, a):
                record_16_bits(f"{operation.overloadpacket.__name__} with an fp32 buffer")
                return run(b, a)
        if not (isinstance(a, Tensor) and isinstance(b, Tensor)):  # `x + 1`: a number, which redispatch does not take
            with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(own)):  # noqa: SLF001
                return operation(a, b, **kwargs)
        return operation.redispatch(keys & after, a, b, **kwargs)

    return kernel


def _is_scaled(x: Tensor, table: Tensor) -> bool:
    """Whether a 16-bit activation meets a table that broadcasts to its shape, in a lean region."""
    return (
        x.dtype in DTYPES_16_BIT
        and table.dtype is torch.float32
        and table.dim() > 0
        and not table.requires_grad
        and current_rule() is Rule.LEAN
        and type(x) in _PLAIN
        and type(table) in _PLAIN
        and torch._C._functorch.peek_interpreter_stack() is None  # noqa: SLF001 - torch.func has no public test
        and _identity(table) in _storages
        and torch.broadcast_shapes(x.shape, table.shape) == x.shape  # type: ignore[no-untyped-call]
    )


def _multiply(x: Tensor, table: Tensor) -> Tensor:
    return _Scaled.apply(x, table)  # type: ignore[no-any-return, no-untyped-call]


def _add(x: Tensor, table: Tensor) -> Tensor:
    return _Shifted.apply(x, table)  # type: ignore[no-any-return, no-untyped-call]


def _into_16_bits(operation: Callable[..., Tensor], x: Tensor, table: Tensor) -> Tensor:
    """One kernel that reads both dtypes, computes in fp32 and writes the activation's dtype."""
    return operation(x, table, out=torch.empty_like(x))


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(table)
        return _into_16_bits(torch.mul, x, table)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (table,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # to be differentiated again
            return (grad * table).to(grad.dtype), None
        return _into_16_bits(torch.mul, grad, table), None


class _Shifted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor) -> Tensor:  # noqa: ARG004 - torch's signature
        return _into_16_bits(torch.add, x, table)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004 - torch's signature
        return grad, None
