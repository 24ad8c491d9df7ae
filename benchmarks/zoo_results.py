"""What the zoo benchmark derives from its measurements: ratios with intervals, bars, and the tables; no torch.

A ratio of two rows is the median over the rounds of the ratio of their rates in the same round. Its interval is that of the
order statistics around the median: the narrowest symmetric one that contains the true median with at least 90 % probability,
which for five to seven rounds is the smallest to the largest, and for eight the second smallest to the second largest. Fewer than
five rounds cannot reach 90 %; the interval is then the smallest to the largest as well. A bar for speed is met if the interval
reaches it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["ACCURACY_BAR", "bars_of", "describe_bar", "interval", "ratio_of", "render_tables"]

COVERAGE = 0.90
LEAN_SPEED, LEAN_SPEED_FP32_BUFFERS, FP16_LEAN_SPEED, PRESET_SPEED = 0.98, 0.95, 0.96, 1.00
# Bytes per parameter above the pure model's peak. The pure model stores 2 B weight, 2 B gradient and two 2 B moments; lean adds
# 2 B of master and 2 x 2 B of moments, or with 8-bit moments 2 B of master less what the moments save.
LEAN_BYTES, LEAN_8BIT_BYTES, PRESET_PEAK = 6.1, 0.4, 1.005
ACCURACY_BAR = 1.10

Record = Mapping[str, Any]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The order statistics around the median that contain the true one with at least 90 % probability, or min and max."""
    ordered, n = sorted(values), len(values)
    outside, rank = 0.0, 0  # how many values to leave out at each end
    while rank + 1 <= (n - 1) // 2:
        outside += 2 * math.comb(n, rank) / 2**n
        if 1 - (outside + 2 * math.comb(n, rank + 1) / 2**n) < COVERAGE:
            break
        rank += 1
    return ordered[rank], ordered[n - 1 - rank]


def ratio_of(record: Record, row: str, baseline: str) -> dict[str, Any] | None:
    """The speed of `row` relative to `baseline` with its interval; None unless both were measured."""
    rates = {entry["name"]: entry.get("rates") for entry in record["rows"]}
    if not rates.get(row) or not rates.get(baseline):
        return None
    ratios = [a / b for a, b in zip(rates[row], rates[baseline], strict=True)]
    low, high = interval(ratios)
    return {"row": row, "baseline": baseline, "median": statistics.median(ratios), "low": low, "high": high}


def _speed_bar(record: Record, row: str, baseline: str, limit: float) -> Iterable[dict[str, Any]]:
    ratio = ratio_of(record, row, baseline)
    if ratio is not None:
        yield {"bar": f"{row}: speed / {baseline}", **ratio, "limit": limit, "met": ratio["high"] >= limit}


def _peak_bar(
    record: Record, row: str, baseline: str, *, factor: float = 1.0, added: float = 0.0
) -> Iterable[dict[str, Any]]:
    """The peak of `row` at most `factor` times that of `baseline` plus `added` bytes per parameter."""
    peaks, requested = (
        {entry["name"]: entry.get(key) for entry in record["rows"]} for key in ("peak_bytes", "requested_bytes")
    )
    peak, other = peaks.get(row), peaks.get(baseline)
    if peak is not None and other is not None:
        limit = round(factor * other + added * record["parameters"])
        bar = {
            "bar": f"{row}: peak", "row": row, "baseline": baseline, "peak_bytes": peak, "limit": limit,
            "bytes_per_parameter": (peak - other) / record["parameters"], "met": peak <= limit,
        }  # fmt: skip
        if requested.get(row) is not None and requested.get(baseline) is not None:
            bar["requested_per_parameter"] = (requested[row] - requested[baseline]) / record["parameters"]
        yield bar


def describe_bar(bar: Mapping[str, Any]) -> str:
    """The value of a bar next to its limit."""
    if "median" in bar:
        return f"{bar['median']:.3f} ({bar['low']:.3f} to {bar['high']:.3f}), bar {bar['limit']:.2f}"
    requested = f" ({bar['requested_per_parameter']:+.2f} requested)" if "requested_per_parameter" in bar else ""
    return f"{bar['bytes_per_parameter']:+.2f} B/param{requested} against {bar['baseline']}, {bar['peak_bytes'] / bar['limit']:.4f} of the bar"


def bars_of(record: Record) -> list[dict[str, Any]]:
    """Every bar that the measured rows allow to judge, with its value and whether it is met."""
    lean = LEAN_SPEED_FP32_BUFFERS if record["fp32_buffers"] else LEAN_SPEED
    bars = [
        *_speed_bar(record, "bf16-lean", "pure bf16", lean),
        *_peak_bar(record, "bf16-lean", "pure bf16", added=LEAN_BYTES),
        *_speed_bar(record, "bf16-lean,states=8bit", "pure bf16", lean),
        *_peak_bar(record, "bf16-lean,states=8bit", "pure bf16", added=LEAN_8BIT_BYTES),
        *_speed_bar(record, "fp16-lean", "pure fp16", FP16_LEAN_SPEED),
    ]
    for name in ("bf16", "fp16"):
        bars += _speed_bar(record, name, f"torch AMP {name}", PRESET_SPEED)
        bars += _peak_bar(record, name, f"torch AMP {name}", factor=PRESET_PEAK)
    for row in ("bf16-lean + compile", "bf16-lean,states=8bit + compile"):
        for baseline in ("torch AMP bf16 + compile", "FlashOptim bf16 + compile"):
            bars += _speed_bar(record, row, baseline, 1.0)
    return bars


# --- tables ---------------------------------------------------------------------------------------------------------

