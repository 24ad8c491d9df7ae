"""From runs to rows: speed, memory and loss of each variant over all its repeats, relative to the reference.

Everything relative is computed run by run, with the reference's run of the same seed, before anything is averaged.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from halfstep.comparison.estimate import Estimate, curve_distance, from_groups, from_values, paired_ratio
from halfstep.comparison.measurements import PredictedPeak
from halfstep.comparison.numerics.skips import root_cause, skip_notes
from halfstep.comparison.record import RunRecord
from halfstep.comparison.survey import Survey
from halfstep.comparison.variant import Variant

__all__ = ["METRICS", "Row", "build_row", "final_loss", "metric_of", "noise_of", "seeds_differ"]

NOT_PREDICTED = "not predicted"
_LAST = 0.1  # the share of a run's steps whose mean loss is its final loss
_MIN_LAST = 5  # steps needed for a standard deviation


@dataclass(frozen=True)
class Row:
    """One variant, over all its repeats."""

    label: str
    variant: Variant  # stored as `contender`
    machine: str
    status: str  # done, or failed with a reason
    reason: str
    num_runs: int  # completed ones
    step_seconds: Estimate | None = None
    mean_seconds: float | None = None  # of a step, outliers included: the wall time of the run divided by its steps
    spread: float | None = None  # interquartile range of the step times divided by their median
    samples_per_second: Estimate | None = None
    speedup: Estimate | None = None  # relative to the reference
    warmup_seconds: float | None = None
    warmup_steps: int = 0
    num_ranks: int = 1
    peak_bytes: float | None = None  # of the largest rank
    rank_peaks: tuple[float, ...] | None = None  # of each rank, where there are several
    memory: dict[str, float] | None = None  # the peak by category, in bytes
    predicted_bytes: float | None = None  # the peak that `halfstep plan` predicts
    predicted_gpu: str | None = None  # for a stated GPU, where the run was on a CPU; None: for the device of the run
    predicted_parts: dict[str, float] | None = None  # and that peak by category
    memory_ratio: float | None = None
    split: dict[str, float] | None = None  # seconds of each phase
    flops_per_second: float | None = None
    flops_share: float | None = None  # of the matmul rate measured here in the same format
    cut_at: int | None = None  # the step of loss, val_loss and metric, where no run got to its last one; None: the last
    loss: Estimate | None = None  # the mean of the last tenth of the steps
    loss_gap: Estimate | None = None  # minus the reference's, seed by seed
    loss_noise: float | None = None  # standard deviation of the reference's final loss over seeds
    step_noise: float | None = None  # and over its last steps: used where all seeds give the same run
    loss_distance: float | None = None  # of the whole curve from the reference's
    beyond_noise: bool | None = None  # whether that exceeds the distance between the reference's own seeds
    val_loss: Estimate | None = None
    metric: Estimate | None = None
    metric_gap: Estimate | None = None
    val_seconds: float | None = None  # of the whole validation, data included
    val_samples_per_second: float | None = None
    skips: int = 0
    nonfinite: int = 0
    cosine: float | None = None  # of the first gradients with fp32's
    gradient_error: float | None = None  # of the first gradients, relative to fp32's
    eager_error: float | None = None  # and relative to those of the same precision without compilation
    underflow: float | None = None  # share of the gradient that is 0 here and not in fp32, in a step after training
    worst_layer: str | None = None  # the module with the largest share, or where a gradient became inf or NaN
    worst_underflow: float | None = None  # that module's share
    overflowed: str | None = None  # what happened in it, if gradients are not finite: see `measurements.Numerics`
    census: dict[str, Any] | None = None
    truth: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain values under the keys of comparison.json, with every metric of `METRICS`."""
        values = asdict(self)
        del values["variant"]
        return {**values, "contender": self.variant.as_dict(), "figures": {m: metric_of(self, m) for m in METRICS}}


