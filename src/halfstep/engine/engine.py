"""The Engine: mixed-precision training in the right order, for a loop of one's own.

    engine = halfstep.Engine(model, optimizer, precision="auto", max_norm=1.0, accumulate=4, scheduler=scheduler)
    for x, y in loader:
        with engine.forward():
            loss = loss_fn(model(x), y)
        engine.backward(loss)
        result = engine.step()

`backward` multiplies by the loss scale. `step` closes a window every `accumulate` calls: it looks at the gradients once,
unscales, clips and steps, or skips; moves the loss scale; averages; puts buffers back after a skip; advances the
schedulers only for a step that happened; and clears the gradients.

Nothing in a step waits for the device (with fused optimizers): the outcome is delivered to the host by the next step,
before it launches its own update. On a CPU it is delivered at once. `evaluate`, `save`, `state_dict` and `close` wait.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from halfstep.backends import SingleDevice
from halfstep.checkpoint.directory import load_checkpoint, save_checkpoint
from halfstep.engine.buffers import BufferGuard
from halfstep.engine.casting import cast_model, sum_gradients_in_fp32, uncast_forwards, wrap_forwards
from halfstep.engine.compiling import check_compile, compile_model, records_graphs
from halfstep.engine.ema import Ema
from halfstep.engine.guards import GradientWatch, advance, check_loss, check_scaler, check_settings, named_trainables
from halfstep.engine.region import compute_region, recomputing, upcast
from halfstep.engine.release import GIVES_UP, GradientRelease, check_release
from halfstep.engine.result import StepResult
from halfstep.engine.state import checkpoint_parts, load_engine, load_engine_checkpoint, state_of
from halfstep.engine.steps import choose_path, coalesce, decide, keep_from_others, take_step, unscale_in_place, widen
from halfstep.engine.truth import Truth, build_truth, census
from halfstep.engine.window import Window
from halfstep.errors import SettingError
from halfstep.events import say
from halfstep.hardware.probe import Hardware, probe
from halfstep.hardware.tf32 import set_tf32
from halfstep.kernels.scale_update import COUNTERS
from halfstep.optim.adopt import adopt
from halfstep.optim.lean import LeanOptimizer
from halfstep.precision.choice import resolve
from halfstep.precision.policy import Policy
from halfstep.scaling.readback import Readback
from halfstep.scaling.scaler import Scaler, make_scaler, stop_if_stuck

__all__ = ["Engine"]

_CONSECUTIVE = COUNTERS.index("consecutive_skips")
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


class Engine:
    """Trains one model with one or several optimizers under a precision policy.

    `precision` is a policy, its text, a foreign name, or "auto". `max_norm` clips the true gradients; None does not clip.
    `ema` is the decay of a moving average of the masters. `compile=True` compiles the model in place, and `compile="reduce-overhead"` in
    that mode of torch.compile, with CUDA graphs. `deterministic=True` asks torch for deterministic algorithms. `gradient_release=True`
    updates each parameter inside backward. `scaler` replaces the policy's loss scaler. `on_step(result)` is called when the outcome of
    a step has arrived. `watch` is an object with `attach(engine)`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        precision: str | Policy = "auto",
        *,
        max_norm: float | None = None,
        accumulate: int = 1,
        scheduler: Any = None,
        ema: float | None = None,
        compile: bool | str = False,  # noqa: A002 - torch's own word for it
        deterministic: bool = False,
        gradient_release: bool = False,
        watch: Any = None,
        backend: SingleDevice | None = None,
        scaler: Scaler | None = None,
        on_step: Callable[[StepResult], None] | None = None,
    ) -> None:
        given = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
        schedulers = list(scheduler) if isinstance(scheduler, Sequence) else [] if scheduler is None else [scheduler]
        check_settings(model, given, schedulers, max_norm, accumulate)
        check_compile(compile)
        self.backend = backend or SingleDevice()
        self.model = model
        self._module = self.backend.unwrap(model)
        self.hardware: Hardware = probe()
        self.policy, self.notes = resolve(precision, self.hardware)
        if self.policy.compute == "fp8":
            raise SettingError(
                "precision fp8 is named but not built yet. Use bf16-lean, which holds weights the same way."
            )
        self.backend.check(self.policy)
        for note in self.notes:
            say(note)
        self.max_norm, self.accumulate, self.schedulers = max_norm, accumulate, schedulers
        self._params = named_trainables(self._module, given)
        self.device = next(iter(self._params.values())).device
        if gradient_release:
            check_release(self.policy, max_norm, accumulate, compiled=bool(compile))
        self._undo = contextlib.ExitStack()  # what close() puts back
        self._apply_precision(given, lean=gradient_release)
        self.optimizers = [path.optimizer for path in self._paths]
        self.scaler = scaler or make_scaler(self.policy.scaling)
        check_scaler(self.scaler, self.policy.compute)
        self.ema = None if ema is None else Ema(self._params, ema, self._master_of)
        self._buffers = BufferGuard(self._module)
        hide, in_graphs = self.policy.widens_grads(accumulate), records_graphs(compile, self.device)
        self._watch_grads = GradientWatch(self._params, self.optimizers, in_graphs=in_graphs, hide=hide)
        self.window = Window(accumulate)
        self._readback = Readback()
        self._tables: dict[Any, Any] = {}  # of the kernel that takes the norm
        self._on_step = on_step
        self._region_depth = 0
        self._release: GradientRelease | None = None
        if gradient_release:
            self._release = GradientRelease([o for o in self.optimizers if isinstance(o, LeanOptimizer)], self._params)
            self._undo.callback(self._release.close)
        self._closed = False
        self.attempts = self.micro_batches = self.applied = 0  # tried; seen; updates that happened, as far as delivered
        self._truth: Truth | None = None
        if deterministic:
            self._undo.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
            self._undo.callback(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
            torch.use_deterministic_algorithms(True)
            torch.backends.cudnn.benchmark = False
        compile_model(self._module, compile)
        if watch is not None:
            watch.attach(self)

    def _apply_precision(self, given: list[torch.optim.Optimizer], *, lean: bool) -> None:
        policy = self.policy
        if policy.compute in {"fp32", "tf32"} and self.device.type == "cuda":
            # Process-wide: another engine may set it otherwise, so close() leaves it.
            set_tf32(policy.compute == "tf32")
        masters = cast_model(self._module, policy)
        wrap_forwards(self._module, policy)
        self._undo.callback(uncast_forwards, self._module)
        lean = lean or policy.params != "fp32" or policy.states != "fp32"
        held = [
            adopt(o, master=policy.master if policy.params != "fp32" else "none", states=policy.states) if lean else o
            for o in given
        ]
        for each in held:
            if isinstance(each, LeanOptimizer):
                for param in (p for group in each.param_groups for p in group["params"] if p.requires_grad):
                    each.hold_master(param, masters.get(param))
        if policy.widens_grads(self.accumulate):
            sum_gradients_in_fp32(self._params.values(), policy)
        self._paths = [choose_path(o, self._module) for o in held]
        keep_from_others(held, self._undo)

    # --- regions ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Compute in the policy's precision inside this block."""
        self._require_open()
        self._buffers.save()
        with self._watch_grads.set_aside(), self._region():
            yield

    @contextlib.contextmanager
    def evaluate(self, *, ema: bool = False) -> Iterator[None]:
        """Validation: eval mode, no gradients, the policy's precision; with `ema=True` on the averaged weights."""
        self._require_open()
        self._deliver(wait=True)
        if ema and self.ema is None:
            raise SettingError("evaluate(ema=True) needs Engine(ema=DECAY); this engine keeps no average.")
        training = [m for m in self._module.modules() if m.training]
        swapped = self.ema.swapped() if ema and self.ema is not None else contextlib.nullcontext()
        self._module.eval()
        try:
            with swapped, self._watch_grads.set_aside(), torch.no_grad(), self._region():
                yield
        finally:
            for module in training:
                module.training = True

    @contextlib.contextmanager
    def _region(self) -> Iterator[None]:
        self._region_depth += 1
        try:
            with compute_region(self.device.type, self.policy.compute):
                yield
        finally:
            self._region_depth -= 1

    # --- one window ---------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, weight: float | Tensor | None = None, *, retain_graph: bool = False) -> None:
        """Backpropagate the scaled loss; `weight` weighs this micro-batch in its window, e.g. by its tokens.

        May be called for several losses of one micro-batch: their gradients add up, and the first call's weight is for all.
        """
        self._require_open()
        check_loss(loss)
        self._watch_grads.check("backward")
        if self.window.found_inf is not None:
            raise SettingError("backward() after unscale(): these gradients are divided already. Call step() first.")
        if self._release is not None and (weight is not None or self.window.has_gradients):
            raise SettingError(
                "With gradient_release the update happens inside backward(): call it once per step, and without weight=."
            )
        factor = self.window.weigh(weight)
        scaled = self.scaler.scale(loss)
        if not (isinstance(factor, float) and factor == 1.0):
            scaled = scaled * factor
        quiet = contextlib.nullcontext() if self.window.is_last() else self.backend.no_sync(self.model)
        with quiet, torch.autocast(self.device.type, enabled=False), recomputing():
            scaled.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        self.window.has_gradients = True
        self._watch_grads.remember()

    @property
    def in_window(self) -> bool:
        """Whether micro-batches have been accumulated that no update has used yet."""
        return self.window.has_gradients

    def unscale(self) -> None:
        """Divide the gradients now, for people who edit them before `step`; clipping still comes in `step`."""
        self._require_backward("unscale")
        self._watch_grads.check("unscale")
        if self._release is not None:
            raise SettingError("unscale() has nothing to divide: with gradient_release the gradients are gone already.")
        if self.window.found_inf is not None:
            raise SettingError("unscale() was already called in this window; call step() before the next.")
        widen(self._params.values())
        grads, divisor = self._gradients(), self._divisor()
        self.window.found_inf = decide(grads, divisor, None, self.backend.agree).found_inf
        unscale_in_place(grads, divisor)
        self._watch_grads.forget()

    def step(self, *, last: bool = False) -> StepResult:
        """End this micro-batch; every `accumulate` calls, or with `last=True`, update the weights."""
        if self._region_depth:
            raise SettingError(
                "step() was called inside `with engine.forward():`. Leave the block first: cast weights are cached in it."
            )
        self._require_backward("step")
        if self.window.found_inf is None:
            self._watch_grads.check("step")
        self._deliver(wait=True)  # of the step before: its schedulers come first, and its work is long done
        # No micro-batch ends in a step(last=True) that comes after the data ran out; it only closes the window.
        self.micro_batches += self.window.end_micro_batch()
        lr = float(self.optimizers[0].param_groups[0]["lr"])
        if not self.window.is_full() and not last:
            return StepResult(self.attempts, boundary=False, lr=lr)
        return self._close_window(lr)

    def _close_window(self, lr: float) -> StepResult:
        coalesce(list(self._params.values()))
        grads = self._gradients()
        scale = self.scaler.scale_on(self.device).clone()
        earlier = self.window.found_inf  # the gradients are unscaled already
        divisor = self._divisor() if earlier is None else torch.ones((), device=self.device)
        if self._release is None:
            decision = decide(grads, divisor, self.max_norm, self.backend.agree, self._tables)
        else:
            decision = self._release.finish(self.device)
        if earlier is not None:
            decision.found_inf.copy_(torch.maximum(decision.found_inf, earlier))
        undivided = self.scaler.settings.mode == "none" and self.window.weighs_one()
        divides = self.max_norm is not None or not (undivided or earlier is not None)
        if self._release is None:
            take_step(self._paths, decision, divides=divides)
        self.scaler.advance(decision.found_inf)
        self._buffers.restore_if(decision.found_inf)
        if self.ema is not None:
            self.ema.update(decision.found_inf)
        self.attempts += 1
        result = StepResult(self.attempts, boundary=True, lr=lr, wait=lambda: self._deliver(wait=True))
        consecutive = self.scaler.counters[_CONSECUTIVE].to(self.device, torch.float32)
        self._readback.push(torch.stack((decision.found_inf, decision.norm, scale, consecutive)), result)
        if self._truth is None:
            self._truth = self._build_truth(census(grads), sum(g.numel() * g.element_size() for g in grads))
            say(f"truth table\n{self._truth}")
        self.window.open()
        try:
            if self.device.type == "cpu":
                self._deliver(wait=True)  # while the gradients are still there to be named
        finally:
            self.reset_window()
        return result

    def _divisor(self) -> Tensor:
        scale = self.scaler.scale_on(self.device)
        return scale if self.window.weighs_one() else scale * self.window.weight

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self._params.values() if p.grad is not None]

    def reset_window(self) -> None:
        """Drop the gradients of the current window, if any, and begin a new one."""
        for param in self._module.parameters():
            param.grad = None
        self.window.open()
        self._watch_grads.forget()

    def _deliver(self, *, wait: bool) -> None:
        """Hand over the outcomes that have arrived: results, schedulers, hooks, the loud stop."""
        for result, (found, norm, scale, consecutive) in self._readback.deliver(wait=wait):
            result.fill(found, norm, scale)
            if not found:
                self.applied += 1
                advance(self.schedulers, self.applied)
            if self._on_step is not None:
                self._on_step(result)
            stop_if_stuck(int(consecutive), self.scaler.settings, self.scaler.get_scale, self._params.items())

    # --- state --------------------------------------------------------------------------------------------------

    def truth(self) -> Truth:
        """The truth table of this run; before the first step it shows what is there so far."""
        return self._truth or self._build_truth({}, 0)

    def _build_truth(self, grads: dict[str, int], grad_bytes: int) -> Truth:
        known = self.hardware.kind == self.device.type
        return build_truth(
            policy=self.policy,
            params=list(self._params.values()),
            grads=grads,
            grad_bytes=grad_bytes,
            states={p: s for o in self.optimizers for p, s in o.state.items()},
            accumulate=self.accumulate,
            loss_scale=str(self.scaler.settings),
            paths=[path.reason for path in self._paths],
            support=dict(self.hardware.support).get(self.policy.compute) if known else None,
            reduce_dtype=self.backend.reduce_dtype(),
            device=self.hardware.name if known else self.device.type,
            ema=self.ema is not None,
            gives_up=GIVES_UP if self._release is not None else (),
        )

    def _master_of(self, param: Tensor) -> Tensor:
        for optimizer in self.optimizers:
            if isinstance(optimizer, LeanOptimizer) and param in optimizer.state:
                return optimizer.master_of(param)
        return cast(Tensor, upcast(param.detach()))

    def masters(self) -> dict[str, Tensor]:
        """The fp32 value of every trainable parameter, by name."""
        return {name: self._master_of(p) for name, p in self._params.items()}

    def names_of(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """The model's names of an optimizer's parameters, in its own order."""
        names = {id(p): name for name, p in self._params.items()}
        return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs, apart from the random number generators; only between windows."""
        return state_of(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken; what does not fit is refused before anything is changed."""
        load_engine(self, state)

    def save(self, path: str | Path, **extra: Any) -> Path:
        """Write a checkpoint directory: weights under the model's own names, state, random number generators."""
        weights, state, meta = checkpoint_parts(self, extra)
        return save_checkpoint(path, weights=weights, state=state, meta=meta)

    def load(self, path: str | Path) -> dict[str, Any]:
        """Go on from a checkpoint directory; returns what `save` was given as extra."""
        return load_engine_checkpoint(self, load_checkpoint(path))

    def close(self) -> None:
        """Deliver what is under way and undo what was set up; weights stay as trained, and TF32 as it was switched."""
        if not self._closed:
            self._deliver(wait=True)
            self._undo.close()
            self.backend.close()
            self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _require_open(self) -> None:
        if self._closed:
            raise SettingError("This engine is closed; build a new one to go on.")

    def _require_backward(self, what: str) -> None:
        self._require_open()
        if not self.window.has_gradients:
            raise SettingError(
                f"{what}() without engine.backward(loss) in this window. A bare loss.backward() leaves gradients unscaled; "
                "write engine.backward(loss)."
            )
