"""Gradients averaged over ranks in buckets, while backward is still computing the rest.

torch's own reducer is fixed to the dtype of the weights and to a wrapper around the model. This one takes gradients as they
are: fp32 gradients of bf16 weights, reduced in the policy's format, of a model that nobody wrapped.

    layout      parameters in reverse order, as backward reaches them, in buckets of one device and dtype: a first small one so
                that messages start early, then larger ones. Ranks compare the layout whenever it changes.
    arrival     a hook on each parameter counts gradients. A bucket is sent once it is complete and every bucket before it was
                sent: the order of messages is the same on all ranks, whatever order gradients arrive in.
    message     the gradients in the reduce format, then one number per parameter: 1 if this rank has its gradient. A parameter
                without a gradient sends zeros. The gradient itself is freed.
    write-back  the mean over ranks in the gradient's dtype, one tensor per bucket of which the gradients are views. A
                parameter that no rank used has no gradient; only a rank that lacks a gradient reads the numbers back.

An fp16 sum over N ranks overflows where the mean is above 65504 / N, and gradients divided by N underflow. So they are
divided by about sqrt(N) before the sum and by the rest after it, as FSDP2 does.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from halfstep.errors import SettingError
from halfstep.hardware.units import few

__all__ = [
    "BUCKET_BYTES",
    "FIRST_BUCKET_BYTES",
    "BucketBytes",
    "GradientReducer",
    "Reductions",
    "bucket_bytes",
    "divisors",
]

# Those of DistributedDataParallel.
FIRST_BUCKET_BYTES = 2**20
BUCKET_BYTES = 25 * 2**20
_ALIGNMENT = 16  # bytes: kernels load several elements at once


@dataclass(frozen=True)
class Reductions:
    """How often all gradients were reduced over ranks, and the bytes of the messages that this rank passed for it."""

    count: int = 0
    message_bytes: int = 0


@dataclass(frozen=True)
class BucketBytes:
    """The sizes of one bucket, alignment and the number per parameter included."""

    message: int  # in the reduce format
    gradients: int  # what is allocated for the means that are written back


@dataclass(frozen=True)
class _Slot:
    """The place of one parameter's gradient in its bucket."""

    name: str
    param: Tensor
    offset: int  # in elements
    shape: torch.Size  # of real numbers
    stride: tuple[int, ...]

    def view(self, flat: Tensor) -> Tensor:
        """The part of a bucket's tensor that is this gradient's, as real numbers."""
        return flat.as_strided(self.shape, self.stride, self.offset)

    def gradient(self, flat: Tensor) -> Tensor:
        """The gradient itself, as a view of a bucket's tensor."""
        view = self.view(flat)
        # Not a plain view: those share one version counter, and the Engine could not tell which gradient was edited.
        return (torch.view_as_complex(view) if self.param.is_complex() else view).data


@dataclass(eq=False)
class _Bucket:
    """Gradients of one device and dtype that travel together."""

    slots: list[_Slot]
    num_values: int  # elements before the numbers that show which gradients this rank has
    grad_dtype: torch.dtype  # of real numbers
    wire_dtype: torch.dtype
    device: torch.device
    waiting: set[Tensor] = field(default_factory=set)
    missing: list[_Slot] = field(default_factory=list)  # without a gradient on this rank
    flat: Tensor | None = None
    work: Any = None

    @property
    def num_elements(self) -> int:
        """Elements of the message."""
        return self.num_values + len(self.slots)

    @property
    def message_bytes(self) -> int:
        """The size of the message."""
        return self.num_elements * self.wire_dtype.itemsize


