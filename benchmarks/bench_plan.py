"""Peak memory of training steps, measured on a GPU, next to what `halfstep.plan` predicts without one.

    python benchmarks/bench_plan.py measure FILE.json [CASE...]      on a GPU: two steps, and a third by phase, for every case
    python benchmarks/bench_plan.py predict FILE.json [TABLE.md]     anywhere: predictions next to the measurements in FILE
    python benchmarks/bench_plan.py reduce FILE.json SMALL.json.gz   anywhere: only what tests/planning/test_estimator.py reads

A CASE is MODEL, MODEL=PRECISION or *=PRECISION of plan_models.py or plan_more.py; "more" stands for all of the latter, and the
default is all of the former. Before each case everything is freed and the allocator's cache is emptied.
"""

from __future__ import annotations

import gc
import gzip
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from plan_models import available_cases
from plan_more import more_cases

from halfstep.backends.context import RunContext
from halfstep.engine.engine import Engine
from halfstep.hardware.environment import environment
from halfstep.hardware.units import gib_text
from halfstep.train.stream import to_device

PRECISIONS = ("fp32", "bf16", "fp16", "bf16-lean", "bf16-lean,states=8bit")


def _stats() -> dict[str, int]:
    stats = torch.cuda.memory_stats()
    return {
        "allocated": stats["allocated_bytes.all.current"],
        "allocated_peak": stats["allocated_bytes.all.peak"],
        "requested_peak": stats["requested_bytes.all.peak"],
        "reserved_peak": stats["reserved_bytes.all.peak"],
    }


def _phase(row: dict[str, Any], name: str, before: int) -> int:
    torch.cuda.synchronize()
    now = _stats()
    row["phases"][name] = {"before": before, "after": now["allocated"], **{k: now[k] for k in now if "peak" in k}}
    torch.cuda.reset_peak_memory_stats()
    return now["allocated"]


def cublas_workspaces(device: torch.device) -> int:
    """Allocate cuBLAS's workspaces, which stay allocated; returns their size."""
    x = torch.randn(64, 64, device=device, requires_grad=True)
    (x @ x).sum().backward()
    del x
    return torch.cuda.memory_allocated()


