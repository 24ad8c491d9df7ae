"""The verdict: which precision to use here, what it costs and saves, and how certain that is.

How it works. A row is a candidate if all its runs completed, its loss is not worse than the reference's beyond the
reference's own seed-to-seed noise, and it has fp32 masters. The fastest candidate wins if it is faster than the
reference by more than both its own interval and 3 %; below that, placement and order decide on most machines. If none is
faster, the one with the least memory wins if it needs at least 5 % less; on a CPU, whose resident set is mostly torch
itself, only speed counts. Otherwise no precision is measurably better.

A loss is worse beyond noise if its curve is farther from the reference's than the reference's own curves are from each
other, or if the final loss is higher by more than its interval and than the reference's standard deviation over seeds.
Without different seeds (there is one, or the job repeats the same run for each), it is worse if it is higher by more than
the reference's loss varies from step to step at its end, and by more than 1 %. A non-finite final loss is worse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from halfstep.comparison.estimate import Estimate
from halfstep.comparison.rows import Row
from halfstep.comparison.survey import Survey

__all__ = ["Verdict", "is_worse", "judge"]

MIN_SPEEDUP = 0.03  # smaller differences of speed do not count
MIN_SAVING = 0.05  # nor of memory
MIN_LOSS_GAP = 0.01  # nor of a loss, relative, where there is no seed noise to compare it with
HIGH_CAST_SHARE = 0.15  # of an operator census, worth a sentence
LOW_FLOPS_SHARE = 0.05  # of the matmul rate: the job is too small for the format
_LOW_PRECISION = ("bf16", "fp16", "fp8")


@dataclass(frozen=True)
class Verdict:
    """The recommendation, and the paragraph that explains it."""

    use: str | None  # the label of a row, or None where nothing can be recommended
    kind: str  # faster, smaller, same, slower, unfit (a faster row must not be used) or unknown
    text: str
    confidence: str

    def __str__(self) -> str:
        return self.text


def judge(rows: Sequence[Row], reference: str | None, survey: Survey) -> Verdict:
    """The verdict over the rows of one machine."""
    base = next((row for row in rows if row.label == reference), None)
    done = [row for row in rows if row.status == "done" and row.step_seconds is not None]
    confidence = _confidence(done, survey)
    if not done:
        reasons = "; ".join(dict.fromkeys(row.reason for row in rows))
        return Verdict(None, "unknown", f"No run completed, so there is nothing to recommend. {reasons}", "none")
    if base is None or base.status != "done":
        return _without_reference(done, base, confidence)
    ours = [row for row in done if row.variant.baseline is None and row is not base]
    fit = [row for row in ours if not is_worse(row) and row.variant.has_fp32_master]
    faster = [row for row in fit if _is_faster(row)]
    if faster:
        return _use(max(faster, key=_speed), base, rows, "faster", confidence)
    smaller = [row for row in fit if survey.device != "cpu" and (row.memory_ratio or 1) < 1 - MIN_SAVING]
    smaller = [row for row in smaller if not _is_slower(row)]
    if smaller:
        return _use(min(smaller, key=lambda row: row.memory_ratio or 1), base, rows, "smaller", confidence)
    unfit = [row for row in ours if row not in fit and _is_faster(row)]
    if unfit:
        return _reject(base, unfit, rows, confidence)
    slower = [row for row in ours if _is_slower(row)]
    if ours and len(slower) == len(ours):
        return _stay(base, slower, rows, survey, confidence)
    return _same(base, ours, rows, confidence)


def is_worse(row: Row) -> bool:
    """Whether the loss of a row is worse than the reference's, beyond the reference's own noise."""
    gap = row.loss_gap
    if row.loss is None and row.nonfinite:
        return True
    if gap is None or gap.value <= 0:
        return False
    if row.loss_noise is None:
        least = MIN_LOSS_GAP * abs(row.loss.value - gap.value) if row.loss is not None else 0.0
        return row.step_noise is not None and gap.value > max(row.step_noise, least)
    return bool(row.beyond_noise) or (gap.excludes(0) and gap.value > row.loss_noise)


def _speed(row: Row) -> float:
    return row.speedup.value if row.speedup is not None else 0.0


def _is_faster(row: Row) -> bool:
    s = row.speedup
    return s is not None and s.value > 1 + MIN_SPEEDUP and s.low > 1 and not _is_single(row)


def _is_slower(row: Row) -> bool:
    s = row.speedup
    return s is not None and s.value < 1 - MIN_SPEEDUP and s.high < 1 and not _is_single(row)


def _is_single(row: Row) -> bool:
    """Whether a row is one turn of one run, which has no interval and cannot be distinguished from noise."""
    seconds = row.step_seconds
    return seconds is not None and seconds.count == 1 and seconds.low == seconds.high


def _use(best: Row, base: Row, rows: Sequence[Row], kind: str, confidence: str) -> Verdict:
    speed = _relative_speed(best.speedup, base.label)
    gain = speed if kind == "faster" else f"as fast as {base.label} within noise"
    text = (
        f"Use {best.label} here: it is {gain}{_memory(best)}, and {_accuracy(best)}. {confidence}{_lighter(best, rows)}"
        f"{_failures(rows)}{_against_baselines(best, rows)}"
    )
    return Verdict(best.label, kind, text, confidence)


def _stay(base: Row, slower: Sequence[Row], rows: Sequence[Row], survey: Survey, confidence: str) -> Verdict:
    best = max(slower, key=_speed)
    assert best.speedup is not None
    slowdown = Estimate(1 / best.speedup.value, 1 / best.speedup.high, 1 / best.speedup.low, best.speedup.count)
    fastest = {row.variant.compute: row for row in sorted(slower, key=_speed)}  # the fastest row of each format
    reasons = dict.fromkeys(filter(None, (_why_slow(row, survey) for row in reversed(fastest.values()))))
    mixed = any(row.variant.compute in _LOW_PRECISION for row in slower)
    text = (
        f"Stay with {base.label} here: {'mixed precision is' if mixed else 'every other row is'} slower on this machine. "
        f"The fastest alternative, {best.label}, is {_number(slowdown, 'x')} slower per step. {' '.join((*reasons, confidence))}"
        f"{_failures(rows)}"
    )
    return Verdict(base.label, "slower", text, confidence)


def _reject(base: Row, unfit: Sequence[Row], rows: Sequence[Row], confidence: str) -> Verdict:
    """Rows are faster, and none of them should be used."""
    reasons = "; ".join(
        f"{row.label} is {_relative_speed(row.speedup, base.label)}, but {_why_unfit(row)}" for row in unfit
    )
    text = f"Stay with {base.label} here: {reasons}. {confidence}{_failures(rows)}"
    return Verdict(base.label, "unfit", text, confidence)


def _why_unfit(row: Row) -> str:
    if not is_worse(row):
        return "has no fp32 master weights, so small updates are lost"
    if row.loss_gap is None:
        return f"{row.nonfinite} of its losses are not finite, including the last ones"
    noise = (
        "across seeds" if row.loss_noise is not None else "from step to step, the only noise estimate available here"
    )
    where = "final loss" if row.cut_at is None else f"loss at step {row.cut_at}"
    return f"its {where} is worse: {_signed(row.loss_gap)}, beyond fp32's own noise {noise}"


def _same(base: Row, ours: Sequence[Row], rows: Sequence[Row], confidence: str) -> Verdict:
    if not ours:
        return _only_reference(base, rows, confidence)
    bad = [row.label for row in ours if is_worse(row)]
    worse = f" The loss of {', '.join(bad)} is worse than that of {base.label} beyond noise." if bad else ""
    speeds = "; ".join(f"{row.label} {_number(row.speedup, 'x')}" for row in ours if row.speedup is not None)
    text = (
        f"No precision is measurably better than {base.label} here (relative speed: {speeds}). "
        f"{confidence}{worse}{_failures(rows)}"
    )
    return Verdict(base.label, "same", text, confidence)


def _only_reference(base: Row, rows: Sequence[Row], confidence: str) -> Verdict:
    baselines = [row for row in rows if row.variant.baseline and row.status == "done" and row.speedup is not None]
    if baselines:
        speeds = "; ".join(f"{row.label} is {_relative_speed(row.speedup, base.label)}" for row in baselines)
        text = f"Of Halfstep's precisions only {base.label} completed, so there is nothing to choose from. {speeds}. {confidence}"
    else:
        text = f"Only {base.label} completed, so there is nothing to choose from."
    return Verdict(base.label, "unknown", text + _failures(rows), confidence)


def _without_reference(done: Sequence[Row], base: Row | None, confidence: str) -> Verdict:
    best = max(done, key=lambda row: row.samples_per_second.value if row.samples_per_second else 0)
    why = "did not run" if base is None else f"failed ({base.reason})"
    text = (
        f"{best.label} is the fastest row that completed, at {_number(best.samples_per_second)} samples per second. The fp32 "
        f"reference {why}, so its speedup and its loss cannot be compared. {confidence}"
    )
    return Verdict(best.label, "unknown", text, confidence)


def _memory(row: Row) -> str:
    if row.memory_ratio is None or abs(1 - row.memory_ratio) < MIN_SAVING / 2:
        return ""
    if row.memory_ratio < 1:
        return f" with {1 - row.memory_ratio:.0%} less memory"
    return f" with {row.memory_ratio - 1:.0%} more memory"


def _accuracy(row: Row) -> str:
    gap = row.loss_gap
    if gap is None:
        return "its loss could not be compared"
    if row.loss_distance is None:
        curve = f"its loss curve could not be compared, because {row.nonfinite} losses are not finite"
    elif row.beyond_noise is None:
        reason = "with one repeat" if gap.count < 2 else "because all seeds give the same run"
        curve = f"the noise of fp32's loss curve is unknown {reason}"
    elif row.beyond_noise:
        curve = "its loss curve differs by more than fp32's seed-to-seed noise, but is not worse"
    else:
        curve = "its loss curve is within fp32's seed-to-seed noise"
    metric = f"; the metric changes by {_signed(row.metric_gap)}" if row.metric_gap is not None else ""
    where = "final loss" if row.cut_at is None else f"loss at step {row.cut_at}, where it was cut short,"
    return f"its {where} differs by {_signed(gap)}; {curve}{metric}"


def _lighter(best: Row, rows: Sequence[Row]) -> str:
    """A row with less memory that is still faster than the reference."""
    lighter = [
        row
        for row in rows
        if row.status == "done" and row is not best and row.variant.baseline is None and row.peak_bytes and best.peak_bytes
        and row.peak_bytes < best.peak_bytes * (1 - MIN_SAVING) and not is_worse(row) and row.speedup and row.speedup.value > 1
    ]  # fmt: skip
    if not lighter:
        return ""
    row = min(lighter, key=lambda r: r.peak_bytes or 0)
    assert row.peak_bytes is not None
    assert best.peak_bytes is not None
    saving = 1 - row.peak_bytes / best.peak_bytes
    return f" If memory is short, {row.label} uses {saving:.0%} less at {_number(row.speedup, 'x')} the speed of fp32."


def _failures(rows: Sequence[Row]) -> str:
    failed = [row for row in rows if row.status == "failed"]
    return "".join(f" {row.label} failed: {row.reason.rstrip('.')}." for row in failed)


def _against_baselines(best: Row, rows: Sequence[Row]) -> str:
    """The fastest baseline of the same kind, eager or compiled."""
    baselines = [
        row
        for row in rows
        if row.variant.baseline and row.status == "done" and bool(row.variant.compile) == bool(best.variant.compile)
    ]
    if not baselines or best.step_seconds is None:
        return ""
    fastest = min(baselines, key=lambda row: row.step_seconds.value if row.step_seconds else 0)
    assert fastest.step_seconds is not None
    ratio = fastest.step_seconds.value / best.step_seconds.value
    memory = ""
    if fastest.peak_bytes and best.peak_bytes:
        memory = f" and {best.peak_bytes / fastest.peak_bytes:.0%} of its memory"
    return f" Compared with {fastest.label}, the fastest peer: {ratio:.2f}x its speed{memory}."


def _why_slow(row: Row, survey: Survey) -> str:
    compute = row.variant.compute
    if compute not in _LOW_PRECISION:
        return ""
    level, why = survey.support_for(compute)
    if level == "emulated":
        return f"{compute} is emulated here: {why}."
    if level == "slow":
        return f"{compute} is no faster than fp32 here: {why}."
    casts = (row.census or {}).get("share", {}).get("casts", 0)
    if casts > HIGH_CAST_SHARE:
        return f"{row.label} spends {casts:.0%} of its operator time on casts."
    if row.flops_share is not None and row.flops_share < LOW_FLOPS_SHARE:
        return (
            f"{compute} is native here, but the job is too small to benefit: it reaches {row.flops_share:.1%} of the rate of large "
            f"{compute} matrix products on this machine."
        )
    return ""


def _confidence(done: Sequence[Row], survey: Survey) -> str:
    repeats = max((row.num_runs for row in done), default=0)
    if any(_is_single(row) for row in done):
        return "One turn of one repeat has no interval, so a difference in speed cannot be distinguished from noise: use more --steps or --repeats."
    if repeats < 2:
        return "One repeat: the 95 % intervals do not include variation between runs."
    order = "taking turns" if survey.side_by_side else "one run after the other"
    fewer = "; ".join(f"{row.label} has {row.num_runs}" for row in done if row.num_runs < repeats)
    return f"95 % intervals over {repeats} repeats, {order}{f' ({fewer})' if fewer else ''}."


def _relative_speed(speed: Estimate | None, label: str) -> str:
    return f"{_number(speed, 'x')} as fast as {label}"


def _number(estimate: Estimate | None, unit: str = "") -> str:
    if estimate is None:
        return "?"
    value, low, high = (_digits(x) for x in (estimate.value, estimate.low, estimate.high))
    return f"{value}{unit}" if low == high else f"{value}{unit} ({low} to {high})"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _signed(estimate: Estimate | None) -> str:
    if estimate is None:
        return "?"
    half = (estimate.high - estimate.low) / 2
    return f"{estimate.value:+.4f}" + (f" +- {half:.4f}" if half else "")
