"""Accelerate: our scaler in the place of torch's, and a Watch on what `prepare` has made.

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    session = attach(accelerator)

The scaler that `prepare` put into the accelerator and its optimizers is replaced by `halfstep.GradScaler` with the same settings
and state: it has a minimum, counts and a hard stop. Skipped steps are examined where the model returns its loss; in other
loops `session.record(fn)`, before a forward, says how to compute the loss again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from halfstep.errors import SettingError
from halfstep.events import log_info
from halfstep.integrations.monitor import Monitor, Outlet
from halfstep.integrations.versions import warn_if_untested
from halfstep.scaling.gradscaler import GradScaler

__all__ = ["attach", "replace_scaler"]


def attach(
    accelerator: Accelerator,
    *,
    every: int = 100,
    activations: bool = False,
    max_skips: int | None = 25,
    outlets: Sequence[Outlet] = (),
    start: int = 0,
) -> Monitor:
    """Watch the models and optimizers that an accelerator has prepared, until `close()`; its `watch` has samples and events.

    `start` is the number of steps that a resumed run has taken already: events continue to count from there.
    """
    warn_if_untested("accelerate")
    models = [accelerator.unwrap_model(each, keep_fp32_wrapper=True) for each in accelerator._models]  # noqa: SLF001 - has no public name
    optimizers = list(accelerator._optimizers)  # noqa: SLF001
    if not models or not optimizers:
        raise SettingError(
            "This accelerator has no model and optimizer yet: call accelerator.prepare(...) before attach()."
        )
    replace_scaler(accelerator, [item for model in models for item in model.named_parameters()])
    # Several models, as in a GAN, are watched as one whose names begin with their number.
    whole = models[0] if len(models) == 1 else nn.ModuleList(models)
    settings: dict[str, Any] = {"every": every, "activations": activations, "max_skips": max_skips, "outlets": outlets}
    monitor = Monitor(whole, optimizers, accelerator.scaler, start=start, **settings)
    for model in models:
        monitor.follow(model, accelerator.gradient_accumulation_steps)
    _observe_losses(accelerator, monitor)
    _observe_steps(accelerator, monitor)
    return monitor


def replace_scaler(accelerator: Accelerator, named_parameters: Sequence[tuple[str, Any]] = ()) -> None:
    """Put a `halfstep.GradScaler` with the same settings and state into an accelerator, if it has torch's."""
    theirs = accelerator.scaler
    if type(theirs) not in {torch.amp.GradScaler, torch.cuda.amp.GradScaler}:
        return  # none, ours, or one that knows about shards
    ours = GradScaler(
        theirs._device,  # noqa: SLF001 - has no public name
        theirs.get_scale(),
        theirs.get_growth_factor(),
        theirs.get_backoff_factor(),
        theirs.get_growth_interval(),
        theirs.is_enabled(),
        named_parameters=named_parameters,
    )
    if theirs.is_enabled():
        ours.load_state_dict(theirs.state_dict())
    accelerator.scaler = ours
    for optimizer in accelerator._optimizers:  # noqa: SLF001
        if optimizer.scaler is theirs:
            optimizer.scaler = ours
    log_info("accelerator.scaler is a halfstep.GradScaler with the settings and the state of torch's.")


def _observe_losses(accelerator: Accelerator, monitor: Monitor) -> None:
    """See losses that the model does not return."""
    backward = accelerator.backward

    def observed(loss: Any, **kwargs: Any) -> None:
        backward(loss, **kwargs)
        monitor.add_other_loss(loss)

    accelerator.backward = observed
    monitor.on_close(lambda: vars(accelerator).pop("backward", None))


def _observe_steps(accelerator: Accelerator, monitor: Monitor) -> None:
    """See the end of each step: all optimizers have stepped, or one of them steps again."""
    optimizers = list(accelerator._optimizers)  # noqa: SLF001
    stepped: set[int] = set()

    def observe(number: int, optimizer: Any) -> None:
        step = optimizer.step

        def observed(*args: Any, **kwargs: Any) -> Any:
            returned = step(*args, **kwargs)
            if accelerator.sync_gradients:  # else it did nothing: the window is not over
                again = number in stepped
                stepped.add(number)
                if again or len(stepped) == len(optimizers):
                    stepped.clear()
                    stepped.update([number] if again else [])
                    monitor.end_step()
            return returned

        optimizer.step = observed
        monitor.on_close(lambda: vars(optimizer).pop("step", None))

    for number, optimizer in enumerate(optimizers):
        observe(number, optimizer)
