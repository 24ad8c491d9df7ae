"""The plots of the report page, as plain data for Plotly, each with its words and its table.

A colour "@c1" is a name: page.js puts the page's own colour there, so that light, dark and paper each have theirs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from halfstep.report.markup import Markup, tag
from halfstep.report.page_tables import data_table

__all__ = ["Plot", "build_plots", "thin"]

MOST_POINTS = 400
# In the order of the bars. What is counted in a row that has no prediction has the colour of its predicted parts.
_MEMORY = {
    "process": "@p0", "weights": "@p1", "buffers": "@c2", "gradients": "@p2", "optimizer": "@p3", "states": "@p3",
    "master": "@c5", "average": "@c1", "activations, rest": "@p5", "activations": "@p5", "cast cache": "@c8", "temporaries": "@p4",
    "batch": "@c6", "workspaces": "@c7", "transforms": "@c4", "rounding": "@p0", "not predicted": "@c0",
}  # fmt: skip
_FORMATS = ("bf16", "fp16", "fp8", "tf32", "fp32", "casts", "other")
_PART_COLOURS = ("@p1", "@p2", "@p3", "@p4", "@p5", "@c8")
_NAMED_COLOURS = _MEMORY | {
    "fp32": "@p0", "bf16": "@p1", "fp16": "@p2", "casts": "@p5", "fp8": "@p3", "tf32": "@p4", "other": "@p3",
}  # fmt: skip
Values = dict[str, Any]


@dataclass(frozen=True)
class Plot:
    """One plot: its data, what it shows in words, and the same as a table."""

    id: str
    title: str
    caption: str
    data: list[Values]
    layout: Values
    heads: list[str]
    lines: list[list[str]] = field(default_factory=list)

    def figure(self) -> Markup:
        """The element of the page."""
        name = f"{self.id}-title"
        height = self.layout.get("height", 300)
        return tag(
            "figure",
            tag("h3", self.title, id=name),
            tag("figcaption", self.caption),
            tag("div", id=self.id, class_="plot", role="img", aria_labelledby=name, style=f"height: {height}px"),
            tag("details", tag("summary", "Show as a table"), data_table(self.title, self.heads, self.lines)),
        )


def build_plots(values: Values) -> list[Plot]:
    """Every plot that has something to show."""
    makers: tuple[Callable[[Values], Plot | None], ...] = (
        _speed, _memory, _split, _flops, _loss, _gap, _norm, _scale, _census,
    )  # fmt: skip
    return [plot for plot in (make(values) for make in makers) if plot is not None]


def thin(curve: Sequence[Any], width: int) -> list[float | None]:
    """Means over `width` neighbouring steps; None where a value is missing or not finite."""
    found: list[float | None] = []
    for start in range(0, len(curve), width):
        part = curve[start : start + width]
        fine = all(isinstance(v, (int, float)) and math.isfinite(v) for v in part)
        found.append(statistics.fmean(part) if fine else None)
    return found


# --- bars -------------------------------------------------------------------------------------------------------


def _bars(count: int, title: str, **more: Any) -> Values:
    return {
        "height": 80 + 34 * count,
        "margin": {"l": 10, "r": 16, "t": 8, "b": 44},
        "xaxis": {"title": {"text": title}, "rangemode": "tozero"},
        "yaxis": {"autorange": "reversed", "type": "category"},
        "showlegend": False,
        "bargap": 0.35,
        **more,
    }


def _stacked(count: int, title: str, **more: Any) -> Values:
    layout = _bars(count, title, barmode="stack", showlegend=True, **more)
    layout["height"] += 40
    layout["margin"] = {"l": 10, "r": 16, "t": 36, "b": 44}
    layout["legend"] = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "traceorder": "normal"}
    return layout


def _colour(values: Values, label: str) -> str:
    labels = [row["label"] for row in values["rows"]]
    return f"@c{labels.index(label) % 9}"


def _speed(values: Values) -> Plot | None:
    rows = [row for row in values["rows"] if row["samples_per_second"]]
    if not rows:
        return None
    rates = [row["samples_per_second"] for row in rows]
    bar = {
        "type": "bar",
        "orientation": "h",
        "y": [row["label"] for row in rows],
        "x": [rate["value"] for rate in rates],
        "marker": {"color": [_colour(values, row["label"]) for row in rows]},
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [rate["high"] - rate["value"] for rate in rates],
            "arrayminus": [rate["value"] - rate["low"] for rate in rates],
            "color": "@ink",
            "thickness": 1.5,
        },
        "hovertemplate": "%{y}: %{x:,.4g} samples/s<extra></extra>",
    }
    lines = [
        [r["label"], *(f"{s[k]:,.1f}" for k in ("value", "low", "high"))] for r, s in zip(rows, rates, strict=True)
    ]
    caption = (
        "Longer is faster. Bars are medians; whiskers are 95 % intervals over turns and repeats. Warm-up is left out."
    )
    return Plot(
        "plot-speed", "Samples per second", caption, [bar], _bars(len(rows), "samples/s"),
        ["precision", "samples/s", "low", "high"], lines,
    )  # fmt: skip


def _parts_plot(
    identifier: str, title: str, caption: str, unit: str, labels: list[str], parts: dict[str, list[float]], digits: str
) -> Plot:
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "y": labels,
            "x": amounts,
            "marker": {"color": _NAMED_COLOURS.get(name, _PART_COLOURS[number % len(_PART_COLOURS)])},
            "hovertemplate": f"%{{y}}, {name}: %{{x:{digits}}} {unit}<extra></extra>",
        }
        for number, (name, amounts) in enumerate(parts.items())
    ]
    lines = [
        [
            label,
            *(format(amounts[i], digits) for amounts in parts.values()),
            format(sum(a[i] for a in parts.values()), digits),
        ]
        for i, label in enumerate(labels)
    ]
    return Plot(identifier, title, caption, data, _stacked(len(labels), unit), ["precision", *parts, "total"], lines)


def _memory(values: Values) -> Plot | None:
    rows = [row for row in values["rows"] if row["memory"]]
    if not rows:
        return None
    largest = max(sum(row["memory"].values()) for row in rows)
    unit, size = ("GiB", 2**30) if largest >= 2**30 else ("MiB", 2**20)
    names = sorted(dict.fromkeys(n for row in rows for n in row["memory"]), key=lambda n: (*_MEMORY, n).index(n))
    parts = {name: [row["memory"].get(name, 0.0) / size for row in rows] for name in names}
    caption = "The peak while training, by what it holds. Weights, gradients and optimizer states are counted; the rest of the peak is activations."
    if predicted := [row for row in rows if row.get("predicted_bytes")]:
        caption = "The peak while training. Its parts are predicted, by cause; what was measured beyond the prediction is a part of its own."
        if len(predicted) < len(rows):
            caption += " Compiled rows are not predicted: there the weights, gradients and optimizer's states are counted, and the rest is activations."
    if "process" in names:
        caption += " On a CPU it is the resident set, and most of it is the process itself: the interpreter and torch."
    return _parts_plot("plot-memory", "Peak memory", caption, unit, [r["label"] for r in rows], parts, ",.3f")


def _split(values: Values) -> Plot | None:
    rows = [row for row in values["rows"] if row["split"]]
    if not rows:
        return None
    parts = {phase: [row["split"][phase] * 1e3 for row in rows] for phase in rows[0]["split"]}
    caption = "Where a step's time goes, in separate steps that wait between phases; their sum can exceed the step time above."
    return _parts_plot("plot-split", "Time of a step", caption, "ms", [r["label"] for r in rows], parts, ",.3f")


def _flops(values: Values) -> Plot | None:
    rows = [row for row in values["rows"] if row["flops_share"] is not None]
    if not rows:
        return None
    bar = {
        "type": "bar",
        "orientation": "h",
        "y": [row["label"] for row in rows],
        "x": [row["flops_share"] * 100 for row in rows],
        "marker": {"color": [_colour(values, row["label"]) for row in rows]},
        "hovertemplate": "%{y}: %{x:.3g} %<extra></extra>",
    }
    lines = [[r["label"], f"{r['flops_share']:.2%}", f"{r['flops_per_second'] / 1e9:,.1f}"] for r in rows]
    caption = "The model's arithmetic per second, as a share of the rate at which large matrices of the same format multiplied here."
    return Plot(
        "plot-flops", "Use of the hardware", caption, [bar], _bars(len(rows), "% of the matmul rate"),
        ["precision", "share", "GFLOP/s"], lines,
    )  # fmt: skip


def _census(values: Values) -> Plot | None:
    rows = [row for row in values["rows"] if row["census"]]
    if not rows:
        return None
    seen = {form for row in rows for form in row["census"]["share"]}
    names = sorted(seen, key=lambda n: (*_FORMATS, n).index(n))
    parts = {name: [row["census"]["share"].get(name, 0.0) * 100 for row in rows] for name in names}
    how = "by the kernels' own time" if rows[0]["census"]["source"] == "profiler" else "by timing each operator"
    caption = (
        f"Share of one step's time by the format operators computed in, {how}; casts are conversions between formats."
    )
    return _parts_plot("plot-census", "Formats at work", caption, "%", [r["label"] for r in rows], parts, ".1f")


# --- curves -----------------------------------------------------------------------------------------------------


def _by_label(values: Values) -> dict[str, list[Values]]:
    found: dict[str, list[Values]] = {}
    for curve in values["curves"]:
        if curve["loss"]:
            found.setdefault(curve["label"], []).append(curve)
    order = [row["label"] for row in values["rows"]]
    return {label: found[label] for label in order if label in found}


def _lines(title: str, **axis: Any) -> Values:
    return {
        "height": 360,
        "margin": {"l": 10, "r": 10, "t": 40, "b": 44},
        "xaxis": {"title": {"text": "step"}},
        "yaxis": {"title": {"text": title}, **axis},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        "hovermode": "x unified",
    }


def _width(curves: dict[str, list[Values]]) -> int:
    longest = max(len(curve["loss"]) for group in curves.values() for curve in group)
    return max(1, longest // 60, -(-longest // MOST_POINTS))


def _mean(curves: Sequence[Sequence[float | None]]) -> list[float | None]:
    found: list[float | None] = []
    for column in zip(*curves, strict=False):
        known = [value for value in column if value is not None]
        found.append(statistics.fmean(known) if len(known) == len(column) else None)
    return found


def _steps(count: int, width: int) -> list[int]:
    return [1 + i * width for i in range(count)]


def _line(values: Values, label: str, y: list[float | None], width: int, **more: Any) -> Values:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": label,
        "x": _steps(len(y), width),
        "y": y,
        "line": {"color": _colour(values, label), "width": 2},
        "hovertemplate": "%{y:.4g}",
        **more,
    }


def _points(
    names: Sequence[str], curves: Sequence[list[float | None]], width: int
) -> tuple[list[str], list[list[str]]]:
    """About ten steps of each curve, for the table."""
    length = min(map(len, curves))
    chosen = sorted({round(i * (length - 1) / 9) for i in range(10)}) if length > 1 else [0]
    shown = [[str(1 + i * width), *("-" if c[i] is None else f"{c[i]:.4f}" for c in curves)] for i in chosen]
    return ["step", *names], shown


def _reference(values: Values) -> str:
    return str(values["machines"][0]["reference"])


def _loss(values: Values) -> Plot | None:
    groups = _by_label(values)
    if not groups:
        return None
    width = _width(groups)
    smoothed = {label: [thin(curve["loss"], width) for curve in group] for label, group in groups.items()}
    means = {label: _mean(curves) for label, curves in smoothed.items()}
    data = []
    seeds = next((curves for label, curves in smoothed.items() if label.partition(" @ ")[0] == _reference(values)), [])
    if len(seeds) > 1:
        length = min(map(len, seeds))
        usable = [i for i in range(length) if all(curve[i] is not None for curve in seeds)]
        columns = [[value for curve in seeds if (value := curve[i]) is not None] for i in usable]
        high, low = [max(column) for column in columns], [min(column) for column in columns]
        x = [1 + i * width for i in usable]
        band = {
            "type": "scatter",
            "mode": "lines",
            "fill": "toself",
            "x": [*x, *reversed(x)],
            "y": [*high, *reversed(low)],
        }
        shade = {"fillcolor": "@c0/0.18", "line": {"width": 0}, "hoverinfo": "skip", "name": "fp32, seed to seed"}
        data.append({**band, **shade})
    data += [_line(values, label, mean, width) for label, mean in means.items()]
    heads, lines = _points(list(means), list(means.values()), width)
    caption = (
        f"Training loss, mean over seeds and over {width} steps." if width > 1 else "Training loss, mean over seeds."
    )
    caption += " The shaded band is what fp32 itself does from seed to seed." if len(seeds) > 1 else ""
    finite = [v for mean in means.values() for v in mean if v is not None]
    kind = {"type": "log", "dtick": "D2"} if finite and min(finite) > 0 and max(finite) > 20 * min(finite) else {}
    return Plot("plot-loss", "Loss", caption, data, _lines("loss", **kind), heads, lines)


def _gap(values: Values) -> Plot | None:
    groups = _by_label(values)
    reference = {(c["label"].partition(" @ ")[2], c["repeat"]): c["loss"] for c in values["curves"]
                 if c["label"].partition(" @ ")[0] == _reference(values)}  # fmt: skip
    comparable = all(m["same_weights"] and m["same_batches"] for m in values["machines"])
    if len(groups) < 2 or not reference or not comparable:
        return None
    width = _width(groups)
    gaps: dict[str, list[float | None]] = {}
    for label, group in groups.items():
        pairs = [(curve["loss"], reference.get((label.partition(" @ ")[2], curve["repeat"]), [])) for curve in group]
        curves = [
            [
                a - b if isinstance(a, float) and isinstance(b, float) else None
                for a, b in zip(mine, other, strict=False)
            ]
            for mine, other in pairs
            if other
        ]
        if curves and label.partition(" @ ")[0] != _reference(values):
            gaps[label] = _mean([thin(curve, width) for curve in curves])
    if not gaps:
        return None
    data = [_line(values, label, gap, width) for label, gap in gaps.items()]
    heads, lines = _points(list(gaps), list(gaps.values()), width)
    noise = "" if values["noise"] is None else f" fp32's own curves are {values['noise']:.4f} apart from seed to seed."
    caption = f"Loss minus fp32's with the same seed and batches; above zero is worse.{noise}"
    return Plot("plot-gap", "Distance from fp32", caption, data, _lines("loss - fp32's"), heads, lines)


def _norm(values: Values) -> Plot | None:
    groups = {k: g for k, g in _by_label(values).items() if any(v is not None for c in g for v in c["grad_norm"])}
    if not groups:
        return None
    width = _width(groups)
    means = {label: _mean([thin(c["grad_norm"], width) for c in group]) for label, group in groups.items()}
    heads, lines = _points(list(means), list(means.values()), width)
    caption = "Norm of the true gradients before clipping, mean over seeds; gaps are steps with a gradient that is not finite."
    data = [_line(values, label, mean, width) for label, mean in means.items()]
    return Plot("plot-norm", "Gradient norm", caption, data, _lines("norm", type="log", dtick="D2"), heads, lines)


def _scale(values: Values) -> Plot | None:
    data: list[Values] = []
    lines: list[list[str]] = []
    for label, group in _by_label(values).items():
        curve = group[0]
        scale = [None if s is None else math.log2(s) for s in curve["scale"]]
        if len({s for s in scale if s is not None} - {0.0}) == 0:
            continue
        changes = [i for i in range(len(scale)) if i in {0, len(scale) - 1} or scale[i] != scale[i - 1]]
        data.append(
            _line(
                values, label, [scale[i] for i in changes], 1, x=[i + 1 for i in changes],
                line={"color": _colour(values, label), "width": 2, "shape": "hv"},
            )
        )  # fmt: skip
        marks = curve["skipped"]
        look = {"symbol": "x", "size": 9, "color": _colour(values, label)}
        data.append(
            {
                "type": "scatter", "mode": "markers", "name": f"{label}, skipped", "x": marks,
                "y": [scale[i - 1] for i in marks], "marker": look, "hovertemplate": "skipped",
            }
        )  # fmt: skip
        lines.append([label, f"2^{scale[0]:g}", f"2^{scale[-1]:g}", ", ".join(map(str, marks[:20])) or "none"])
    if not data:
        return None
    caption = f"The loss scale of the first repeat (seed {values['curves'][0]['seed']}); crosses are steps skipped because a gradient was not finite."
    layout = _lines("loss scale", tickprefix="2^", dtick=1)
    layout["height"] = 260
    return Plot(
        "plot-scale", "Loss scale", caption, data, layout, ["precision", "first", "last", "skipped steps"], lines
    )
