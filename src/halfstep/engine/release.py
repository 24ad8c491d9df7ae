"""Gradient release: parameters are updated inside backward, bucket by bucket, and their gradients dropped at once.

Ordinarily all gradients are alive when the step begins: 2 or 4 bytes per parameter. With release about one bucket of them is.
A hook on each parameter only notes that its gradient is complete. Gradients arrive in nearly the same order in every step,
so those that arrived one after the other in the first step form a bucket, and when the last of a bucket has arrived, its
parameters are updated together: one pass for norm and finite check and one for the update, whose tables are reused from
step to step. A pass per parameter would be bound by the host and by launches.

If the order changes, a bucket may wait for a gradient that comes late or never. It is then released with what it has: when
too much is waiting, and at the end of backward at the latest. After the former the order is recorded again.

The price is that nothing can be decided from all gradients together. There is no norm to clip by, no loss scale that could
undo earlier updates after a later layer's overflow, no second micro-batch; and a non-finite gradient skips only its own
bucket, when others may have been updated already. So it is an option, allowed where the rest of the step does not need
these guarantees, and the truth table lists what is waived.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from halfstep.engine.steps import Decision
from halfstep.errors import SettingError
from halfstep.kernels.gradstats import flag_and_norm
from halfstep.kernels.table import copied_to
from halfstep.optim.lean import LeanOptimizer
from halfstep.precision.policy import Policy

__all__ = ["BUCKET_BYTES", "WAIVED_GUARANTEES", "GradientRelease", "check_release"]

# Bytes of gradients that complete a bucket. Large enough that launches and tables are a small part of its update, small
# next to any model for which release matters, and within the 50 MB cache of an H100 or H200, so that the update finds
# the gradients there that the norm has read. A smaller model is one bucket, updated as in the ordinary step.
BUCKET_BYTES = 32 * 2**20
_MAX_WAITING = 2  # buckets' worth of gradients that may wait for the rest of their buckets

WAIVED_GUARANTEES = (
    "gradient release: a non-finite gradient skips only the bucket of parameters it is released with, not the step",
    "gradient release: gradients cannot be clipped, only their norm reported",
)


def check_release(
    policy: Policy, max_norm: float | None, accumulate: int, *, compiled: bool, backend: str = "single"
) -> None:
    """Raise where something needs all gradients at once."""
    reason = None
    if policy.scaling.mode != "none":
        reason = f"precision {policy} scales the loss, and an overflow in a later layer could not undo earlier updates"
    elif max_norm is not None:
        reason = f"max_norm={max_norm} needs the norm of all gradients before the first update; use max_norm=None"
    elif accumulate > 1:
        reason = f"accumulate={accumulate} adds gradients up before the update; use accumulate=1 and a larger batch"
    elif backend == "ddp":
        reason = "gradients are averaged over ranks after they would have been used, and the ranks would drift apart"
    elif backend == "fsdp":
        reason = "FSDP2 reduces the gradients of a whole unit after its backward, and agrees on them over ranks when the window closes"
    elif backend == "deepspeed":
        reason = "DeepSpeed partitions the gradients of a whole window, and ranks agree on them when it closes"
    elif compiled:
        reason = "compile=True returns all gradients of the compiled backward at once, so none would be released early"
    if reason is not None:
        raise SettingError(f"gradient_release=True cannot be used here: {reason}.")


@dataclass(frozen=True)
class _Owner:
    """Where a parameter belongs."""

    optimizer: LeanOptimizer
    group: dict[str, Any]


@dataclass(eq=False)
class _Bucket:
    """Parameters that are updated together."""

    params: list[Tensor] = field(default_factory=list)  # in the order in which their gradients first arrived
    waiting: set[Tensor] = field(default_factory=set)  # those of them whose gradients have arrived and are not used yet
    waiting_bytes: int = 0
    tables: dict[Any, Any] = field(default_factory=dict)  # of the kernels

    def forget(self) -> None:
        """Wait for all gradients again."""
        self.waiting, self.waiting_bytes = set(), 0

    def release(self, owners: Mapping[Tensor, _Owner]) -> Tensor | None:
        """Update the waiting parameters, or none if a gradient is not finite, and drop the gradients; returns their norm."""
        # Whatever the order of arrival was: the kernels' tables are those of the last time if the parameters are the same.
        params = [p for p in self.params if p in self.waiting and p.grad is not None]
        self.forget()
        if not params:
            return None
        flag, norm = flag_and_norm([p.grad for p in params], self.tables)  # type: ignore[misc]
        members: dict[LeanOptimizer, list[tuple[dict[str, Any], Tensor]]] = {}
        for param in params:
            owner = owners[param]
            members.setdefault(owner.optimizer, []).append((owner.group, param))
        for optimizer, pairs in members.items():
            optimizer.step_some(pairs, flag, self.tables)
        for param in params:
            param.grad = None
        return norm


class _Arrivals:
    """The gradients of one device, in the order of their arrival; autograd has one thread per device."""

    def __init__(self, device: torch.device, owners: Mapping[Tensor, _Owner]) -> None:
        self._device, self._owners, self._limit = device, owners, BUCKET_BYTES
        self._bucket_of: dict[Tensor, _Bucket] = {}
        self._open = _Bucket()  # for parameters that arrive for the first time
        self._waiting: dict[_Bucket, None] = {}  # buckets with gradients that are not used yet, the oldest first
        self._arrived: set[Tensor] = set()  # in this backward
        self._stream: torch.cuda.Stream | None = None  # the waiting gradients were computed on it
        self._order_changed = False
        self._norms: list[Tensor] = []  # of the buckets released in this step

    def start(self) -> None:
        """Begin a backward; gradients that a failed one has left are no longer waited for."""
        for bucket in self._waiting:
            bucket.forget()
        if self._order_changed:
            self._bucket_of, self._open, self._order_changed = {}, _Bucket(), False
        self._waiting, self._arrived, self._stream, self._norms = {}, set(), None, []

    def __contains__(self, param: Tensor) -> bool:
        """Whether the gradient of a parameter has arrived in this backward."""
        return param in self._arrived

    def add(self, param: Tensor) -> None:
        """Note that the gradient of a parameter is complete; releases its bucket if that was the last one."""
        assert param.grad is not None
        if self._device.type == "cuda":
            self._follow(torch.cuda.current_stream(self._device))
        self._arrived.add(param)
        bucket = self._bucket_of.get(param)
        if bucket is None:
            bucket = self._bucket_of[param] = self._open
            bucket.params.append(param)
        bucket.waiting.add(param)
        bucket.waiting_bytes += param.grad.numel() * param.grad.element_size()
        self._waiting[bucket] = None
        if bucket is not self._open:
            is_full = len(bucket.waiting) == len(bucket.params)
        else:
            is_full = bucket.waiting_bytes >= self._limit
        if is_full:
            self._release([bucket])
        elif len(self._waiting) > 1 and sum(b.waiting_bytes for b in self._waiting) > _MAX_WAITING * self._limit:
            self._order_changed = True
            self._release(self._waiting)

    def finish(self) -> None:
        """Release what is still waiting at the end of backward, in the thread of its caller."""
        if self._stream is None:
            self._release(self._waiting)
        else:
            self._follow(torch.cuda.current_stream(self._device), always=True)

    def take_norms(self) -> list[Tensor]:
        """The norms of the buckets released since the last call."""
        norms, self._norms = self._norms, []
        return norms

    def _follow(self, stream: torch.cuda.Stream, *, always: bool = False) -> None:
        """Release what was computed on another stream there, because its memory is reused in that stream's order."""
        before, self._stream = self._stream, stream
        if before is None or (before == stream and not always):
            return
        with torch.cuda.stream(before):  # which selects the device as well
            self._release(self._waiting)
        if before != stream:
            stream.wait_stream(before)

    @torch.no_grad()
    def _release(self, buckets: Iterable[_Bucket]) -> None:
        for bucket in list(buckets):
            if bucket is self._open:
                self._open = _Bucket()
            del self._waiting[bucket]
            norm = bucket.release(self._owners)
            if norm is not None:
                self._norms.append(norm)


