"""The formats that a machine supports and the precision to use, as text and as plain data."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from halfstep.hardware.advisory import Advisory
from halfstep.hardware.devices import FORMAT_NAMES
from halfstep.hardware.measure import Measured
from halfstep.hardware.probe import Hardware
from halfstep.hardware.torch_build import torch_version
from halfstep.precision.choice import Choice
from halfstep.report.theme import CAUTION, GOOD, STRONG

__all__ = ["WIDTH", "as_data", "as_text"]

WIDTH = 100


def as_data(
    hardware: Hardware,
    choice: Choice,
    measured: Sequence[Measured] = (),
    statements: Sequence[str] = (),
    advisories: Sequence[Advisory] = (),
) -> dict[str, Any]:
    """The report as values that JSON can represent."""
    return {
        "hardware": {
            "name": hardware.name,
            "kind": hardware.kind,
            "arch": hardware.arch,
            "vendor": hardware.vendor,
            "memory_bytes": hardware.memory_bytes,
            "count": hardware.count,
            "known": hardware.known,
            "support": {n: {"support": hardware.support[n], "why": hardware.support.why(n)} for n in FORMAT_NAMES},
            "notes": list(hardware.notes),
        },
        "choice": {
            "policy": str(choice.policy),
            "reasons": list(choice.reasons),
            "rejected": {rejection.format: rejection.reason for rejection in choice.rejected},
        },
        "torch": torch_version(),
        "measured": [
            {
                "format": m.format,
                "gflops_median": m.gflops_median,
                "spread": m.spread,
                "runs": m.runs,
                "ratio_to_fp32": m.ratio_to_fp32,
                "size": m.size,
            }
            for m in measured
        ],
        "statements": list(statements),
        "advisories": [
            {
                "id": a.id,
                "affected": [str(affected) for affected in a.affected],
                "features": list(a.features),
                "consequence": a.consequence,
                "remedy": a.remedy,
                "threads": list(a.threads),
            }
            for a in advisories
        ],
    }


def as_text(
    hardware: Hardware,
    choice: Choice,
    measured: Sequence[Measured] = (),
    statements: Sequence[str] = (),
    advisories: Sequence[Advisory] = (),
    *,
    colour: bool = False,
    width: int = WIDTH,
) -> str:
    """The report as text, at most 100 columns wide; with `colour`, for a terminal."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    out = io.StringIO()
    console = Console(file=out, width=min(width, WIDTH), force_terminal=colour, no_color=not colour, highlight=False)

    def write(text: str, indent: int = 0, style: str = "") -> None:
        console.print(Padding(Text(text, style=style), (0, 0, 0, indent)))

    def table(*headings: str) -> Table:
        columns = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style=STRONG)
        for heading in headings:
            columns.add_column(heading)
        return columns

    write(str(hardware), style=STRONG)
    for note in hardware.notes:
        write(note, 2)
    write("")
    write(f"Use {choice.policy}", style=f"bold {GOOD}")
    for reason in choice.reasons:
        write(reason, 2)
    write("")
    reasons = {rejection.format: rejection.reason for rejection in choice.rejected}
    formats = table("format", "support", "")
    for name in FORMAT_NAMES:
        support = hardware.support[name]
        formats.add_row(name, Text(support, style=_STYLES[support]), Text(_remark(name, support, reasons)))
    console.print(formats)
    if measured:
        write("")
        write("Measured speed of square matmuls:", style=STRONG)
        speeds = table("format", "GFLOP/s", "spread", "runs", "size", "x fp32")
        for m in measured:
            speeds.add_row(m.format, m.speed, f"{m.spread:.0%}", str(m.runs), str(m.size), f"{m.ratio_to_fp32:.2g}")
        console.print(speeds)
        for statement in statements:
            write(statement, 2)
    if advisories:
        write("")
        write("Known defects of this installation:", style=STRONG)
        defects = table("advisory", "affected", "if a program uses")
        for a in advisories:
            defects.add_row(a.id, str(a.affected[0]), Text(a.usage.replace("`", "")))
        console.print(defects)
        write("docs/advisories.md has the consequence, the remedy and the thread of each.", 2)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


_STYLES = {
    "native": GOOD,
    "slow": CAUTION,
    "emulated": CAUTION,
    "none": "",
}


def _remark(name: str, support: str, reasons: dict[str, str]) -> str:
    """Why a format was not chosen, without the word that the support column already shows."""
    if name not in reasons:
        return "chosen"
    return reasons[name].removeprefix(f"{support}: ").removeprefix("not available: ")
