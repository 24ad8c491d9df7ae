"""Guard: `optimizer.step()` changes nothing when a gradient is not finite, in any loop.

A bf16 or fp32 loop has no loss scaler, so nothing looks at its gradients: one NaN is written to every weight, the run
continues, and after a few checkpoints the last healthy one is gone. `Guard(optimizer)` gates the step:

    guard = halfstep.Guard(optimizer)
    loss.backward()
    optimizer.step()        # the update, or nothing at all

How it works. The gradients are read once, for their norm, which is inf or NaN exactly if an element is (or if the norm is
beyond fp32's range, about 1.8e19). An optimizer that follows torch's fused protocol gets the flag as the tensor `found_inf` and
skips in its own kernel, step counts included, so the host does not wait. For any other optimizer the host reads the flag,
the one wait, and does not call the step.

Under a GradScaler with a fused optimizer the flag is already there: Guard only makes it 0 or 1, adds the case of a scale
of 0, and counts. With another optimizer the scaler does not call a step that it skips, so Guard neither sees nor counts it.

Only the step is gated: a scheduler that the loop advances itself advances after a skip, too.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from halfstep.engine.steps import create_momentum, gradients_of, is_stepped_by_engine, skips_on_device
from halfstep.errors import OverflowStop, SettingError
from halfstep.events import log_warning
from halfstep.kernels.gradstats import flag_and_norm
from halfstep.optim.trainable import unsupported_kind
from halfstep.scaling.readback import Readback
from halfstep.scaling.scaler import named_parameters_of, nonfinite_gradients
from halfstep.scaling.skip_counts import count_step

__all__ = ["Guard", "GuardCounts", "guard_of"]

_GUARD = "_halfstep_guard"  # on the step of a guarded optimizer


@dataclass(frozen=True)
class GuardCounts:
    """How many steps a Guard let pass or skipped."""

    steps: int  # calls of step(), skipped ones included
    skips: int
    consecutive_skips: int


class Guard:
    """Makes `optimizer.step()` a no-op when a gradient is not finite, until `close()`.

    `max_consecutive` skipped steps in a row raise OverflowStop (None: never), on a GPU one step late; `named_parameters`, as from
    `model.named_parameters()`, provides the names in that error. Sharded parameters (FSDP2) need `process_group`, over
    which the ranks agree to skip. An optimizer has one Guard; several optimizers have one each and decide separately.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        max_consecutive: int | None = 25,
        *,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        process_group: Any = None,
    ) -> None:
        _check(optimizer, max_consecutive, sharded=process_group is not None)
        self.max_consecutive = max_consecutive
        self._optimizer, self._group = weakref.ref(optimizer), process_group
        self._names = {id(param): name for name, param in named_parameters or ()}
        self._counts: Tensor | None = None
        self._skips = 0  # as far as they have been delivered
        self._tables: dict[Any, dict[Any, Any]] = {}  # of the kernel that reads the gradients, by device
        self._readback, self._closed = Readback(), False
        self.observer: Any = None  # the hooks of a Watch on the same optimizer
        self._before = vars(optimizer).get("step")  # set if a scheduler has wrapped it
        self._gate = optimizer.step = _gate(self, optimizer.step)  # type: ignore[method-assign]

    @property
    def counts(self) -> GuardCounts:
        """Steps and skips so far; on a GPU this waits for the device."""
        return GuardCounts(*([0, 0, 0] if self._counts is None else self._counts.tolist()))

    def close(self) -> None:
        """Give the optimizer its own step back."""
        self._closed = True
        observer, self.observer = self.observer, None
        if observer is not None:
            observer.observe_steps()
        optimizer = self._optimizer()
        # A scheduler built later has wrapped the gated step, which then stays and lets everything pass.
        if optimizer is None or vars(optimizer).get("step") is not self._gate:
            return
        if self._before is None:
            del optimizer.step
        else:
            optimizer.step = self._before  # type: ignore[method-assign]

    # --- the step ---------------------------------------------------------------------------------------------------

    def _step(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        optimizer = self._optimizer()
        if self._closed or optimizer is None:
            return step(*args, **kwargs)
        loss, args, kwargs = _run_closure(optimizer, args, kwargs)
        if self.observer is not None:
            self.observer.before_guarded()
        scaler_flag = getattr(optimizer, "found_inf", None)
        if isinstance(scaler_flag, Tensor):
            flag = _usable_flag(scaler_flag, getattr(optimizer, "grad_scale", None))
            returned = self._step_on_device(optimizer, flag, step, args, kwargs)
        else:
            flag = self._read_gradients(optimizer)
            if skips_on_device(optimizer):
                returned = self._step_on_device(optimizer, flag, step, args, kwargs)
            elif flag.item():  # the one wait
                optimizer._opt_called, returned = True, None  # type: ignore[attr-defined]  # noqa: SLF001 - or schedulers warn
            else:
                returned = step(*args, **kwargs)
        if self.observer is not None:
            self.observer.after_guarded(flag)
        self._count(optimizer, flag)
        return returned if loss is None else loss

    def _step_on_device(
        self, optimizer: torch.optim.Optimizer, flag: Tensor, step: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        if isinstance(optimizer, torch.optim.SGD):
            create_momentum(optimizer)
        before = vars(optimizer).get("found_inf")
        optimizer.found_inf = flag  # type: ignore[attr-defined]
        try:
            return step(*args, **kwargs)
        finally:
            if before is None:
                del optimizer.found_inf  # type: ignore[attr-defined]
            else:
                optimizer.found_inf = before  # type: ignore[attr-defined]

    @torch.no_grad()
    def _read_gradients(self, optimizer: torch.optim.Optimizer) -> Tensor:
        """1 if an element of a gradient is not finite, on any rank of the group; else 0."""
        params = [p for group in optimizer.param_groups for p in group["params"]]
        groups: dict[torch.device, list[Tensor]] = {}
        for grad in gradients_of({str(i): p for i, p in enumerate(params)}).values():
            local = grad.to_local() if hasattr(grad, "to_local") else grad
            groups.setdefault(local.device, []).append(local)
        device = params[0].device
        flags = [flag_and_norm(grads, self._tables.setdefault(d, {}))[0].to(device) for d, grads in groups.items()]
        if not flags:
            flag = torch.zeros((), dtype=torch.float32, device=device)
        else:
            flag = flags[0] if len(flags) == 1 else torch.stack(flags).amax()
        if self._group is not None:
            torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group=self._group)
        return flag

    # --- counts and the hard stop -----------------------------------------------------------------------------------

    def _count(self, optimizer: torch.optim.Optimizer, flag: Tensor) -> None:
        if self._counts is None:
            self._counts = torch.zeros(3, dtype=torch.int64, device=flag.device)
        count_step(self._counts, flag.detach().reshape(()).ne(0))
        # Ranks that agree must also stop together, so on a GPU they read the counts of the step before, arrived or not.
        together = self._group is not None and flag.device.type != "cpu"
        arrived = self._readback.deliver(wait=True) if together else []
        self._readback.push(self._counts)
        for _, values in arrived if together else self._readback.deliver(wait=False):
            self._report(optimizer, *map(int, values))

    def _report(self, optimizer: torch.optim.Optimizer, steps: int, skips: int, consecutive: int) -> None:
        """Log the skips number 1, 2, 4, 8, ... and raise after too many in a row."""
        new, self._skips = skips > self._skips, skips
        if self.max_consecutive is not None and consecutive >= self.max_consecutive:
            raise OverflowStop(
                f"{consecutive} steps of {type(optimizer).__name__} in a row were skipped because of non-finite gradients "
                f"(max_consecutive={self.max_consecutive}). {nonfinite_gradients(named_parameters_of(optimizer, self._names))} "
                "Usual causes: NaN or inf in the data or the loss, weights that are not finite, or a learning rate that is too high. "
                "max_consecutive=None never stops."
            )
        if new and skips & (skips - 1) == 0:
            log_warning(
                f"Guard: step {steps} of {type(optimizer).__name__} was skipped because a gradient is not finite; {skips} skipped so far."
            )

    def __repr__(self) -> str:
        optimizer = self._optimizer()
        return f"Guard({type(optimizer).__name__}, max_consecutive={self.max_consecutive})"


def guard_of(optimizer: torch.optim.Optimizer) -> Guard | None:
    """The Guard of an optimizer, if it has one that is not closed."""
    guard: Guard | None = getattr(optimizer.step, _GUARD, None)
    return None if guard is None or guard._closed else guard  # noqa: SLF001 - of this file


def _gate(guard: Guard, step: Callable[..., Any]) -> Callable[..., Any]:
    """The step that replaces an optimizer's own; refers to the optimizer weakly, as it is stored in it."""
    method = getattr(step, "__func__", None)

    def gated(*args: Any, **kwargs: Any) -> Any:
        optimizer = guard._optimizer()  # noqa: SLF001 - of this file
        return guard._step(step if method is None else types.MethodType(method, optimizer), args, kwargs)  # noqa: SLF001

    signature, marks = inspect.signature(step), vars(method or step)
    if method is not None:
        step = method  # not the bound method, which refers to the optimizer
    functools.update_wrapper(gated, step)
    del vars(gated)["__wrapped__"]
    gated.__signature__ = signature  # type: ignore[attr-defined]  # GradScaler looks at it
    vars(gated).update(marks)
    # Schedulers wrap the function of a bound method.
    gated.__func__ = lambda _, *args, **kwargs: gated(*args, **kwargs)  # type: ignore[attr-defined]
    for function in (gated, gated.__func__):  # type: ignore[attr-defined]
        setattr(function, _GUARD, guard)
    return gated


def _check(optimizer: Any, max_consecutive: Any, *, sharded: bool) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise SettingError(
            f"Guard takes a torch.optim.Optimizer, not {type(optimizer).__name__}; several optimizers have one Guard each."
        )
    name = type(optimizer).__name__
    if max_consecutive is not None and (
        isinstance(max_consecutive, bool) or not isinstance(max_consecutive, int) or max_consecutive < 1
    ):
        raise SettingError(f"max_consecutive={max_consecutive!r} must be a whole number of at least 1, or None.")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise SettingError(
            "LBFGS computes several gradients inside one step(), which a Guard around it cannot check. Check the loss in the closure."
        )
    if guard_of(optimizer) is not None:
        raise SettingError(f"This {name} has a Guard already; close() that one first, or keep it.")
    if is_stepped_by_engine(optimizer):
        raise SettingError(
            f"This {name} is stepped by a halfstep.Engine, which skips non-finite gradients itself; remove the Guard."
        )
    for param_name, param in named_parameters_of(optimizer, {}):
        kind = unsupported_kind(param) if param.requires_grad else None
        is_sharded = hasattr(param, "to_local") or getattr(param, "_is_flat_param", False)
        if kind is not None and not (sharded and is_sharded):
            way_out = "Pass process_group=, over which the ranks agree to skip." if is_sharded else kind[1]
            raise SettingError(f"Guard cannot check {param_name} of {name}: it is {kind[0]}. {way_out}")


def _run_closure(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Run the closure of a step, and return its loss and the arguments without it.

    torch's optimizers and ours run it once, before anything else, so it can run before the gradients are checked.
    """
    closure = args[0] if args else kwargs.get("closure")
    if closure is None:
        return None, args, kwargs
    name = type(optimizer).__name__
    if not type(optimizer).__module__.startswith(("torch.optim", "halfstep.optim")):
        raise SettingError(
            f"{name}.step(closure) may use the closure in its own way, so Guard cannot check the gradients in between. Call backward "
            "first and step() without a closure."
        )
    if getattr(optimizer, "found_inf", None) is not None:
        raise SettingError(
            f"{name}.step(closure) cannot be used with a loss scaler: the gradients of the closure would not be unscaled. Call backward "
            "first and step() without a closure."
        )
    with torch.enable_grad():
        loss = cast("Callable[[], Any]", closure)()
    return loss, args[1:], {key: value for key, value in kwargs.items() if key != "closure"}


@torch.no_grad()
def _usable_flag(flag: Tensor, scale: Tensor | None) -> Tensor:
    """A scaler's flag as 0 or 1: fused kernels compare it with 1, torch's scaler adds up devices, and its scale may be 0."""
    bad = flag.reshape(()) != 0
    if isinstance(scale, Tensor):
        scale = scale.reshape(()).to(bad.device)
        bad = bad | ~(scale.isfinite() & (scale > 0))
    return bad.to(torch.float32)
