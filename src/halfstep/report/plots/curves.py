"""The curves of the report page over training steps: loss, gap to fp32, gradient norm, loss scale."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from halfstep.report.html_table import Table, data_table
from halfstep.report.plots.plot import Plot, Values, row_colour

__all__ = ["gap_plot", "loss_plot", "norm_plot", "scale_plot", "thin"]

MAX_POINTS = 400
_Curve = list[float | None]


def thin(curve: Sequence[Any], width: int) -> _Curve:
    """Means over `width` neighbouring steps; None where a value is missing or not finite."""
    means: _Curve = []
    for start in range(0, len(curve), width):
        part = curve[start : start + width]
        finite = all(isinstance(v, (int, float)) and math.isfinite(v) for v in part)
        means.append(statistics.fmean(part) if finite else None)
    return means


def loss_plot(values: Values) -> Plot | None:
    """The training loss of each row, with the spread of fp32 over seeds."""
    groups = _by_label(values)
    if not groups:
        return None
    width = _width(groups)
    smoothed = {label: [thin(curve["loss"], width) for curve in group] for label, group in groups.items()}
    means = {label: _mean(curves) for label, curves in smoothed.items()}
    seeds = next((curves for label, curves in smoothed.items() if _policy(label) == _reference(values)), [])
    data = [_band(seeds, width)] if len(seeds) > 1 else []
    data += [_trace(values, label, mean, width) for label, mean in means.items()]
    caption = (
        f"Training loss, mean over seeds and over {width} steps." if width > 1 else "Training loss, mean over seeds."
    )
    caption += " The shaded band is fp32's own range over seeds." if len(seeds) > 1 else ""
    finite = [v for mean in means.values() for v in mean if v is not None]
    axis = {"type": "log", "dtick": "D2"} if finite and min(finite) > 0 and max(finite) > 20 * min(finite) else {}
    return Plot("plot-loss", "Loss", caption, data, _layout("loss", **axis), _points("Loss", means, width))


def gap_plot(values: Values) -> Plot | None:
    """The training loss of each row minus fp32's with the same seed."""
    groups = _by_label(values)
    reference = {
        (_machine(curve["label"]), curve["repeat"]): curve["loss"]
        for curve in values["curves"]
        if _policy(curve["label"]) == _reference(values)
    }
    comparable = all(machine["same_weights"] and machine["same_batches"] for machine in values["machines"])
    if len(groups) < 2 or not reference or not comparable:
        return None
    width = _width(groups)
    gaps: dict[str, _Curve] = {}
    for label, group in groups.items():
        pairs = [(curve["loss"], reference.get((_machine(label), curve["repeat"]), [])) for curve in group]
        curves = [_difference(loss, reference_loss) for loss, reference_loss in pairs if reference_loss]
        if curves and _policy(label) != _reference(values):
            gaps[label] = _mean([thin(curve, width) for curve in curves])
    if not gaps:
        return None
    data = [_trace(values, label, gap, width) for label, gap in gaps.items()]
    noise = "" if values["noise"] is None else f" fp32's own curves differ by {values['noise']:.4f} between seeds."
    title = "Loss gap to fp32"
    caption = f"Loss minus fp32's with the same seed and batches; above zero is worse.{noise}"
    return Plot("plot-gap", title, caption, data, _layout("loss - fp32 loss"), _points(title, gaps, width))


def norm_plot(values: Values) -> Plot | None:
    """The gradient norm of each row."""
    groups = {
        label: group
        for label, group in _by_label(values).items()
        if any(norm is not None for curve in group for norm in curve["grad_norm"])
    }
    if not groups:
        return None
    width = _width(groups)
    means = {label: _mean([thin(curve["grad_norm"], width) for curve in group]) for label, group in groups.items()}
    title = "Gradient norm"
    caption = "Norm of the unscaled gradients before clipping, mean over seeds; the line breaks at steps with non-finite gradients."
    data = [_trace(values, label, mean, width) for label, mean in means.items()]
    return Plot(
        "plot-norm", title, caption, data, _layout("norm", type="log", dtick="D2"), _points(title, means, width)
    )


