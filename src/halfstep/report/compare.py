"""A comparison at a terminal: a progress bar while it runs, then a table, the verdict and the files written."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from halfstep.hardware.units import bytes_text, seconds_text
from halfstep.report.theme import BAD, GOOD, STRONG, make_progress_console

if TYPE_CHECKING:
    from halfstep.comparison.gate import GateResult
    from halfstep.comparison.result import Comparison
    from halfstep.comparison.survey import Survey

__all__ = ["WIDTH", "CompareProgress", "as_text"]

WIDTH = 140
_STYLES = {
    "faster": f"bold {GOOD}",
    "smaller": f"bold {GOOD}",
    "same": STRONG,
    "slower": STRONG,
    "unfit": STRONG,
    "unknown": f"bold {BAD}",
}


class CompareProgress:
    """An observer that draws a progress bar on a terminal, or prints one line per repeat elsewhere."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self.console = make_progress_console()
        columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("steps"), TimeRemainingColumn())
        self._bar = Bar(*columns, TextColumn("{task.description}"), console=self.console, transient=True)
        self._task = self._bar.add_task("inspecting the machine and the job", total=None)
        self._repeats = 0
        self._round = -1
        if self.console.is_terminal:
            self._bar.start()

    def surveyed(self, survey: Survey, total_steps: int) -> None:
        """Print what is compared, on which machine."""
        self._bar.update(self._task, total=total_steps)
        self._repeats = survey.settings.repeats
        variants, steps = len(survey.variants), survey.settings.steps
        order = "interleaved" if survey.side_by_side else "one after another"
        self.console.print(
            f"{survey.target} on {survey.place}: {variants} precisions x {self._repeats} repeats x {steps} steps, {order}; "
            f"batch {survey.batch}, {survey.num_params:,} parameters",
            soft_wrap=not self.console.is_terminal,
        )
        for note in survey.notes:
            self.console.print(f"note: {note}", markup=False, soft_wrap=not self.console.is_terminal)

    def stepped(self, label: str, repeat: int, count: int) -> None:
        """Advance the bar."""
        if repeat != self._round:
            self._round = repeat
            if not self.console.is_terminal:
                self.console.print(f"repeat {repeat + 1} of {self._repeats}")
        self._bar.update(self._task, advance=count, description=f"repeat {repeat + 1} of {self._repeats}: {label}")

    def failed(self, label: str, repeat: int, reason: str) -> None:
        """Print why a run failed."""
        self.console.print(
            f"{label} failed in repeat {repeat + 1}: {reason}", markup=False, soft_wrap=not self.console.is_terminal
        )

    def close(self) -> None:
        """Remove the bar; where none was drawn, stopping it would print an empty line."""
        if self.console.is_terminal:
            self._bar.stop()


def as_text(
    comparison: Comparison,
    files: Sequence[tuple[str, Path]] = (),
    gates: Sequence[GateResult] = (),
    *,
    colour: bool = False,
    width: int = WIDTH,
) -> str:
    """The comparison as text."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from halfstep.comparison.table import fit_columns, table_cells

    out = io.StringIO()
    console = Console(file=out, width=min(width, WIDTH), force_terminal=colour, no_color=not colour, highlight=False)
    headings, cells, dropped = fit_columns(*table_cells(comparison.rows), min(width, WIDTH))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style=STRONG)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number == 0 else "right", no_wrap=number == 0)
    for row, line in zip(comparison.rows, cells, strict=True):
        style = BAD if row.status == "failed" else f"bold {GOOD}" if row.label == comparison.verdict.use else ""
        table.add_row(*(Text(cell) for cell in line), style=style)
    if comparison.rows:  # a comparison that was stopped at once has none
        console.print(table)
    if dropped:
        console.print(Text(f"Columns omitted here, see the report: {', '.join(dropped)}."))
    console.print()
    warm = [row for row in comparison.rows if row.warmup_seconds is not None]
    if warm:
        times = ", ".join(f"{row.label} {seconds_text(row.warmup_seconds or 0)}" for row in warm)
        counts = sorted({row.warmup_steps for row in warm})
        steps = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        console.print(Text(f"Warm-up, not timed: the first {steps} steps of each run ({times})."))
    for sentence in (_validation_line(comparison), _planned_line(comparison)):
        if sentence:
            console.print(Text(sentence))
    console.print(Text(comparison.verdict.text, style=_STYLES[comparison.verdict.kind]))
    for note in comparison.notes:
        console.print(Text(f"note: {note}"))
    for gate in gates:
        console.print(Text(str(gate), style=BAD if gate.failed else GOOD))
    for name, path in files:
        console.print(Text(f"{name:8} {path}"), soft_wrap=True)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _validation_line(comparison: Comparison) -> str:
    """The time and speed of each row's validation."""
    timed = [(row.label, row.val_seconds, row.val_samples_per_second) for row in comparison.rows]
    rates = [
        f"{label} {seconds_text(s)} ({rate:,.0f}/s)" for label, s, rate in timed if s is not None and rate is not None
    ]
    return f"Validation, with samples/s: {', '.join(rates)}." if rates else ""


def _planned_line(comparison: Comparison) -> str:
    """Which memory is which, on a machine without a GPU."""
    gpus = " or ".join(dict.fromkeys(row.predicted_gpu for row in comparison.rows if row.predicted_gpu is not None))
    if not gpus:
        return ""
    workspaces = max((row.predicted_parts or {}).get("workspaces", 0) for row in comparison.rows)
    share = f", {bytes_text(workspaces)} of it cuBLAS workspaces" if workspaces else ""
    return (
        f"peak is this process's memory, torch included; GPU peak is what `halfstep plan` predicts for {gpus}{share}."
    )
