"""The Engine: mixed-precision training in the right order, around a loop that the user owns.

    engine = halfstep.Engine(model, optimizer, precision="auto", max_norm=1.0, accumulate=4, scheduler=scheduler)
    for x, y in loader:
        with engine.forward():
            loss = loss_fn(model(x), y)
        engine.backward(loss)
        result = engine.step()

`backward` multiplies by the loss scale. `step` closes a window every `accumulate` calls: it reads the gradients once,
unscales, clips and steps, or skips; updates the loss scale and the EMA; restores buffers after a skip; advances the
schedulers only for a step that happened; and clears the gradients.

Nothing in a step waits for the device (with fused optimizers): the outcome is delivered to the host by the next step,
before it launches its own update. On a CPU it is delivered at once. `evaluate`, `save`, `state_dict` and `close` wait.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from halfstep.backends import Backend, make_backend
from halfstep.checkpoint.directory import Checkpoint, load_checkpoint, save_checkpoint
from halfstep.engine.blocks import Blocks
from halfstep.engine.buffers import BufferGuard
from halfstep.engine.checks import check_loss, check_scaler, check_settings
from halfstep.engine.compiling import check_compile, compile_model, records_graphs
from halfstep.engine.delivery import Delivery, Progress
from halfstep.engine.determinism import make_deterministic
from halfstep.engine.ema import Ema
from halfstep.engine.guards import GradientGuard
from halfstep.engine.region import recomputing
from halfstep.engine.release import GradientRelease, check_release
from halfstep.engine.result import StepResult
from halfstep.engine.setup import as_list, prepare_run
from halfstep.engine.state import RunParts, checkpoint_parts, engine_state, load_state, restore_extra, state_of
from halfstep.engine.steps import reject_foreign_steps
from halfstep.engine.truth import Truth, truth_of
from halfstep.engine.update import Update
from halfstep.engine.watch import EngineWatch, check_watch, hook_of
from halfstep.engine.window import Window
from halfstep.errors import SettingError
from halfstep.events import log_info
from halfstep.hardware.probe import Hardware, probe
from halfstep.precision.choice import resolve
from halfstep.precision.policy import Policy
from halfstep.scaling.scaler import Scaler, make_scaler

__all__ = ["Engine"]


class Engine:
    """Trains one model with one or several optimizers under a precision policy.

    `precision` is a policy, its text, a foreign name, or "auto". `max_norm` clips the true gradients; None does not clip.
    `ema` is the decay of an EMA of the masters. `compile=True` compiles the model in place, and `compile="reduce-overhead"` in
    that mode of torch.compile, with CUDA graphs. `deterministic=True` asks torch for deterministic algorithms.
    `gradient_release=True` updates each parameter inside backward. `backend` is a Backend or its name. `scaler` replaces the
    policy's loss scaler. `on_step(result)` is called when the outcome of a step has arrived. `watch` implements methods of
    `halfstep.engine.watch.EngineWatch`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        precision: str | Policy = "auto",
        *,
        max_norm: float | None = None,
        accumulate: int = 1,
        scheduler: Any = None,
        ema: float | None = None,
        compile: bool | str = False,  # noqa: A002 - torch's own word for it
        deterministic: bool = False,
        gradient_release: bool = False,
        watch: EngineWatch | Any = None,
        backend: Backend | str = "auto",
        scaler: Scaler | None = None,
        on_step: Callable[[StepResult], None] | None = None,
    ) -> None:
        optimizers, schedulers = as_list(optimizer), as_list(scheduler)
        check_settings(model, optimizers, schedulers, max_norm, accumulate)
        check_compile(compile)
        check_watch(watch)
        self.hardware: Hardware = probe()
        self.policy, self.notes = resolve(precision, self.hardware)
        self.backend = make_backend(backend, model)
        self.backend.check(model, self.policy)
        self.scaler = scaler or make_scaler(self.policy.scaling)
        check_scaler(self.scaler, self.policy.compute)
        if gradient_release:
            check_release(self.policy, max_norm, accumulate, compiled=bool(compile))
        for note in self.notes:
            log_info(note)
        self.model, self.max_norm, self.accumulate = model, max_norm, accumulate
        module = self.backend.prepare(model, optimizers)
        run = self._run = prepare_run(
            module, optimizers, self.policy, accumulate=accumulate, gradient_release=gradient_release
        )
        self.device, self.optimizers, self.schedulers = run.device, run.optimizers, schedulers
        reject_foreign_steps(self.optimizers, run.undo)
        self.ema = None if ema is None else Ema(run.params, ema, run.master_of)
        self.window, self.progress = Window(accumulate), Progress()
        self._buffers = BufferGuard(module)
        hide, in_graphs = self.policy.widens_grads(accumulate), records_graphs(compile, self.device)
        self._gradients = GradientGuard(run.params, self.optimizers, in_graphs=in_graphs, hide=hide)
        self._release = GradientRelease(self.optimizers, run.params, run.undo) if gradient_release else None
        self._blocks = Blocks(run, self.backend, self._buffers, self._gradients, self.ema)
        self._update = Update(run, self.backend, self.scaler, self._buffers, self.ema, self._release, max_norm, watch)
        callbacks = [hook_of(watch, "delivered"), *([] if on_step is None else [on_step])]
        self._delivery = Delivery(self.progress, schedulers, self.scaler, run.params, callbacks)
        self._watch, self._closed = watch, False
        self._truth: Truth | None = None
        if deterministic:
            make_deterministic(run.undo)
        compile_model(module, compile)
        hook_of(watch, "attach")(self)

    # --- blocks -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Compute in the policy's precision inside this block."""
        self._require_open()
        with self._blocks.forward(last=self.window.is_last()):
            yield

    @contextlib.contextmanager
    def evaluate(self, *, ema: bool = False) -> Iterator[None]:
        """Validation: eval mode, no gradients, the policy's precision; with `ema=True` on the EMA weights."""
        self._require_open()
        self._delivery.drain()
        with self._blocks.evaluate(ema=ema):
            yield

    # --- one window ---------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, weight: float | Tensor | None = None, *, retain_graph: bool = False) -> None:
        """Backpropagate the scaled loss; `weight` is this micro-batch's weight in its window, e.g. its tokens.

        May be called for several losses of one micro-batch: their gradients add up, and the first call's weight is for all.
        """
        self._require_open()
        check_loss(loss)
        self._gradients.check("backward")
        if self.window.found_inf is not None:
            raise SettingError("backward() after unscale(): these gradients are already divided. Call step() first.")
        if self._release is not None and (weight is not None or self.window.has_gradients):
            raise SettingError(
                "With gradient_release the update happens inside backward(): call it once per step, and without weight=."
            )
        factor = self.window.weigh(weight)
        scaled = self.scaler.scale(loss)
        if not (isinstance(factor, float) and factor == 1.0):
            scaled = scaled * factor
        with torch.autocast(self.device.type, enabled=False), recomputing():
            self.backend.backward(scaled, retain_graph=retain_graph)
        self.window.has_gradients = True
        self._gradients.record()

    @property
    def in_window(self) -> bool:
        """Whether micro-batches have been accumulated that no update has used yet."""
        return self.window.has_gradients

    def unscale(self) -> None:
        """Divide the gradients now, for people who edit them before `step`; clipping still happens in `step`."""
        self._require_backward("unscale")
        self._gradients.check("unscale")
        if self._release is not None:
            raise SettingError("unscale() has nothing to divide: with gradient_release the gradients are already used.")
        if self.window.found_inf is not None:
            raise SettingError("unscale() was already called in this window; call step() before the next.")
        self._update.unscale(self.window)
        self._gradients.forget()

    def step(self, *, last: bool = False) -> StepResult:
        """End this micro-batch; every `accumulate` calls, or with `last=True`, update the weights."""
        if self._blocks.depth:
            raise SettingError(
                "step() was called inside `with engine.forward():`. Leave the block first: cast weights are cached in it."
            )
        self._require_backward("step")
        if self.window.found_inf is None:
            self._gradients.check("step")
        self._delivery.drain()  # of the step before: its schedulers come first, and its work is long done
        # A step(last=True) after the data ran out ends no micro-batch; it only closes the window.
        self.progress.micro_batches += self.window.end_micro_batch()
        lr = float(self.optimizers[0].param_groups[0]["lr"])
        if not self.window.is_full() and not last:
            return StepResult(self.progress.attempts, boundary=False, lr=lr)
        return self._close_window(lr)

    def _close_window(self, lr: float) -> StepResult:
        gradients, scale = self._update.gradients(), self.scaler.scale_on(self.device).clone()
        decision = self._update.apply(self.window, gradients)
        self.progress.attempts += 1
        result = StepResult(self.progress.attempts, boundary=True, lr=lr, wait=self._delivery.drain)
        self._delivery.push(decision, scale, result)
        hook_of(self._watch, "after_step")(result)
        if self._truth is None:
            self._truth = self._build_truth(list(gradients.values()))
            log_info(f"truth table\n{self._truth}")
        self.window.open()
        try:
            if self.device.type == "cpu":
                self._delivery.drain()  # while the gradients still exist, so that the hard stop can name them
        finally:
            self.reset_window()
        return result

    def reset_window(self) -> None:
        """Drop the gradients of the current window, if any, and start a new one."""
        for param in self._run.module.parameters():
            param.grad = None
        self.window.open()
        self._gradients.forget()
        self._buffers.forget()

    # --- state --------------------------------------------------------------------------------------------------

    def truth(self) -> Truth:
        """The truth table of this run; before the first step it shows what exists so far."""
        return self._truth or self._build_truth([])

    def _build_truth(self, grads: list[Tensor]) -> Truth:
        ema, released = self.ema is not None, self._release is not None
        return truth_of(self._run, self.hardware, self.backend, self.scaler, grads, ema=ema, released=released)

    @property
    def params(self) -> dict[str, Tensor]:
        """The parameters that the optimizers own, by name."""
        return self._run.params

    def masters(self) -> dict[str, Tensor]:
        """The fp32 value of every trainable parameter, by name."""
        return self._parts().masters()

    def _parts(self) -> RunParts:
        return RunParts(self._run, self.schedulers, self.scaler, self.ema, self.window, self.progress, self.backend)

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs apart from the random-number state; only between windows."""
        self._delivery.drain()
        return state_of(self._parts(), self.truth().as_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`; what does not fit is rejected before anything is changed."""
        load_state(self._parts(), state)
        self._delivery.discard()  # outcomes of the run that this state replaces
        self.reset_window()

    def save(self, path: str | Path, *, overwrite: bool = False, allow_nonfinite: bool = False, **extra: Any) -> Path:
        """Write a checkpoint directory: weights under the model's own names, state, random-number state."""
        weights, state, meta = checkpoint_parts(self.state_dict(), extra, allow_nonfinite=allow_nonfinite)
        return save_checkpoint(path, weights=weights, state=state, meta=meta, overwrite=overwrite)

    def load(self, path: str | Path | Checkpoint) -> dict[str, Any]:
        """Continue from a checkpoint directory; returns what `save` was given as extra."""
        checkpoint = path if isinstance(path, Checkpoint) else load_checkpoint(path)
        self.load_state_dict(engine_state(checkpoint))
        return restore_extra(checkpoint)

    def close(self) -> None:
        """Deliver pending outcomes and revert the set-up; weights stay as trained, and TF32 as it was switched."""
        if not self._closed:
            self._delivery.drain()
            hook_of(self._watch, "close")()
            self._run.undo.close()
            self.backend.close()
            self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _require_open(self) -> None:
        if self._closed:
            raise SettingError("This engine is closed; build a new one to continue.")

    def _require_backward(self, method: str) -> None:
        self._require_open()
        if not self.window.has_gradients:
            raise SettingError(
                f"{method}() without engine.backward(loss) in this window. A bare loss.backward() leaves gradients unscaled; "
                "write engine.backward(loss)."
            )
