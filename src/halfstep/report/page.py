"""A comparison as one HTML page: no network, light and dark, readable on a phone and on paper, with or without sight.

Everything the plots show is in tables beside them, so the page says the same with scripts switched off. Plotly's script
comes out of the installed package and is written into the page.
"""

from __future__ import annotations

import importlib
from importlib import resources
from typing import TYPE_CHECKING, Any

from halfstep.errors import MissingError
from halfstep.report.markup import Markup, embed_json, join, tag
from halfstep.report.page_plots import Plot, build_plots
from halfstep.report.page_tables import census_tables, environment_list, summary_table, truth_table

if TYPE_CHECKING:
    from halfstep.comparison.result import Comparison
    from halfstep.comparison.rows import Row

__all__ = ["render_page"]

_KINDS = {"faster": "good", "smaller": "good", "same": "warn", "slower": "warn", "unfit": "warn", "unknown": "bad"}
_HEADLINES = {
    "faster": "Use {use}",
    "smaller": "Use {use}",
    "same": "No difference beyond noise",
    "slower": "Stay with {use}",
    "unfit": "Stay with {use}",
    "unknown": "No recommendation",
}


def render_page(comparison: Comparison) -> str:
    """The page as text."""
    values = comparison.as_dict()
    plots = build_plots(values)
    body = join(
        [
            tag("a", "Skip to the figures", href="#figures", class_="skip"),
            _header(comparison, values),
            tag(
                "main", _verdict(comparison), _figures(comparison), *_sections(plots, values), _foot(values), id="main"
            ),
            tag("footer", "Made by halfstep compare. Every figure on this page was measured in the runs it shows."),
            embed_json("comparison", values),
            embed_json("plots", {plot.id: {"data": _escaped(plot.data), "layout": plot.layout} for plot in plots}),
            tag("script", Markup(_plotly_script())),
            tag("script", Markup(_asset("page.js"))),
        ]
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", _title(values)),
        tag("style", Markup(_asset("page.css"))),
    )
    return f"<!doctype html>\n{tag('html', head, tag('body', body), lang='en')}\n"


