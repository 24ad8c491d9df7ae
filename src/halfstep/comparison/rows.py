"""From runs to rows: what each precision cost and did, over all its repeats, and against the reference.

Everything relative is formed run by run, with the reference's run of the same seed, before anything is averaged.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from halfstep.comparison.contender import Contender
from halfstep.comparison.estimate import Estimate, curve_distance, from_groups, from_values, paired_ratio
from halfstep.comparison.record import RunRecord

__all__ = ["METRICS", "Row", "build_row", "final_loss", "metric_of", "noise_of", "seeds_tell"]

NOT_PREDICTED = "not predicted"
_LAST = 0.1  # the share of a run's steps whose mean loss is its final loss
_FEWEST_LAST = 5  # steps that a spread can be taken of


@dataclass(frozen=True)
class Row:
    """One precision or peer, over all its repeats."""

    label: str
    contender: Contender
    machine: str
    status: str  # done, or failed with the reason beside it
    reason: str
    num_runs: int  # that were completed
    step_seconds: Estimate | None = None
    mean_seconds: float | None = None  # of a step, slow ones and all: what a clock over the whole run would give
    spread: float | None = None  # the middle half of the steps spans this share of the median
    samples_per_second: Estimate | None = None
    speedup: Estimate | None = None  # against the reference
    warmup_seconds: float | None = None
    warmup_steps: int = 0
    peak_bytes: float | None = None
    memory: dict[str, float] | None = None  # the peak by what it holds, in bytes
    predicted_bytes: float | None = None  # the peak as `halfstep plan` predicts it
    memory_ratio: float | None = None
    split: dict[str, float] | None = None  # seconds of each phase
    flops_per_second: float | None = None
    flops_share: float | None = None  # of the matmul rate measured here in the same format
    loss: Estimate | None = None  # the mean of the last tenth of the steps
    loss_gap: Estimate | None = None  # against the reference's, seed by seed
    loss_noise: float | None = None  # the spread (standard deviation) of the reference's final loss over seeds
    step_noise: float | None = None  # and from step to step, at its end: what there is where seeds do not tell
    loss_distance: float | None = None  # of the whole curve from the reference's
    beyond_noise: bool | None = None  # whether that is more than the reference's own, from seed to seed
    val_loss: Estimate | None = None
    metric: Estimate | None = None
    metric_gap: Estimate | None = None
    skips: int = 0
    nonfinite: int = 0
    cosine: float | None = None  # of the first gradients with fp32's
    gradient_error: float | None = None
    census: dict[str, Any] | None = None
    truth: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()


# What `--fail-if` can ask a row for, and in which words.
METRICS = {
    "step_ms": "median time of a step, in milliseconds",
    "mean_step_ms": "mean time of a step, in milliseconds: what a clock over the whole run gives",
    "samples_per_second": "examples trained on per second, at the median time of a step",
    "speedup": "times as fast as the reference",
    "memory_gib": "peak memory, in GiB",
    "memory_ratio": "peak memory against the reference's",
    "loss": "training loss at the end",
    "loss_gap": "training loss at the end, minus the reference's",
    "loss_distance": "mean distance of the loss curve from the reference's",
    "val_loss": "validation loss",
    "metric": "validation metric",
    "metric_gap": "validation metric, minus the reference's",
    "skips": "steps skipped, over all repeats",
    "nonfinite": "steps with a loss that is not finite, over all repeats",
    "cosine": "cosine of the first gradients with fp32's",
    "flops_share": "share of the measured matmul rate that the model reaches",
}


def metric_of(row: Row, name: str) -> float | None:
    """One of `METRICS` as a plain number, or None where it was not measured."""
    if name == "step_ms":
        return None if row.step_seconds is None else row.step_seconds.value * 1e3
    if name == "mean_step_ms":
        return None if row.mean_seconds is None else row.mean_seconds * 1e3
    if name == "memory_gib":
        return None if row.peak_bytes is None else row.peak_bytes / 2**30
    value = getattr(row, name)
    return value.value if isinstance(value, Estimate) else value


def final_loss(run: RunRecord, length: int | None = None) -> float | None:
    """The mean loss of the last tenth of a run, or of its first `length` steps."""
    loss = run.loss[:length]
    last = loss[-max(1, int(len(loss) * _LAST)) :]
    return statistics.fmean(last) if last and all(map(math.isfinite, last)) else None


def seeds_tell(runs: Sequence[RunRecord]) -> bool:
    """Whether runs of several seeds are different runs; a job that seeds itself makes the same one again."""
    return len({(run.measured.get("weights"), run.measured.get("batch")) for run in runs}) > 1


def noise_of(runs: Sequence[RunRecord]) -> float | None:
    """How far the reference's own loss curves are apart from seed to seed, in the mean; None where seeds do not tell."""
    whole = [run for run in runs if run.failure is None]
    pairs = itertools.combinations(whole if seeds_tell(whole) else [], 2)
    found = [d for one, other in pairs if (d := curve_distance(one.loss, other.loss)) is not None]
    return statistics.fmean(found) if found else None