# The metrics of a row that `--fail-if` can use, with their meaning.
METRICS = {
    "step_ms": "median time of a step, in milliseconds",
    "mean_step_ms": "mean time of a step, in milliseconds, outliers included",
    "samples_per_second": "training examples per second, at the median time of a step",
    "speedup": "speed relative to the reference",
    "memory_gib": "peak memory, in GiB; of the largest rank",
    "memory_ratio": "peak memory relative to the reference",
    "predicted_gib": "peak memory that `halfstep plan` predicts, in GiB; for the stated GPU on a machine without one",
    "loss": "training loss at the end",
    "loss_gap": "training loss at the end, minus the reference's",
    "loss_distance": "mean distance of the loss curve from the reference's",
    "val_loss": "validation loss",
    "metric": "validation metric",
    "metric_gap": "validation metric, minus the reference's",
    "val_seconds": "time of the whole validation, in seconds",
    "val_samples_per_second": "validation examples per second",
    "skips": "steps skipped, over all repeats",
    "nonfinite": "steps with a non-finite loss, over all repeats",
    "cosine": "cosine of the first gradients with fp32's",
    "gradient_error": "relative error of the first gradients with respect to fp32's",
    "eager_error": "relative difference of a compiled row's first gradients from those of the same precision without compilation",
    "underflow": "share of the gradient's elements that are 0 as stored and not in fp32, in a step after training",
    "flops_share": "share of the measured matmul rate that the job reaches",
}


def metric_of(row: Row, name: str) -> float | None:
    """One of `METRICS` as a plain number, or None where it was not measured."""
    if name == "step_ms":
        return None if row.step_seconds is None else row.step_seconds.value * 1e3
    if name == "mean_step_ms":
        return None if row.mean_seconds is None else row.mean_seconds * 1e3
    if name == "memory_gib":
        return None if row.peak_bytes is None else row.peak_bytes / 2**30
    if name == "predicted_gib":
        return None if row.predicted_bytes is None else row.predicted_bytes / 2**30
    value = getattr(row, name)
    return value.value if isinstance(value, Estimate) else value


def final_loss(run: RunRecord, length: int | None = None) -> float | None:
    """The mean loss of the last tenth of a run, or of its first `length` steps."""
    loss = run.loss[:length]
    last = loss[-max(1, int(len(loss) * _LAST)) :]
    return statistics.fmean(last) if last and all(map(math.isfinite, last)) else None


def seeds_differ(runs: Sequence[RunRecord]) -> bool:
    """Whether different seeds give different runs; a job that seeds itself repeats the same one."""
    return len({(run.measured.weights_digest, run.measured.batch_digest) for run in runs}) > 1


def noise_of(runs: Sequence[RunRecord]) -> float | None:
    """The mean distance between the reference's own loss curves of different seeds; None if all seeds give one run."""
    completed = [run for run in runs if run.failure is None]
    pairs = itertools.combinations(completed if seeds_differ(completed) else [], 2)
    distances = [d for one, other in pairs if (d := curve_distance(one.loss, other.loss)) is not None]
    return statistics.fmean(distances) if distances else None


def build_row(runs: Sequence[RunRecord], reference: Sequence[RunRecord], survey: Survey, label: str) -> Row:
    """One row from its runs, the reference's runs and the survey."""
    variant = runs[0].variant
    completed = [run for run in runs if run.failure is None]
    status, reason = _status(runs)
    row = Row(
        label,
        variant,
        runs[0].machine,
        status,
        reason,
        num_runs=len(completed),
        num_ranks=survey.settings.ranks,
        notes=(*variant.notes, *skip_notes(runs)),
    )
    timed = [run for run in runs if run.slices]
    if not timed:
        return row
    reference = [run for run in reference if run.failure is None]
    seconds = from_groups([[statistics.median(turn) for turn in run.slices] for run in timed])
    assert seconds is not None
    samples = float(timed[0].measured.samples or survey.samples or survey.batch)
    steps = [second for run in timed for second in run.seconds]
    surveyed = next((m for run in timed if (m := run.measured).split is not None or m.census is not None), None)
    gradients = next((run.measured.gradients for run in timed if run.measured.gradients is not None), None)
    eager = next((run.measured.eager_gradients for run in timed if run.measured.eager_gradients is not None), None)
    warmups = [run.measured.warmup_seconds for run in timed if run.measured.warmup_seconds is not None]
    predicted = next((run.measured.predicted for run in completed if run.measured.predicted is not None), None)
    return replace(
        row,
        **_losses(_longest(completed or timed), reference, comparable=survey.is_comparable),
        **_validation_speed(completed),
        **_flops(seconds.value, variant.compute, survey, samples),
        step_seconds=seconds,
        mean_seconds=statistics.fmean(steps),
        spread=_spread(steps),
        samples_per_second=seconds.over(samples),
        speedup=_speedup(timed, reference),
        warmup_seconds=statistics.median(warmups) if warmups else None,
        warmup_steps=timed[0].settings.num_warmup,
        peak_bytes=_peak(completed),
        rank_peaks=_rank_peaks(completed),
        memory=_memory(completed),
        predicted_bytes=None if predicted is None else predicted.peak_bytes,
        predicted_gpu=None if predicted is None else predicted.gpu,
        predicted_parts=None if predicted is None or predicted.gpu is None else _parts(predicted),
        memory_ratio=_ratio(_peak(completed), _peak(reference)),
        split=None if surveyed is None else surveyed.split,
        skips=sum(sum(run.skipped) for run in runs),
        nonfinite=sum(run.num_nonfinite for run in runs),
        cosine=None if gradients is None else _finite(gradients.cosine),
        gradient_error=None if gradients is None else _finite(gradients.relative_error),
        eager_error=None if eager is None else _finite(eager.relative_error),
        **_numerics(timed),
        census=None if surveyed is None else surveyed.census,
        truth=next((run.measured.truth for run in timed if run.measured.truth), None),
    )


