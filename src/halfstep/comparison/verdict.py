"""The verdict: which precision to use here, what it costs and saves, and how sure that is.

How it works. A row is a candidate if all its runs were completed, its loss is not worse than the reference's beyond the
reference's own seed-to-seed noise, and it keeps fp32 masters. Among the candidates the fastest wins, if it is faster than
the reference by more than both its own interval and 3 %; below that, differences of placement and order decide on most
machines. Where nothing is faster, less memory wins if it is at least 5 % less, and on a CPU, whose resident set is mostly
torch itself, only speed counts. Where neither holds, the verdict is that there is no difference beyond noise.

A loss is worse beyond noise if its curve is farther from the reference's than the reference's own curves are from each
other, or if the final loss is higher by more than its interval and than the reference's spread over seeds. Where seeds
do not tell (there is one, or the job makes the same run of each), it is worse if it is higher by more than the
reference's loss moves from step to step at its end, and by more than 1 %. A final loss that is not finite is worse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from halfstep.comparison.estimate import Estimate
from halfstep.comparison.rows import Row

__all__ = ["Verdict", "judge", "worse"]

FASTER = 0.03  # a smaller difference of speed is none
SMALLER = 0.05  # and of memory
HIGHER = 0.01  # and of a loss, where there is no noise of seeds to hold it against
CASTS_TELL = 0.15  # a share of time in casts that is worth saying
_SIXTEEN = ("bf16", "fp16", "fp8")


@dataclass(frozen=True)
class Verdict:
    """What to use, and the paragraph that says why."""

    use: str | None  # the label of a row, or None where nothing can be recommended
    kind: str  # faster, smaller, same, slower, unfit (a faster row is there, and not to be used) or unknown
    text: str
    confidence: str

    def __str__(self) -> str:
        return self.text


def judge(rows: Sequence[Row], reference: str | None, found: dict[str, Any]) -> Verdict:
    """The verdict over the rows of one machine."""
    base = next((row for row in rows if row.label == reference), None)
    done = [row for row in rows if row.status == "done" and row.step_seconds is not None]
    sure = _confidence(done, found)
    if not done:
        reasons = "; ".join(dict.fromkeys(row.reason for row in rows))
        return Verdict(None, "unknown", f"No run was completed, so there is nothing to recommend. {reasons}", "none")
    if base is None or base.status != "done":
        return _without_reference(done, base, sure)
    ours = [row for row in done if row.contender.peer is None and row is not base]
    # A CPU that multiplies a format no faster than fp32 gains nothing by it, but a loss that is worse is another matter.
    fit = [row for row in ours if not worse(row) and row.contender.keeps_master]
    faster = [row for row in fit if _is_faster(row)]
    if faster:
        best = max(faster, key=_speed)
        return _use(best, base, rows, "faster", sure)
    smaller = [row for row in fit if found["device"] != "cpu" and (row.memory_ratio or 1) < 1 - SMALLER]
    smaller = [row for row in smaller if not _is_slower(row)]
    if smaller:
        best = min(smaller, key=lambda row: row.memory_ratio or 1)
        return _use(best, base, rows, "smaller", sure)
    unfit = [row for row in ours if row not in fit and _is_faster(row)]
    if unfit:
        return _pass_over(base, unfit, rows, sure)
    slower = [row for row in ours if _is_slower(row)]
    if ours and len(slower) == len(ours):
        return _stay(base, slower, rows, found, sure)
    return _same(base, ours, rows, sure)


def worse(row: Row) -> bool:
    """Whether a row learns worse than the reference, beyond the reference's own noise."""
    gap = row.loss_gap
    if row.loss is None and row.nonfinite:
        return True
    if gap is None or gap.value <= 0:
        return False
    if row.loss_noise is None:
        least = HIGHER * abs(row.loss.value - gap.value) if row.loss is not None else 0.0
        return row.step_noise is not None and gap.value > max(row.step_noise, least)
    return bool(row.beyond_noise) or (gap.excludes(0) and gap.value > row.loss_noise)


def _speed(row: Row) -> float:
    return row.speedup.value if row.speedup is not None else 0.0


def _is_faster(row: Row) -> bool:
    s = row.speedup
    return s is not None and s.value > 1 + FASTER and s.low > 1 and not _is_single(row)


def _is_slower(row: Row) -> bool:
    s = row.speedup
    return s is not None and s.value < 1 - FASTER and s.high < 1 and not _is_single(row)