class GradientRelease:
    """Updates parameters from hooks in a backward that runs inside `with release:`; `finish` returns the outcome of the step.

    Any other backward leaves its gradients, which the Engine's guards then report.
    """

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], names: Mapping[str, Tensor], undo: contextlib.ExitStack
    ) -> None:
        self._names = {param: name for name, param in names.items()}
        self._undo, self._is_running = undo, False
        self._owners: dict[Tensor, _Owner] = {}
        for optimizer in optimizers:
            assert isinstance(optimizer, LeanOptimizer)  # setup adopts every optimizer under gradient release
            optimizer._opt_called = True  # type: ignore[attr-defined]  # noqa: SLF001 - or schedulers miss its step()
            self._owners |= {p: _Owner(optimizer, group) for group in optimizer.param_groups for p in group["params"]}
        self._arrivals = {device: _Arrivals(device, self._owners) for device in {p.device for p in self._owners}}
        self._without_hook = list(self._owners)
        self._register()

    def _register(self) -> None:
        """Put a hook on each parameter that has none yet; frozen ones take none before they are unfrozen."""
        for param in (p for p in self._without_hook if p.requires_grad):
            handle = param.register_post_accumulate_grad_hook(_hook(self))  # type: ignore[no-untyped-call]
            self._undo.callback(handle.remove)
        self._without_hook = [p for p in self._without_hook if not p.requires_grad]

    def arrive(self, param: Tensor) -> None:
        """Take the complete gradient of a parameter; in a backward that the Engine does not run it stays where it is."""
        if not self._is_running:
            return
        arrivals = self._arrivals[param.device]
        if param in arrivals:
            raise SettingError(
                f"The gradient of {self._names[param]} was computed twice in one step: with gradient_release it was used and dropped "
                "the first time. Call engine.backward(loss) once per step, and use checkpoint(use_reentrant=False)."
            )
        arrivals.add(param)

    def __enter__(self) -> None:
        self._register()
        for arrivals in self._arrivals.values():
            arrivals.start()
        self._is_running = True

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        self._is_running = False
        if kind is None:
            for arrivals in self._arrivals.values():
                arrivals.finish()

    def finish(self, device: torch.device) -> Decision:
        """The flag (whether any bucket was skipped) and the norm of the released gradients; starts the next step."""
        parts = [norm for arrivals in self._arrivals.values() for norm in arrivals.take_norms()]
        norms = [copied_to(norm, device) for norm in parts]
        norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros((), device=device)
        return Decision((~norm.isfinite()).to(torch.float32), norm, torch.ones((), device=device))


def _hook(release: GradientRelease) -> Callable[[Tensor], None]:
    # Weak: parameters refer to their hooks, and a cycle would keep weights and states until the next garbage collection.
    reference = weakref.ref(release)

    def arrive(param: Tensor) -> None:
        target = reference()
        if target is not None:
            target.arrive(param)

    return arrive
