"""Hooks of a Watch in a loop that Halfstep does not own.

With torch's GradScaler (or halfstep.GradScaler) its `step` is wrapped: the gradients are looked at before it, divided by the scale
unless `unscale_` was called, and whether it skipped is read from its flags, on a GPU without waiting. Without a scaler the
optimizer's step hooks are used, and its gradients are taken as they are, divided by `optimizer.grad_scale` where that is set. A
Guard on the optimizer shows its decisions itself: what it skips never reaches the optimizer.

Ranks that share the parameters (FSDP2) deliver the outcome of a step at the same place, on a GPU at the start of the next step: what
follows from it, such as a hard stop, happens on all of them.
"""

from __future__ import annotations

import contextlib
import types
import weakref
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState

from halfstep.engine.steps import gradients_of, is_stepped_by_engine
from halfstep.errors import SettingError
from halfstep.events import log_once
from halfstep.optim.trainable import check_trainable
from halfstep.scaling.readback import Readback
from halfstep.scaling.skip_counts import flag_of_all
from halfstep.watching.guard import Guard, guard_of
from halfstep.watching.loop_replay import LoopReplays
from halfstep.watching.sampler import num_nonfinite

__all__ = ["LoopHooks", "named_params_of"]

_NOTHING = contextlib.nullcontext()


