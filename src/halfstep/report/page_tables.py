"""The tables of the report page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from halfstep.report.markup import Markup, join, tag

if TYPE_CHECKING:
    from halfstep.comparison.estimate import Estimate
    from halfstep.comparison.result import Comparison
    from halfstep.comparison.rows import Row

__all__ = ["census_tables", "data_table", "environment_list", "scroll", "summary_table", "truth_table"]

_MEAN_DIFFERS = 0.01  # of the median, from which on the mean step is shown too


def scroll(table: Markup, label: str) -> Markup:
    """A table that scrolls sideways where it does not fit; focusable, so that a keyboard can scroll it too."""
    return tag("div", table, class_="scroll", tabindex="0", role="region", aria_label=label)


def summary_table(comparison: Comparison) -> Markup:
    """One row per precision; cells carry their exact value in `data-value`."""
    from halfstep.comparison.rows import metric_of
    from halfstep.hardware.units import bytes_text, seconds_text

    def cell(row: Row, metric: str, text: str, more: str = "") -> Markup:
        small = [tag("small", more)] if more else []
        return tag("td", text, *small, data_row=row.label, data_metric=metric, data_value=metric_of(row, metric))

    heads = [
        "precision",
        "step",
        "samples/s",
        "speed",
        "peak memory",
        "final loss",
        "gap to fp32",
        "val loss",
        "metric",
    ]
    heads += ["skipped", "gradient cosine", "warm-up"]
    lines = []
    for number, row in enumerate(comparison.rows):
        swatch = tag("span", class_="swatch", style=f"background: var(--c{number % 9})", aria_hidden="true")
        name = tag("th", swatch, row.label, scope="row")
        if row.step_seconds is None:
            lines.append(tag("tr", name, tag("td", row.reason, colspan=len(heads) - 1, class_="text"), class_="failed"))
            continue
        noise = "" if row.beyond_noise is None else "beyond noise" if row.beyond_noise else "within noise"
        is_reference = row.speedup is not None and row.speedup.low == row.speedup.high == 1
        cells = [
            cell(
                row,
                "step_ms",
                seconds_text(row.step_seconds.value),
                _spread(row),
            ),
            cell(row, "samples_per_second", _number(row.samples_per_second, ",.0f")),
            cell(row, "speedup", "reference")
            if is_reference
            else cell(row, "speedup", _number(row.speedup, ".2f", "x"), _range(row.speedup)),
            cell(
                row,
                "memory_gib",
                "-" if row.peak_bytes is None else bytes_text(row.peak_bytes),
                "" if row.predicted_bytes is None else f"predicted {bytes_text(row.predicted_bytes)}",
            ),
            cell(row, "loss", _number(row.loss, ".4f")),
            cell(row, "loss_gap", "reference")
            if is_reference
            else cell(row, "loss_gap", _number(row.loss_gap, "+.4f"), noise),
            cell(row, "val_loss", _number(row.val_loss, ".4f")),
            cell(row, "metric", _number(row.metric, ".4f"), _half(row.metric)),
            cell(row, "skips", str(row.skips), f"{row.nonfinite} losses not finite" if row.nonfinite else ""),
            cell(row, "cosine", "-" if row.cosine is None else f"{row.cosine:.6f}"),
            tag(
                "td",
                "-" if row.warmup_seconds is None else seconds_text(row.warmup_seconds),
                tag("small", f"{row.warmup_steps} steps"),
            ),
        ]
        kind = "failed" if row.status == "failed" else "used" if row.label == comparison.verdict.use else None
        lines.append(tag("tr", name, *cells, class_=kind))
    head = tag(
        "thead",
        tag("tr", *(tag("th", text, scope="col", class_="text" if not i else None) for i, text in enumerate(heads))),
    )
    table = tag("table", head, tag("tbody", *lines), id="summary")
    return scroll(table, "Figures of each precision")


def _number(estimate: Estimate | None, digits: str, unit: str = "") -> str:
    if estimate is None:
        return "-"
    return format(estimate.value, digits if estimate.value >= 100 or digits != ",.0f" else ".3g") + unit


def _range(estimate: Estimate | None) -> str:
    return "" if estimate is None or estimate.low == estimate.high else f"{estimate.low:.2f} to {estimate.high:.2f}"


def _spread(row: Row) -> str:
    """How steps differ, and their mean where it is another figure than the median."""
    from halfstep.hardware.units import seconds_text

    parts = [] if row.spread is None else [f"spread {row.spread:.0%}"]
    if row.mean_seconds and row.step_seconds and abs(row.mean_seconds / row.step_seconds.value - 1) > _MEAN_DIFFERS:
        parts.append(f"mean {seconds_text(row.mean_seconds)}")
    return ", ".join(parts)


def _half(estimate: Estimate | None) -> str:
    return "" if estimate is None or estimate.low == estimate.high else f"+- {(estimate.high - estimate.low) / 2:.4f}"


def data_table(caption: str, heads: list[str], lines: list[list[str]]) -> Markup:
    """The values behind a plot."""
    head = tag(
        "thead",
        tag("tr", *(tag("th", text, scope="col", class_="text" if not i else None) for i, text in enumerate(heads))),
    )
    body = tag(
        "tbody",
        *(tag("tr", tag("th", line[0], scope="row"), *(tag("td", cell) for cell in line[1:])) for line in lines),
    )
    return scroll(tag("table", tag("caption", caption), head, body), caption)


def truth_table(values: dict[str, Any]) -> Markup:
    """What each row held and computed in: properties downwards, precisions across."""
    rows = [row for row in values["rows"] if row["truth"]]
    if not rows:
        return tag("p", "No row came far enough to have one.", class_="soft")
    names = list(dict.fromkeys(name for row in rows for name in row["truth"]["rows"] if name != "precision"))
    head = tag(
        "tr",
        tag("th", "", scope="col", class_="text"),
        *(tag("th", row["label"], scope="col", class_="text") for row in rows),
    )
    lines = [
        tag(
            "tr",
            tag("th", name, scope="row"),
            *(tag("td", row["truth"]["rows"].get(name, "-"), class_="text") for row in rows),
        )
        for name in names
    ]
    for key, words in (("lossy", "lossy"), ("gives_up", "gives up")):
        if any(row["truth"][key] for row in rows):
            cells = (tag("td", "; ".join(row["truth"][key]) or "-", class_="text") for row in rows)
            lines.append(tag("tr", tag("th", words, scope="row"), *cells))
    return scroll(
        tag("table", tag("thead", head), tag("tbody", *lines), id="truth-table"), "Truth table of each precision"
    )


def census_tables(values: dict[str, Any]) -> Markup:
    """For each row, the operators that took the longest, and why some stayed in fp32."""
    parts = []
    for row in values["rows"]:
        census = row["census"]
        if not census:
            continue
        total = sum(item["seconds"] for item in census["rows"]) or 1.0
        lines = [
            tag(
                "tr",
                tag("th", item["op"], scope="row"),
                tag("td", item["format"]),
                tag("td", f"{item['calls']:,}"),
                tag("td", f"{item['seconds'] / total:.1%}"),
                tag("td", item["why"], class_="text"),
            )
            for item in census["rows"][:15]
        ]
        heads = ("operator", "format", "calls", "share of time", "why in fp32")
        head = tag(
            "tr",
            *(tag("th", text, scope="col", class_="text" if text in {heads[0], heads[-1]} else None) for text in heads),
        )
        table = scroll(tag("table", tag("thead", head), tag("tbody", *lines)), f"Operators of {row['label']}")
        products = ", ".join(f"{share:.0%} {form}" for form, share in census["products"].items())
        about = f"Matrix products: {products or 'none seen'}. Casts: {census['share'].get('casts', 0):.1%} of the time."
        odd = [f"{'x'.join(map(str, item['shape']))} ({item['calls']})" for item in census["misaligned"][:6]]
        if odd:
            about += (
                f" 16-bit products with a side that is no multiple of 8, which tensor cores want: {', '.join(odd)}."
            )
        parts.append(
            tag("details", tag("summary", f"Operators of {row['label']}"), tag("p", about, class_="small"), table)
        )
    return join(parts)


def environment_list(values: dict[str, Any]) -> Markup:
    """Versions and machines."""
    parts = []
    for machine in values["machines"]:
        known = {**machine["environment"], "device": machine["device"], "target": machine["target"]}
        pairs = [(name, ", ".join(map(str, v)) if isinstance(v, list) else v) for name, v in known.items()]
        rates = ", ".join(f"{m['format']} {m['gflops_median']:,.0f}" for m in machine["matmul"])
        if rates:
            pairs.append(("matmul rate, GFLOP/s", rates))
        terms = [join([tag("dt", name), tag("dd", value)]) for name, value in pairs if value not in {None, ""}]
        parts.append(join([tag("h3", machine["machine"]), tag("dl", *terms)]))
    return join(parts)
