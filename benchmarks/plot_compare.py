"""Turn a comparison into two small SVG charts for a README, and into a table for benchmarks/results.

python benchmarks/plot_compare.py runs/compare-vit_l_16/comparison.json --out docs/images --table benchmarks/results/compare.md
"""

import argparse
import html
import json
from pathlib import Path

WIDTH, LETTER, BAR, GAP, TOP, BOTTOM = 760, 8.2, 20, 9, 46, 14
STYLE = """
  text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1b1f24; }
  .soft { fill: #59616b; } .title { font-weight: 600; font-size: 15px; }
  .ours { fill: #0072b2; } .peer { fill: #9aa4ae; } .base { fill: #5f6b76; } .whisker { stroke: #1b1f24; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e8eaed; } .soft { fill: #a3acb6; } .ours { fill: #56b4e9; } .peer { fill: #6b7681; } .base { fill: #a7b1bb; }
    .whisker { stroke: #e8eaed; }
  }
"""


def bars(title, unit, rows):
    """One bar per row of (label, kind, value, low, high, text)."""
    height = TOP + len(rows) * (BAR + GAP) + BOTTOM
    labels = max(len(label) for label, *_ in rows) * LETTER  # the column's width, for the widest fonts in use
    available = WIDTH - labels - 110
    largest = max(high for *_, high, _ in rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{html.escape(title)}">',
        f"<style>{STYLE}</style>",
        f'<text class="title" x="0" y="18">{html.escape(title)}</text>',
        f'<text class="soft" x="0" y="36">{html.escape(unit)}</text>',
    ]
    for number, (label, kind, value, low, high, text) in enumerate(rows):
        y = TOP + number * (BAR + GAP)
        middle = y + BAR / 2
        scaled = [labels + available * amount / largest for amount in (value, low, high)]
        parts += [
            f'<text x="{labels - 8:.0f}" y="{middle + 4.5}" text-anchor="end">{html.escape(label)}</text>',
            f'<rect class="{kind}" x="{labels:.0f}" y="{y}" width="{scaled[0] - labels:.1f}" height="{BAR}" rx="3"/>',
            f'<text x="{scaled[2] + 8:.1f}" y="{middle + 4.5}">{html.escape(text)}</text>',
        ]
        if high > low:
            parts.append(f'<path class="whisker" d="M{scaled[1]:.1f} {middle}H{scaled[2]:.1f}"/>')
    return "\n".join([*parts, "</svg>", ""])


def table(values):
    """The record of a comparison: settings, versions, figures, verdict."""
    lines = [f"# {values['machines'][0]['target']}: precisions compared", ""]
    for machine in values["machines"]:
        versions = {name: value for name, value in machine["environment"].items() if value}
        lines += [f"{machine['machine']}; {versions}", "", f"`{' '.join(machine['command'])}`", ""]
    lines += [
        "| row | samples/s (95 % interval) | step ms | mean step ms | speed | peak GiB | final loss | gap to fp32 | cosine | share of matmul rate |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in values["rows"]:
        if not row["samples_per_second"]:
            lines.append(f"| {row['label']} | {row['reason']} | | | | | | | | |")
            continue
        rate, figures = row["samples_per_second"], row["figures"]
        shown = [
            "-" if figures[name] is None else format(figures[name], digits)
            for name, digits in (
                ("step_ms", ".2f"), ("mean_step_ms", ".2f"), ("speedup", ".3f"), ("memory_gib", ".2f"), ("loss", ".4f"), ("loss_gap", "+.4f"),
                ("cosine", ".6f"), ("flops_share", ".1%"),
            )
        ]  # fmt: skip
        lines.append(
            f"| {row['label']} | {rate['value']:,.1f} ({rate['low']:,.1f} to {rate['high']:,.1f}) | {' | '.join(shown)} |"
        )
    return "\n".join([*lines, "", values["verdict"]["text"], *(f"- {note}" for note in values["notes"]), ""])


def kind_of(row):
    """The colour class: peer, reference or ours."""
    if row["contender"]["peer"]:
        return "peer"
    return "base" if row["contender"]["policy"] in {"fp32", "tf32"} else "ours"


def main():
    """Read one comparison, write two charts and a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("comparison", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    parser.add_argument("--table", type=Path)
    args = parser.parse_args()
    values = json.loads(args.comparison.read_text())
    if args.table:
        args.table.parent.mkdir(parents=True, exist_ok=True)
        args.table.write_text(table(values))
        print(args.table)
    machine = values["machines"][0]
    where = f"{machine['target']}, batch {machine['batch']}, {machine['machine']}"
    done = [row for row in values["rows"] if row["status"] == "done"]
    speed = [
        (
            row["label"],
            kind_of(row),
            *(row["samples_per_second"][k] for k in ("value", "low", "high")),
            f"{row['samples_per_second']['value']:,.0f}",
        )
        for row in sorted(done, key=lambda row: row["samples_per_second"]["value"])
    ]
    memory = [
        (row["label"], kind_of(row), *([row["peak_bytes"] / 2**30] * 3), f"{row['peak_bytes'] / 2**30:.1f}")
        for row in sorted(done, key=lambda row: -row["peak_bytes"])
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    for name, text in (
        (
            "compare_speed.svg",
            bars(f"Samples per second: {where}", "longer is faster; medians, lines are 95 % intervals", speed),
        ),
        ("compare_memory.svg", bars(f"Peak memory, GiB: {where}", "shorter is better", memory)),
    ):
        (args.out / name).write_text(text)
        print(args.out / name)


if __name__ == "__main__":
    main()