def _numerics(runs: Sequence[RunRecord]) -> dict[str, Any]:
    numerics = next((run.measured.numerics for run in runs if run.measured.numerics is not None), None)
    if numerics is None:
        return {}
    names = ("underflow", "worst_layer", "worst_underflow", "overflowed")
    return {name: getattr(numerics, name) for name in names}


def _status(runs: Sequence[RunRecord]) -> tuple[str, str]:
    failed = [run for run in runs if run.failure is not None]
    if failed:
        assert failed[0].failure is not None
        share = f" ({len(failed)} of {len(runs)} runs)" if len(runs) > 1 else ""
        cause = root_cause(failed[0]) if failed[0].failure.kind == "overflow" else ""
        reason = f"{failed[0].failure.reason}{f' Examined: {cause}.' if cause else ''}"
        return "failed", f"{failed[0].failure.kind}{share}: {reason}"
    diverged = [run for run in runs if run.diverged_at is not None]
    if diverged:
        run = diverged[0]
        reason = f"the loss is not finite from step {run.diverged_at} on with seed {run.seed}"
        cause = root_cause(run)
        return "failed", f"NaN ({len(diverged)} of {len(runs)} runs): {reason}{f': {cause}' if cause else ''}"
    return "done", ""


def _pairs(runs: Sequence[RunRecord], reference: Sequence[RunRecord]) -> list[tuple[RunRecord, RunRecord]]:
    """Each run with the reference's run of the same seed."""
    by_repeat = {run.repeat: run for run in reference}
    return [(run, by_repeat[run.repeat]) for run in runs if run.repeat in by_repeat]


def _speedup(runs: Sequence[RunRecord], reference: Sequence[RunRecord]) -> Estimate | None:
    pairs = _pairs(runs, reference)
    return paired_ratio(
        [[statistics.median(turn) for turn in other.slices] for _, other in pairs],
        [[statistics.median(turn) for turn in run.slices] for run, _ in pairs],
    )


def _losses(runs: Sequence[RunRecord], reference: Sequence[RunRecord], *, comparable: bool) -> dict[str, Any]:
    validations = [run.measured.validation for run in runs if run.measured.validation is not None]
    num_steps = len(runs[0].loss)
    losses: dict[str, Any] = {
        "cut_at": num_steps if num_steps < runs[0].settings.steps else None,
        "loss": _mean([final_loss(run) for run in runs]),
        "val_loss": _mean([validation.loss for validation in validations]),
        "metric": _mean([validation.metric for validation in validations if validation.metric is not None]),
    }
    if not comparable:
        return losses
    pairs = _pairs(runs, reference)
    distances = [d for a, b in pairs if (d := curve_distance(a.loss, b.loss)) is not None]
    distance = statistics.fmean(distances) if distances else None
    noise = noise_of(reference)
    ends = [value for run in reference if (value := final_loss(run)) is not None]
    return {
        **losses,
        "loss_noise": statistics.stdev(ends) if len(ends) > 1 and seeds_differ(reference) else None,
        "step_noise": _step_noise(reference),
        "loss_gap": _mean([_loss_gap(*pair) for pair in pairs]),
        "metric_gap": _mean([gap for pair in pairs if (gap := _metric_gap(*pair)) is not None]),
        "loss_distance": distance,
        "beyond_noise": None if distance is None or noise is None else distance > noise,
    }