def named_params_of(optimizer: Any, model: nn.Module) -> dict[str, Tensor]:
    """The parameters of an optimizer, by the model's names."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise SettingError(f"Watch.attach takes an Engine or torch optimizers, not {type(optimizer).__name__}.")
    name = type(optimizer).__name__
    if is_stepped_by_engine(optimizer):
        raise SettingError(f"This {name} is stepped by a halfstep.Engine; pass the Watch to it: Engine(watch=Watch()).")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise SettingError("LBFGS computes several gradients inside one step(), which a Watch cannot see.")
    names = {param: key.replace("_orig_mod.", "") for key, param in model.named_parameters()}
    params = [p for group in optimizer.param_groups for p in group["params"]]
    strangers = sum(p not in names for p in params)
    if strangers:
        raise SettingError(
            f"{strangers} of {len(params)} parameters of {name} are not in the model. Pass the module that owns them: Watch(model)."
        )
    named = {names[p]: p for p in params}
    check_trainable(named.items(), "Watch", shards=True)
    return named


class LoopHooks:
    """Calls a stream around the steps of one optimizer, until `close()`."""

    def __init__(
        self,
        stream: Any,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler | None,
        replays: LoopReplays | None,
        start: int = 0,
    ) -> None:
        """`start` is the number of steps that the run has taken already."""
        self._stream, self._step, self._replays = stream, start, replays
        # Weak: the hooks are stored in the optimizer and the scaler.
        self._optimizer = weakref.ref(optimizer)
        self._params: Mapping[str, Tensor] = stream.sampler.params
        self._is_sharded = stream.sampler.shards is not None
        self._readback = Readback()
        self._handles: list[Any] = []
        self._guard: Guard | None = None
        self._scaler = weakref.ref(scaler) if scaler is not None and scaler.is_enabled() else None
        if scaler is not None and self._scaler is not None:
            _hooks_of(scaler)[optimizer] = self
            return
        self._guard = guard_of(optimizer)
        if self._guard is not None:
            self._guard.observer = self
        else:
            self.observe_steps()

    def observe_steps(self) -> None:
        """Use the optimizer's own hooks; also called by a Guard that is closed."""
        optimizer, self._guard = self._optimizer(), None
        if optimizer is not None:
            self._handles = [
                optimizer.register_step_pre_hook(self._pre_hook),
                optimizer.register_step_post_hook(self._post_hook),
            ]

    def close(self) -> None:
        """Deliver what is pending and remove the hooks."""
        for handle in self._handles:
            handle.remove()
        if self._guard is not None:
            self._guard.observer = None
        scaler, optimizer = None if self._scaler is None else self._scaler(), self._optimizer()
        if scaler is not None and optimizer is not None:
            hooks = _hooks_of(scaler)
            hooks.pop(optimizer, None)
            if not hooks:
                del scaler.step
        self._deliver(wait=True)

    # --- with a scaler ----------------------------------------------------------------------------------------------

    def around_step(
        self,
        scaler: torch.amp.GradScaler,
        optimizer: torch.optim.Optimizer,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run the scaler's step with the stream's calls around it."""
        scale = scaler._get_scale_async()  # noqa: SLF001 - get_scale() would wait for the device
        state = scaler._per_optimizer_states[id(optimizer)]  # noqa: SLF001 - the stage and flags have no public name
        divisor = None if state["stage"] is OptState.UNSCALED else scale
        self._begin(divisor)
        returned = type(scaler).step(scaler, optimizer, *args, **kwargs)
        flags = list(scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())  # noqa: SLF001
        if flags and scale is not None:  # which changes in update(), after this
            self._end(flag_of_all(flags, scale.device), scale)
        else:
            self._end(None, None)
        return returned

    # --- without one ------------------------------------------------------------------------------------------------

    def _pre_hook(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # torch passes the optimizer in `args`, too.
        if any(callable(a) for a in args[1:]) or callable(kwargs.get("closure")):
            log_once(
                "Watch: step(closure) computes gradients inside the step, so a watch sees those of the step before."
            )
        scale = getattr(optimizer, "grad_scale", None)
        self._begin(scale if isinstance(scale, Tensor) else None)

    def _post_hook(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        flag = getattr(optimizer, "found_inf", None)
        self._end(flag if isinstance(flag, Tensor) else None, None)

    # --- with a Guard -----------------------------------------------------------------------------------------------

    def before_guarded(self) -> None:
        """Called by a Guard before it takes or skips a step."""
        self._begin(None)

    def after_guarded(self, flag: Tensor) -> None:
        """Called by a Guard with the flag that decided."""
        self._end(flag, None)

    # --- all --------------------------------------------------------------------------------------------------------

    def _begin(self, divisor: Tensor | None) -> None:
        self._deliver(wait=self._is_sharded)
        self._step += 1
        if self._replays is not None:
            self._replays.end_window(self._step)
        optimizer = self._optimizer()
        optimizers = [] if optimizer is None else [optimizer]
        self._stream.before(self._step, lambda: gradients_of(self._params), divisor, optimizers)

    def _end(self, found_inf: Tensor | None, scale: Tensor | None) -> None:
        self._stream.after(found_inf)
        if found_inf is not None and found_inf.is_cpu:  # known already
            self._arrived(self._step, found_inf.item(), 1.0 if scale is None else scale.item())
        elif found_inf is not None:
            flag = found_inf.detach().reshape(1)
            # One kernel at most: each is launched in every step.
            values = flag if scale is None else torch.cat((flag, scale.detach().reshape(1)))
            self._readback.push(values, self._step)
        if not self._is_sharded or self._stream.device.type == "cpu":
            self._deliver(wait=False)

    def _deliver(self, *, wait: bool) -> None:
        if len(self._readback):
            for step, (flag, *scale) in self._readback.deliver(wait=wait):
                self._arrived(step, flag, *scale)
        if self._stream.is_pending:
            self._stream.collect(wait=wait)

    def _arrived(self, step: int, flag: float, scale: float = 1.0) -> None:
        skipped = flag != 0
        nonfinite: dict[str, int] = {}
        if skipped and self._stream.device.type == "cpu":
            nonfinite, shards = num_nonfinite(gradients_of(self._params)), self._stream.sampler.shards
            nonfinite = nonfinite if shards is None else shards.add_up(nonfinite)
        self._stream.outcome(step, skipped=skipped, scale=scale, nonfinite=nonfinite)
        if self._replays is not None:
            with self._stream.paused() if skipped else _NOTHING:
                self._replays.delivered(step, skipped=skipped, scale=scale)


class _WatchedStep:
    """The step of a scaler with hooks, by optimizer; in a copy or a pickle of the scaler it is the plain step."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler = weakref.ref(scaler)
        self.hooks: MutableMapping[torch.optim.Optimizer, LoopHooks] = weakref.WeakKeyDictionary()

    def __call__(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        scaler = self._scaler()
        assert scaler is not None
        hooks = self.hooks.get(optimizer)
        if hooks is not None:
            return hooks.around_step(scaler, optimizer, args, kwargs)
        return type(scaler).step(scaler, optimizer, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _plain_step, (self._scaler(),)


def _plain_step(scaler: torch.amp.GradScaler) -> Any:
    return types.MethodType(type(scaler).step, scaler)


def _hooks_of(scaler: torch.amp.GradScaler) -> MutableMapping[torch.optim.Optimizer, LoopHooks]:
    """The hooks on a scaler by optimizer; its step is wrapped when they are first needed."""
    step = vars(scaler).get("step")
    if step is None:
        step = scaler.step = _WatchedStep(scaler)  # type: ignore[method-assign]
    if not isinstance(step, _WatchedStep):
        raise SettingError(
            "Another tool has replaced this scaler's step(); a Watch cannot see the steps that it skips."
        )
    return step.hooks