def build_row(runs: Sequence[RunRecord], reference: Sequence[RunRecord], found: dict[str, Any], label: str) -> Row:
    """One row out of its runs, the reference's runs and the survey."""
    contender = runs[0].contender
    whole = [run for run in runs if run.failure is None]
    status, reason = _status(runs)
    base: dict[str, Any] = {
        "label": label,
        "contender": contender,
        "machine": runs[0].machine,
        "status": status,
        "reason": reason,
    }
    common: dict[str, Any] = {"num_runs": len(whole), "notes": (*contender.notes, *_overflow_note(runs))}
    timed = [run for run in runs if run.slices]
    if not timed:
        return Row(**base, **common)
    reference = [run for run in reference if run.failure is None]
    turns = [[statistics.median(turn) for turn in run.slices] for run in timed]
    seconds = from_groups(turns)
    assert seconds is not None
    samples = float(timed[0].measured.get("samples") or found["samples"] or found["batch"])
    steps = [second for run in timed for second in run.seconds]
    surveyed = next((run.measured for run in timed if {"split", "census"} & set(run.measured)), {})
    gradients: dict[str, Any] = next((run.measured["gradients"] for run in timed if "gradients" in run.measured), {})
    memory = _memory(whole)
    return Row(
        **base,
        **common,
        **_losses(whole, reference, comparable=found["same_weights"] and found["same_batches"]),
        **_flops(seconds.value, contender.compute, found, samples),
        step_seconds=seconds,
        mean_seconds=statistics.fmean(steps),
        spread=_spread(steps),
        samples_per_second=seconds.over(samples),
        speedup=_speedup(timed, reference),
        warmup_seconds=statistics.median(run.measured["warmup_seconds"] for run in timed),
        warmup_steps=timed[0].settings.num_warmup,
        peak_bytes=_peak(whole),
        memory=memory,
        predicted_bytes=next(
            (run.measured["predicted"]["peak_bytes"] for run in whole if "predicted" in run.measured), None
        ),
        memory_ratio=_ratio(_peak(whole), _peak(reference)),
        split=surveyed.get("split"),
        skips=sum(sum(run.skipped) for run in runs),
        nonfinite=sum(run.num_nonfinite for run in runs),
        cosine=_finite(gradients.get("cosine")),
        gradient_error=_finite(gradients.get("relative_error")),
        census=surveyed.get("census"),
        truth=next((run.measured["truth"] for run in timed if run.measured.get("truth")), None),
    )


def _overflow_note(runs: Sequence[RunRecord]) -> tuple[str, ...]:
    found = [run.measured["gradients"]["cosine"] for run in runs if "gradients" in run.measured]
    if all(map(math.isfinite, found)):
        return ()
    return (
        "the gradients of the first step overflowed, as a loss scale that is still too high makes them; they have no cosine",
    )


def _status(runs: Sequence[RunRecord]) -> tuple[str, str]:
    failed = [run for run in runs if run.failure is not None]
    if failed:
        assert failed[0].failure is not None
        many = f" ({len(failed)} of {len(runs)} runs)" if len(runs) > 1 else ""
        return "failed", f"{failed[0].failure['kind']}{many}: {failed[0].failure['reason']}"
    diverged = [(run.seed, run.diverged_at) for run in runs if run.diverged_at is not None]
    if diverged:
        seed, step = diverged[0]
        return (
            "failed",
            f"NaN ({len(diverged)} of {len(runs)} runs): the loss is not finite from step {step} on, seed {seed}",
        )
    return "done", ""


def _speedup(runs: Sequence[RunRecord], reference: Sequence[RunRecord]) -> Estimate | None:
    theirs = {run.repeat: run for run in reference}
    pairs = [(run, theirs[run.repeat]) for run in runs if run.repeat in theirs]
    return paired_ratio(
        [[statistics.median(turn) for turn in other.slices] for _, other in pairs],
        [[statistics.median(turn) for turn in run.slices] for run, _ in pairs],
    )


