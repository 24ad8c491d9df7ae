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

import dataclasses
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from halfstep.backends.parts import Parts
from halfstep.engine.engine import Engine
from halfstep.engine.result import StepResult
from halfstep.engine.steps import Decision, gradients_of
from halfstep.errors import SettingError
from halfstep.events import log_info, log_once, log_warning
from halfstep.scaling.readback import Readback
from halfstep.watching.activations import Activations
from halfstep.watching.attach import LoopHooks, named_params_of
from halfstep.watching.autopsy import Autopsy
from halfstep.watching.cost import WatchCost, cost_of
from halfstep.watching.events import Event
from halfstep.watching.loop_replay import LoopReplays
from halfstep.watching.losses import Fingerprint, LossRule
from halfstep.watching.report import WatchReport
from halfstep.watching.sample import Sample
from halfstep.watching.sampler import Sampler, num_nonfinite
from halfstep.watching.shards import ShardStatistics, shards_of_loop
from halfstep.watching.skips import Autopsies
from halfstep.watching.stream import Stream

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
        self._replays: LoopReplays | None = None  # of a loop that Halfstep does not own
        self._engine: weakref.ref[Engine] | None = None
        self._rank: int | None = None  # where there are several

    @property
    def sampling(self) -> str:
        """What must be the same on every rank of a sharded model, whose statistics are combined."""
        return f"every={self.every}, gradients={self.gradients}, weights={self.weights}"

    # --- set-up -----------------------------------------------------------------------------------------------------

    def attach(
        self,
        target: Engine | torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        scaler: torch.amp.GradScaler | None = None,
        *,
        start: int = 0,
    ) -> Self:
        """Watch an Engine, which calls this itself, or the optimizers of another loop, resumed after `start` steps."""
        if isinstance(target, Engine):
            self._attach_engine(target)
            return self
        optimizers = list(target) if isinstance(target, Sequence) else [target]
        if self._model is None:
            raise SettingError("Watch.attach(optimizer) needs the model for its names: Watch(model).attach(optimizer).")
        if self._engine is not None:
            raise SettingError("This Watch belongs to an Engine; build another one for another loop.")
        loops = [(optimizer, named_params_of(optimizer, self._model)) for optimizer in optimizers]
        self._rank = _rank_of_process()
        for optimizer, params in loops:
            shards = shards_of_loop(params, self.sampling)
            root = self._model if not self._streams else None
            stream = self._add_stream(params, _state_of(optimizer), root, shards)
            replays = None
            if self.replay and len(loops) == 1 and shards is None:  # a forward of shards waits for the other ranks
                has_scale = scaler is not None and scaler.is_enabled()
                replays = self._replays = LoopReplays(self._model, params, self._examined, has_scale=has_scale)
            self._loops.append(LoopHooks(stream, optimizer, scaler, replays, start))
            stream.arm()
        return self

    def record(self, compute_loss: Callable[[], Any], factor: float = 1.0) -> None:
        """Before a forward in a loop of your own: how to compute its loss again, in case the step is skipped.

        `factor` is what the loop multiplies this loss by, such as 1 / the number of micro-batches.
        """
        if self._replays is None:
            raise SettingError(_no_record(self))
        self._replays.record(compute_loss, factor)

    def _attach_engine(self, engine: Engine) -> None:
        if self._streams:
            raise SettingError("This Watch is attached already; build one Watch per Engine.")
        if self._model is not None and self._model is not engine.model:
            raise SettingError("Engine(watch=Watch(model)) has another model than the Engine; leave the argument out.")
        self._engine = weakref.ref(engine)
        if self._autopsies is not None:
            self._autopsies.attach(weakref.proxy(engine))
        root = engine._run.module  # noqa: SLF001 - of several modules; it has no other name
        context, shards, parts = engine.backend.context(), None, engine.backend.parts()
        params = engine.params if parts is None else {name: engine.params[name] for name in parts.values}
        if context.world_size > 1:
            self._rank = context.rank
            shards = ShardStatistics(params, context, parts) if engine.backend.shards else None
        stream = self._add_stream(params, _state_of(*engine.optimizers), root, shards, parts)
        stream.has_outcomes, stream.released = True, engine._release is not None  # noqa: SLF001
        stream.arm()

    def _add_stream(
        self,
        params: Mapping[str, Tensor],
        state_of: Callable[[Tensor], Mapping[str, Any]],
        model: nn.Module | None,
        shards: ShardStatistics | None = None,
        parts: Parts | None = None,
    ) -> Stream:
        values = None if parts is None else parts.values
        sampler = Sampler(params, state_of, gradients=self.gradients, weights=self.weights, shards=shards, parts=values)
        hooks = Activations(model) if self.activations and model is not None else None
        stream = Stream(sampler, hooks, self.every, self._finish, self._send)
        self._streams.append(stream)
        return stream

    @property
    def is_replaying(self) -> bool:
        """Whether a step of a loop of your own is being computed again: its hooks on forwards should do nothing then."""
        return self._replays is not None and self._replays.is_replaying

    # --- the Engine's calls -----------------------------------------------------------------------------------------

    def before_step(self, gradients: Mapping[str, Tensor], divisor: Tensor) -> None:
        """Called by the Engine before each update."""
        engine = None if self._engine is None else self._engine()
        assert engine is not None
        (stream,) = self._streams
        stream.before(engine.progress.attempts + 1, lambda: gradients, divisor, engine.optimizers)

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
            engine, shards = None if self._engine is None else self._engine(), stream.sampler.shards
            own = None if engine is None else engine.backend.gradients()
            counts = num_nonfinite(gradients_of(stream.sampler.params) if own is None else own)
            nonfinite = dict(counts if shards is None else shards.add_up(counts))
        stream.outcome(
            result.step, skipped=result.skipped, scale=result.scale, nonfinite=nonfinite, ranks=self._overflowed(result)
        )
        stream.collect(wait=False)
        self._examine(result)

    def _overflowed(self, result: StepResult) -> tuple[int, ...]:
        """The ranks whose own gradients were not finite, of a step that was skipped."""
        engine = None if self._engine is None or self._rank is None else self._engine()
        return engine.backend.overflowed_ranks if engine is not None and result.skipped else ()

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
        if self._autopsies is not None and self._engine is not None:
            self._autopsies.close()
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
        """Of the skipped steps that were examined; they need `engine.step(replay=...)`, or `record` in another loop."""
        if self._replays is not None:
            return self._replays.autopsies
        return [] if self._autopsies is None else self._autopsies.autopsies

    def report(self) -> WatchReport:
        """The last sample as a table of the worst parameters, with the events so far."""
        return WatchReport.of(list(self.samples), list(self.events), str(self.cost) if self.samples else "")

    def _finish(self, sample: Sample) -> None:
        self.samples.append(sample)

    def _examined(self, autopsy: Autopsy) -> None:
        self._send(Event("autopsy", autopsy.step, autopsy.sentence, autopsy.as_dict(), autopsy.advice, autopsy.rank))

    def _send(self, event: Event) -> None:
        if event.rank is None and self._rank is not None:
            event = dataclasses.replace(event, rank=self._rank)
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


def _no_record(watch: Watch) -> str:
    """Why `record` cannot be called."""
    if not watch.replay:
        return "Watch.record has no effect with replay=False; leave that argument out."
    if watch._engine is not None:  # noqa: SLF001 - of this file
        return "This Watch belongs to an Engine: pass the function to engine.step(replay=fn)."
    if any(stream.sampler.shards is not None for stream in watch._streams):  # noqa: SLF001
        return "Watch.record has no effect on sharded parameters: a forward waits for all ranks, so none computes a step again."
    if watch._streams:  # noqa: SLF001
        return "Watch.record needs a Watch of one optimizer: which one's step a micro-batch belongs to is not known."
    return "Call Watch.attach(optimizer, scaler) before Watch.record."


def _rank_of_process() -> int | None:
    """The rank of this process in the default group, where it has several."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    return dist.get_rank()


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