def measure_one(
    job: Any,
    precision: str,
    batch_size: int,
    device: torch.device,
    *,
    recompute: str | None = None,
    phases: bool = True,
) -> dict[str, Any]:
    """Peaks of two whole steps, then of the phases of a third."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    row: dict[str, Any] = {
        "precision": precision,
        "batch": batch_size,
        "base": torch.cuda.memory_allocated(),
        "phases": {},
    }
    torch.manual_seed(0)
    context = RunContext(device, batch_size=batch_size)
    with device:
        model = job.call("model", context)
    model.to(device).train()  # torch.Tensor(...) ignores the block above
    optimizer = job.call("optimizer", context, model=model)
    engine = Engine(model, optimizer, precision, max_norm=1.0, recompute=recompute)
    loader = job.call("data", RunContext(batch_size=batch_size), split="train", epoch=0)
    batch = to_device(next(iter(loader)), device)

    def step() -> None:
        with engine.forward():
            loss = job.call("loss", context, model=model, batch=batch, split="train", epoch=0)
        engine.backward(loss)
        del loss
        engine.step()

    step()
    torch.cuda.synchronize()
    row["first_step"] = _stats()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    row["step"] = _stats()
    if not phases:
        engine.close()
        return row
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with engine.forward():
        loss = job.call("loss", context, model=model, batch=batch, split="train", epoch=0)
    before = _phase(row, "forward", before)
    engine.backward(loss)
    del loss
    before = _phase(row, "backward", before)
    engine.step()
    _phase(row, "step", before)
    row["seconds"] = time.perf_counter() - start
    engine.close()
    return row


def measure(path: Path, only: tuple[str, ...] = ()) -> None:
    """Measure the cases and write the rows; a case that fails is a row with its error."""
    device = torch.device("cuda")
    rows = []
    head = {"environment": environment(), "workspaces": cublas_workspaces(device)}
    selected = set(only) - {"more"}
    cases = {**({} if "more" in only else available_cases()), **(more_cases() if only else {})}
    for name, (batches, make) in cases.items():
        for batch_size, precision in itertools.product(batches, PRECISIONS):
            if selected and not {name, f"{name}={precision}", f"*={precision}"} & selected:
                continue
            try:
                row = measure_one(make(), precision, batch_size, device)
            except Exception as error:
                message = f"{type(error).__name__}: {error}"[:300]
                row = {"precision": precision, "batch": batch_size, "error": message}
            rows.append({"model": name, **row})
            shown = gib_text(row["step"]["allocated_peak"]) if "step" in row else row["error"]
            print(name, batch_size, precision, shown, round(row.get("seconds", 0), 2), flush=True)
        path.write_text(json.dumps({**head, "rows": rows}), encoding="utf-8")


def predict(path: Path, table: Path | None, only: tuple[str, ...] = ()) -> None:
    """Predict every measured row and write both into one table."""
    from halfstep.planning.estimator import Estimator
    from halfstep.precision.policy import Policy

    measured = json.loads(path.read_text(encoding="utf-8"))
    cases = {**available_cases(), **more_cases()}
    estimators: dict[tuple[str, str], Estimator] = {}
    lines, errors, omitted = [], [], set()
    start = time.perf_counter()
    for row in measured["rows"]:
        name, precision = row["model"], row["precision"]
        if name not in cases:
            omitted.add(name)
            continue
        if only and name not in only:
            continue
        if "error" in row:
            lines.append(f"| {name} | {row['batch']} | {precision} | | not measured: {row['error']} | | | | |")
            continue
        if (name, precision) not in estimators:
            estimators[name, precision] = Estimator(cases[name][1](), Policy.parse(precision))
        estimate = estimators[name, precision].at(row["batch"])
        peak = _peak_bytes(measured, row)
        error = estimate.peak_bytes / peak - 1
        errors.append(abs(error))
        reserved = row["step"].get("reserved_peak")
        cells = (
            name, row["batch"], precision, f"{estimate.peak_bytes / 2**30:.3f}", f"{peak / 2**30:.3f}", f"{100 * error:+.2f} %",
            estimate.peak.moment, f"{estimate.peak.reserved / 2**30:.2f}", "" if reserved is None else f"{reserved / 2**30:.2f}",
        )  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
        print(lines[-1], flush=True)
    seconds = time.perf_counter() - start
    text = _TEXT.format(
        measured=measured["environment"], predicted=environment(), rows=len(errors), median=100 * statistics.median(errors),
        worst=100 * max(errors), beyond=sum(e > 0.07 for e in errors), seconds=seconds, lines="\n".join(lines),
        omitted=", ".join(sorted(omitted)) or "none",
        about=_ABOUT[not {row["model"] for row in measured["rows"]} - set(more_cases())],
    )  # fmt: skip
    print(text.split("\n| model")[0])
    if table is not None:
        table.write_text(text, encoding="utf-8")


def _peak_bytes(measured: dict[str, Any], row: dict[str, Any]) -> int:
    """The peak of a row, less what earlier cases left allocated in the measuring process."""
    return int(row["step"]["allocated_peak"] - row["base"] + measured["workspaces"])


def reduce(path: Path, small: Path) -> None:
    """Write only the columns that the tests read."""
    measured = json.loads(path.read_text(encoding="utf-8"))
    rows = [
        {**{key: row[key] for key in ("model", "batch", "precision")}, "peak_bytes": _peak_bytes(measured, row)}
        for row in measured["rows"]
        if "error" not in row
    ]
    small.write_bytes(gzip.compress(json.dumps(rows).encode(), mtime=0))


_ABOUT = {
    False: """Three rules were derived from rows of this table: when cuDNN transforms whole images for a wide fp32 convolution (unet,
resnet50), the workspace of a 1 x 1 filter backward (unet, timm_efficientnet_b0), and that attention with a permuted bias uses the
plain formula (hf_t5).""",
    True: """The models were predicted with rules that were not derived from any row of this table, except for hf_swin_tiny: its rows
were 3 to 26 % too high, because attention with a learnt bias was assumed to use the plain formula. What decides is whether the
rows of the bias are contiguous (T5's are not, Swin's are), as torch's source shows; the table was computed again with that rule.""",
}
_TEXT = """# Peak memory of a training step: predicted and measured

Measured on one H200: {measured}

Predicted without a GPU: {predicted}

{rows} rows; error of the prediction: median {median:.2f} %, worst {worst:.2f} %, above 7 %: {beyond}. Predicting took {seconds:.0f} s.
Cases whose library was not installed where the predictions were made: {omitted}.

Measured is `max_memory_allocated` of the second step of an Engine with AdamW and clipping, in a process whose cache was emptied
before each case; what earlier cases had left allocated (1 to 8 MiB) is subtracted. The rules for single operations come from
bench_plan_parts.py, bench_plan_convs.py and ask_cudnn.py. There is no factor per model.
{about}

| model | batch | precision | predicted GiB | measured GiB | error | peak in | reserved, predicted | reserved, measured |
|---|---|---|---|---|---|---|---|---|
{lines}
"""

if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1] not in {"measure", "predict", "reduce"}:
        sys.exit(__doc__)
    if sys.argv[1] == "measure":
        measure(Path(sys.argv[2]), tuple(sys.argv[3:]))
    elif sys.argv[1] == "reduce":
        reduce(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        predict(Path(sys.argv[2]), Path(sys.argv[3]) if len(sys.argv) > 3 else None, tuple(sys.argv[4:]))
