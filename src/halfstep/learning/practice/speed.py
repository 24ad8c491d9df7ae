"""Task 1: speed and memory with and without mixed precision."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from halfstep.check.finding import Finding
from halfstep.hardware.units import count_text
from halfstep.learning.practice.loop import LOOP_RULES, check_row, loop_rows, run_row
from halfstep.learning.practice.printed import numbers
from halfstep.learning.practice.record import Row, Run, Step

__all__ = ["speed_rows"]

_FEWEST_STEPS = 2


def speed_rows(runs: Sequence[Run], findings: Sequence[Finding]) -> list[Row]:
    """The rows of task 1, from an observed run and one without observation of operators."""
    run, timed = runs
    full = [s for s in run.steps if run.compute_of(s) == "fp32"]
    mixed = [s for s in run.steps if run.compute_of(s) in {"fp16", "bf16"}]
    times = _step_times(run, timed)
    # A script that offers fp16 as an option and runs in bf16 needs no scaler for what it measured.
    rules = LOOP_RULES if any(run.compute_of(s) == "fp16" for s in mixed) or not mixed else LOOP_RULES - {"HS123"}
    advice = ""
    if run.error.startswith("AssertionError") and full and mixed:
        advice = "Do not assert a speed-up: on hardware without 16-bit units mixed precision is slower. Print what you measure."
    rows = [
        run_row(run, advice),
        check_row(findings, rules),
        Row("fp32", f"at least {_FEWEST_STEPS} steps in fp32", count_text(len(full), "step"), len(full) >= _FEWEST_STEPS,
            "" if len(full) >= _FEWEST_STEPS else "Train the same model in fp32 too, without autocast."),
        *loop_rows(run, ("fp16", "bf16"), scaler=False),
    ]  # fmt: skip
    if full and mixed:
        rows.append(_same_model_row(full, mixed))
    if len(full) >= _FEWEST_STEPS and len(mixed) >= _FEWEST_STEPS:
        rows += [_clock_row(run, times), _memory_row(run), _comparison_row(run, times)]
    return rows


def _step_times(run: Run, timed: Run) -> dict[str, float]:
    """Seconds per step in fp32 and in 16 bits, in the run without observation of operators."""
    steps = timed.steps if len(timed.steps) == len(run.steps) else run.steps
    kinds: dict[str, list[float]] = {"fp32": [], "mixed": []}
    previous = ""
    for measured, step in zip(run.steps, steps, strict=True):
        kind = "fp32" if run.compute_of(measured) == "fp32" else "mixed"
        if kind == previous:  # the first step of a phase includes its set-up
            kinds[kind].append(step.seconds)
        previous = kind
    return {kind: statistics.median(values) for kind, values in kinds.items() if values}


def _same_model_row(full: Sequence[Step], mixed: Sequence[Step]) -> Row:
    same = bool({s.model for s in full} & {s.model for s in mixed})
    measured = "the same parameter shapes" if same else f"{full[0].model} in fp32, {mixed[0].model} in 16 bits"
    to_do = "" if same else "Train the same model in both modes, or the numbers cannot be compared."
    return Row("model", "the same model in both modes", measured, same, to_do)


def _phases(run: Run) -> list[tuple[int, int]]:
    """The range of steps, from the first to after the last, of each of the two modes."""
    ranges = []
    for wanted in (("fp32",), ("fp16", "bf16")):
        indices = [i for i, s in enumerate(run.steps) if run.compute_of(s) in wanted]
        ranges.append((indices[0], indices[-1] + 1))
    return ranges


def _clock_row(run: Run, times: dict[str, float]) -> Row:
    read = all(sum(first <= n <= end for n in run.clock_reads) >= 2 for first, end in _phases(run))
    # A clock that is not observed, such as datetime's, shows in the numbers.
    candidates = [each for t in times.values() if t for each in (t, t * 1000, 1 / t)]
    printed = sum(any(0.5 < n / c < 2 for c in candidates) for n in numbers(run.output) if n > 0)
    fine = read or printed >= 2
    to_do = (
        "Read time.perf_counter() before and after the steps of each mode (on a GPU, after torch.cuda.synchronize())."
    )
    return Row("speed", "time is measured in both modes", "it is" if fine else "a clock was not read around the steps of both",
               fine, "" if fine else to_do)  # fmt: skip


def _memory_row(run: Run) -> Row:
    expected = "peak memory is read in both modes"
    phases = sorted(_phases(run))
    reads = [[r for r in run.memory_reads if first < r[0] <= end or r[0] == end] for first, end in phases]
    late = [r for r in run.memory_reads if r[0] > phases[0][0]]
    if not all(reads) and len(late) < 2:
        to_do = "Read torch.cuda.max_memory_allocated() after the steps of each mode."
        return Row("memory", expected, f"read {count_text(len(late), 'time')} after a step", False, to_do)
    peaks = [r for r in run.memory_reads if r[1].startswith("max_")]
    second = [r for r in peaks if r[0] > phases[1][0]]
    first = [r for r in peaks if r[0] <= phases[1][0]]
    reset = any(phases[0][1] <= n <= phases[1][1] for n in run.resets)
    if first and second and not reset and first[-1][2] == second[-1][2] and first[-1][2] > 0:
        to_do = (
            "Call torch.cuda.reset_peak_memory_stats() before the second mode: the peak was still that of the first."
        )
        return Row(
            "memory", expected, f"the same peak twice, {second[-1][2] / 1024:.0f} KiB, without a reset", False, to_do
        )
    names = ", ".join(sorted({r[1] for r in run.memory_reads}))
    return Row("memory", expected, f"read by {names}", True)


def _comparison_row(run: Run, times: dict[str, float]) -> Row:
    distinct = set(numbers(run.output))
    fine = len(distinct) >= 2
    measured = f"{len(distinct)} different numbers"
    if len(times) == 2:
        measured += (
            f"; by the grader: fp32 {times['fp32'] * 1000:.2f} ms per step, mixed {times['mixed'] * 1000:.2f} ms"
        )
    to_do = "Print the time and the peak memory of both modes."
    return Row("report", "times and memory of both modes are printed", measured, fine, "" if fine else to_do)