def _is_single(row: Row) -> bool:
    """Whether a row is one turn of one run, which has no interval and tells nothing apart from noise."""
    seconds = row.step_seconds
    return seconds is not None and seconds.count == 1 and seconds.low == seconds.high


def _use(best: Row, base: Row, rows: Sequence[Row], kind: str, sure: str) -> Verdict:
    cost = _memory(best)
    gain = _times(best.speedup, base.label) if kind == "faster" else "as fast as " + base.label + " within noise"
    text = f"Use {best.label} here: it is {gain}{cost}, and {_accuracy(best)}. {sure}{_others(best, rows)}{_peers(best, rows)}"
    return Verdict(best.label, kind, text, sure)


def _stay(base: Row, slower: Sequence[Row], rows: Sequence[Row], found: dict[str, Any], sure: str) -> Verdict:
    least = max(slower, key=_speed)
    assert least.speedup is not None
    times = Estimate(1 / least.speedup.value, 1 / least.speedup.high, 1 / least.speedup.low, least.speedup.count)
    first = {row.contender.compute: row for row in sorted(slower, key=_speed)}  # of each format, its fastest row
    why = " ".join(dict.fromkeys(filter(None, (_why_slow(row, found) for row in reversed(first.values())))))
    what = "mixed precision is" if any(row.contender.compute in _SIXTEEN for row in slower) else "every other row is"
    text = (
        f"Stay with {base.label} here: {what} slower on this machine. The least slow, {least.label}, takes "
        f"{_figure(times)} times as long for a step. {why} {sure}{_failures(rows)}"
    )
    return Verdict(base.label, "slower", text, sure)


def _pass_over(base: Row, unfit: Sequence[Row], rows: Sequence[Row], sure: str) -> Verdict:
    """Rows are faster, and none of them is to be used."""
    told = "; ".join(f"{row.label} is {_times(row.speedup, base.label)}, but {_why_unfit(row)}" for row in unfit)
    return Verdict(base.label, "unfit", f"Stay with {base.label} here: {told}. {sure}{_failures(rows)}", sure)


def _why_unfit(row: Row) -> str:
    if not worse(row):
        return "keeps no fp32 master, so that small updates vanish"
    if row.loss_gap is None:
        return f"{row.nonfinite} of its losses are not finite, its last ones among them"
    noise = "from seed to seed" if row.loss_noise is not None else "from step to step, which is all that tells here"
    return f"learns worse: its final loss is higher by {_signed(row.loss_gap)}, beyond fp32's own noise {noise}"


def _same(base: Row, ours: Sequence[Row], rows: Sequence[Row], sure: str) -> Verdict:
    if not ours:
        peers = [row for row in rows if row.contender.peer and row.status == "done" and row.speedup is not None]
        beside = "; ".join(f"{row.label} is {_times(row.speedup, base.label)}" for row in peers)
        only = (
            f"Of Halfstep's precisions only {base.label} was completed" if peers else f"Only {base.label} was completed"
        )
        text = f"{only}, so there is nothing to choose from.{f' {beside}. {sure}' if peers else ''}{_failures(rows)}"
        return Verdict(base.label, "unknown", text, sure)
    bad = [row for row in ours if worse(row)]
    aside = f" {', '.join(r.label for r in bad)} learnt worse than {base.label} beyond its noise." if bad else ""
    speeds = "; ".join(f"{row.label} {_figure(row.speedup)} times" for row in ours if row.speedup is not None)
    text = (
        f"No difference beyond noise speaks for another precision than {base.label} here (speed against it: {speeds}). "
        f"{sure}{aside}{_failures(rows)}"
    )
    return Verdict(base.label, "same", text, sure)


def _without_reference(done: Sequence[Row], base: Row | None, sure: str) -> Verdict:
    best = max(done, key=lambda row: row.samples_per_second.value if row.samples_per_second else 0)
    why = "was not run" if base is None else f"failed ({base.reason})"
    speed = _figure(best.samples_per_second)
    text = (
        f"{best.label} is the fastest that was completed, at {speed} samples per second. The fp32 reference {why}, so what it "
        f"gains, and whether it learns as well, is not known. {sure}"
    )
    return Verdict(best.label, "unknown", text, sure)


def _memory(row: Row) -> str:
    if row.memory_ratio is None or abs(1 - row.memory_ratio) < SMALLER / 2:
        return ""
    if row.memory_ratio < 1:
        return f" in {1 - row.memory_ratio:.0%} less memory"
    return f" in {row.memory_ratio - 1:.0%} more memory"


