"""The tables of the report page, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from halfstep.hardware.units import bytes_text, seconds_text
from halfstep.report.html_table import Table
from halfstep.report.plots.plot import NUM_ROW_COLOURS

if TYPE_CHECKING:
    from halfstep.comparison.estimate import Estimate
    from halfstep.comparison.result import Comparison
    from halfstep.comparison.rows import Row

__all__ = ["Census", "Summary", "SummaryCell", "SummaryRow", "census_tables", "environments", "summary", "truth_table"]

HEADS = (
    "precision", "step", "samples/s", "speedup", "peak memory", "final loss", "gap to fp32", "val loss", "metric", "validation", "skipped",
    "gradient cosine", "underflow, worst layer", "warm-up",
)  # fmt: skip
MAX_OPERATORS = 15  # in the table of a row
MAX_SHAPES = 6  # of misaligned products
_MEAN_DIFFERS = 0.01  # relative to the median; from here on the mean step time is shown as well


@dataclass(frozen=True)
class SummaryCell:
    """A number for people, small print under it, and for programs the metric and its exact value."""

    text: str
    note: str = ""
    metric: str = ""
    value: float | None = None


@dataclass(frozen=True)
class SummaryRow:
    """One precision; without cells, the reason why it has none."""

    label: str
    colour: str
    kind: str  # used, failed, or empty
    reason: str
    cells: tuple[SummaryCell, ...]


@dataclass(frozen=True)
class Summary:
    """The results of every precision."""

    heads: tuple[str, ...]
    rows: tuple[SummaryRow, ...]


@dataclass(frozen=True)
class Census:
    """The operators of one row and a sentence about its matrix products and casts."""

    about: str
    table: Table


def summary(comparison: Comparison) -> Summary:
    """One row for each precision."""
    rows = []
    for number, row in enumerate(comparison.rows):
        kind = "used" if row.label == comparison.verdict.use else ""
        if row.status == "failed" or row.step_seconds is None:
            kind = "failed"
        colour = f"c{number % NUM_ROW_COLOURS}"
        rows.append(SummaryRow(row.label, colour, kind, row.reason, _cells(row)))
    return Summary(HEADS, tuple(rows))


def _cells(row: Row) -> tuple[SummaryCell, ...]:
    from halfstep.comparison.rows import metric_of
    from halfstep.comparison.table import at_step, show_layer, show_share

    if row.step_seconds is None:
        return ()

    def cell(metric: str, text: str, note: str = "") -> SummaryCell:
        return SummaryCell(text, note, metric, metric_of(row, metric))

    at = at_step(row).strip()
    noise = "" if row.beyond_noise is None else "beyond noise" if row.beyond_noise else "within noise"
    is_reference = row.speedup is not None and row.speedup.low == row.speedup.high == 1
    speedup = ("reference", "") if is_reference else (_number(row.speedup, ".2f", "x"), _range(row.speedup))
    gap = ("reference", "") if is_reference else (_number(row.loss_gap, "+.4f"), _joined(noise, at))
    predicted = "" if row.predicted_bytes is None else f"predicted {bytes_text(row.predicted_bytes)}"
    if row.predicted_gpu is not None:
        predicted = f"of the process; {predicted} on {row.predicted_gpu}"
    if row.rank_peaks:
        predicted = f"by rank: {', '.join(map(bytes_text, row.rank_peaks))}"
    warmup = "-" if row.warmup_seconds is None else seconds_text(row.warmup_seconds)
    return (
        cell("step_ms", seconds_text(row.step_seconds.value), _spread(row)),
        cell("samples_per_second", _number(row.samples_per_second, ",.0f")),
        cell("speedup", *speedup),
        cell("memory_gib", "-" if row.peak_bytes is None else bytes_text(row.peak_bytes), predicted),
        cell("loss", _number(row.loss, ".4f"), at),
        cell("loss_gap", *gap),
        cell("val_loss", _number(row.val_loss, ".4f"), at),
        cell("metric", _number(row.metric, ".4f"), _joined(_half(row.metric), at)),
        cell("val_seconds", "-" if row.val_seconds is None else seconds_text(row.val_seconds), _validation_rate(row)),
        cell("skips", str(row.skips), f"{row.nonfinite} non-finite losses" if row.nonfinite else ""),
        cell("cosine", "-" if row.cosine is None else f"{row.cosine:.6f}", _gradient_errors(row)),
        cell(
            "underflow",
            "-" if row.underflow is None else show_share(row.underflow),
            "" if row.worst_layer is None else show_layer(row),
        ),
        SummaryCell(warmup, f"{row.warmup_steps} steps"),
    )


def _joined(*notes: str) -> str:
    return ", ".join(filter(None, notes))


def _validation_rate(row: Row) -> str:
    rate = row.val_samples_per_second
    uncompiled = "uncompiled" if row.variant.compile else ""
    return "" if rate is None else _joined(f"{_digits(rate)} samples/s", uncompiled)


def _gradient_errors(row: Row) -> str:
    """How far the first gradients are from fp32's, and for a compiled row from those without compilation."""
    parts = [] if row.gradient_error is None else [f"error {row.gradient_error:.2g}"]
    return ", ".join(parts + ([] if row.eager_error is None else [f"{row.eager_error:.2g} from eager"]))


