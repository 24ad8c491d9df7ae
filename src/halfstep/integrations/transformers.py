"""transformers' Trainer, and the trainers of TRL, which are built on it.

    trainer = Trainer(model, args, train_dataset=data, callbacks=[HalfstepCallback()])

The callback attaches when training begins, to the optimizer and the scaler that the Trainer made, and detaches when it ends. It
sees each loss before `logging_nan_inf_filter` replaces a NaN by the average of the others, and the gradients unscaled.

A skipped step is computed again through the model's own forward, which returns the loss. A trainer with a loss of its own, as
most of TRL's have, is passed to the callback, which then calls its `compute_loss`:

    trainer.add_callback(HalfstepCallback(trainer))
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from halfstep.errors import SettingError
from halfstep.integrations.monitor import Monitor, Outlet
from halfstep.integrations.versions import warn_if_untested
from halfstep.watching.watch import Watch

__all__ = ["HalfstepCallback"]


class HalfstepCallback(TrainerCallback):  # type: ignore[misc]
    """Watches a Trainer: numerics every `every` steps, skipped steps with their cause, NaN losses, a stop after `max_skips` in a row.

    `outlets` are called with each Event; `watch` has the samples and events of the run.
    """

    def __init__(
        self,
        trainer: Trainer | None = None,
        *,
        every: int = 100,
        activations: bool = False,
        max_skips: int | None = 25,
        outlets: Sequence[Outlet] = (),
    ) -> None:
        if trainer is not None and not isinstance(trainer, Trainer):
            raise SettingError(f"HalfstepCallback takes a transformers.Trainer, not {type(trainer).__name__}.")
        warn_if_untested("transformers")
        self._trainer = trainer
        settings: dict[str, Any] = {"every": every, "activations": activations, "max_skips": max_skips}
        self._attach: Callable[..., Monitor] = functools.partial(Monitor, outlets=outlets, **settings)
        self._monitor: Monitor | None = None

    @property
    def watch(self) -> Watch:
        """The Watch of the last training run."""
        if self._monitor is None:
            raise SettingError("HalfstepCallback has no Watch before training begins.")
        return self._monitor.watch

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        optimizer: Any = None,
        **_: Any,
    ) -> None:
        """Attach to what the Trainer has made."""
        self._detach()  # from a run that raised
        assert model is not None
        self._monitor = self._attach(model, [optimizer], getattr(optimizer, "scaler", None), start=state.global_step)
        if self._trainer is None:
            self._monitor.follow(model, args.gradient_accumulation_steps)
        else:
            self._wrap_compute_loss(self._trainer, args.gradient_accumulation_steps)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """A step is over, taken or skipped."""
        if self._monitor is not None:
            self._monitor.end_step()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Deliver what is pending and detach."""
        self._detach()

    def _wrap_compute_loss(self, trainer: Trainer, accumulate: int) -> None:
        own, monitor = trainer.compute_loss, self._monitor
        assert monitor is not None

        def compute_loss(model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if monitor.is_replaying or not model.training:
                return own(model, inputs, *args, **kwargs)
            copy = dict(inputs)  # a loss may take the labels out
            divided = kwargs.get("num_items_in_batch") is not None
            monitor.record(
                lambda: _first(own(model, dict(copy), *args, **kwargs)), 1.0 if divided else 1.0 / accumulate
            )
            result = own(model, inputs, *args, **kwargs)
            monitor.add_loss(_first(result))
            return result

        trainer.compute_loss = compute_loss

    def _detach(self) -> None:
        if self._trainer is not None:
            vars(self._trainer).pop("compute_loss", None)
        if self._monitor is not None:
            self._monitor.close()


def _first(result: Any) -> Any:
    """The loss of what `compute_loss` returns: alone, or with the outputs."""
    return result[0] if isinstance(result, tuple) else result
