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
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from halfstep.backends import Backend, make_backend
from halfstep.engine.averaging import average_masters
from halfstep.engine.blocks import Blocks
from halfstep.engine.buffers import BufferGuard
from halfstep.engine.checks import (
    check_assignment,
    check_backward,
    check_loss,
    check_settings,
    check_step,
    check_unscale,
    choose_scaler,
    fixed_names,
    require_backward,
)
from halfstep.engine.compiling import check_compile, compile_model, records_graphs, start_workers
from halfstep.engine.delivery import Delivery, Progress
from halfstep.engine.ema import Ema
from halfstep.engine.frozen import FrozenWatch
from halfstep.engine.guards import GradientGuard, ModelGuard
from halfstep.engine.members import as_module
from halfstep.engine.region import recomputing
from halfstep.engine.rehearsal import start_rehearsal
from halfstep.engine.release import GradientRelease, check_release
from halfstep.engine.replay.record import Replays
from halfstep.engine.result import StepResult
from halfstep.engine.saved.methods import SavedEngine
from halfstep.engine.schedules import Schedules
from halfstep.engine.setup import as_list, prepare_module, prepare_run
from halfstep.engine.steps import reject_foreign_steps
from halfstep.engine.truth import Truth, TruthObserver
from halfstep.engine.update import Update
from halfstep.engine.watch import EngineWatch, hook_of, watch_settings
from halfstep.engine.window import Window
from halfstep.errors import SettingError
from halfstep.events import log_once
from halfstep.hardware.determinism import make_deterministic
from halfstep.hardware.probe import Hardware, probe
from halfstep.precision.choice import resolve
from halfstep.precision.policy import Policy
from halfstep.scaling.scaler import Scaler

__all__ = ["Engine"]


