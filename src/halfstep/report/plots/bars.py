"""The bar plots of the report page: speed, memory, phases of a step, hardware utilization, compute formats."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from halfstep.report.html_table import data_table
from halfstep.report.memory_parts import MEMORY_COLOURS, in_order
from halfstep.report.plots.plot import Plot, Values, row_colour

__all__ = ["census_plot", "flops_plot", "memory_plot", "phases_plot", "speed_plot"]

_FORMAT_COLOURS = {"bf16": "p1", "fp16": "p2", "fp8": "p3", "tf32": "p4", "fp32": "p0", "casts": "p5", "other": "p3"}
_PART_COLOURS = ("p1", "p2", "p3", "p4", "p5", "c8")


def speed_plot(values: Values) -> Plot | None:
    """Samples per second of each row, with intervals."""
    rows = [row for row in values["rows"] if row["samples_per_second"]]
    if not rows:
        return None
    rates = [row["samples_per_second"] for row in rows]
    bar = _row_bars(values, rows, [rate["value"] for rate in rates], "%{y}: %{x:,.4g} samples/s<extra></extra>")
    bar["error_x"] = {
        "type": "data",
        "symmetric": False,
        "array": [rate["high"] - rate["value"] for rate in rates],
        "arrayminus": [rate["value"] - rate["low"] for rate in rates],
        "color": "@ink",
        "thickness": 1.5,
    }
    lines = [
        [row["label"], *(f"{rate[key]:,.1f}" for key in ("value", "low", "high"))]
        for row, rate in zip(rows, rates, strict=True)
    ]
    title = "Samples per second"
    caption = (
        "Longer is faster. Bars are medians and whiskers 95% intervals over rounds and repeats; warm-up is excluded."
    )
    table = data_table(title, ["precision", "samples/s", "low", "high"], lines)
    return Plot("plot-speed", title, caption, [bar], _layout(len(rows), "samples/s"), table)


def memory_plot(values: Values) -> Plot | None:
    """Peak memory of each row, by part."""
    rows = [row for row in values["rows"] if row["memory"]]
    if not rows:
        return None
    size, unit = _unit(sum(row["memory"].values()) for row in rows)
    names = in_order(name for row in rows for name in row["memory"])
    parts = {name: [row["memory"].get(name, 0.0) / size for row in rows] for name in names}
    caption = "Peak memory while training, by category. Weights, gradients and optimizer states are counted; the rest of the peak is activations."
    if predicted := [row for row in rows if row.get("predicted_bytes") and not row.get("predicted_gpu")]:
        caption = "Peak memory while training. The categories are predicted; memory measured beyond the prediction is shown separately."
        if len(predicted) < len(rows):
            caption += " Compiled runs are not predicted: their weights, gradients and optimizer states are counted, and the rest is activations."
    if "process" in names:
        caption += " On a CPU it is the resident set size, most of which is the Python process and torch."
    return _parts_plot("plot-memory", "Peak memory", caption, unit, rows, parts, ",.3f", MEMORY_COLOURS)


def planned_plot(values: Values) -> Plot | None:
    """The predicted peak of each row on a GPU that this machine does not have, by part."""
    rows = [row for row in values["rows"] if row.get("predicted_parts")]
    if not rows:
        return None
    size, unit = _unit(sum(row["predicted_parts"].values()) for row in rows)
    names = in_order(name for row in rows for name in row["predicted_parts"])
    parts = {name: [row["predicted_parts"].get(name, 0.0) / size for row in rows] for name in names}
    gpus = " or ".join(dict.fromkeys(row["predicted_gpu"] for row in rows))
    caption = (
        f"What `halfstep plan` predicts for torch.cuda.max_memory_allocated() on {gpus}, at the same batch; nothing ran there. "
        "Workspaces are cuBLAS's, the same in every precision."
    )
    return _parts_plot("plot-planned", f"Predicted peak on {gpus}", caption, unit, rows, parts, ",.3f", MEMORY_COLOURS)


def _unit(sizes: Iterable[float]) -> tuple[int, str]:
    return (2**30, "GiB") if max(sizes) >= 2**30 else (2**20, "MiB")


def phases_plot(values: Values) -> Plot | None:
    """The time of a step of each row, by phase."""
    rows = [row for row in values["rows"] if row["split"]]
    if not rows:
        return None
    parts = {phase: [row["split"][phase] * 1e3 for row in rows] for phase in rows[0]["split"]}
    caption = (
        "Time per phase, from separate steps that synchronize between phases; the sum can exceed the step time above."
    )
    return _parts_plot("plot-split", "Step time by phase", caption, "ms", rows, parts, ",.3f", {})


def flops_plot(values: Values) -> Plot | None:
    """The arithmetic rate of each row, relative to large matrix products."""
    rows = [row for row in values["rows"] if row["flops_share"] is not None]
    if not rows:
        return None
    bar = _row_bars(values, rows, [row["flops_share"] * 100 for row in rows], "%{y}: %{x:.3g} %<extra></extra>")
    lines = [[row["label"], f"{row['flops_share']:.2%}", f"{row['flops_per_second'] / 1e9:,.1f}"] for row in rows]
    title = "Hardware utilization"
    caption = (
        "The model's FLOP/s as a percentage of the rate measured here for large matrix products in the same format."
    )
    table = data_table(title, ["precision", "utilization", "GFLOP/s"], lines)
    return Plot("plot-flops", title, caption, [bar], _layout(len(rows), "% of the matmul rate"), table)


def census_plot(values: Values) -> Plot | None:
    """The time of a step of each row, by the format that its operators compute in."""
    rows = [row for row in values["rows"] if row["census"]]
    if not rows:
        return None
    order = list(_FORMAT_COLOURS)
    formats = {name for row in rows for name in row["census"]["share"]}
    names = sorted(formats, key=lambda name: (order.index(name) if name in order else len(order), name))
    parts = {name: [row["census"]["share"].get(name, 0.0) * 100 for row in rows] for name in names}
    how = "from kernel times" if rows[0]["census"]["source"] == "profiler" else "by timing each operator"
    caption = f"Share of one step's time by the format that operators compute in, {how}; casts are conversions between formats."
    return _parts_plot("plot-census", "Compute formats", caption, "%", rows, parts, ".1f", _FORMAT_COLOURS)


def _row_bars(values: Values, rows: list[Values], lengths: list[float], hover: str) -> Values:
    """One bar for each row, in the row's colour."""
    return {
        "type": "bar",
        "orientation": "h",
        "y": [row["label"] for row in rows],
        "x": lengths,
        "marker": {"color": ["@" + row_colour(values, row["label"]) for row in rows]},
        "hovertemplate": hover,
    }