def _losses(runs: Sequence[RunRecord], reference: Sequence[RunRecord], *, comparable: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "loss": _mean([final_loss(run) for run in runs]),
        "val_loss": _mean([run.measured["validation"]["loss"] for run in runs]),
        "metric": _mean(
            [run.measured["validation"]["metric"] for run in runs if "metric" in run.measured["validation"]]
        ),
    }
    if not comparable:
        return found
    theirs = {run.repeat: run for run in reference}
    pairs = [(run, theirs[run.repeat]) for run in runs if run.repeat in theirs]
    metrics = [
        a.measured["validation"]["metric"] - b.measured["validation"]["metric"]
        for a, b in pairs
        # A metric is of the end of a run: of runs of different lengths it says nothing about their precision.
        if len(a.loss) == len(b.loss) and "metric" in a.measured["validation"] and "metric" in b.measured["validation"]
    ]
    distances = [d for a, b in pairs if (d := curve_distance(a.loss, b.loss)) is not None]
    distance = statistics.fmean(distances) if distances else None
    noise = noise_of(reference)
    ends = [value for run in reference if (value := final_loss(run)) is not None]
    return {
        **found,
        "loss_noise": statistics.stdev(ends) if len(ends) > 1 and seeds_tell(reference) else None,
        "step_noise": _step_noise(reference),
        "loss_gap": _mean([_gap(*pair) for pair in pairs]),
        "metric_gap": _mean(metrics),
        "loss_distance": distance,
        "beyond_noise": None if distance is None or noise is None else distance > noise,
    }


def _mean(values: Sequence[float | None]) -> Estimate | None:
    """The mean over seeds; None if one of them has no finite value, because the mean of the others would hide it."""
    kept = [value for value in values if value is not None and math.isfinite(value)]
    return from_values(kept) if len(kept) == len(values) else None


def _step_noise(runs: Sequence[RunRecord]) -> float | None:
    """The spread of a run's last losses, a tenth of them and at least five, in the mean over runs."""
    ends = [run.loss[-max(_FEWEST_LAST, int(len(run.loss) * _LAST)) :] for run in runs]
    found = [statistics.stdev(end) for end in ends if len(end) >= _FEWEST_LAST and all(map(math.isfinite, end))]
    return statistics.fmean(found) if found else None


def _gap(run: RunRecord, reference: RunRecord) -> float | None:
    """The difference of final losses; where one run was stopped early, at the last step both have."""
    length = min(len(run.loss), len(reference.loss))
    mine, other = final_loss(run, length), final_loss(reference, length)
    return None if mine is None or other is None else mine - other


def _flops(seconds: float, compute: str, found: dict[str, Any], samples: float) -> dict[str, Any]:
    """Operations per second, counted once in fp32: what the model asks for, whatever a precision makes of it."""
    count = found.get("flops_per_step")
    if not count:
        return {}
    rate = count * samples / (found["samples"] or samples) / seconds
    measured = {m["format"]: m["gflops_median"] * 1e9 for m in found["matmul"]}
    return {"flops_per_second": rate, "flops_share": rate / measured[compute] if measured.get(compute) else None}


def _memory(runs: Sequence[RunRecord]) -> dict[str, float] | None:
    """The peak by what it holds: what is counted exactly, and the rest, which is activations, rest."""
    whole = [run.measured for run in runs if "peak_bytes" in run.measured]
    if not whole:
        return None
    one = whole[0]
    if "predicted" in one:  # by cause, as planned; what was measured beyond that is a part of its own
        parts = {name: float(size) for name, size in one["predicted"]["parts"].items() if size}
        beyond = one["peak_bytes"] - one["predicted"]["peak_bytes"]
        return parts | ({NOT_PREDICTED: float(beyond)} if beyond > 0 else {})
    held = {name: float(size) for name, size in one["held"].items()}
    base = {"process": float(one["base_bytes"])} if one["base_bytes"] else {}
    rest = statistics.median(m["peak_bytes"] for m in whole) - sum(held.values()) - sum(base.values())
    return {**base, **held, "activations, rest": max(0.0, rest)}


def _peak(runs: Sequence[RunRecord]) -> float | None:
    peaks = [run.measured["peak_bytes"] for run in runs if "peak_bytes" in run.measured]
    return statistics.median(peaks) if peaks else None


def _ratio(mine: float | None, other: float | None) -> float | None:
    return None if mine is None or not other else mine / other


def _spread(steps: Sequence[float]) -> float | None:
    if len(steps) < 4:
        return None
    low, middle, high = statistics.quantiles(steps, n=4)
    return (high - low) / middle


def _finite(value: Any) -> float | None:
    return value if isinstance(value, float) and math.isfinite(value) else None