_EAGER = (
    ("pure bf16 / AMP", "pure bf16", "torch AMP bf16"),
    ("bf16 / AMP", "bf16", "torch AMP bf16"),
    ("bf16-lean / pure", "bf16-lean", "pure bf16"),
    ("8-bit lean / pure", "bf16-lean,states=8bit", "pure bf16"),
    ("FlashOptim / pure", "FlashOptim bf16", "pure bf16"),
    ("fp16 / AMP fp16", "fp16", "torch AMP fp16"),
    ("fp16-lean / pure fp16", "fp16-lean", "pure fp16"),
)
_COMPILED = (
    ("pure / AMP", "pure bf16 + compile", "torch AMP bf16 + compile"),
    ("FlashOptim / AMP", "FlashOptim bf16 + compile", "torch AMP bf16 + compile"),
    ("bf16-lean / AMP", "bf16-lean + compile", "torch AMP bf16 + compile"),
    ("bf16-lean / FlashOptim", "bf16-lean + compile", "FlashOptim bf16 + compile"),
    ("8-bit lean / FlashOptim", "bf16-lean,states=8bit + compile", "FlashOptim bf16 + compile"),
    ("blocks / whole", "bf16-lean + compile=blocks", "bf16-lean + compile"),
)
_PEAKS = ("torch AMP bf16", "pure bf16", "bf16", "bf16-lean", "bf16-lean,states=8bit", "FlashOptim bf16")


def render_tables(records: Sequence[Record]) -> str:
    """Markdown tables of recorded runs; of several records of one model and kind the last one counts."""
    last = {(r["kind"], r["model"]): r for r in records}
    parts = [
        _speed_table("Speed, eager", _EAGER, [r for (kind, _), r in last.items() if kind == "eager"]),
        _peak_table("Peak GiB, eager", "", [r for (kind, _), r in last.items() if kind == "eager"]),
        _speed_table("Speed, compiled", _COMPILED, [r for (kind, _), r in last.items() if kind == "compiled"]),
        _peak_table("Peak GiB, compiled", " + compile", [r for (kind, _), r in last.items() if kind == "compiled"]),
        _accuracy_table([r for (kind, _), r in last.items() if kind == "accuracy"]),
        _missed([r for (kind, _), r in last.items() if kind != "accuracy"]),
    ]
    return "\n\n".join(part for part in parts if part)


def _grid(title: str, header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    if not lines:
        return ""
    rule = "|".join(["", *("---" for _ in header), ""])
    return "\n".join(
        [f"{title}:", "", f"| {' | '.join(header)} |", rule, *(f"| {' | '.join(line)} |" for line in lines)]
    )


def _label(record: Record) -> str:
    return f"{record['library']} {record['model']}{' (tiny)' if record['tiny'] else ''}, {record['batch']}"


def _speed_table(title: str, columns: Sequence[tuple[str, str, str]], records: Sequence[Record]) -> str:
    lines = []
    for record in records:
        limits = {(bar["row"], bar["baseline"]): bar["met"] for bar in bars_of(record) if "median" in bar}
        cells = []
        for _, row, baseline in columns:
            ratio = ratio_of(record, row, baseline)
            missed = " (*)" if not limits.get((row, baseline), True) else ""
            cells.append(
                "" if ratio is None else f"{ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f}){missed}"
            )
        lines.append([_label(record), f"{record['parameters'] / 1e6:.0f}", *cells])
    note = "ratio: median of the rounds (interval); (*) its bar is not reached"
    return _grid(f"{title} ({note})", ["model, batch", "M params", *(name for name, _, _ in columns)], lines)


def _peak_table(title: str, suffix: str, records: Sequence[Record]) -> str:
    lines = []
    for record in records:
        peaks = {row["name"]: row.get("peak_bytes") for row in record["rows"]}
        missed = {bar["row"] for bar in bars_of(record) if "peak_bytes" in bar and not bar["met"]}
        if not any(peaks.values()):
            continue
        cells = [
            f"{peaks[name] / 2**30:.2f}{' (*)' if name in missed else ''}" if peaks.get(name) else ""
            for name in (f"{name}{suffix}" for name in _PEAKS)
        ]
        lines.append([_label(record), *cells])
    return _grid(title, ["model, batch", *_PEAKS], lines)


def _accuracy_table(records: Sequence[Record]) -> str:
    lines = []
    for record in records:
        cells = []
        for name in ("bf16", "fp16"):
            errors = {row["name"]: row.get("error_l2") for row in record["rows"] if row["format"] == name}
            pure, lean, amp = (errors.get(n) for n in (f"pure {name}", f"{name}-lean", f"torch AMP {name}"))
            cells += [f"{value:.2e}" if value else "" for value in (pure, lean, amp)]
            cells += [f"{lean / other:.3f}" if lean and other else "" for other in (pure, amp)]
        lines.append([_label(record), *cells])
    columns = [
        f"{name} {cell}" for name in ("bf16", "fp16") for cell in ("pure", "lean", "AMP", "lean / pure", "lean / AMP")
    ]
    return _grid("Relative error of the gradients against fp64", ["model, batch", *columns], lines)


def _missed(records: Sequence[Record]) -> str:
    """The bars that are not met, and the rows that did not run."""
    lines = [
        f"- {record['model']}: {bar['bar']}: {describe_bar(bar)}"
        for record in records
        for bar in bars_of(record)
        if not bar["met"]
    ]
    lines += [
        f"- {record['model']}: {row['name']} did not run: {row['error']}"
        for record in records
        for row in record["rows"]
        if "error" in row
    ]
    return "\n".join(["Not reached, or not run:", "", *lines]) if lines else ""
