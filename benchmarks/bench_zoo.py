"""Speed, peak memory and gradient accuracy on models of timm, transformers and diffusers, against torch AMP and pure 16-bit models.

    python benchmarks/bench_zoo.py [--models NAME,NAME] [--row NAME ...] [--rounds 5] [--json FILE]   eager rows
    python benchmarks/bench_zoo.py --compile ...       compiled rows, by default of four models
    python benchmarks/bench_zoo.py --accuracy ...      relative error of the gradients against fp64
    python benchmarks/bench_zoo.py --leaks ...         fp32 results in the graphs of the lean presets, beyond the pure model's
    python benchmarks/bench_zoo.py --table FILE ...    the tables of recorded runs

All rows of a model live in one process. A round times every row once, some steps in a row after one that is not timed, and each
round begins with the next row, so that a drift of the clocks affects all of them alike. Ratios, intervals and bars are explained in
zoo_results.py, the loops in zoo_rows.py, the accuracy in zoo_gradients.py, the models in zoo_models.py.

The peak of a row is `max_memory_allocated` of its fourth step less what was allocated before its model was built, i.e. the other
rows' weights and states, and the batch, which all rows share; only this row's model has activations and gradients then. The caching
allocator rounds large blocks by up to 1 MiB, which varies with what ran before: `requested_bytes` is the same peak without that. Autocast's
weight cache is as torch has it, and part of a row's peak. TF32, cuDNN's benchmark mode and memory formats are torch's defaults, the
same for all rows, and recorded.

Halfstep's compute region registers kernels for autocast that stay in the process, where they pass torch AMP's calls on. Their cost
for the torch AMP rows, if any, shows in `rate_before_engines`: one timing before the first Engine exists.

With --compile, torch's limit of recompilations per function is multiplied by the number of rows, because all of them share code.
--tiny runs small forms of the same models anywhere; its speeds mean nothing.
"""

from __future__ import annotations

import argparse
import datetime as dt
import gc
import importlib.metadata
import json
import logging
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from zoo_gradients import ACCURACY_ROWS, build_model, gradient_rows, leak_lines
from zoo_models import CASES, COMPILED, HELD_BACK, Case, case_of_target
from zoo_results import bars_of, describe_bar, ratio_of, render_tables
from zoo_rows import COMPILED_ROWS, EAGER_ROWS, RESIDUAL_ROW, Loop, Row, make_loop, unavailable

from halfstep.backends.context import RunContext
from halfstep.hardware.accelerator import pick_device
from halfstep.hardware.environment import environment
from halfstep.hardware.onednn import ignore_fallback_warnings
from halfstep.train.stream import to_device

WARM_UP = 3
LIBRARIES = ("timm", "transformers", "diffusers", "flashoptim", "triton")


# --- one model ------------------------------------------------------------------------------------------------------


def measure(case: Case, rows: tuple[Row, ...], device: torch.device, args: argparse.Namespace) -> dict[str, Any]:
    """Build every row, then time them in rounds."""
    start = time.perf_counter()
    batch_size = args.batch or case.batch_size(tiny=args.tiny)
    job, context = case.job(tiny=args.tiny), RunContext(device, batch_size=batch_size)
    template = build_model(job, context)
    batch = to_device(next(iter(job.call("data", context, split="train", epoch=0))), device)
    _create_workspaces(device)
    entries: dict[str, dict[str, Any]] = {}
    loops: dict[str, Loop] = {}
    num_steps = 0
    for row in sorted(rows, key=lambda row: row.kind == "engine"):  # engines last, see the docstring
        entry = entries[row.name] = {"name": row.name, "format": row.format}
        reason = unavailable(row, device)
        if reason:
            entry["error"] = reason
            continue
        before, before_requested = _allocated(device), _requested(device)
        try:
            built = time.perf_counter()
            loop = make_loop(row, template, job, batch, context)
            for _ in range(WARM_UP):
                loop.step()
            _synchronize(device)
            entry["warm_up_seconds"] = time.perf_counter() - built
            entry |= _peak_of_step(loop, device, before, before_requested)
            num_steps = num_steps or _choose_steps(loop, device, args.seconds)
            if row.kind == "amp":
                entry["rate_before_engines"] = _rate(loop, num_steps, batch_size, device)
        except Exception as error:  # a row that cannot train this model is a result; the others still run
            entry["error"] = f"{type(error).__name__}: {error}"[:300]
            loop = None
        if loop is None:
            gc.collect()
        else:
            loops[row.name] = loop
    rates = _time_rounds([row.name for row in rows if row.name in loops], loops, num_steps, batch_size, device, args)
    for name, loop in loops.items():
        entries[name] |= {
            "rates": rates[name],
            "rate": statistics.median(rates[name]),
            "finite": bool(torch.isfinite(loop.step())),
            "skipped": loop.skipped(),
        }
        loop.close()
    record = {
        "kind": "compiled" if args.compile else "eager",
        **_about(case, device, args, batch_size),
        "parameters": sum(param.numel() for param in template.parameters()),
        "rounds": args.rounds,
        "steps_per_round": num_steps,
        "rows": [entries[row.name] for row in rows],
    }
    pairs = [(a.name, b.name) for a in rows for b in rows if a is not b and a.format == b.format and b.kind != "engine"]
    record["ratios"] = [ratio for pair in pairs if (ratio := ratio_of(record, *pair)) is not None]
    record["bars"] = bars_of(record)
    record["seconds"] = time.perf_counter() - start
    return record