def _number(estimate: Estimate | None, digits: str, unit: str = "") -> str:
    if estimate is None:
        return "-"
    return (_digits(estimate.value) if digits == ",.0f" else format(estimate.value, digits)) + unit


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _range(estimate: Estimate | None) -> str:
    return "" if estimate is None or estimate.low == estimate.high else f"{estimate.low:.2f} to {estimate.high:.2f}"


def _spread(row: Row) -> str:
    """The spread of step times, and their mean where it differs from the median."""
    parts = [] if row.spread is None else [f"spread {row.spread:.0%}"]
    if row.mean_seconds and row.step_seconds and abs(row.mean_seconds / row.step_seconds.value - 1) > _MEAN_DIFFERS:
        parts.append(f"mean {seconds_text(row.mean_seconds)}")
    return ", ".join(parts)


def _half(estimate: Estimate | None) -> str:
    return "" if estimate is None or estimate.low == estimate.high else f"+- {(estimate.high - estimate.low) / 2:.4f}"


def truth_table(values: dict[str, Any]) -> Table | None:
    """Storage and compute dtypes of each row: properties downwards, precisions across; None if no run recorded them."""
    rows = [row for row in values["rows"] if row["truth"]]
    if not rows:
        return None
    names = list(dict.fromkeys(name for row in rows for name in row["truth"]["rows"] if name != "precision"))
    lines = [(name, *(row["truth"]["rows"].get(name, "-") for row in rows)) for name in names]
    for key, heading in (("lossy", "lossy"), ("waived_guarantees", "waived guarantees")):
        if any(row["truth"][key] for row in rows):
            lines.append((heading, *("; ".join(row["truth"][key]) or "-" for row in rows)))
    heads = ("", *(row["label"] for row in rows))
    prose = frozenset(range(len(heads)))
    return Table("Truth table of each precision", heads, tuple(lines), prose, id="truth-table")


def census_tables(values: dict[str, Any]) -> list[Census]:
    """For each row, the operators that took the longest, and why some stayed in fp32."""
    heads = ("operator", "format", "calls", "share of time", "why in fp32")
    censuses = []
    for row in values["rows"]:
        census = row["census"]
        if not census:
            continue
        total = sum(item["seconds"] for item in census["rows"]) or 1.0
        lines = [
            (item["op"], item["format"], f"{item['calls']:,}", f"{item['seconds'] / total:.1%}", item["why"])
            for item in census["rows"][:MAX_OPERATORS]
        ]
        table = Table(f"Operators of {row['label']}", heads, tuple(lines), prose=frozenset({len(heads) - 1}))
        products = ", ".join(f"{share:.0%} {name}" for name, share in census["products"].items())
        about = f"Matrix products: {products or 'none'}. Casts: {census['share'].get('casts', 0):.1%} of the time."
        shapes = [
            f"{'x'.join(map(str, item['shape']))} ({item['calls']})" for item in census["misaligned"][:MAX_SHAPES]
        ]
        if shapes:
            about += f" 16-bit products with a dimension that is not a multiple of 8, as tensor cores need: {', '.join(shapes)}."
        censuses.append(Census(about, table))
    return censuses


def environments(values: dict[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Each machine with its versions, device and matmul rates."""
    machines = []
    for machine in values["machines"]:
        fields = {**machine["environment"], "device": machine["device"], "target": machine["target"]}
        fields["matmul rate, GFLOP/s"] = [f"{m['format']} {m['gflops_median']:,.0f}" for m in machine["matmul"]]
        texts = {name: ", ".join(map(str, v)) if isinstance(v, list) else v for name, v in fields.items()}
        pairs = [(name, str(text)) for name, text in texts.items() if text not in {None, ""}]
        machines.append((machine["machine"], pairs))
    return machines
