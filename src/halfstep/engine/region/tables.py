"""fp32 buffers of a lean model: a product or sum with one, and a concatenation, gives 16 bits.

Rotary tables, sinusoidal positions and attention masks are fp32 buffers. torch promotes `x * cos` to fp32, and after
`x + positions` the whole residual stream of a network is fp32. A pure 16-bit model rounds its buffers. Here they stay as
they are, because angles and frequencies computed from them need fp32; but where a buffer, or a view of one, is multiplied with,
added to or subtracted from a 16-bit activation, or concatenated with one, it is rounded like the activation. The buffers are
recognised by their storage, and what a model makes of one with numbers (`-1e4 * (1 - mask)`) by an attribute of the result.
(Products that read fp32 and write 16 bits in one kernel are not vectorised by torch: EVA-02's rotations took 9.4 ms of a step
on an H200, against 5.5 ms in the pure model.)

Products and sums are frequent, and a kernel in Python costs a few microseconds, so it is registered only while a model
with such buffers trains. Vectors do not count: those of models are mostly frequencies from which tables are computed
(`inv_freq` of every rotary embedding in transformers), and their models should not pay. Concatenations are different: what a
vector is concatenated with is a vector of parameters (timm's biases of queries and values, with zeros for the keys between
them), so where the kernels are registered, vectors count there. Compiled code is traced without it: there the fp32 values stay
inside a fused kernel.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from halfstep.engine.region.rule import STATE, Rule, cast_once, current_rule, record_16_bits
from halfstep.precision.formats import DTYPES_16_BIT

__all__ = ["KEYS", "recognise_tables"]

KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}
# How an autocast kernel redispatches. torch's guard object does the same, in twice the time. What was excluded before stays so:
# torch calls Python kernels directly when it traces, and "excluded" is also how it stores that autocast is off.
exclude_key: Callable[[Any, bool], None] = torch._C._dispatch_tls_set_dispatch_key_excluded  # noqa: SLF001
is_excluded: Callable[[Any], bool] = torch._C._dispatch_tls_is_dispatch_key_excluded  # noqa: SLF001

_LEAN = Rule.LEAN  # looking up a member of an enum costs as much as the comparison
_DERIVED = "_halfstep_table"  # an attribute of tensors computed from a table and numbers
_PLAIN = (Tensor, nn.Parameter, FakeTensor)  # those of a plan are fake; no other subclass is looked into

_storages: Counter[int] = Counter()  # identities of the tables' storages, by the number of models that use them
_vectors: Counter[int] = Counter()  # and of other buffers of these models
_libraries: dict[str, torch.library.Library] = {}


@contextlib.contextmanager
def recognise_tables(buffers: Iterable[Tensor]) -> Iterator[None]:
    """Inside this block, lean regions give 16 bits for products and sums with these fp32 tensors of at least two dimensions."""
    buffers = [b for b in buffers if b.device.type in KEYS]
    tables = [b for b in buffers if b.dim() > 1]
    identities = {_identity(table) for table in tables}
    others = {_identity(b) for b in buffers} - identities if tables else set()
    _storages.update(identities)
    _vectors.update(others)
    for device_type in {table.device.type for table in tables} - _libraries.keys():
        _libraries[device_type] = _install(KEYS[device_type])
    # Bound here: an Engine that nobody closed is collected at the end of the process, after the names of this module.
    remove, storages, vectors, libraries, is_ending = _remove, _storages, _vectors, _libraries, sys.is_finalizing
    try:
        yield
    finally:
        remove(storages, identities)
        remove(vectors, others)
        if not storages and not is_ending():  # torch.library may be gone then, too
            for library in libraries.values():
                library._destroy()  # type: ignore[no-untyped-call]  # noqa: SLF001 - the only way to remove them
            libraries.clear()


def _remove(counter: Counter[int], identities: Iterable[int]) -> None:
    counter.subtract(identities)
    for identity in [i for i, count in counter.items() if count <= 0]:
        del counter[identity]


def _identity(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]  # noqa: SLF001 - fake tensors have one too


def _install(key: str) -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    own = getattr(torch._C.DispatchKey, key)  # noqa: SLF001
    with warnings.catch_warnings():  # torch warns where a kernel is replaced
        warnings.simplefilter("ignore", UserWarning)
        aten = torch.ops.aten
        for operation in (aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.rsub.Scalar):
            library.impl(operation, _kernel(operation, own), key)  # type: ignore[no-untyped-call]
        library.impl(torch.ops.aten.cat.default, _concatenation(own), key)  # type: ignore[no-untyped-call]
    return library


def _kernel(operation: Any, own_key: Any) -> Callable[..., Any]:
    base = operation.overloadpacket.__name__
    call, name = getattr(torch, base), f"{base} with an fp32 buffer"

    def kernel(a: Any, b: Any, *args: Any, **kwargs: Any) -> Any:
        are_tensors = isinstance(a, Tensor) and isinstance(b, Tensor)
        if are_tensors and a.dtype is not b.dtype:
            if _is_met(b, a):
                record_16_bits(name)
                b = _rounded(b, a.dtype)
            elif _is_met(a, b):
                record_16_bits(name)
                a = _rounded(a, b.dtype)
        before = is_excluded(own_key)
        exclude_key(own_key, True)
        try:
            result = call(a, b, *args, **kwargs)
        finally:
            exclude_key(own_key, before)
        if not are_tensors and result.dtype is torch.float32 and (_is_table(a) or _is_table(b)):
            setattr(result, _DERIVED, True)
        return result

    return kernel


def _concatenation(own_key: Any) -> Callable[..., Any]:

    def kernel(tensors: Any, dim: int = 0) -> Any:
        narrow = {t.dtype for t in tensors if t.dtype is not torch.float32}
        if len(narrow) == 1 and current_rule() is _LEAN:
            dtype = narrow.pop()
            if dtype in DTYPES_16_BIT and any(_is_buffer(t) for t in tensors):
                record_16_bits("cat with an fp32 buffer")
                tensors = [_rounded(t, dtype) if _is_buffer(t) else t for t in tensors]
        before = is_excluded(own_key)
        exclude_key(own_key, True)
        try:
            return torch.cat(tensors, dim)  # of several dtypes, the widest, as autocast has it
        finally:
            exclude_key(own_key, before)

    return kernel


def _is_buffer(tensor: Tensor) -> bool:
    """Whether this is an fp32 buffer of a lean model that has tables."""
    if tensor.dtype is not torch.float32 or tensor.requires_grad or type(tensor) not in _PLAIN:
        return False
    identity = _identity(tensor)
    return identity in _storages or identity in _vectors


def _rounded(table: Tensor, dtype: torch.dtype) -> Tensor:
    """The table in 16 bits: one copy per region, because every layer of a network uses the same one, and autograd saves it."""
    # Every layer makes its own, and a mask of -1e9 must not be inf in a row that is masked as a whole.
    if hasattr(table, _DERIVED):
        largest = torch.finfo(dtype).max
        return table.clamp(-largest, largest).to(dtype)
    if table.is_inference():  # has no version
        return table.to(dtype)
    place = (_identity(table), table.storage_offset(), table.shape, table.stride(), table._version)  # noqa: SLF001
    key = (place, dtype, torch.is_inference_mode_enabled())
    return cast_once(key, lambda: table.to(dtype))


def _is_met(table: Tensor, x: Tensor) -> bool:
    """Whether this is a table that broadcasts to the shape of a 16-bit activation, in a lean region."""
    return (
        x.dtype in DTYPES_16_BIT
        and (STATE.rule or current_rule()) is _LEAN
        and type(x) in _PLAIN
        and _is_table(table)
        and _broadcasts(table, x)
    )


def _broadcasts(table: Tensor, x: Tensor) -> bool:
    """Whether a table takes the shape of an activation; torch.broadcast_shapes takes 26 us on an x86 core, and this 2."""
    sizes, own = x.shape, table.shape
    return len(own) <= len(sizes) and all(o in (1, s) for o, s in zip(reversed(own), reversed(sizes), strict=False))


def _is_table(value: Any) -> bool:
    """Whether this is a table of a model, or what numbers made of one."""
    return (
        type(value) in _PLAIN
        and value.dtype is torch.float32
        and value.dim() > 0
        and not value.requires_grad
        and (_identity(value) in _storages or hasattr(value, _DERIVED))
    )
