"""A comparison as one HTML page: no network, light and dark, usable on a phone, on paper and with a screen reader.

Every value in a plot is also in a table, so the page is complete without scripts. Plotly's script comes from the
installed package and is written into the page. The values are computed here and laid out by templates/report.html.j2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from halfstep.hardware.torch_build import require
from halfstep.hardware.units import bytes_text, count_text, seconds_text
from halfstep.report.html_page import asset, render_html, script_json, script_source
from halfstep.report.numerics.heat import heat_maps
from halfstep.report.numerics.view import format_of, rows_of
from halfstep.report.page_tables import census_tables, environments, summary, truth_table
from halfstep.report.plots.bars import census_plot, flops_plot, memory_plot, phases_plot, planned_plot, speed_plot
from halfstep.report.plots.curves import gap_plot, loss_plot, norm_plot, scale_plot
from halfstep.report.plots.plot import Plot, Values

if TYPE_CHECKING:
    from halfstep.comparison.result import Comparison
    from halfstep.comparison.rows import Row

__all__ = ["build_plots", "page_values", "render_page"]

_KINDS = {"faster": "good", "smaller": "good", "same": "warn", "slower": "warn", "unfit": "warn", "unknown": "bad"}
_HEADLINES = {
    "faster": "Use {use}",
    "smaller": "Use {use}",
    "same": "No measurable difference",
    "slower": "Stay with {use}",
    "unfit": "Stay with {use}",
    "unknown": "No recommendation",
}
_PLOTS: tuple[Callable[[Values], Plot | None], ...] = (
    speed_plot, memory_plot, planned_plot, phases_plot, flops_plot, loss_plot, gap_plot, norm_plot, scale_plot, census_plot,
)  # fmt: skip


def render_page(comparison: Comparison) -> str:
    """The page as text."""
    data = comparison.as_dict()
    plots = build_plots(data)
    return render_html(
        "report.html.j2",
        {
            **page_values(comparison, data),
            "plots": {plot.id: plot for plot in plots},
            "data": script_json(data),
            "drawings": script_json({plot.id: plot.drawing() for plot in plots}),
            "plotly": script_source(_plotly_script()),
            "script": script_source(asset("report.js")),
        },
    )


def build_plots(data: Values) -> list[Plot]:
    """Every plot that has something to show."""
    return [plot for plot in (build(data) for build in _PLOTS) if plot is not None]


def page_values(comparison: Comparison, data: Values) -> dict[str, Any]:
    """Everything the page shows except its plots; `data` is the comparison as plain values."""
    first = data["machines"][0]
    # A row without a step time has its reason in the table already.
    failed = [(row.label, row.reason) for row in comparison.rows if row.status == "failed" and row.step_seconds]
    return {
        "title": f"{first['target']}: {count_text(len(data['rows']), 'precision')} compared",
        "about": _about(comparison, data),
        "verdict": _verdict(comparison),
        "summary": summary(comparison),
        "failed": failed,
        "samples": _samples(data),
        "censuses": census_tables(data),
        "truth": truth_table(data),
        "environments": environments(data),
        "commands": "\n".join(dict.fromkeys(" ".join(machine["command"]) for machine in data["machines"])),
    }


def _samples(data: Values) -> list[dict[str, Any]]:
    """The heat maps of each row that was sampled."""
    samples = []
    for sample in data["samples"]:
        fmt = format_of(sample["compute"])
        heat = heat_maps(tuple(rows_of(sample, fmt)), fmt)
        if heat:
            samples.append({"label": sample["label"], "heat": heat})
    return samples


def _about(comparison: Comparison, data: Values) -> str:
    machines = "; ".join(dict.fromkeys(survey.place for survey in comparison.surveys))
    first = data["machines"][0]
    settings = first["settings"]
    order = "interleaved" if first["side_by_side"] else "one after another"
    stopped = f" Stopped early by {comparison.stopped_by}." if comparison.stopped_by else ""
    return (
        f"{machines}. {first['num_params']:,} parameters, batch {first['batch']}, {settings['steps']} steps, "
        f"{settings['repeats']} repeats with different seeds, runs {order}.{stopped}"
    )


def _verdict(comparison: Comparison) -> dict[str, Any]:
    verdict = comparison.verdict
    used = next((row for row in comparison.rows if verdict.use in {row.label, row.variant.label}), None)
    return {
        "kind": _KINDS[verdict.kind],
        "headline": _HEADLINES[verdict.kind].format(use=verdict.use),
        "text": verdict.text,
        "tiles": [] if used is None else _tiles(used),
        "notes": comparison.notes,
    }


def _tiles(row: Row) -> list[tuple[str, str]]:
    """The key numbers of the recommended precision, each with its label."""
    from halfstep.comparison.table import at_step

    tiles = []
    if row.samples_per_second is not None and row.step_seconds is not None:
        tiles.append((f"{row.samples_per_second.value:,.0f}/s", f"samples, {row.label}"))
        tiles.append((seconds_text(row.step_seconds.value), "per step"))
    if row.speedup is not None and row.speedup.low != row.speedup.high:
        tiles.append((f"{row.speedup.value:.2f}x", "speedup over fp32"))
    if row.peak_bytes is not None:
        tiles.append((bytes_text(row.peak_bytes), "peak memory"))
    if row.predicted_gpu is not None and row.predicted_bytes is not None:
        tiles.append((bytes_text(row.predicted_bytes), f"predicted peak, {row.predicted_gpu}"))
    if row.metric is not None:
        tiles.append((f"{row.metric.value:.4f}", f"validation metric{at_step(row)}"))
    elif row.val_loss is not None:
        tiles.append((f"{row.val_loss.value:.4f}", f"validation loss{at_step(row)}"))
    return tiles


def _plotly_script() -> str:
    script: str = require("plotly", "The HTML report", "train").offline.get_plotlyjs()
    return script