def _longest(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """The runs with the most steps: a mean over losses of different steps would be the loss of none."""
    most = max(len(run.loss) for run in runs)
    return [run for run in runs if len(run.loss) == most]


def _validation_speed(runs: Sequence[RunRecord]) -> dict[str, Any]:
    timed = [(v.seconds, v.samples) for run in runs if (v := run.measured.validation) and v.seconds and v.samples]
    if not timed:
        return {}
    return {
        "val_seconds": statistics.median(seconds for seconds, _ in timed),
        "val_samples_per_second": statistics.median(samples / seconds for seconds, samples in timed),
    }


def _mean(values: Sequence[float | None]) -> Estimate | None:
    """The mean over seeds; None if one of them has no finite value, because the mean of the others would hide it."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return from_values(finite) if len(finite) == len(values) else None


def _step_noise(runs: Sequence[RunRecord]) -> float | None:
    """The standard deviation of a run's last losses (a tenth of them, at least five), averaged over runs."""
    ends = [run.loss[-max(_MIN_LAST, int(len(run.loss) * _LAST)) :] for run in runs]
    deviations = [statistics.stdev(end) for end in ends if len(end) >= _MIN_LAST and all(map(math.isfinite, end))]
    return statistics.fmean(deviations) if deviations else None


def _metric_gap(run: RunRecord, reference: RunRecord) -> float | None:
    """The difference of metrics; None for runs of different lengths, where it would not be due to the precision."""
    mine, other = run.measured.validation, reference.measured.validation
    if len(run.loss) != len(reference.loss) or mine is None or other is None:
        return None
    return None if mine.metric is None or other.metric is None else mine.metric - other.metric


def _loss_gap(run: RunRecord, reference: RunRecord) -> float | None:
    """The difference of final losses; where one run was stopped early, at the last step that both have."""
    length = min(len(run.loss), len(reference.loss))
    mine, other = final_loss(run, length), final_loss(reference, length)
    return None if mine is None or other is None else mine - other


def _flops(seconds: float, compute: str, survey: Survey, samples: float) -> dict[str, Any]:
    """Operations per second. They are counted once, in fp32: the work of the model is the same in every precision."""
    if not survey.flops_per_step:
        return {}
    rate = survey.flops_per_step * samples / (survey.samples or samples) / seconds
    one_rank = survey.matmul_rate(compute)
    peak_rate = None if one_rank is None else one_rank * survey.settings.ranks
    return {"flops_per_second": rate, "flops_share": rate / peak_rate if peak_rate else None}


def _memory(runs: Sequence[RunRecord]) -> dict[str, float] | None:
    """The peak by category: the predicted categories, or exact counts with activations as the rest."""
    measured = [run.measured for run in runs if run.measured.peak_bytes is not None]
    if not measured:
        return None
    first, peak = measured[0], _peak(runs)
    assert first.peak_bytes is not None
    assert peak is not None
    if first.predicted is not None and first.predicted.gpu is None:
        parts = _parts(first.predicted)
        beyond = first.peak_bytes - first.predicted.peak_bytes
        return parts | ({NOT_PREDICTED: float(beyond)} if beyond > 0 else {})
    allocated = {name: float(size) for name, size in (first.allocated or {}).items()}
    base = {"process": float(first.base_bytes)} if first.base_bytes else {}
    rest = peak - sum(allocated.values()) - sum(base.values())
    return {**base, **allocated, "activations, rest": max(0.0, rest)}


def _parts(predicted: PredictedPeak) -> dict[str, float]:
    return {name: float(size) for name, size in predicted.parts.items() if size}


def _peak(runs: Sequence[RunRecord]) -> float | None:
    peaks = [run.measured.peak_bytes for run in runs if run.measured.peak_bytes is not None]
    return statistics.median(peaks) if peaks else None


def _rank_peaks(runs: Sequence[RunRecord]) -> tuple[float, ...] | None:
    peaks = [run.measured.rank_peaks for run in runs if run.measured.rank_peaks]
    return tuple(map(statistics.median, zip(*peaks, strict=True))) if peaks else None


def _ratio(mine: float | None, other: float | None) -> float | None:
    return None if mine is None or not other else mine / other


def _spread(steps: Sequence[float]) -> float | None:
    if len(steps) < 4:
        return None
    low, middle, high = statistics.quantiles(steps, n=4)
    return (high - low) / middle


def _finite(value: Any) -> float | None:
    return value if isinstance(value, float) and math.isfinite(value) else None