class GradientReducer:
    """Averages the gradients of named parameters over the ranks of a group; every rank must call the same methods."""

    def __init__(
        self,
        params: Mapping[str, Tensor],
        group: Any,
        reduce_dtype: torch.dtype,
        *,
        compare: Callable[[dict[str, str]], None] = lambda _: None,
        first_bucket_bytes: int = FIRST_BUCKET_BYTES,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """`compare` raises if the layout, as text by parameter, differs between ranks."""
        self._params, self._group, self._reduce_dtype, self._compare = dict(params), group, reduce_dtype, compare
        self._limits = (first_bucket_bytes, bucket_bytes)
        self._trained = [False] * len(self._params)  # whether each required a gradient in this window
        self._layout: list[Any] | None = None
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[Tensor, _Bucket] = {}
        self._num_sent = 0  # buckets of the reduction in progress
        self._armed = False
        self._lock = threading.RLock()  # autograd has a thread per device
        self._handles: dict[Tensor, Any] = {}
        self.reductions = Reductions()
        self.found_inf: Tensor | None = None  # 1 if a message of this rank was not finite; until `reset`

    # --- one reduction ------------------------------------------------------------------------------------------

    def observe(self) -> None:
        """Note which parameters the next backward trains: one that is frozen later in its window still has a gradient."""
        pairs = zip(self._trained, self._params.values(), strict=True)
        self._trained = [trained or param.requires_grad for trained, param in pairs]

    def arm(self) -> None:
        """Send buckets as the next backward completes them; `finish` must follow it."""
        self._prepare()
        self._armed = True

    def finish(self) -> bool:
        """Send what was not sent, wait for all, and write the means back.

        Returns whether a gradient arrived after its bucket was sent (a re-entrant checkpoint of a shared weight): it was added
        to the mean on this rank only, and all must be reduced again.
        """
        self._armed = False
        with self._lock:
            while self._num_sent < len(self._buckets):
                self._send(self._buckets[self._num_sent])
        late = [slot for bucket in self._buckets for slot in self._write_back(bucket)]
        self._num_sent = 0
        sent = sum(bucket.message_bytes for bucket in self._buckets)
        self.reductions = Reductions(self.reductions.count + 1, self.reductions.message_bytes + sent)
        return bool(late)

    def reduce(self) -> None:
        """Average the gradients as they are."""
        self._prepare()
        self.finish()

    def reset(self) -> None:
        """The window ended: drop a reduction that a failed backward left unfinished."""
        self._trained = [False] * len(self._params)
        self._armed, self._num_sent, self.found_inf = False, 0, None
        for bucket in self._buckets:
            bucket.work = bucket.flat = None  # not awaited: the other ranks may have stopped

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    @property
    def message_bytes(self) -> int:
        """The size of all messages of one reduction; 0 before the first."""
        return sum(bucket.message_bytes for bucket in self._buckets)

    # --- layout -------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Lay the buckets out, if parameters were frozen, unfrozen or cast since the last time."""
        self.observe()
        entries = zip(self._trained, self._params.values(), strict=True)
        layout = [(trained, _grad_dtype(p), p.device) for trained, p in entries]
        if layout != self._layout:
            active = {n: p for (n, p), trained in zip(self._params.items(), self._trained, strict=True) if trained}
            self._compare_layout(active)
            self._buckets, self._layout = _lay_out(active, self._reduce_dtype, *self._limits), layout
            self._bucket_of = {slot.param: bucket for bucket in self._buckets for slot in bucket.slots}
            hook = _notify(weakref.ref(self))
            for param in (p for p in active.values() if p.requires_grad and p not in self._handles):
                self._handles[param] = param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        for bucket in self._buckets:
            bucket.waiting = {slot.param for slot in bucket.slots}

    def _compare_layout(self, active: Mapping[str, Tensor]) -> None:
        try:
            self._compare({name: f"{tuple(p.shape)}, gradient in {_grad_dtype(p)}" for name, p in active.items()})
        except RuntimeError as error:  # of the process group
            if self._layout is None:
                raise
            old = [name for name, (required, *_) in zip(self._params, self._layout, strict=True) if required]
            changed = [name for name in self._params if (name in active) != (name in old)]
            raise SettingError(
                f"requires_grad or the gradients' dtype changed since the last reduction ({few(changed)}), and the other ranks did not "
                "answer: they did not change theirs. Freeze and unfreeze parameters on every rank before the same window."
            ) from error

    # --- messages -----------------------------------------------------------------------------------------------

    def arrived(self, param: Tensor) -> None:
        """Note that backward has added to a parameter's gradient, and send the buckets that are complete."""
        if not self._armed or param not in self._bucket_of:
            return
        with self._lock:
            self._bucket_of[param].waiting.discard(param)
            while self._num_sent < len(self._buckets) and not self._buckets[self._num_sent].waiting:
                self._send(self._buckets[self._num_sent])

    @torch.no_grad()
    def _send(self, bucket: _Bucket) -> None:
        flat = torch.empty(bucket.num_elements, dtype=bucket.wire_dtype, device=bucket.device)
        present = [slot for slot in bucket.slots if slot.param.grad is not None]
        bucket.missing = [slot for slot in bucket.slots if slot.param.grad is None]
        before, _ = self._divisors(bucket)
        if present:
            values = [_real(_dense(slot)) for slot in present]
            if before != 1:  # in the gradients' own dtype, whose range is at least that of the message
                values = list(torch._foreach_mul(values, 1 / before))  # noqa: SLF001
            views = [slot.view(flat) for slot in present]
            torch._foreach_copy_(views, values)
            self._look(views)
        flat[bucket.num_values :].fill_(1)
        for index, slot in enumerate(bucket.slots):
            if slot.param.grad is None:
                slot.view(flat).zero_()
                flat[bucket.num_values + index : bucket.num_values + index + 1].zero_()
            slot.param.grad = None
        bucket.flat, bucket.work = flat, dist.all_reduce(flat, group=self._group, async_op=True)
        self._num_sent += 1

    def _look(self, values: list[Tensor]) -> None:
        """Note whether they are finite: after the sum over ranks nothing shows which rank had an overflow."""
        values = [each for each in values if each.numel()]
        if not values:
            return
        largest = torch.stack(list(torch._foreach_norm(values, math.inf))).amax()  # noqa: SLF001
        found_inf = (~largest.isfinite()).to(torch.float32)
        first = found_inf if self.found_inf is None else self.found_inf
        self.found_inf = torch.maximum(first, found_inf.to(first.device))

    @torch.no_grad()
    def _write_back(self, bucket: _Bucket) -> list[_Slot]:
        """Give every parameter its mean; returns those whose gradient grew after it was sent."""
        flat, work = bucket.flat, bucket.work
        bucket.flat = bucket.work = None
        assert flat is not None
        work.wait()
        used = flat[bucket.num_values :].tolist() if bucket.missing else []
        unused = {slot.param for slot, share in zip(bucket.slots, used, strict=False) if not share}
        _, after = self._divisors(bucket)
        wide = flat.float() if bucket.grad_dtype is torch.float32 else flat
        means = wide.div_(after).to(bucket.grad_dtype)
        late = []
        for slot in bucket.slots:
            if slot.param in unused:
                continue
            mean = slot.gradient(means)
            if slot.param.grad is not None:
                mean.add_(slot.param.grad)
                late.append(slot)
            slot.param.grad = mean
        return late

    def _divisors(self, bucket: _Bucket) -> tuple[int, float]:
        num_ranks = dist.get_world_size(self._group)
        return divisors(num_ranks) if bucket.wire_dtype is torch.float16 else (1, num_ranks)


def divisors(num_ranks: int) -> tuple[int, float]:
    """A power of two of about sqrt(N) to divide by before an fp16 sum over N ranks, and what remains of N after it."""
    before = 1
    while num_ranks % before == 0 and num_ranks / before > before:
        before *= 2
    return before, num_ranks / before


def bucket_bytes(
    params: Mapping[str, Tensor],
    reduce_dtype: torch.dtype,
    first_bucket_bytes: int = FIRST_BUCKET_BYTES,
    bucket_bytes: int = BUCKET_BYTES,
) -> tuple[BucketBytes, ...]:
    """The sizes of the buckets of these parameters, in the order in which they are sent; nothing is allocated."""
    buckets = _lay_out(params, reduce_dtype, first_bucket_bytes, bucket_bytes)
    return tuple(BucketBytes(b.message_bytes, b.num_elements * b.grad_dtype.itemsize) for b in buckets)


def _lay_out(params: Mapping[str, Tensor], reduce_dtype: torch.dtype, first: int, rest: int) -> list[_Bucket]:
    """The buckets of these parameters, in the order in which they are sent."""
    filling: dict[Any, list[tuple[str, Tensor]]] = {}
    sizes: dict[Any, int] = {}
    groups: list[tuple[Any, list[tuple[str, Tensor]]]] = []
    for name, param in reversed(list(params.items())):
        grad_dtype = _grad_dtype(param)
        # A 64-bit gradient would lose its digits in any of the policy's formats.
        wire_dtype = torch.float64 if grad_dtype is torch.float64 else reduce_dtype
        key = (param.device, grad_dtype, wire_dtype)
        filling.setdefault(key, []).append((name, param))
        sizes[key] = sizes.get(key, 0) + _real(param).numel() * wire_dtype.itemsize
        if sizes[key] >= (rest if groups else first):
            groups.append((key, filling.pop(key)))
            del sizes[key]
    groups += filling.items()
    return [_bucket(members, *key) for key, members in groups]


def _bucket(
    members: Sequence[tuple[str, Tensor]], device: torch.device, grad_dtype: torch.dtype, wire_dtype: torch.dtype
) -> _Bucket:
    slots, offset = [], 0
    step = _ALIGNMENT // min(grad_dtype.itemsize, wire_dtype.itemsize)
    for name, param in members:
        like = _real(param.detach())
        # In the order of the weight's own elements, as autograd makes gradients: fused optimizers expect it.
        stride = like.stride() if _is_dense(like) else torch.empty(like.shape, device="meta").stride()
        slots.append(_Slot(name, param, offset, like.shape, stride))
        offset += -(-like.numel() // step) * step
    return _Bucket(slots, offset, grad_dtype, wire_dtype, device)


def _grad_dtype(param: Tensor) -> torch.dtype:
    """The dtype of a parameter's gradients, of a complex one that of their parts."""
    dtype: torch.dtype = getattr(param, "grad_dtype", None) or param.dtype
    return dtype.to_real()


def _dense(slot: _Slot) -> Tensor:
    grad = slot.param.grad
    assert grad is not None
    if grad.layout is not torch.strided:
        raise SettingError(
            f'Parameter {slot.name} has a sparse gradient, which backend="ddp" does not reduce. Use nn.Embedding(sparse=False).'
        )
    return grad


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements of a tensor fill its memory, each once, in some order of its dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _notify(reducer: weakref.ref[GradientReducer]) -> Callable[[Tensor], None]:
    # No strong reference: a cycle through the parameters would keep them in memory until the next garbage collection.
    def hook(param: Tensor) -> None:
        target = reducer()
        if target is not None:
            target.arrived(param)

    return hook