def _parts_plot(
    identifier: str,
    title: str,
    caption: str,
    unit: str,
    rows: list[Values],
    parts: dict[str, list[float]],
    digits: str,
    colours: dict[str, str],
) -> Plot:
    """Stacked bars: one for each row, one colour for each part."""
    labels = [row["label"] for row in rows]
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "y": labels,
            "x": amounts,
            "marker": {"color": "@" + colours.get(name, _PART_COLOURS[number % len(_PART_COLOURS)])},
            "hovertemplate": f"%{{y}}, {name}: %{{x:{digits}}} {unit}<extra></extra>",
        }
        for number, (name, amounts) in enumerate(parts.items())
    ]
    lines = []
    for number, label in enumerate(labels):
        amounts = [of_rows[number] for of_rows in parts.values()]
        lines.append([label, *(format(amount, digits) for amount in [*amounts, sum(amounts)])])
    table = data_table(title, ["precision", *parts, "total"], lines)
    return Plot(identifier, title, caption, data, _stacked_layout(len(labels), unit), table)


def _layout(count: int, title: str, **more: Any) -> Values:
    return {
        "height": 80 + 34 * count,
        "margin": {"l": 10, "r": 16, "t": 8, "b": 44},
        "xaxis": {"title": {"text": title}, "rangemode": "tozero"},
        "yaxis": {"autorange": "reversed", "type": "category"},
        "showlegend": False,
        "bargap": 0.35,
        **more,
    }


def _stacked_layout(count: int, title: str) -> Values:
    layout = _layout(count, title, barmode="stack", showlegend=True)
    layout["height"] += 40
    layout["margin"] = {"l": 10, "r": 16, "t": 36, "b": 44}
    layout["legend"] = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "traceorder": "normal"}
    return layout