def _escaped(data: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Plots whose names are shown as they are; Plotly takes <b> and <a> in a label for markup."""

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(item) for item in value]
        return value.replace("&", "&amp;").replace("<", "&lt;") if isinstance(value, str) else value

    return [{key: plain(value) if key in {"name", "x", "y"} else value for key, value in one.items()} for one in data]


def _plotly_script() -> str:
    try:
        offline = importlib.import_module("plotly.offline")
    except ImportError as error:
        raise MissingError(
            f"The HTML report needs plotly, which cannot be imported ({error}); the figures are in comparison.json. "
            "Install it (pip install plotly), here or where you copy the directory to."
        ) from error
    script: str = offline.get_plotlyjs()
    return script.replace("</script", "<\\/script")


def _asset(name: str) -> str:
    return resources.files("halfstep.report").joinpath(name).read_text(encoding="ascii")


def _title(values: dict[str, Any]) -> str:
    return f"{values['machines'][0]['target']}: {len(values['rows'])} precisions compared"


def _header(comparison: Comparison, values: dict[str, Any]) -> Markup:
    where = "; ".join(dict.fromkeys(machine["machine"] for machine in values["machines"]))
    first = values["machines"][0]
    settings = first["settings"]
    about = (
        f"{where}. {first['num_params']:,} parameters, batch {first['batch']}, {settings['steps']} steps, "
        f"{settings['repeats']} repeats with a seed each; rows {'took turns' if first['side_by_side'] else 'ran one after the other'}."
    )
    links = [("verdict", "Verdict"), ("figures", "Figures"), ("speed", "Speed and memory"), ("learning", "Learning")]
    links += [("operators", "Operators"), ("truth", "Truth table"), ("environment", "Environment")]
    stopped = f" Stopped early by {comparison.stopped_by}." if comparison.stopped_by else ""
    return tag(
        "header",
        tag(
            "div",
            tag("h1", _title(values)),
            tag("p", about + stopped, class_="soft"),
            tag("nav", *(tag("a", text, href=f"#{target}") for target, text in links), aria_label="Sections"),
        ),
        tag("button", "Colours: auto", id="theme", type="button", data_theme="auto", hidden=True),
    )


def _verdict(comparison: Comparison) -> Markup:
    verdict = comparison.verdict
    notes = [tag("li", note) for note in comparison.notes]
    used = next((row for row in comparison.rows if verdict.use in {row.label, row.variant.label}), None)
    return tag(
        "section",
        tag("h2", _HEADLINES[verdict.kind].format(use=verdict.use), id="verdict-title"),
        tag("p", verdict.text),
        *([tag("div", *_tiles(used), class_="tiles")] if used is not None else []),
        *([tag("h3", "Worth knowing"), tag("ul", *notes)] if notes else []),
        class_=f"verdict {_KINDS[verdict.kind]}",
        id="verdict",
        aria_labelledby="verdict-title",
    )


def _tiles(row: Row) -> list[Markup]:
    from halfstep.hardware.units import bytes_text, seconds_text

    found = []
    if row.samples_per_second is not None and row.step_seconds is not None:
        found.append((f"{row.samples_per_second.value:,.0f} /s", f"samples, {row.label}"))
        found.append((seconds_text(row.step_seconds.value), "for a step"))
    if row.speedup is not None and row.speedup.low != row.speedup.high:
        found.append((f"{row.speedup.value:.2f} x", "fp32's speed"))
    if row.peak_bytes is not None:
        found.append((bytes_text(row.peak_bytes), "peak memory"))
    if row.metric is not None:
        found.append((f"{row.metric.value:.4f}", "validation metric"))
    elif row.val_loss is not None:
        found.append((f"{row.val_loss.value:.4f}", "validation loss"))
    return [tag("div", tag("b", value), tag("span", words), class_="tile") for value, words in found]


def _figures(comparison: Comparison) -> Markup:
    measured = [row for row in comparison.rows if row.step_seconds is not None]  # the others' reason is in the table
    failed = [tag("li", tag("b", row.label), f": {row.reason}") for row in measured if row.status == "failed"]
    return tag(
        "section",
        tag("h2", "Figures"),
        tag(
            "p",
            "Medians with 95 % intervals where a second number follows. Speed is against fp32, formed turn by turn; the gap is the final "
            "training loss minus fp32's of the same seed.",
            class_="soft small",
        ),
        summary_table(comparison),
        *([tag("h3", "Runs that did not go through"), tag("ul", *failed)] if failed else []),
        id="figures",
    )


def _sections(plots: list[Plot], values: dict[str, Any]) -> list[Markup]:
    by_id = {plot.id: plot for plot in plots}

    def show(*names: str) -> list[Markup]:
        return [by_id[name].figure() for name in names if name in by_id]

    def section(identifier: str, title: str, *children: Any) -> Markup:
        return tag("section", tag("h2", title), *children, id=identifier)

    no_scale = [] if "plot-scale" in by_id else [tag("p", "No row scales its loss.", class_="soft small")]
    return [
        section("speed", "Speed and memory", tag("div", *show("plot-speed", "plot-memory", "plot-split", "plot-flops"), class_="pair")),
        section(
            "learning", "Learning", *show("plot-loss"), tag("div", *show("plot-gap", "plot-norm"), class_="pair"),
            *show("plot-scale"), *no_scale,
        ),
        section("operators", "Did anything run in 16 bits?", *show("plot-census"), census_tables(values)),
        section("truth", "What each row really held", truth_table(values)),
    ]  # fmt: skip


def _foot(values: dict[str, Any]) -> Markup:
    commands = [" ".join(machine["command"]) for machine in values["machines"]]
    return tag(
        "section",
        tag("h2", "Environment, and how to do it again"),
        environment_list(values),
        tag("pre", "\n".join(dict.fromkeys(commands))),
        id="environment",
    )
