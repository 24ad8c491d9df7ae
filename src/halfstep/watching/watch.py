"""Watch: the numerics of a run while it trains, cheap enough to leave on.

    engine = halfstep.Engine(model, optimizer, "fp16", watch=halfstep.Watch(every=100))

or, in a loop of your own with torch's GradScaler or none:

    watch = halfstep.Watch(model).attach(optimizer, scaler)

At the steps 1, 2, 4, ... 64 and then every `every` steps a sample is taken: exponents of the unscaled gradients, of the weights
and, if requested, of the activations, and what the update did to the weights (`watching.sampler`). It is counted on the device,
copied to the host behind an event and delivered at a later step, so that no step waits. Between samples a step costs nothing but
looking at the outcome that the Engine delivers anyway.

Events (`watching.events`) go to `outlet(event)`, to the logger and to `watch.events`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from halfstep.engine.engine import Engine
from halfstep.engine.result import StepResult
from halfstep.engine.steps import Decision
from halfstep.errors import SettingError
from halfstep.events import log_info, log_once, log_warning
from halfstep.scaling.readback import Readback
from halfstep.watching.activations import Activations
from halfstep.watching.attach import LoopHooks, named_params_of
from halfstep.watching.autopsy import Autopsy
from halfstep.watching.cost import StepClock, WatchCost, cost_of
from halfstep.watching.events import DriftRule, Event, LostUpdateRule, OutcomeRule
from halfstep.watching.losses import Fingerprint, LossRule
from halfstep.watching.report import WatchReport
from halfstep.watching.sample import Sample
from halfstep.watching.sampler import Sampler, is_due, num_nonfinite
from halfstep.watching.skips import Autopsies

__all__ = ["Watch", "WatchCost"]

_NUM_SAMPLES = 8  # that are stored
_NUM_EVENTS = 1000
_QUIET = {
    "skip",
    "scale",
}  # logged at their 1st, 2nd, 4th, ... occurrence: a dynamic loss scale skips in every healthy run


class Watch:
    """Samples the numerics of a run: give it to `Engine(watch=...)`, or call `attach(optimizer, scaler)` in another loop.

    `every` is the number of steps between samples. `activations` also counts the outputs of leaf modules. `outlet` is called with each
    Event. `replay` examines skipped steps, where the loop passes `engine.step(replay=...)`. `model` is needed only outside an Engine.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        every: int = 100,
        activations: bool = False,
        gradients: bool = True,
        weights: bool = True,
        outlet: Callable[[Event], None] | None = None,
        replay: bool = True,
    ) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise SettingError(f"every={every!r} must be a whole number of steps of at least 1.")
        if model is not None and not isinstance(model, nn.Module):
            raise SettingError(f"Watch(model) takes a torch.nn.Module, not {type(model).__name__}.")
        self.every, self.activations, self.gradients, self.weights = every, activations, gradients, weights
        self.replay, self._outlet, self._model = replay, outlet, model
        self.samples: deque[Sample] = deque(maxlen=_NUM_SAMPLES)
        self.events: deque[Event] = deque(maxlen=_NUM_EVENTS)
        self._kinds: dict[str, int] = {}
        self._streams: list[Stream] = []
        self._loops: list[LoopHooks] = []
        self._losses = LossRule()
        self._sums = Readback()
        self._autopsies = Autopsies(self._examined) if replay else None
        self._engine: weakref.ref[Engine] | None = None

    # --- set-up -----------------------------------------------------------------------------------------------------

    def attach(
        self,
        target: Engine | torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        scaler: torch.amp.GradScaler | None = None,
    ) -> Self:
        """Watch an Engine, which calls this itself, or the optimizers of another loop."""
        if isinstance(target, Engine):
            self._attach_engine(target)
            return self
        optimizers = list(target) if isinstance(target, Sequence) else [target]
        if self._model is None:
            raise SettingError("Watch.attach(optimizer) needs the model for its names: Watch(model).attach(optimizer).")
        if self._engine is not None:
            raise SettingError("This Watch belongs to an Engine; build another one for another loop.")
        loops = [(optimizer, named_params_of(optimizer, self._model)) for optimizer in optimizers]
        for optimizer, params in loops:
            stream = self._add_stream(params, _state_of(optimizer), self._model if not self._streams else None)
            self._loops.append(LoopHooks(stream, optimizer, scaler))
            stream.arm()
        return self

    def _attach_engine(self, engine: Engine) -> None:
        if self._streams:
            raise SettingError("This Watch is attached already; build one Watch per Engine.")
        if self._model is not None and self._model is not engine.model:
            raise SettingError("Engine(watch=Watch(model)) has another model than the Engine; leave the argument out.")
        self._engine = weakref.ref(engine)
        if self._autopsies is not None:
            self._autopsies.attach(weakref.proxy(engine))
        root = engine._run.module  # noqa: SLF001 - of several modules; it has no other name
        stream = self._add_stream(engine.params, _state_of(*engine.optimizers), root)
        stream.has_outcomes, stream.released = True, engine._release is not None  # noqa: SLF001
        stream.arm()

    def _add_stream(
        self, params: Mapping[str, Tensor], state_of: Callable[[Tensor], Mapping[str, Any]], model: nn.Module | None
    ) -> Stream:
        sampler = Sampler(params, state_of, gradients=self.gradients, weights=self.weights)
        hooks = Activations(model) if self.activations and model is not None else None
        stream = Stream(sampler, hooks, self.every, self._finish, self._send)
        self._streams.append(stream)
        return stream

    # --- the Engine's calls -----------------------------------------------------------------------------------------

    def before_step(self, gradients: Mapping[str, Tensor], divisor: Tensor) -> None:
        """Called by the Engine before each update."""
        engine = None if self._engine is None else self._engine()
        assert engine is not None
        (stream,) = self._streams
        stream.before(engine.progress.attempts + 1, gradients, divisor, engine.optimizers)

    def decided(self, gradients: Mapping[str, Tensor], decision: Decision) -> None:
        """Called by the Engine before each update with its decision: which gradients are not finite is known from their sums."""
        if decision.sums is not None:
            self._sums.push(decision.sums, list(gradients))

    def after_step(self, result: StepResult) -> None:
        """Called by the Engine after each update was launched."""
        self._streams[0].after()

    def delivered(self, result: StepResult) -> None:
        """Called by the Engine when the outcome of a step has arrived."""
        nonfinite: dict[str, int | None] = {}
        stream = self._streams[0]
        arrived = self._sums.deliver_tensors(wait=False)  # pushed before the outcome, so those of its step are here
        if result.skipped and arrived:
            names, sums = arrived[-1]
            nonfinite = {name: None for name, usable in zip(names, sums.isfinite().tolist(), strict=True) if not usable}
        elif result.skipped and stream.device.type == "cpu":  # gradients still exist, and reading them is free
            nonfinite = dict(num_nonfinite(stream.sampler.params))
        stream.outcome(result.step, skipped=result.skipped, scale=result.scale, nonfinite=nonfinite)
        stream.collect(wait=False)
        self._examine(result)

    def _examine(self, result: StepResult) -> None:
        engine = None if self._engine is None else self._engine()
        if self._autopsies is None or engine is None:
            return
        if result.skipped and not engine.replays.is_used:  # a dynamic loss scale skips in every healthy run
            log_once(
                "Watch: pass engine.step(replay=fn), where fn() computes the loss again, and skipped steps are examined."
            )
            engine.replays.take(result.step)
            return
        with self._streams[0].paused():
            self._autopsies.delivered(result)

    def close(self) -> None:
        """Deliver what is pending and remove every hook."""
        for loop in self._loops:
            loop.close()
        for stream in self._streams:
            stream.collect(wait=True)
            stream.close()

    def state_dict(self) -> dict[str, Any]:
        """What the rules remember of losses and outcomes, as plain values: a resumed run then reports what one run would."""
        outcomes = [stream.outcomes.state_dict() for stream in self._streams]
        return {"losses": self._losses.state_dict(), "outcomes": outcomes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue as the watch that this state is of; call it after `attach`."""
        if len(state["outcomes"]) != len(self._streams):
            raise SettingError(
                f"The state is that of a Watch of {len(state['outcomes'])} optimizers, and this one is attached to {len(self._streams)}."
            )
        self._losses.load_state_dict(state["losses"])
        for stream, saved in zip(self._streams, state["outcomes"], strict=True):
            stream.outcomes.load_state_dict(saved)

    # --- results ----------------------------------------------------------------------------------------------------

    def observe_loss(
        self, step: int, loss: float, fingerprint: Fingerprint | None = None, samples: int | None = None
    ) -> None:
        """Report the loss of a step, a number on the host, so that NaN losses and spikes become events.

        `fingerprint` returns a text that identifies the batch; it is called only for a loss that may be reported. `samples` is the
        number of examples that the loss is a mean of; short batches are not judged.
        """
        for event in self._losses.observe(step, float(loss), fingerprint, samples):
            self._send(event)

    @property
    def cost(self) -> WatchCost:
        """The measured time of the samples that have arrived, of a step, and the share of the one in the other; waits for nothing."""
        return cost_of([s.sampler.seconds for s in self._streams], [s.clock for s in self._streams])

    @property
    def autopsies(self) -> list[Autopsy]:
        """Of the skipped steps that were examined; they need `engine.step(replay=...)`."""
        return [] if self._autopsies is None else self._autopsies.autopsies

    def report(self) -> WatchReport:
        """The last sample as a table of the worst parameters, with the events so far."""
        return WatchReport.of(list(self.samples), list(self.events), str(self.cost) if self.samples else "")

    def _finish(self, sample: Sample) -> None:
        self.samples.append(sample)

    def _examined(self, autopsy: Autopsy) -> None:
        self._send(Event("autopsy", autopsy.step, autopsy.sentence, autopsy.as_dict(), autopsy.advice))

    def _send(self, event: Event) -> None:
        self.events.append(event)
        count = self._kinds[event.kind] = self._kinds.get(event.kind, 0) + 1
        if event.kind == "autopsy":
            pass  # logged already, with all its lines
        elif event.kind not in _QUIET:
            log_warning(f"Watch: {event}")
        elif count & (count - 1) == 0:
            log_info(f"Watch: {event}")
        if self._outlet is not None:
            self._outlet(event)


class Stream:
    """One sequence of steps that a Watch looks at, and the rules that judge its samples."""

    def __init__(
        self,
        sampler: Sampler,
        activations: Activations | None,
        every: int,
        finish: Callable[[Sample], None],
        send: Callable[[Event], None],
    ) -> None:
        self.sampler, self._activations, self._every = sampler, activations, every
        self._finish, self._send = finish, send
        self.outcomes, self._lost, self._drift = OutcomeRule(), LostUpdateRule(), DriftRule()
        self._num_steps = 0  # since the Watch was attached: a resumed run is sampled early, too
        self._waiting: deque[Sample] = deque()
        self._skipped: dict[int, bool] = {}
        self._sampled: set[int] = set()
        self._reported_missing = False
        self.clock = StepClock(self.device)
        self.has_outcomes = False  # whether `outcome` is called for every step
        self.released = False  # whether weights are updated inside backward

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(iter(self.sampler.params.values())).device

    def arm(self) -> None:
        """Prepare for the next forward, if its step is sampled."""
        if is_due(self._num_steps + 1, self._every):
            if self._activations is not None:
                self._activations.arm()
            if self.released:
                self.sampler.arm()

    def before(
        self,
        step: int,
        gradients: Mapping[str, Tensor],
        divisor: Tensor | None,
        optimizers: Iterable[torch.optim.Optimizer],
    ) -> None:
        """Before an update: begin a sample where one is due."""
        self._num_steps += 1
        if is_due(self._num_steps, self._every):
            self._sampled.add(step)
            self.sampler.before(step, gradients, divisor, self._idle(optimizers))

    def after(self, found_inf: Tensor | None = None) -> None:
        """After an update was launched: end the sample, and prepare for the next step."""
        if self.sampler.is_open:
            table = None
            if self._activations is not None:
                table = self._activations.take()
                self._report_missing()
            self.sampler.after(table, found_inf)
        self.clock.mark()
        self.arm()

    def outcome(self, step: int, *, skipped: bool, scale: float | None, nonfinite: Mapping[str, int | None]) -> None:
        """The outcome of a step has arrived."""
        if self.has_outcomes and step in self._sampled:
            self._skipped[step] = skipped
        for event in self.outcomes.observe(step, skipped=skipped, scale=scale, nonfinite=nonfinite):
            self._send(event)

    def collect(self, *, wait: bool) -> None:
        """Judge the samples that have arrived and whose outcome is known."""
        self._waiting.extend(self.sampler.deliver(wait=wait))
        while self._waiting and (wait or not self.has_outcomes or self._waiting[0].step in self._skipped):
            sample = self._waiting.popleft()
            self._sampled.discard(sample.step)
            skipped = self._skipped.pop(sample.step, sample.skipped)
            sample = dataclasses.replace(sample, skipped=skipped)
            self._finish(sample)
            for rule in (self._lost, self._drift):
                for event in rule.observe(sample):
                    self._send(event)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside this block forwards are not counted: a step may be computed again."""
        if self._activations is None:
            yield
            return
        self._activations.is_paused = True
        try:
            yield
        finally:
            self._activations.is_paused = False

    def close(self) -> None:
        """Remove the hooks."""
        self.sampler.disarm()
        if self._activations is not None:
            self._activations.disarm()

    def _idle(self, optimizers: Iterable[torch.optim.Optimizer]) -> frozenset[str]:
        """The parameters whose learning rate is 0."""
        idle = {
            id(p)
            for optimizer in optimizers
            for group in optimizer.param_groups
            if not isinstance(group.get("lr"), Tensor) and group.get("lr") == 0
            for p in group["params"]
        }
        return frozenset(name for name, p in self.sampler.params.items() if id(p) in idle) if idle else frozenset()

    def _report_missing(self) -> None:
        assert self._activations is not None
        reason = self._activations.missing()
        if reason is not None and not self._reported_missing:
            self._reported_missing = True
            advice = "Gradients, weights and updates are watched all the same."
            self._send(Event("no-activations", self._num_steps, f"activations are not watched: {reason}", {}, advice))


def _state_of(*optimizers: torch.optim.Optimizer) -> Callable[[Tensor], Mapping[str, Any]]:
    """The state of a parameter in whichever of these optimizers has one; keeps none of them alive."""
    references = [weakref.ref(optimizer) for optimizer in optimizers]

    def state_of(param: Tensor) -> Mapping[str, Any]:
        for reference in references:
            optimizer = reference()
            if optimizer is not None and param in optimizer.state:
                state: Mapping[str, Any] = optimizer.state[param]
                return state
        return {}

    return state_of
