"""One run of one row: train, time and measure.

The order matters. The first step also yields the gradients that are compared with fp32's. Warm-up steps are trained but
not timed. Timed steps come in slices, between which other rows take their turns. Everything that would disturb training
comes after it: validation, then a step whose numbers are sampled, a few steps timed phase by phase with the device
synchronized in between, and one step under the census. Nothing is measured after those last steps.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from halfstep.checkpoint.rng import restore_rng, rng_state, seed_everything
from halfstep.comparison.census import DispatchCensus, write_census
from halfstep.comparison.census_trace import trace_step
from halfstep.comparison.clock import StepClock, peak_bytes, reset_peak, resident_bytes, synchronize
from halfstep.comparison.gradients import compare_gradients, gather_gradients, save_gradients
from halfstep.comparison.loops import make_loop
from halfstep.comparison.measurements import Curves, Measurements, Numerics, PredictedPeak, TrialResult, Validation
from halfstep.comparison.numerics.underflow import judge_sample, num_underflows, take_sample, where_not_zero
from halfstep.comparison.ranks.member import Member, backend_of, single_member
from halfstep.comparison.settings import DEFAULT_GPU
from halfstep.comparison.spec import TrialSpec
from halfstep.comparison.training_loop import StepOutcome, TrainingLoop, build_parts
from halfstep.engine.compiling import records_graphs
from halfstep.jobs.job import Job, trainable
from halfstep.optim.shards import local
from halfstep.train.build import seed_rank
from halfstep.train.stream import DataStream, batch_size_of, fingerprint, to_device
from halfstep.train.validation import padded_batches
from halfstep.watching.activations import Activations
from halfstep.watching.sample import Sample

__all__ = ["PHASES", "Trial"]

PHASES = ("data", "forward", "backward", "step")
NUM_SPLIT = 5  # steps whose phases are timed separately
NUM_SAMPLED = 3  # steps that are tried until one does not overflow
NUM_WATCHED = 3  # steps under the CPU census; the minimum time of each operator counts


class Trial:
    """A run in progress; `measurements` has what was measured so far."""

    def __init__(self, job: Job, spec: TrialSpec, member: Member | None = None) -> None:
        self.job, self.spec, self.member = job, spec, member or single_member(spec)
        self.context = self.member.context
        self.device = self.context.device
        self.measurements = Measurements(base_bytes=resident_bytes() if self.device.type == "cpu" else 0)
        seed_everything(spec.seed)
        parts = build_parts(job, self.context)
        self._model = parts.model
        self._named = trainable(parts.model)  # before a baseline wraps the model and changes the names
        self._add(weights_digest=fingerprint([p for _, p in self._named]))
        self.loop: TrainingLoop = make_loop(spec.variant, parts, spec.settings.max_norm, backend_of(spec.settings, job))
        self._is_sharded = spec.settings.strategy == "fsdp"
        if self._is_sharded:  # its parameters were replaced, under the same names
            self._named = trainable(parts.model)
        self.loop.model.train()
        seed_everything(spec.seed)  # setup may draw random numbers; all rows train on the same ones
        seed_rank(spec.seed, self.context.rank)
        self._stream = DataStream(job, self.context, split="train")
        self._batches = self._endless(self._stream)
        self._clock = StepClock(self.device)
        self._losses: list[Tensor] = []
        self._outcomes: list[Callable[[], StepOutcome]] = []
        self._sizes: list[int] = []  # examples of all ranks in each step
        self._own_sizes: list[int] = []  # and of this one
        self.seconds: list[float] = []  # of every timed step
        self.slices: list[int] = []  # steps in each turn
        self._curves: Curves | None = None
        self._sample: Sample | None = None

    def _add(self, **values: Any) -> None:
        self.measurements = replace(self.measurements, **values)

    def _endless(self, stream: DataStream) -> Iterator[tuple[int, Any]]:
        epoch = 0
        while True:
            for batch in stream.batches(epoch):
                yield epoch, batch
            epoch += 1

    # --- training ----------------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """The first steps (compilation, autotuning, optimizer states), timed as a whole."""
        self.member.wait()
        start = time.perf_counter()
        self.loop.examine_skips(on=True)
        for number in range(self.spec.settings.num_warmup):
            self._step(first=number == 0, examine=True)
        synchronize(self.device)
        for read in self._outcomes[-1:]:
            read()  # on a GPU, the outcome of the last step arrives here
        self.loop.examine_skips(on=False)
        self._add(
            skip_causes=self.loop.skip_causes() or None,
            warmup_seconds=time.perf_counter() - start - self.loop.examining_seconds(),
            warmup_steps=self.spec.settings.num_warmup,
            warmup_peak_bytes=peak_bytes(self.device),
        )
        reset_peak(self.device)

    def run_slice(self, count: int) -> None:
        """One turn: train and time `count` steps."""
        self.member.wait()  # the request does not reach all ranks at the same time
        self._clock.tick()
        for _ in range(count):
            self._step()
            self._clock.tick()
        self.seconds += self._clock.seconds()
        self.slices.append(count)

    def _step(self, *, first: bool = False, examine: bool = False) -> None:
        epoch, raw = next(self._batches)
        if first:
            self._add(batch_digest=self.member.digest(fingerprint(raw)))
        share = self._stream.share
        batch = to_device(raw, self.device)
        loss = self._forward(epoch, batch)
        self.loop.backward(loss, share.weight)
        if first:
            self._count_bytes()
            if self.spec.survey:
                self.loop.look_at_gradients(self._named, self._compare_gradients)
        self._outcomes.append(self.loop.step(self._replay(epoch, batch) if examine else None))
        self._losses.append(loss.detach().to(torch.float32, copy=True))  # a CUDA graph overwrites it on replay
        self._sizes.append(share.total)
        self._own_sizes.append(share.num_examples)

    def _forward(self, epoch: int, batch: Any, split: str = "train") -> Tensor:
        with self.loop.forward():
            return self._loss(self.loop.model, epoch, batch, split)

    def _loss(self, model: Any, epoch: int, batch: Any, split: str = "train") -> Tensor:
        loss: Tensor = self.job.call("loss", self.context, model=model, batch=batch, epoch=epoch, split=split)
        return loss

    def _replay(self, epoch: int, batch: Any) -> Callable[[], Tensor]:
        return lambda: self._loss(self.loop.model, epoch, batch)

    def _compare_gradients(self, gradients: list[tuple[str, Tensor]], divisor: float) -> None:
        files = {
            "gradients": (self.spec.gradients, self.spec.is_reference),
            "eager_gradients": (self.spec.eager_gradients, not self.spec.variant.compile),
        }
        for name, (path, is_mine) in files.items():
            if path is None or not (is_mine or path.exists()):
                continue
            if not self.member.is_main:
                gather_gradients(gradients)
            elif is_mine:
                save_gradients(path, gradients, divisor)
            else:
                self._add(**{name: compare_gradients(path, gradients, divisor)})

    def _count_bytes(self) -> None:
        """Bytes of weights and gradients; optimizer states exist only after the step."""
        params = [p for _, p in self._named]
        grads = [p.grad for p in params if p.grad is not None]
        self._add(allocated={"weights": _bytes(params), "gradients": _bytes(grads)})

    # --- after training ----------------------------------------------------------------------------------------

    def finish(self, *, quick: bool = False) -> None:
        """Everything that is measured after training, or only the quick part of it."""
        peak = peak_bytes(self.device)
        if records_graphs(self.spec.variant.compile, self.device):
            # The memory of a graph replay is counted by the allocator only while the graph is recorded.
            peak = max(peak, self.measurements.warmup_peak_bytes or 0)
        self._add(
            peak_bytes=peak,
            allocated={**(self.measurements.allocated or {}), "optimizer": _bytes(self.loop.state_tensors())},
            truth=self.loop.truth(),
            samples=statistics.median(self._sizes),
        )
        self._add(validation=self._validate())
        curves = self.curves()  # before further steps add to the engine's results
        losses = self.member.mean_losses(list(curves.loss), self._own_sizes[: len(curves.loss)])
        self._curves = replace(curves, loss=tuple(losses))
        if len(self._losses) < self.spec.settings.steps:
            self._add(stopped_after=len(self._losses))
        if self.spec.survey and quick:
            self._add(unsurveyed=True)  # the rest is missing, and `--resume` repeats the run
        elif self.spec.survey:
            self._survey()
        self.measurements = self.member.combine(self.measurements)

    def _survey(self) -> None:
        """Numerics, phases, census and predicted memory: once per row."""
        self.loop.end_schedule()  # OneCycleLR, for one, raises when it is stepped beyond its total_steps
        for name, measure in (("numerics", self._numerics), ("split", self._split), ("census", self._census)):
            if name == "numerics" and self._is_sharded:
                self._add(numerics_failed="the model is sharded, and it needs whole gradients (use --backend ddp)")
                continue
            try:
                self._add(**{name: measure()})
            except Exception as error:  # a profiler without permissions must not cost the finished run
                self._add(**{f"{name}_failed": _describe(error)})
        # The prediction covers neither compilation nor ranks, and only CUDA's rules of memory.
        covered = not self.spec.variant.compile and self.spec.settings.strategy == "single"
        if covered and self.device.type in {"cuda", "cpu"}:
            self._predict()

    def _predict(self) -> None:
        """The peak that `halfstep plan` predicts: of this GPU, to compare with the measured one, or of a stated one."""
        from halfstep.planning import predict_peak  # a second of imports, after all timing

        gpu = None if self.device.type == "cuda" else self.spec.settings.gpu or DEFAULT_GPU
        estimate = predict_peak(self.job, self.spec.variant.policy, self.spec.batch, seed=self.spec.seed, gpu=gpu)
        if estimate is not None:
            self._add(predicted=PredictedPeak(estimate.peak_bytes, dict(estimate.peak.breakdown), gpu))

    def result(self) -> TrialResult:
        """Everything so far; the curves are empty where a device error made them unreadable."""
        curves = Curves()
        with contextlib.suppress(Exception):
            curves = self.curves()
        return TrialResult(curves, tuple(self.seconds), tuple(self.slices), self.measurements, self._sample)

    def curves(self) -> Curves:
        """Loss, gradient norm, scale and skips of every training step; synchronizes with the device."""
        if self._curves is not None:
            return self._curves
        losses = torch.stack(self._losses).tolist() if self._losses else []
        outcomes = [read() for read in self._outcomes[: len(losses)]]
        return Curves(
            tuple(losses),
            tuple(o.grad_norm for o in outcomes),
            tuple(o.scale for o in outcomes),
            tuple(o.skipped for o in outcomes),
        )

    def _validate(self) -> Validation | None:
        random_numbers = rng_state()
        sums = {"loss": 0.0} | ({"metric": 0.0} if self.job.metric is not None else {})
        total = 0
        arguments = {"model": self.loop.model, "epoch": 0, "split": "val"}
        stream = DataStream(self.job, self.context, split="val")
        if not self.job.has_validation or not stream.exists(0):
            restore_rng(random_numbers)
            return None
        # Data without a length may be infinite: use as many batches as there are steps, the same in every row.
        limit = self.spec.settings.steps if stream.num_batches(0) is None else None
        synchronize(self.device)
        start = time.perf_counter()
        with self._uncompiled(), self.loop.evaluate():
            for raw, counts in self._together(self._limited(stream.batches(0), limit)):
                batch = to_device(raw, self.device)
                size = batch_size_of(batch, 1) if counts else 0
                for name in sums:
                    sums[name] += float(self.job.call(name, self.context, batch=batch, **arguments)) * size
                total += size
        synchronize(self.device)
        seconds = time.perf_counter() - start
        restore_rng(random_numbers)
        *values, everything = self.member.ranks.sums(*sums.values(), total)
        means = {name: value / everything for name, value in zip(sums, values, strict=True)}
        return Validation(**means, seconds=seconds, samples=int(everything))

    def _limited(self, batches: Iterator[Any], limit: int | None) -> Iterator[Any]:
        for number, raw in enumerate(batches):
            if number == limit:
                self._add(validation_cut=limit)
                return
            yield raw

    def _together(self, batches: Iterator[Any]) -> Iterator[tuple[Any, bool]]:
        """The batches, as many on every rank: a forward may exchange messages. The second value is whether one counts."""
        return padded_batches(batches, self.member.ranks) if self.member.several else ((raw, True) for raw in batches)

    def _numerics(self) -> Numerics:
        """What the format does to one more step; one that overflows is tried again, at the lower scale that follows."""
        epoch, batch = self._next_on_device()
        random_numbers = rng_state()
        not_zero = None
        try:
            with self._uncompiled():
                own = where_not_zero(self._model, lambda model: self._loss(model, epoch, batch))
            not_zero = self.member.any_of(own)
        except Exception as error:  # no memory for a copy, or a job that cannot use one: the rest is known all the same
            self._add(numerics_failed=f"its gradients could not be computed in fp32 ({_describe(error)})")
        self.loop.examine_skips(on=True)
        try:
            for _ in range(NUM_SAMPLED):
                restore_rng(random_numbers)
                numerics = self.member.ranks.broadcast(self._sample_step(epoch, batch, not_zero))
                if numerics.overflowed in {None, "forward", "data", "weights"}:  # what a lower scale cannot change
                    break
        finally:
            self.loop.examine_skips(on=False)
            self._add(skip_causes=self.loop.skip_causes() or None)
        return numerics

    def _sample_step(self, epoch: int, batch: Any, not_zero: dict[str, Tensor] | None) -> Numerics:
        activations = Activations(self._model)
        activations.arm()
        try:
            loss = self._forward(epoch, batch)
            self.loop.backward(loss)
        finally:
            counted = activations.take()
        scale = self.loop.divisor()
        self._sample = take_sample(len(self._losses) + 1, self._named, scale, counted)
        underflows = None if not_zero is None else num_underflows(self._named, not_zero)
        examined = len(self.loop.skip_causes())
        self.loop.step(self._replay(epoch, batch))()
        causes = self.member.ranks.gather(self.loop.skip_causes()[examined:])
        cause = next((cause for each in causes for cause in each), None)
        return judge_sample(self._sample, underflows, cause)

    def _split(self) -> dict[str, float]:
        """Median seconds of each phase, in steps that synchronize between phases."""
        times: dict[str, list[float]] = {phase: [] for phase in PHASES}

        def timed(phase: str, work: Callable[[], Any]) -> Any:
            start = time.perf_counter()
            result = work()
            synchronize(self.device)
            times[phase].append(time.perf_counter() - start)
            return result

        for _ in range(NUM_SPLIT):
            synchronize(self.device)
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
        requested = self.spec.variant.compute
        if self.device.type == "cuda":
            kernels = trace_step(lambda: self._one_step(epoch, batch, lambda _: None))
            # Without permission to read the GPU's counters the profiler records no kernels.
            return write_census([kernels], "profiler", requested=requested) if kernels else None
        watched = []
        with self._uncompiled():  # compiled kernels bypass the dispatcher
            for _ in range(NUM_WATCHED):
                census = DispatchCensus()
                with census:
                    self._one_step(epoch, batch, functools.partial(setattr, census, "phase"))
                watched.append(census.entries)
        return write_census(watched, "dispatch", requested=requested)

    def _uncompiled(self) -> contextlib.AbstractContextManager[Any]:
        """Without compilation: validation would otherwise recompile the model, a minute for ten batches."""
        if not self.spec.variant.compile:
            return contextlib.nullcontext()
        stance: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
        return stance

    def _one_step(self, epoch: int, batch: Any, enter_phase: Callable[[str], None]) -> None:
        enter_phase("forward")
        loss = self._forward(epoch, batch)
        enter_phase("backward")
        self.loop.backward(loss)
        enter_phase("step")
        self.loop.step()


def _describe(error: Exception) -> str:
    message = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {message}"


def _bytes(tensors: list[Any]) -> int:
    """Of what this rank stores."""
    return sum(t.numel() * t.element_size() for t in map(local, tensors))