def scale_plot(values: Values) -> Plot | None:
    """The loss scale of each row that has one, with the skipped steps."""
    data: list[Values] = []
    lines: list[list[str]] = []
    for label, group in _by_label(values).items():
        curve = group[0]
        scale = [None if s is None else math.log2(s) for s in curve["scale"]]
        if not {s for s in scale if s is not None} - {0.0}:
            continue
        colour = "@" + row_colour(values, label)
        changes = [i for i in range(len(scale)) if i in {0, len(scale) - 1} or scale[i] != scale[i - 1]]
        line = {"x": [i + 1 for i in changes], "line": {"color": colour, "width": 2, "shape": "hv"}}
        data.append(_trace(values, label, [scale[i] for i in changes], 1, **line))
        skipped = curve["skipped"]
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": f"{label}, skipped",
                "x": skipped,
                "y": [scale[i - 1] for i in skipped],
                "marker": {"symbol": "x", "size": 9, "color": colour},
                "hovertemplate": "skipped",
            }
        )
        lines.append([label, f"2^{scale[0]:g}", f"2^{scale[-1]:g}", ", ".join(map(str, skipped[:20])) or "none"])
    if not data:
        return None
    title = "Loss scale"
    caption = f"The loss scale of the first repeat (seed {values['curves'][0]['seed']}); crosses are steps skipped because of non-finite gradients."
    layout = _layout("loss scale", tickprefix="2^", dtick=1) | {"height": 260}
    table = data_table(title, ["precision", "first", "last", "skipped steps"], lines)
    return Plot("plot-scale", title, caption, data, layout, table)


def _by_label(values: Values) -> dict[str, list[Values]]:
    """The curves of each row, in the order of the rows."""
    groups: dict[str, list[Values]] = {}
    for curve in values["curves"]:
        if curve["loss"]:
            groups.setdefault(curve["label"], []).append(curve)
    order = [row["label"] for row in values["rows"]]
    return {label: groups[label] for label in order if label in groups}


def _policy(label: str) -> str:
    """A row of several machines is called "policy @ machine"."""
    return label.partition(" @ ")[0]


def _machine(label: str) -> str:
    return label.partition(" @ ")[2]


def _reference(values: Values) -> str:
    return str(values["machines"][0]["reference"])


def _width(curves: dict[str, list[Values]]) -> int:
    """How many steps one point stands for."""
    longest = max(len(curve["loss"]) for group in curves.values() for curve in group)
    return max(1, longest // 60, -(-longest // MAX_POINTS))


def _mean(curves: Sequence[Sequence[float | None]]) -> _Curve:
    means: _Curve = []
    for column in zip(*curves, strict=False):
        known = [value for value in column if value is not None]
        means.append(statistics.fmean(known) if len(known) == len(column) else None)
    return means


def _difference(loss: Sequence[Any], reference: Sequence[Any]) -> _Curve:
    pairs = zip(loss, reference, strict=False)
    return [a - b if isinstance(a, float) and isinstance(b, float) else None for a, b in pairs]


def _steps(count: int, width: int) -> list[int]:
    return [1 + i * width for i in range(count)]


def _band(seeds: list[_Curve], width: int) -> Values:
    """The range of several curves as a shaded area."""
    columns = [[value for value in column if value is not None] for column in zip(*seeds, strict=False)]
    usable = [(1 + i * width, column) for i, column in enumerate(columns) if len(column) == len(seeds)]
    steps = [step for step, _ in usable]
    high, low = [max(column) for _, column in usable], [min(column) for _, column in usable]
    return {
        "type": "scatter",
        "mode": "lines",
        "fill": "toself",
        "x": [*steps, *reversed(steps)],
        "y": [*high, *reversed(low)],
        "fillcolor": "@c0/0.18",
        "line": {"width": 0},
        "hoverinfo": "skip",
        "name": "fp32, range over seeds",
    }


def _trace(values: Values, label: str, y: _Curve, width: int, **more: Any) -> Values:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": label,
        "x": _steps(len(y), width),
        "y": y,
        "line": {"color": "@" + row_colour(values, label), "width": 2},
        "hovertemplate": "%{y:.4g}",
        **more,
    }


def _layout(title: str, **axis: Any) -> Values:
    return {
        "height": 360,
        "margin": {"l": 10, "r": 10, "t": 40, "b": 44},
        "xaxis": {"title": {"text": "step"}},
        "yaxis": {"title": {"text": title}, **axis},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        "hovermode": "x unified",
    }


def _points(title: str, curves: dict[str, _Curve], width: int) -> Table:
    """About ten steps of each curve as a table."""
    length = min(map(len, curves.values()))
    chosen = sorted({round(i * (length - 1) / 9) for i in range(10)}) if length > 1 else [0]
    lines = [
        [str(1 + i * width), *("-" if curve[i] is None else f"{curve[i]:.4f}" for curve in curves.values())]
        for i in chosen
    ]
    return data_table(title, ["step", *curves], lines)
