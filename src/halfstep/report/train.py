"""A training run at a terminal: a progress bar while it runs, a summary when it is done."""

from __future__ import annotations

import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfstep.report.theme import make_progress_console

if TYPE_CHECKING:
    from halfstep.engine.engine import Engine
    from halfstep.train import TrainOutcome
    from halfstep.train.recorder import StepLine

__all__ = ["Progress", "outcome_dict", "render_outcome", "side_by_side"]


class Progress:
    """An observer that draws a progress bar on a terminal, or prints one line per epoch elsewhere."""

    def __init__(self, total_steps: int | None = None) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self.console = make_progress_console()
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        self._bar = Bar(*columns, TextColumn("{task.fields[text]}"), console=self.console, transient=True)
        self._task = self._bar.add_task("train", total=total_steps, text="")
        self._line: StepLine | None = None

    def started(self, engine: Engine, total_steps: int | None) -> None:
        """Show the bar."""
        self._bar.update(self._task, total=total_steps, completed=engine.progress.attempts)
        if self.console.is_terminal:
            self._bar.start()

    def stepped(self, line: StepLine) -> None:
        """Advance the bar."""
        self._line = line
        self._bar.update(self._task, completed=line.step, text=describe(line))

    def validated(self, epoch: int, values: dict[str, float]) -> None:
        """One line per validation."""
        train = "" if self._line is None else f"  {describe(self._line)}"
        validation = "  ".join(f"val {name} {value:.4f}" for name, value in values.items())
        self.console.print(f"epoch {epoch + 1:3}{train}  {validation}")

    def saved(self, path: Path) -> None:
        """Prints nothing: the run file records each save."""

    def close(self) -> None:
        """Remove the bar; where none was drawn, stopping it would print an empty line."""
        if self.console.is_terminal:
            self._bar.stop()


def describe(line: StepLine) -> str:
    """Loss, speed, loss scale and skipped steps on one line."""
    scale = f"  scale 2^{math.log2(line.scale):.0f}" if line.scale and line.scale != 1 else ""
    skips = f"  skipped {line.skips}" if line.skips else ""
    return f"loss {line.loss:.4f}  {line.samples_per_second:,.0f}/s{scale}{skips}"


def outcome_dict(outcome: TrainOutcome) -> dict[str, Any]:
    """The outcome as values that JSON can represent; non-finite numbers become strings."""
    values = asdict(outcome)
    for key in ("out", "checkpoint"):
        values[key] = None if values[key] is None else str(values[key])
    if values["loss"] is not None and not math.isfinite(values["loss"]):
        values["loss"] = str(values["loss"])
    values["validation"] = {k: v if math.isfinite(v) else str(v) for k, v in outcome.validation.items()}
    return values


def render_outcome(outcome: TrainOutcome) -> str:
    """The result and the files written."""
    validation = "  ".join(f"val {name} {value:.4f}" for name, value in outcome.validation.items()) or "not validated"
    ended = f"stopped by {outcome.stopped_by}" if outcome.stopped_by else "failed" if outcome.problem else "done"
    lines = [
        f"{outcome.precision}: {ended} after {outcome.steps} steps, {outcome.skips} skipped; {validation}",
        f"run file    {outcome.out / 'run.jsonl'}",
        f"checkpoint  {outcome.checkpoint or 'none'}",
    ]
    if (page := outcome.out / "report.html").exists():
        lines.append(f"report      {page}")
    lines += outcome.numerics
    if outcome.problem:
        lines.append(f"problem     {outcome.problem}")
    if outcome.stopped_by:
        lines.append(f"resume with halfstep train --resume --out {outcome.out}")
    return "\n".join(lines)


def side_by_side(outcomes: list[TrainOutcome]) -> str:
    """One row per precision."""
    from rich.console import Console
    from rich.table import Table

    table = Table("precision", "steps", "skipped", "train loss", "val loss", "val metric")
    for o in outcomes:
        loss = "-" if o.loss is None else f"{o.loss:.4f}"
        val, metric = (f"{o.validation[k]:.4f}" if k in o.validation else "-" for k in ("loss", "metric"))
        table.add_row(o.precision, str(o.steps), str(o.skips), loss, val, metric)
    console = Console(file=sys.stdout, width=100)
    with console.capture() as captured:
        console.print(table)
    return captured.get()