def _accuracy(row: Row) -> str:
    gap = row.loss_gap
    if gap is None:
        return "its loss could not be compared"
    noise = "within fp32's own from seed to seed"
    if row.beyond_noise is None:
        noise = "not told with one repeat" if gap.count < 2 else "not told, because all seeds give the same run"
    if row.loss_distance is None:
        noise = f"not told, because {row.nonfinite} losses are not finite"
    if row.beyond_noise:
        noise = "farther than fp32's own from seed to seed, but not worse"
    change = f"; the metric changes by {_signed(row.metric_gap)}" if row.metric_gap is not None else ""
    return f"its final loss differs by {_signed(gap)}, its curve is {noise}{change}"


def _others(best: Row, rows: Sequence[Row]) -> str:
    """What else is worth a sentence: a lighter row that is nearly as fast, and whoever failed."""
    text = ""
    lighter = [
        row
        for row in rows
        if row.status == "done" and row is not best and row.contender.peer is None and row.peak_bytes and best.peak_bytes
        and row.peak_bytes < best.peak_bytes * (1 - SMALLER) and not worse(row) and row.speedup and row.speedup.value > 1
    ]  # fmt: skip
    if lighter:
        row = min(lighter, key=lambda r: r.peak_bytes or 0)
        assert row.peak_bytes is not None
        assert best.peak_bytes is not None
        text = f" If memory is short, {row.label} takes {1 - row.peak_bytes / best.peak_bytes:.0%} less than that at {_times(row.speedup, 'fp32')}."
    return text + _failures(rows)


def _failures(rows: Sequence[Row]) -> str:
    failed = [row for row in rows if row.status == "failed"]
    return "".join(f" {row.label} did not run through: {row.reason.rstrip('.')}." for row in failed)


def _peers(best: Row, rows: Sequence[Row]) -> str:
    """The best peer of the same kind, eager or compiled."""
    peers = [
        row
        for row in rows
        if row.contender.peer and row.status == "done" and bool(row.contender.compile) == bool(best.contender.compile)
    ]
    if not peers or best.step_seconds is None:
        return ""
    peer = min(peers, key=lambda row: row.step_seconds.value if row.step_seconds else 0)
    assert peer.step_seconds is not None
    ratio = peer.step_seconds.value / best.step_seconds.value
    memory = ""
    if peer.peak_bytes and best.peak_bytes:
        memory = f" with {best.peak_bytes / peer.peak_bytes:.0%} of its memory"
    return f" Against {peer.label}, the fastest peer, it is {ratio:.2f} times as fast{memory}."


def _why_slow(row: Row, found: dict[str, Any]) -> str:
    compute = row.contender.compute
    if compute not in _SIXTEEN:
        return ""
    support, why = found["support"].get(compute, ["native", ""])
    if support == "emulated":
        return f"{compute} is emulated here: {why}."
    if support == "slow":
        return f"{compute} is no faster than fp32 here: {why}."
    casts = (row.census or {}).get("share", {}).get("casts", 0)
    if casts > CASTS_TELL:
        return f"{row.label} spends {casts:.0%} of its operators' time on casts."
    if row.flops_share is not None and row.flops_share < 0.05:
        return (
            f"{compute} is native here, but the job is too small to use it: it reaches {row.flops_share:.1%} of the rate at "
            f"which large {compute} matrices multiply on this machine."
        )
    return ""


def _confidence(done: Sequence[Row], found: dict[str, Any]) -> str:
    repeats = min((row.num_runs for row in done), default=0)
    if any(_is_single(row) for row in done):
        return "One turn of one repeat has no interval, so no difference of speed is told from noise: give more --steps or --repeats."
    if repeats < 2:
        return "One repeat: the intervals (95 %) know nothing of what differs from run to run."
    turns = "taking turns" if found.get("side_by_side") else "one after the other"
    return f"95 % intervals over {repeats} repeats, {turns}."


def _times(speed: Estimate | None, label: str) -> str:
    return f"{_figure(speed)} times as fast as {label}"


def _figure(estimate: Estimate | None) -> str:
    if estimate is None:
        return "?"
    value, low, high = (_short(x) for x in (estimate.value, estimate.low, estimate.high))
    return value if low == high else f"{value} ({low} to {high})"


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _signed(estimate: Estimate | None) -> str:
    if estimate is None:
        return "?"
    half = (estimate.high - estimate.low) / 2
    return f"{estimate.value:+.4f}" + (f" +- {half:.4f}" if half else "")
