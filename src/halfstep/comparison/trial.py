"""One run of one row: train, time, measure, and write everything down.

The order of things matters. The first step also gives the gradients that are compared with fp32's. Warm-up steps are
trained but not timed. Timed steps come in slices, between which other rows take their turns. Only when training is over
are the things done that would disturb it: validation, then a few steps split into their phases with the device
synchronised between, then one step under the census. What those last steps change is measured by nobody.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from halfstep.backends.context import RunContext
from halfstep.checkpoint.rng import restore_rng, rng_state, seed_everything
from halfstep.comparison.census import DispatchCensus, write_census
from halfstep.comparison.census_trace import trace_step
from halfstep.comparison.clock import StepClock, peak_bytes, reset_peak, resident_bytes, synchronise
from halfstep.comparison.gradients import compare_gradients, save_gradients
from halfstep.comparison.loops import Loop, Outcome, build_parts, make_loop
from halfstep.comparison.spec import TrialSpec
from halfstep.engine.compiling import records_graphs
from halfstep.jobs.job import Job, trainable
from halfstep.train.stream import DataStream, fingerprint, to_device

__all__ = ["PHASES", "Trial", "batch_size_of"]

PHASES = ("data", "forward", "backward", "step")
NUM_SPLIT = 5  # steps whose phases are timed apart
NUM_WATCHED = 3  # steps under the census of a CPU, of which the least time of each operator counts


def batch_size_of(batch: Any) -> int | None:
    """Examples in a batch: the first dimension of its first tensor."""
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim():
            return leaf.shape[0]
    return None


class Trial:
    """A run in the making; `record` holds what has been measured so far."""

    def __init__(self, job: Job, spec: TrialSpec) -> None:
        self.job, self.spec = job, spec
        self.context = RunContext.single(spec.settings.device, seed=spec.seed, batch_size=spec.batch)
        self.device = self.context.device
        self.record: dict[str, Any] = {"base_bytes": resident_bytes() if self.device.type == "cpu" else 0}
        seed_everything(spec.seed)
        parts = build_parts(job, self.context)
        self._named = trainable(parts.model)  # peers wrap the model, and its names with it
        self.record["weights"] = fingerprint([p for _, p in self._named])
        self.loop: Loop = make_loop(spec.contender, parts, spec.settings.max_norm)
        self.loop.model.train()
        seed_everything(spec.seed)  # whatever a row drew while it was set up, all rows train on the same numbers
        self._batches = self._endless(DataStream(job, self.context, split="train"))
        self._clock = StepClock(self.device)
        self._losses: list[Tensor] = []
        self._outcomes: list[Callable[[], Outcome]] = []
        self._sizes: list[int] = []
        self.seconds: list[float] = []  # of every timed step
        self.slices: list[int] = []  # steps in each turn
        self._curves: dict[str, list[Any]] | None = None

    def _endless(self, stream: DataStream) -> Iterator[tuple[int, Any]]:
        epoch = 0
        while True:
            for batch in stream.batches(epoch):
                yield epoch, batch
            epoch += 1

    # --- training ----------------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """The first steps: compilation, autotuning, optimizer states; their time is noted as a whole."""
        start = time.perf_counter()
        for number in range(self.spec.settings.num_warmup):
            self._step(first=number == 0)
        synchronise(self.device)
        self.record["warmup_seconds"] = time.perf_counter() - start
        self.record["warmup_steps"] = self.spec.settings.num_warmup
        self.record["warmup_peak_bytes"] = peak_bytes(self.device)
        reset_peak(self.device)

    def run_slice(self, count: int) -> None:
        """One turn: train and time `count` steps."""
        self._clock.tick()
        for _ in range(count):
            self._step()
            self._clock.tick()
        self.seconds += self._clock.seconds()
        self.slices.append(count)

    def _step(self, *, first: bool = False) -> None:
        epoch, raw = next(self._batches)
        if first:
            self.record["batch"] = fingerprint(raw)
        loss = self._forward(epoch, to_device(raw, self.device))
        self.loop.backward(loss)
        if first:
            self._compare_gradients()
            self._weigh()
        self._outcomes.append(self.loop.step())
        self._losses.append(loss.detach().to(torch.float32, copy=True))  # a CUDA graph writes the next one over it
        self._sizes.append(batch_size_of(raw) or self.spec.batch)

    def _forward(self, epoch: int, batch: Any, split: str = "train") -> Tensor:
        with self.loop.forward():
            loss: Tensor = self.job.call(
                "loss", self.context, model=self.loop.model, batch=batch, epoch=epoch, split=split
            )
        return loss

    def _compare_gradients(self) -> None:
        path = self.spec.gradients
        if path is None or not self.spec.survey:
            return
        if self.spec.is_reference:
            save_gradients(path, self._named, self.loop.divisor())
        elif path.exists():
            self.record["gradients"] = compare_gradients(path, self._named, self.loop.divisor())

    def _weigh(self) -> None:
        """Bytes of weights and gradients; the optimizer's are there after the step."""
        params = [p for _, p in self._named]
        grads = [p.grad for p in params if p.grad is not None]
        self.record["held"] = {"weights": _bytes(params), "gradients": _bytes(grads)}

    # --- after training ----------------------------------------------------------------------------------------

    def finish(self, *, quick: bool = False) -> None:
        """Everything that is measured once training is over, or only the quick part of it."""
        self.record["peak_bytes"] = peak_bytes(self.device)
        if records_graphs(self.spec.contender.compile, self.device):
            # A replay takes memory that the allocator counted only while the graph was recorded.
            self.record["peak_bytes"] = max(self.record["peak_bytes"], self.record["warmup_peak_bytes"])
        self.record["held"]["optimizer"] = _bytes(self.loop.state_tensors())
        self.record["truth"] = self.loop.truth()
        self.record["samples"] = statistics.median(self._sizes)
        self.record["validation"] = self._validate()
        self._curves = self.curves()  # before further steps add to the engine's
        if len(self._losses) < self.spec.settings.steps:
            self.record["stopped_after"] = len(self._losses)
        if self.spec.survey and quick:
            self.record["unsurveyed"] = True  # what follows is missing, and `--resume` makes the run again
        elif self.spec.survey:
            self.loop.end_schedule()  # OneCycleLR, for one, raises when it is stepped beyond its total_steps
            for name, measure in (("split", self._split), ("census", self._census)):
                try:
                    self.record[name] = measure()
                except Exception as error:  # a profiler that is not allowed here must not cost the run that is done
                    said = (str(error).strip().splitlines() or [""])[0]
                    self.record[f"{name}_failed"] = f"{type(error).__name__}: {said}"
            if self.device.type == "cuda" and not self.spec.contender.compile:  # which the prediction does not know
                self._predict()

    def _predict(self) -> None:
        """What `halfstep plan` says of this run, to stand beside what was measured."""
        from halfstep.planning import predict_peak  # a second of imports, after everything was timed

        estimate = predict_peak(self.job, self.spec.contender.policy, self.spec.batch, seed=self.spec.seed)
        if estimate is not None:
            self.record["predicted"] = {"peak_bytes": estimate.peak_bytes, "parts": dict(estimate.peak.breakdown)}

    def curves(self) -> dict[str, list[Any]]:
        """Loss, gradient norm, scale and skips of every training step; waits for the device."""
        if self._curves is not None:
            return self._curves
        losses = torch.stack(self._losses).tolist() if self._losses else []
        outcomes = [read() for read in self._outcomes[: len(losses)]]
        return {
            "loss": losses,
            "grad_norm": [o.grad_norm for o in outcomes],
            "scale": [o.scale for o in outcomes],
            "skipped": [o.skipped for o in outcomes],
        }

    def _validate(self) -> dict[str, float]:
        before = rng_state()
        sums = {"loss": 0.0} | ({"metric": 0.0} if self.job.metric is not None else {})
        total = 0
        where = {"model": self.loop.model, "epoch": 0, "split": "val"}
        stream = DataStream(self.job, self.context, split="val")
        # Data without a length may have no end: as many batches as there were steps are enough, the same in every row.
        most = self.spec.settings.steps if stream.num_batches(0) is None else None
        with self._uncompiled(), self.loop.evaluate():
            for number, raw in enumerate(stream.batches(0)):
                if number == most:
                    self.record["validation_cut"] = most
                    break
                batch = to_device(raw, self.device)
                size = batch_size_of(batch) or 1
                for name in sums:
                    sums[name] += float(self.job.call(name, self.context, batch=batch, **where)) * size
                total += size
        restore_rng(before)
        return {name: value / total for name, value in sums.items()}

    def _split(self) -> dict[str, float]:
        """Median seconds of each phase, in steps that wait for the device between phases."""
        times: dict[str, list[float]] = {phase: [] for phase in PHASES}

        def timed(phase: str, work: Callable[[], Any]) -> Any:
            start = time.perf_counter()
            result = work()
            synchronise(self.device)
            times[phase].append(time.perf_counter() - start)
            return result

        for _ in range(NUM_SPLIT):
            synchronise(self.device)
            epoch, batch = timed("data", self._next_on_device)
            loss = timed("forward", functools.partial(self._forward, epoch, batch))
            timed("backward", functools.partial(self.loop.backward, loss))
            timed("step", self.loop.step)
        return {phase: statistics.median(seconds) for phase, seconds in times.items()}

    def _next_on_device(self) -> tuple[int, Any]:
        epoch, raw = next(self._batches)
        return epoch, to_device(raw, self.device)

    def _census(self) -> dict[str, Any] | None:
        epoch, batch = self._next_on_device()
        wanted = self.spec.contender.compute
        if self.device.type == "cuda":
            kernels = trace_step(lambda: self._one_step(epoch, batch, lambda _: None))
            # Without leave to read the GPU's counters a profiler sees no kernel, and nothing can be said.
            return write_census([kernels], "profiler", wanted=wanted) if kernels else None
        watched = []
        with self._uncompiled():  # compiled kernels are not seen by the dispatcher
            for _ in range(NUM_WATCHED):
                census = DispatchCensus()
                with census:
                    self._one_step(epoch, batch, functools.partial(setattr, census, "phase"))
                watched.append(census.entries)
        return write_census(watched, "dispatch", wanted=wanted)

    def _uncompiled(self) -> contextlib.AbstractContextManager[Any]:
        """Without compilation: validation would otherwise compile the model anew, a minute for ten batches."""
        if not self.spec.contender.compile:
            return contextlib.nullcontext()
        stance: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
        return stance

    def _one_step(self, epoch: int, batch: Any, note: Callable[[str], None]) -> None:
        note("forward")
        loss = self._forward(epoch, batch)
        note("backward")
        self.loop.backward(loss)
        note("step")
        self.loop.step()


def _bytes(tensors: list[Any]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
