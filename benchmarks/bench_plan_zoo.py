"""Peak memory of the zoo's models, predicted and measured in one run on a GPU.

    python benchmarks/bench_plan_zoo.py [--held-back] [--settings S;S...] [--json FILE] [--table FILE.md] [MODEL...]
    python benchmarks/bench_plan_zoo.py --predict-only [MODEL...]      anywhere: only the predictions

A setting is a precision, with recompute=cheap at its end where blocks are recomputed. The predictions run in other processes,
on the CPU, while the GPU measures. A measured row is the peak of the second step of an Engine with AdamW and clipping, less what
earlier rows left allocated; before each row everything is freed and the allocator's cache is emptied.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

import torch
from bench_plan import cublas_workspaces, measure_one
from zoo_models import CASES, HELD_BACK, Case, case_of_target

from halfstep.hardware.environment import environment
from halfstep.planning.estimator import Estimator
from halfstep.planning.trace import StepOptions
from halfstep.precision.policy import Policy

SETTINGS = ("bf16", "fp16", "bf16-lean", "bf16-lean,states=8bit", "fp16-lean", "bf16-lean,recompute=cheap")
LIMITS = {False: (0.01, 0.03), True: (0.01, 0.05)}  # median and worst, without and with recomputation
_RECOMPUTE = ",recompute="


class Row(NamedTuple):
    """One model in one setting; an error is a text in place of the bytes."""

    model: str
    setting: str
    predicted: int | str
    measured: int | str | None

    @property
    def error(self) -> float | None:
        """The relative error of the prediction."""
        if isinstance(self.predicted, int) and isinstance(self.measured, int):
            return self.predicted / self.measured - 1
        return None


def case_of(model: str) -> Case:
    """A model of the zoo by its name, or any other as `timm:NAME` or `transformers:CONFIG`."""
    return case_of_target(model) if ":" in model else (CASES | HELD_BACK)[model]


def parsed(setting: str) -> tuple[str, str | None]:
    """The precision and the value of recompute of a setting."""
    precision, _, recompute = setting.partition(_RECOMPUTE)
    return precision, recompute or None


def predict(model: str, setting: str) -> int | str:
    """The predicted peak, or why there is none."""
    torch.set_num_threads(1)
    case = case_of(model)
    precision, recompute = parsed(setting)
    try:
        options = StepOptions(recompute=recompute)
        return Estimator(case.job(), Policy.parse(precision), options=options).at(case.batch).peak_bytes
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def measure(model: str, setting: str, workspaces: int) -> int | str:
    """The measured peak, or why there is none."""
    case = case_of(model)
    precision, recompute = parsed(setting)
    try:
        row = measure_one(case.job(), precision, case.batch, torch.device("cuda"), recompute=recompute, phases=False)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return int(row["step"]["allocated_peak"] - row["base"] + workspaces)


def run(models: Iterable[str], settings: tuple[str, ...], *, on_gpu: bool) -> list[Row]:
    """Predict and measure every model in every setting."""
    pairs = [(model, setting) for model in models for setting in settings]
    processes = max(1, min(8, (os.cpu_count() or 2) - 1))
    rows = []
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        predictions: list[Future[int | str]] = [pool.submit(predict, *pair) for pair in pairs]
        workspaces = cublas_workspaces(torch.device("cuda")) if on_gpu else 0
        measured = [measure(*pair, workspaces) if on_gpu else None for pair in pairs]
        for pair, prediction, peak in zip(pairs, predictions, measured, strict=True):
            rows.append(Row(*pair, prediction.result(), peak))
    return rows


def as_table(rows: list[Row], settings: tuple[str, ...]) -> str:
    """One line for each model: the measured peak in GiB and the prediction's error; then median and worst."""
    cells = {(row.model, row.setting): _cell(row) for row in rows}
    lines = [f"| model | {' | '.join(settings)} |", "|---" * (len(settings) + 1) + "|"]
    models = dict.fromkeys(row.model for row in rows)
    lines += [f"| {model} | {' | '.join(cells[model, setting] for setting in settings)} |" for model in models]
    summary = []
    for setting in settings:
        errors = [abs(row.error) for row in rows if row.setting == setting and row.error is not None]
        summary.append(f"{statistics.median(errors):.2%} / {max(errors):.2%}" if errors else "")
    lines.append(f"| median / worst | {' | '.join(summary)} |")
    return "\n".join(lines)


def _cell(row: Row) -> str:
    if row.error is not None:
        return f"{int(row.measured or 0) / 2**30:.2f} {row.error:+.2%}"
    if row.measured is None and isinstance(row.predicted, int):
        return f"{row.predicted / 2**30:.2f}"
    return "not predicted" if isinstance(row.predicted, str) else "not measured"


def problems(rows: list[Row]) -> list[str]:
    """What failed, and what is outside the limits."""
    lines = [
        f"{row.model}, {row.setting}, {part}: {value.splitlines()[0][:300]}"
        for row in rows
        for part, value in (("prediction", row.predicted), ("measurement", row.measured))
        if isinstance(value, str)
    ]
    for recomputes, (median, worst) in LIMITS.items():
        errors = {
            f"{row.model}, {row.setting}": abs(row.error)
            for row in rows
            if row.error is not None and (parsed(row.setting)[1] is not None) is recomputes
        }
        lines += [f"{name}: {error:.2%} is above {worst:.0%}" for name, error in errors.items() if error > worst]
        if errors and statistics.median(errors.values()) > median:
            lines.append(
                f"recompute={recomputes}: the median {statistics.median(errors.values()):.2%} is above {median:.0%}"
            )
    return lines


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="default: all of the zoo")
    parser.add_argument("--held-back", action="store_true", help="the models that no rule was derived from")
    parser.add_argument("--settings", default=";".join(SETTINGS), help="separated by semicolons (default: %(default)s)")
    parser.add_argument("--predict-only", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--table", type=Path, metavar="FILE.md")
    options = parser.parse_args()
    models = options.models or list(HELD_BACK if options.held_back else CASES)
    unknown = {model for model in models if ":" not in model} - set(CASES) - set(HELD_BACK)
    if unknown:
        parser.error(f"unknown models: {', '.join(sorted(unknown))}; known: {', '.join(CASES | HELD_BACK)}")
    settings = tuple(options.settings.split(";"))
    start = time.perf_counter()
    rows = run(models, settings, on_gpu=not options.predict_only)
    table = as_table(rows, settings)
    print(table, *problems(rows), f"{len(rows)} rows in {time.perf_counter() - start:.0f} s", sep="\n")
    if options.json is not None:
        data = {"environment": environment(), "rows": [row._asdict() for row in rows]}
        options.json.write_text(json.dumps(data, indent=1), encoding="utf-8")
    if options.table is not None:
        options.table.write_text(_TEXT.format(environment=environment(), table=table), encoding="utf-8")


_TEXT = """# Peak memory of the zoo's models: predicted and measured

{environment}

Each cell: the measured `max_memory_allocated` of the second step in GiB, and the error of the prediction, which was made without
the GPU. The models and batch sizes are those of zoo_models.py; `benchmarks/bench_plan_zoo.py` makes this table.

{table}
"""

if __name__ == "__main__":
    main()
