"""A plan as a section of an HTML page: tables and bars, no script, every text escaped.

`plan_section` is meant for the page of a report, whose style sheet it uses; `render_plan_page` is the section alone in a page of its
own. The bars are plain boxes with a width, so they print and need no script.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from halfstep.report.markup import Markup, join, tag
from halfstep.report.plan import at_once, grouped, largest_text

if TYPE_CHECKING:
    from halfstep.planning import Plan

__all__ = ["PLAN_CSS", "plan_section", "render_plan_page"]

_COLOURS = {
    "weights": "#3b82c4", "buffers": "#8c9aa8", "master": "#1f5f99", "states": "#6fa8dc", "average": "#a3c4e6",
    "batch": "#c3c9d0", "gradients": "#d55e00", "activations": "#009e73", "cast cache": "#66c2a5",
    "temporaries": "#e2a13a", "workspaces": "#b58bc7", "transforms": "#7f4f96", "rounding": "#d9d9d9", "communication": "#7a5200",
}  # fmt: skip
_OTHER = "#999999"
PLAN_CSS = """
.plan-bar { display: flex; height: 1.3em; min-width: 12em; border-radius: 4px; overflow: hidden; background: var(--mark, #eef1f4); }
.plan-bar span { display: block; height: 100%; }
.plan-legend { display: flex; flex-wrap: wrap; gap: 4px 16px; padding: 0; list-style: none; font-size: 0.88rem; }
.plan-swatch { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 7px; }
"""
_PAGE_CSS = """
:root { color-scheme: light dark; }
body { font: 16px/1.55 system-ui, sans-serif; max-width: 1200px; margin: 24px auto; padding: 0 20px; }
table { border-collapse: collapse; font-size: 0.9rem; } th, td { text-align: right; padding: 5px 9px; border-bottom: 1px solid #9995; }
th[scope="row"], td.text { text-align: left; } caption { text-align: left; padding: 14px 0 6px; opacity: 0.8; }
.scroll { overflow-x: auto; }
"""


def plan_section(plan: Plan) -> Markup:
    """The plan as a `<section>`; the page that takes it adds PLAN_CSS to its own style."""
    capacity = plan.capacity
    where = (
        ""
        if capacity is None
        else f" on {capacity.name} ({_gib(capacity.total_bytes)} GiB, {_gib(capacity.usable_bytes)} usable)"
    )
    parts = f" in {plan.accumulate} micro-batches" if plan.accumulate > 1 else ""
    children: list[Any] = [
        tag("h2", "Memory, predicted"),
        tag(
            "p", f"{plan.job}, batch {plan.batch}{parts}{where}. Nothing was run: these are predictions.", class_="soft"
        ),
        _bars(plan),
        _summary(plan),
    ]
    if any(entry.answers for entry in plan.entries):
        children.append(_strategies(plan))
    children.append(_modules(plan))
    children.append(tag("ul", *(tag("li", note) for note in plan.notes)))
    return tag("section", *children, id="plan")


def render_plan_page(plan: Plan) -> str:
    """The section as one offline page."""
    head = join(
        [
            tag("meta", charset="utf-8"),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("title", f"Memory of {plan.job}"),
            tag("style", Markup(_PAGE_CSS + PLAN_CSS)),
        ]
    )
    page = tag(
        "html", tag("head", head), tag("body", tag("h1", f"Memory of {plan.job}"), plan_section(plan)), lang="en"
    )
    return f"<!doctype html>\n{page}\n"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f}"


def _bars(plan: Plan) -> Markup:
    most = max(entry.peak_bytes for entry in plan.entries)
    rows = []
    for entry in plan.entries:
        pieces = [
            tag(
                "span",
                style=f"width:{100 * size / most:.2f}%;background:{_COLOURS.get(cause, _OTHER)}",
                title=f"{cause}: {_gib(size)} GiB",
            )
            for cause, size in entry.estimate.peak.breakdown.items()
        ]
        bar = tag(
            "div", *pieces, class_="plan-bar", role="img", aria_label=f"{entry.precision}: {_gib(entry.peak_bytes)} GiB"
        )
        rows.append(
            tag(
                "tr",
                tag("th", entry.precision, scope="row"),
                tag("td", _gib(entry.peak_bytes)),
                tag("td", bar, style="width:70%"),
            )
        )
    causes = dict.fromkeys(cause for entry in plan.entries for cause in entry.estimate.peak.breakdown)
    legend = [
        tag("li", tag("span", class_="plan-swatch", style=f"background:{_COLOURS.get(cause, _OTHER)}"), cause)
        for cause in causes
    ]
    caption = tag("caption", "Peak of one step in GiB, by cause, at its fullest moment")
    return join([_scroll(tag("table", caption, tag("tbody", *rows))), tag("ul", *legend, class_="plan-legend")])


def _summary(plan: Plan) -> Markup:
    causes = list(dict.fromkeys(cause for entry in plan.entries for cause in entry.estimate.peak.breakdown))
    head = ["precision", "fits one GPU", "fewest GPUs", "largest micro-batch", *causes]
    rows = []
    for entry in plan.entries:
        fits = {True: "yes", False: "no", None: "not known"}[entry.fits]
        sizes = (_gib(entry.estimate.peak.breakdown.get(c, 0)) for c in causes)
        cells = [fits, entry.min_gpus or "-", largest_text(entry), *sizes]
        rows.append([entry.precision, *cells])
    return _table("In numbers", head, rows)


def _strategies(plan: Plan) -> Markup:
    head = ["precision", *(a.strategy for a in plan.entries[0].answers)]
    rows = [
        [e.precision, *(f"{a.num_gpus or 'none'} x {a.micro_batch}, {a.decides}" for a in e.answers)]
        for e in plan.entries
    ]
    return _table(f"Fewest GPUs x examples on each{at_once(plan)}, and what decides", head, rows)


def _modules(plan: Plan) -> Markup:
    first = plan.entries[0]
    rows = [[name, count, _gib(size)] for name, count, size in grouped(first.estimate.peak.modules)[:10]]
    if not rows:
        return Markup("")
    return _table(f"Activations by module in {first.precision}, the largest kinds", ["module", "of them", "GiB"], rows)


def _table(caption: str, head: list[str], rows: list[list[Any]]) -> Markup:
    top = tag("thead", tag("tr", *(tag("th", cell, scope="col") for cell in head)))
    body = [tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:])) for row in rows]
    return _scroll(tag("table", tag("caption", caption), top, tag("tbody", *body)))


def _scroll(table: Markup) -> Markup:
    return tag("div", table, class_="scroll")
