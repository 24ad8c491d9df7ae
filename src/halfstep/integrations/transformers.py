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
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
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
        self._settings: dict[str, Any] = {
            "every": every,
            "activations": activations,
            "max_skips": max_skips,
            "outlets": outlets,
        }
        self._monitor: Monitor | None = None
        self._handles: list[Any] = []
        self._accumulate = 1

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
        self._detach()  # of a run that raised
        assert model is not None
        self._accumulate = args.gradient_accumulation_steps
        self._monitor = Monitor(model, [optimizer], getattr(optimizer, "scaler", None), **self._settings)
        self._handles = [model.register_forward_hook(self._after_forward, with_kwargs=True)]
        if self._trainer is None:
            self._handles.append(model.register_forward_pre_hook(self._before_forward, with_kwargs=True))
        else:
            self._wrap_compute_loss(self._trainer)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """A step is over, taken or skipped."""
        if self._monitor is not None:
            self._monitor.end_step()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Deliver what is pending and detach."""
        self._detach()

    # --- forwards ---------------------------------------------------------------------------------------------------

    def _is_training(self, model: nn.Module) -> bool:
        return self._monitor is not None and not self._monitor.is_replaying and model.training and torch.is_grad_enabled()

    def _before_forward(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if self._is_training(model):
            assert self._monitor is not None
            # Losses that are divided by the number of items of the whole step need no other factor.
            factor = 1.0 if "num_items_in_batch" in kwargs else 1.0 / self._accumulate
            self._monitor.record(functools.partial(_loss_of_model, model, args, kwargs), factor)

    def _after_forward(self, model: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._trainer is None and self._is_training(model):
            assert self._monitor is not None
            self._monitor.add_loss(_loss_in(output))

    def _wrap_compute_loss(self, trainer: Trainer) -> None:
        own = trainer.compute_loss

        def compute_loss(model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            assert self._monitor is not None
            if not model.training or self._monitor.is_replaying:
                return own(model, inputs, *args, **kwargs)
            copy = dict(inputs) if isinstance(inputs, dict) else inputs  # a loss may take labels out of it
            self._monitor.record(lambda: _first(own(model, dict(copy), *args, **kwargs)), 1.0 / self._accumulate)
            result = own(model, inputs, *args, **kwargs)
            self._monitor.add_loss(_first(result))
            return result

        trainer.compute_loss = compute_loss
        self._handles.append(_Restore(trainer))

    def _detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        if self._handles and self._monitor is not None:
            self._monitor.close()
        self._handles = []


class _Restore:
    """Gives a trainer its own `compute_loss` back."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def remove(self) -> None:
        """As a hook's handle."""
        vars(self._trainer).pop("compute_loss", None)


def _first(result: Any) -> Any:
    """The loss of what `compute_loss` returns: alone, or with the outputs."""
    return result[0] if isinstance(result, tuple) else result


def _loss_in(output: Any) -> Any:
    """The loss in a model's output, if it has one."""
    return output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)


def _loss_of_model(model: nn.Module, args: Any, kwargs: Any) -> Tensor:
    loss = _loss_in(model(*args, **kwargs))
    if not isinstance(loss, Tensor):
        raise SettingError(
            "the model returned no loss, so the trainer has one of its own; pass it to the callback: HalfstepCallback(trainer)"
        )
    return loss