class Engine(SavedEngine):
    """Trains a model, or several modules and loose parameters, with one or several optimizers under a precision policy.

    `model` may be a list or dict of modules and parameters. `precision` is a policy, its text, a foreign name, a torch dtype or "auto". `max_norm` clips the true gradients; None does not clip.
    `ema` is the decay of an EMA of the masters. `compile=True` compiles the model in place, `compile="blocks"` its repeated blocks,
    and `compile="reduce-overhead"` the model in that mode of torch.compile, with CUDA graphs. `deterministic=True` asks torch for deterministic algorithms.
    `gradient_release=True` updates parameters inside backward. `recompute="cheap"` computes activations and norms of repeated
    blocks again in backward, and `recompute=0.6` keeps about that share of activations. `backend` is a Backend or its name. `scaler` replaces the
    policy's loss scaler. `on_step(result)` is called when the outcome of a step has arrived. `watch` implements methods of
    `halfstep.engine.watch.EngineWatch`.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module | Tensor] | Mapping[str, nn.Module | Tensor],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        precision: str | Policy | torch.dtype = "auto",
        *,
        max_norm: float | None = None,
        accumulate: int = 1,
        scheduler: Any = None,
        ema: float | None = None,
        compile: bool | str = False,  # noqa: A002 - torch's own word for it
        deterministic: bool = False,
        gradient_release: bool = False,
        recompute: str | float | None = None,
        watch: EngineWatch | Any = None,
        backend: Backend | str = "auto",
        scaler: Scaler | None = None,
        on_step: Callable[[StepResult], None] | None = None,
    ) -> None:
        of_subclass, root = frozenset(vars(self)), as_module(model)
        optimizers, schedulers = as_list(optimizer), as_list(scheduler)
        check_settings(optimizers, schedulers, max_norm, accumulate, ema)
        check_compile(compile)
        start_workers(root, compile)
        self.hardware: Hardware = probe()
        self.policy, self.notes = resolve(precision, self.hardware)
        self.backend = make_backend(backend, root, self.policy, optimizers)
        self.policy = self.backend.adapt(self.policy)
        settings = {"accumulate": accumulate, "max_norm": max_norm, "ema": ema, "compile": compile}
        self.backend.compare({"precision": self.policy} | settings | watch_settings(watch, shards=self.backend.shards))
        self.scaler = choose_scaler(scaler, self.policy)
        if gradient_release:
            check_release(self.policy, max_norm, accumulate, compiled=bool(compile), backend=self.backend.name)
        options: dict[str, Any] = {"gradient_release": gradient_release, "recompute": recompute}
        module = prepare_module(self.backend, root, optimizers, self.policy, compile, **options)
        for note in self.notes:
            log_once(note)
        self.model, self.max_norm, self.accumulate = model, max_norm, accumulate
        options |= {"accumulate": accumulate, "compiled": bool(compile)}
        run = self._run = prepare_run(module, optimizers, self.policy, backend=self.backend, **options)
        self.device, self.optimizers, self.schedulers = run.device, run.optimizers, schedulers
        reject_foreign_steps(self.optimizers, run.undo)
        self.ema = None if ema is None else Ema(run.params, ema, run.master_of)
        self.window, self.progress = Window(accumulate, run.device), Progress()
        self._buffers = BufferGuard(module)
        hide, in_graphs = self.policy.widens_grads(accumulate), records_graphs(compile, self.device)
        self._gradients = GradientGuard(run.params, self.optimizers, in_graphs=in_graphs, hide=hide)
        self._model_guard = ModelGuard(module, run.params, self.backend.drop_copies)
        self._release = GradientRelease(self.optimizers, run.params, run.undo) if gradient_release else None
        self._truths = TruthObserver(
            run, self.hardware, self.backend, self.scaler, ema=ema is not None, released=gradient_release
        )
        losses, self._watch, self._closed = self._truths.losses, watch, False
        self.replays = Replays(run, self.backend, self._buffers, self.scaler, watch, gradient_release, in_graphs, model)
        self._blocks = Blocks(run, self.backend, self._buffers, self._gradients, losses, self.ema, self.replays)
        self._update = Update(run, self.backend, self.scaler, self._buffers, self.ema, self._release, max_norm, watch)
        callbacks = [hook_of(watch, "delivered"), *([] if on_step is None else [on_step])]
        schedules, own = Schedules(schedulers), self.backend.gradients
        self._delivery = Delivery(self.progress, schedules, self.scaler, run.params, callbacks, own)
        average_masters(run)
        self._frozen = FrozenWatch(run, () if ema is None else run.params.values())
        if deterministic:
            make_deterministic(run.undo)
        compile_model(module, compile, run.undo, budget=recompute if isinstance(recompute, float) else None)
        rehearses = compile and not in_graphs  # while a graph is captured no other thread may allocate
        self._await_kernels = start_rehearsal(run, self.scaler, max_norm) if rehearses else lambda: None
        self._fixed = fixed_names(self, Engine, of_subclass)
        hook_of(watch, "attach")(self)

    def __setattr__(self, name: str, value: Any) -> None:
        if "_fixed" in vars(self):
            check_assignment(name, value, self._fixed)
        super().__setattr__(name, value)

    # --- blocks -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Compute in the policy's precision inside this block."""
        self._require_open()
        self._model_guard.check("forward")
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
        check_backward(self.window, weighted=weight is not None, released=self._release is not None)
        self._gradients.check("backward")
        self._truths.losses.observe(loss, entered=self._blocks.entered)
        factor, scaled = self._update.weigh(self.window, weight), self.scaler.scale(loss)
        if not (isinstance(factor, float) and factor == 1.0):
            scaled = scaled * (factor.to(loss.device) if isinstance(factor, Tensor) else factor)
        release, rule = self._release or contextlib.nullcontext(), recomputing(lean=self.policy.is_lean)
        with torch.autocast(self.device.type, enabled=False), rule, release:
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
        check_unscale(self.window, released=self._release is not None)
        self._gradients.check("unscale")
        self._update.unscale(self.window)
        self._gradients.forget()

    def step(self, *, last: bool = False, replay: Callable[[], Any] | None = None) -> StepResult:
        """End this micro-batch; every `accumulate` calls, or with `last=True`, update the weights; `replay()` computes its loss again."""
        check_step(self._blocks.depth)
        self._require_backward("step")
        self._model_guard.check("step")
        if self.window.found_inf is None:
            self._gradients.check("step")
        else:
            self._gradients.check_present("step")
        self._delivery.schedules.check()
        self._delivery.drain()  # of the step before: its schedulers come first, and its work is long done
        # A step(last=True) after the data ran out ends no micro-batch; it only closes the window.
        self.progress.micro_batches += self.window.end_micro_batch()
        self.replays.end_micro_batch(replay, self.window)
        self._truths.losses.end_micro_batch()
        self._blocks.entered = False
        lr = float(self.optimizers[0].param_groups[0].get("lr", math.nan))  # some optimizers compute theirs
        if not self.window.is_full() and not last:
            return StepResult(self.progress.attempts, boundary=False, lr=lr)
        return self._close_window(lr)

    def _close_window(self, lr: float) -> StepResult:
        gradients, scale = self._update.gradients(self.window), self.scaler.scale_on(self.device).clone()
        if self._release is None:
            self._model_guard.check_reached(gradients)
        self._await_kernels()
        decision = self._update.apply(self.window, gradients)
        self._frozen.check()
        self.progress.attempts += 1
        self.replays.end_window(self.progress.attempts)
        result = StepResult(self.progress.attempts, boundary=True, lr=lr, wait=self._delivery.drain)
        self._delivery.push(decision, scale, result)
        hook_of(self._watch, "after_step")(result)
        self._truths.observe(list(gradients.values()))
        self.window.open()
        try:
            if self.device.type == "cpu":
                self._delivery.drain()  # while the gradients still exist, so that the hard stop can name them
        finally:
            self.reset_window()
        return result

    def step_scheduler(self, metric: float | Tensor) -> None:
        """Step the schedulers that need a metric (ReduceLROnPlateau), and only those; call it after validation."""
        self._require_open()
        self._delivery.drain()
        self._delivery.schedules.step_with(metric)

    def reset_window(self) -> None:
        """Drop the gradients of the current window, if any, and start a new one."""
        for param in self._model_guard.parameters:
            param.grad = None
        self.window.open()
        self.backend.reset()
        self._gradients.forget()
        self._buffers.forget()
        self.replays.drop_window()

    # --- state --------------------------------------------------------------------------------------------------

    def truth(self) -> Truth:
        """The truth table of this run; before the first step it shows what exists so far."""
        return self._truths.table()

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
        require_backward(self.window, method)