def _time_rounds(
    names: list[str],
    loops: dict[str, Loop],
    num_steps: int,
    batch_size: int,
    device: torch.device,
    args: argparse.Namespace,
) -> dict[str, list[float]]:
    rates: dict[str, list[float]] = {name: [] for name in names}
    for index in range(args.rounds):
        first = index * max(1, len(names) // args.rounds) % max(1, len(names))
        for name in names[first:] + names[:first]:
            rates[name].append(_rate(loops[name], num_steps, batch_size, device))
    return rates


def _rate(loop: Loop, num_steps: int, batch_size: int, device: torch.device) -> float:
    """Examples per second over `num_steps`, after one step that is not timed."""
    loop.step()
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(num_steps):
        loop.step()
    _synchronize(device)
    return batch_size * num_steps / (time.perf_counter() - start)


def _choose_steps(loop: Loop, device: torch.device, seconds: float) -> int:
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(2):
        loop.step()
    _synchronize(device)
    return max(1, round(2 * seconds / (time.perf_counter() - start)))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _allocated(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    gc.collect()
    _synchronize(device)
    return torch.cuda.memory_allocated()


def _requested(device: torch.device, when: str = "current") -> int:
    """Bytes that tensors asked for, before the allocator rounds them."""
    return int(torch.cuda.memory_stats()[f"requested_bytes.all.{when}"]) if device.type == "cuda" else 0


def _peak_of_step(loop: Loop, device: torch.device, before: int, before_requested: int) -> dict[str, int | None]:
    """Peaks of one step above what there was before the row was built; None where torch does not count."""
    if device.type != "cuda":
        return {"peak_bytes": None, "requested_bytes": None}
    torch.cuda.reset_peak_memory_stats()
    loop.step()
    _synchronize(device)
    return {
        "peak_bytes": torch.cuda.max_memory_allocated() - before,
        "requested_bytes": _requested(device, "peak") - before_requested,
    }


def _create_workspaces(device: torch.device) -> None:
    """Let cuBLAS allocate its workspaces, which stay, so that they do not count for the first row."""
    if device.type == "cuda":
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            layer = torch.nn.Linear(64, 64, device=device, dtype=dtype)
            layer(torch.randn(64, 64, device=device, dtype=dtype)).sum().backward()


def measure_accuracy(case: Case, rows: tuple[Row, ...], device: torch.device, args: argparse.Namespace) -> dict[str, Any]:  # fmt: skip
    """Errors of the gradients of every row of a model."""
    start = time.perf_counter()
    batch_size = args.batch or (2 if args.tiny else max(2, case.batch // 32))
    return {
        "kind": "accuracy",
        **_about(case, device, args, batch_size),
        "num_batches": args.batches,
        "rows": gradient_rows(
            case, rows, device, tiny=args.tiny, batch_size=batch_size, num_batches=args.batches
        ),
        "seconds": time.perf_counter() - start,
    }  # fmt: skip


def _about(case: Case, device: torch.device, args: argparse.Namespace, batch_size: int) -> dict[str, Any]:
    versions = {}
    for library in LIBRARIES:
        try:
            versions[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            versions[library] = None
    return {
        "model": case.name,
        "library": case.library,
        "batch": batch_size,
        "tiny": args.tiny,
        "fp32_buffers": case.fp32_buffers,
        "device": device.type,
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "environment": environment(),
        "versions": versions,
        "settings": {
            "matmul_tf32": torch.backends.cuda.matmul.allow_tf32,
            "cudnn_tf32": torch.backends.cudnn.allow_tf32,
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
        },
    }


# --- the program ----------------------------------------------------------------------------------------------------


def _print_speed(record: dict[str, Any]) -> None:
    head = (
        f"{record['library']} {record['model']}, batch {record['batch']}, {record['parameters'] / 1e6:.1f} M parameters"
    )
    print(f"\n{head}; {record['rounds']} rounds of {record['steps_per_round']} steps; {record['seconds']:.0f} s")
    for row in record["rows"]:
        if "error" in row:
            print(f"  {row['name']:32} did not run: {row['error']}")
            continue
        peak = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:8.2f} GiB"
        notes = ["" if row["finite"] else "loss is not finite", f"{row['skipped']} skipped" if row["skipped"] else ""]
        if "rate_before_engines" in row:
            notes.append(f"{row['rate_before_engines']:.1f}/s before the first engine")
        print(
            f"  {row['name']:32} {row['rate']:10.1f}/s {peak}  warm-up {row['warm_up_seconds']:.1f} s  {', '.join(filter(None, notes))}"
        )
    for bar in record["bars"]:
        verdict = "met   " if bar["met"] else "MISSED"
        print(f"  {verdict} {bar['bar']}: {describe_bar(bar)}")


def _print_accuracy(record: dict[str, Any]) -> None:
    print(
        f"\n{record['library']} {record['model']}, {record['num_batches']} x {record['batch']}; {record['seconds']:.0f} s"
    )
    errors = {row["name"]: row.get("error_l2") for row in record["rows"]}
    for row in record["rows"]:
        if "error" in row:
            print(f"  {row['name']:20} did not run: {row['error']}")
            continue
        lean = row["name"].endswith("-lean")
        others = [f"{name} {row['format']}" for name in ("pure", "torch AMP") if lean]
        ratios = ", ".join(f"{row['error_l2'] / errors[other]:.3f} of {other}" for other in others if errors.get(other))
        print(
            f"  {row['name']:20} {row['error_l2']:.3e}, median of parameters {row['error_median']:.3e}, loss scale {row['loss_scale']:g}  {ratios}"
        )


def _choose(names: list[str] | None, known: dict[str, Any], default: list[str], label: str) -> list[Any]:
    unknown = [name for name in names or () if name not in known]
    if unknown:
        sys.exit(f"Unknown {label} {', '.join(map(repr, unknown))}. Known: {', '.join(known)}.")
    return [known[name] for name in names or default]


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage="%(prog)s [options]"
    )
    parser.add_argument(
        "--models",
        type=lambda text: text.split(","),
        metavar="NAME,NAME",
        help="of the zoo, or timm:NAME, transformers:CONFIG; default: all of the zoo",
    )
    parser.add_argument("--held-back", action="store_true", help="run the models that nothing was tuned on")
    parser.add_argument("--row", action="append", metavar="NAME", help="only this row; repeatable")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.3, help="length of one row's part of a round")
    parser.add_argument("--batch", type=int, help="instead of the model's own batch size")
    parser.add_argument("--limit", type=float, help="start no further model after this many seconds")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tiny", action="store_true", help="small forms of the models, for a CPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append one line per model")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--compile", action="store_true")
    mode.add_argument("--accuracy", action="store_true")
    mode.add_argument("--leaks", action="store_true")
    mode.add_argument("--table", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--batches", type=int, default=3, help="of --accuracy")
    parser.add_argument("--min-bytes", type=int, help="smallest tensor of --leaks; default 1 MB, tiny 1 kB")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Run the chosen part on the chosen models."""
    args = parse(argv)
    if args.table:
        lines = [line for path in args.table for line in path.read_text(encoding="utf-8").splitlines()]
        print(render_tables([json.loads(line) for line in lines if line.strip()]))
        return
    logging.getLogger("halfstep").setLevel(logging.WARNING)  # no truth table for each of ten engines
    ignore_fallback_warnings()
    device = pick_device(args.device)
    default = list(HELD_BACK) if args.held_back else list(COMPILED if args.compile else CASES)
    others = {name: case_of_target(name) for name in args.models or () if ":" in name}
    cases = _choose(args.models, {**CASES, **HELD_BACK, **others}, default, "model")
    all_rows = COMPILED_ROWS if args.compile else ACCURACY_ROWS if args.accuracy else EAGER_ROWS
    named = {row.name: row for row in (*all_rows, RESIDUAL_ROW)}
    rows = tuple(_choose(args.row, named, [row.name for row in all_rows], "row"))
    if args.compile:
        torch._dynamo.config.recompile_limit *= len(rows)  # noqa: SLF001 - where torch has its settings
    start = time.perf_counter()
    for index, case in enumerate(cases):
        if args.limit and time.perf_counter() - start > args.limit:
            print(f"\nTime limit: not run: {', '.join(other.name for other in cases[index:])}", flush=True)
            break
        try:
            record = _run_case(case, rows, device, args)
        except Exception as error:  # a library that is missing or does not know the model; the others still run
            print(f"\n{case.name} did not run: {type(error).__name__}: {error}", flush=True)
            continue
        finally:
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        if record is not None and args.json:
            with args.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        sys.stdout.flush()


def _run_case(
    case: Case, rows: tuple[Row, ...], device: torch.device, args: argparse.Namespace
) -> dict[str, Any] | None:
    """Run and print one model; leaks are printed only."""
    if args.leaks:
        min_bytes = args.min_bytes or (1000 if args.tiny else 10**6)
        batch_size = args.batch or case.batch_size(tiny=args.tiny)
        for line in leak_lines(case, device, tiny=args.tiny, batch_size=batch_size, min_bytes=min_bytes):
            print(line)
        return None
    if args.accuracy:
        record = measure_accuracy(case, rows, device, args)
        _print_accuracy(record)
    else:
        record = measure(case, rows, device, args)
        _print_speed(record)
    return record


if __name__ == "__main__":
    main()
