"""What watching a run costs: Watch and Guard next to the tools that people use for the same question.

    python benchmarks/bench_watch.py [--models NAME,NAME] [--row NAME ...] [--precision bf16] [--rounds 5] [--json FILE]
    python benchmarks/bench_watch.py --kernel      the exponent kernel alone, in several launch shapes, next to a plain read
    python benchmarks/bench_watch.py --autopsy     time of the autopsy of a skipped step, in steps

The models are vit_large_patch16_224 of timm with batch 128 and gpt2_medium of transformers with 8 x 1024 tokens. All rows of a
model live in one process, and a round times every row once, as in bench_zoo.py; a cost is the median over the rounds of the ratio to
the row without watching in the same round, less 1. Rows with Watch have an Engine, the others torch's AMP loop with a fused AdamW:

    Watch every=1                 gradients, weights and updates of every step
    Watch every=1, activations    and the outputs of every leaf module
    Watch between samples         the steps of every=100 in which nothing is sampled
    Guard                         around torch's optimizer
    Watch.attach every=1          torch's loop, watched
    DebugUnderflowOverflow        of transformers: the extremes of all inputs, outputs and weights by forward hooks
    detect_anomaly                of torch.autograd
    histc                         a 64-bin torch.histc of each gradient, read back at the end of the step

The cost of every=100 is that of the steps between samples plus a hundredth of the cost of every=1; `--row "Watch every=100"
--seconds 20` measures it directly, in parts of more than 100 steps. --tiny runs small forms of the models anywhere; its times
mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import datetime as dt
import gc
import json
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from zoo_gradients import build_model
from zoo_models import CASES, Case
from zoo_results import ratio_of
from zoo_rows import LR, MAX_NORM, SCALE

from halfstep import Engine, Guard, LossScaler, Watch
from halfstep.backends.context import RunContext
from halfstep.hardware.accelerator import pick_device
from halfstep.hardware.environment import environment
from halfstep.hardware.onednn import ignore_fallback_warnings
from halfstep.kernels.available import triton_runs_on
from halfstep.kernels.exponents import count_exponents, empty_table
from halfstep.kernels.gradstats import total_norm
from halfstep.precision.formats import COMPUTE_DTYPES
from halfstep.train.stream import to_device

MODELS = ("vit_large_patch16_224", "gpt2_medium")
WARM_UP = 3
PAST_EARLY_SAMPLES = 66  # a Watch samples steps 1, 2, 4, ... 64 whatever `every` is
NEVER = 10**9


@dataclass(frozen=True)
class Row:
    """One way to train, its baseline and the largest cost that is accepted."""

    name: str
    kind: str  # "engine" or "amp"
    watch: dict[str, Any] | None = None  # arguments of Watch
    tool: str = ""  # another tool around torch's loop
    limit: float | None = None
    warm_up: int = WARM_UP

    @property
    def baseline(self) -> str:
        """The row without watching."""
        return "Engine" if self.kind == "engine" else "torch AMP"


ROWS = (
    Row("Engine", "engine"),
    Row("Watch every=1", "engine", {"every": 1}, limit=0.02),
    Row("Watch every=1, activations", "engine", {"every": 1, "activations": True}, limit=0.10),
    Row("Watch between samples", "engine", {"every": NEVER}, warm_up=PAST_EARLY_SAMPLES),
    Row("torch AMP", "amp"),
    Row("Guard", "amp", tool="guard", limit=0.005),
    Row("Watch.attach every=1", "amp", {"every": 1}, limit=0.02),
    Row("DebugUnderflowOverflow", "amp", tool="debug"),
    Row("detect_anomaly", "amp", tool="anomaly"),
    Row("histc", "amp", tool="histc"),
)
LONG = Row("Watch every=100", "engine", {"every": 100}, limit=0.002, warm_up=PAST_EARLY_SAMPLES)
EVERY_100_LIMIT = 0.002
AUTOPSY_LIMIT = 3.0  # steps


@dataclass(frozen=True)
class Loop:
    """A model being trained: `step` returns the loss, `close` reverts the set-up."""

    step: Callable[[], Tensor]
    close: Callable[[], None]
    about: Callable[[], str] = str


# --- rows -----------------------------------------------------------------------------------------------------------


def engine_loop(row: Row, model: nn.Module, loss_of: Callable[[], Tensor], precision: str) -> Loop:
    """Halfstep's Engine, watched or not."""
    watch = None if row.watch is None else Watch(**row.watch)
    scaler = LossScaler(init_scale=SCALE) if precision.startswith("fp16") else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    engine = Engine(model, optimizer, precision, max_norm=MAX_NORM, scaler=scaler, watch=watch)

    def step() -> Tensor:
        with engine.forward():
            loss = loss_of()
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return Loop(step, engine.close, str if watch is None else lambda: str(watch.cost))


def amp_loop(row: Row, model: nn.Module, loss_of: Callable[[], Tensor], precision: str, device: torch.device) -> Loop:
    """The loop of torch's documentation, with a tool around it."""
    fmt = precision.partition("-")[0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=device.type == "cuda")
    scaler = torch.amp.GradScaler(device.type, init_scale=SCALE, enabled=fmt == "fp16")
    params = list(model.parameters())
    closing = contextlib.ExitStack()
    watch, histogram = None, row.tool == "histc"
    if row.watch is not None:
        watch = Watch(model, **row.watch)
        watch.attach(optimizer, scaler if scaler.is_enabled() else None)
        closing.callback(watch.close)
    if row.tool == "guard":
        closing.callback(Guard(optimizer).close)
    if row.tool == "debug":
        from transformers.debug_utils import DebugUnderflowOverflow

        DebugUnderflowOverflow(model)
    region = anomaly_mode() if row.tool == "anomaly" else contextlib.nullcontext()

    def step() -> Tensor:
        with region:
            with torch.autocast(device.type, dtype=COMPUTE_DTYPES[fmt]):
                loss = loss_of()
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if histogram:
            histograms = [torch.histc(p.grad.float(), bins=64) for p in params if p.grad is not None]
            torch.stack(histograms).cpu()
        torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Loop(step, closing.close, str if watch is None else lambda: str(watch.cost))


def anomaly_mode() -> Any:
    """torch's detect_anomaly without its warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.autograd.detect_anomaly(check_nan=True)


def losses_of(case: Case, device: torch.device, args: argparse.Namespace) -> tuple[nn.Module, Callable[..., Tensor], int]:  # fmt: skip
    """The model of a case, its loss on one fixed batch, and the batch size."""
    batch_size = args.batch or case.batch_size(tiny=args.tiny)
    job, context = case.job(tiny=args.tiny), RunContext(device, batch_size=batch_size)
    template = build_model(job, context)
    batch = to_device(next(iter(job.call("data", context, split="train", epoch=0))), device)

    def loss_of(model: nn.Module) -> Tensor:
        return job.call("loss", context, model=model, batch=batch, split="train", epoch=0)

    return template, loss_of, batch_size


# --- costs of a step ------------------------------------------------------------------------------------------------


def measure(case: Case, rows: tuple[Row, ...], device: torch.device, args: argparse.Namespace) -> dict[str, Any]:
    """Build every row, then time them in rounds."""
    template, loss_of, batch_size = losses_of(case, device, args)
    loops: dict[str, Loop] = {}
    entries: dict[str, dict[str, Any]] = {row.name: {"name": row.name} for row in rows}
    for row in rows:
        model = copy.deepcopy(template)

        def loss_now(model: nn.Module = model) -> Tensor:
            return loss_of(model)

        try:
            loop = (
                engine_loop(row, model, loss_now, args.precision)
                if row.kind == "engine"
                else amp_loop(row, model, loss_now, args.precision, device)
            )
            for _ in range(WARM_UP if args.tiny else row.warm_up):
                loop.step()
            synchronize(device)
            loops[row.name] = loop
        except Exception as error:  # a tool that cannot run this model is a result; the others still run
            entries[row.name]["error"] = f"{type(error).__name__}: {error}"[:300]
            gc.collect()
    if not loops:
        sys.exit(f"No row of {case.name} runs here: {entries}")
    num_steps = args.steps or choose_steps(next(iter(loops.values())), device, args.seconds)
    names = list(loops)
    for index in range(args.rounds):
        first = index % len(names)
        for name in names[first:] + names[:first]:
            rate = num_steps / seconds_of(loops[name].step, num_steps, device)
            entries[name].setdefault("rates", []).append(rate)
    for name, loop in loops.items():
        entries[name]["step_ms"] = 1e3 / statistics.median(entries[name]["rates"])
        entries[name]["about"] = loop.about()
        loop.close()
    return {
        "kind": "watch",
        "model": case.name,
        "batch": batch_size,
        "precision": args.precision,
        "tiny": args.tiny,
        "rounds": args.rounds,
        "steps_per_round": num_steps,
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "environment": environment(),
        "rows": list(entries.values()),
    }


def seconds_of(step: Callable[[], Any], num_steps: int, device: torch.device) -> float:
    """Time of `num_steps` steps, after one that is not timed."""
    step()
    synchronize(device)
    start = time.perf_counter()
    for _ in range(num_steps):
        step()
    synchronize(device)
    return time.perf_counter() - start


def choose_steps(loop: Loop, device: torch.device, seconds: float) -> int:
    """Steps that take about `seconds`."""
    return max(1, round(2 * seconds / seconds_of(loop.step, 2, device)))


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def costs(record: dict[str, Any], rows: tuple[Row, ...]) -> Iterator[tuple[str, float, float, float, float | None]]:
    """Name, cost, its interval and its limit, for each row that has a baseline in the record."""
    medians = {}
    for row in rows:
        ratio = ratio_of(record, row.name, row.baseline)
        if ratio is not None and row.name != row.baseline:
            cost, low, high = (1 / ratio[key] - 1 for key in ("median", "high", "low"))
            medians[row.name] = cost
            yield row.name, cost, low, high, row.limit
    if {"Watch every=1", "Watch between samples"} <= medians.keys():
        cost = medians["Watch between samples"] + medians["Watch every=1"] / 100
        yield "Watch every=100 (computed)", cost, cost, cost, EVERY_100_LIMIT


def print_costs(record: dict[str, Any], rows: tuple[Row, ...]) -> None:
    """The table of one model. A limit is met if the interval reaches it."""
    print(f"\n{record['model']}, batch {record['batch']}, {record['precision']}; ", end="")
    print(f"{record['rounds']} rounds of {record['steps_per_round']} steps\n\n| row | ms per step | cost | limit |\n|---|---|---|---|")  # fmt: skip
    known = {name: (cost, low, high, limit) for name, cost, low, high, limit in costs(record, rows)}
    entries = {entry["name"]: entry for entry in record["rows"]}
    for name in dict.fromkeys([*entries, *known]):
        entry = entries.get(name, {})
        if "error" in entry:
            print(f"| {name} | did not run: {entry['error']} | | |")
            continue
        time_text = f"{entry['step_ms']:.2f}" if entry else ""
        cost_text, limit_text = "", ""
        if name in known:
            cost, low, high, limit = known[name]
            cost_text = f"{100 * cost:+.2f} % ({100 * low:+.2f} to {100 * high:+.2f})"
            limit_text = "" if limit is None else f"{100 * limit:g} %, {'met' if low <= limit else 'MISSED'}"
        print(f"| {name} | {time_text} | {cost_text} | {limit_text} |")
    for entry in record["rows"]:
        if entry.get("about"):
            print(f"{entry['name']}: {entry['about']}")


# --- the autopsy ----------------------------------------------------------------------------------------------------


def measure_autopsy(case: Case, device: torch.device, args: argparse.Namespace) -> dict[str, Any]:
    """Time of a step whose backward pass overflows, with its autopsy, less that of a step without; in steps."""
    from halfstep.watching.skips import Autopsies

    template, loss_of, batch_size = losses_of(case, device, args)
    watch = Autopsies()
    engine = Engine(
        template,
        torch.optim.AdamW(template.parameters(), lr=LR),
        "fp16",
        max_norm=MAX_NORM,
        scaler=LossScaler(init_scale=SCALE),
        watch=watch,
    )

    def step(factor: float = 1.0) -> None:
        def compute() -> Tensor:
            return loss_of(template) * factor

        with engine.forward():
            loss = compute()
        engine.backward(loss)
        engine.step(replay=compute)

    for _ in range(WARM_UP):
        step()
    usual = seconds_of(step, 2 if args.tiny else 10, device) / (2 if args.tiny else 10)
    times = []
    for _ in range(3):  # as many as are examined without a limit
        synchronize(device)
        start = time.perf_counter()
        step(2.0**40)
        step()  # on a GPU the outcome arrives here, and the autopsy is part of this step
        synchronize(device)
        times.append((time.perf_counter() - start - 2 * usual) / usual)
    causes = [autopsy.cause for autopsy in watch.autopsies]
    engine.close()
    return {
        "kind": "autopsy",
        "model": case.name,
        "batch": batch_size,
        "step_ms": 1e3 * usual,
        "steps": times,
        "causes": causes,
        "environment": environment(),
    }


# --- the kernel -----------------------------------------------------------------------------------------------------


def measure_kernel(case: Case, device: torch.device, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Milliseconds of one count of all parameters, by dtype, contents and launch shape; and of a plain read."""
    sizes = [p.numel() for p in case.job(tiny=args.tiny).call("model", RunContext(device)).parameters()]
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        usual = [torch.randn(n, device=device).mul_(0.02).to(dtype) for n in sizes]
        half = [t * (torch.rand_like(t, dtype=torch.float32) < 0.5) for t in usual]
        patterns = [
            torch.randint(0, 256, (n * dtype.itemsize,), dtype=torch.uint8, device=device).view(dtype) for n in sizes
        ]
        tables: dict[Any, Any] = {}
        read = milliseconds(lambda grads=usual, tables=tables: total_norm(grads, device, tables), device, args)
        results.append({"dtype": str(dtype), "contents": "normal", "shape": "plain read", "ms": read})
        for contents, tensors in (("normal", usual), ("half zeros", half), ("random bits", patterns)):
            tables = {}
            ms = milliseconds(lambda t=tensors, tables=tables: count_exponents(t, None, tables), device, args)
            results.append({"dtype": str(dtype), "contents": contents, "shape": "default", "ms": ms})
        results += [
            {"dtype": str(dtype), "contents": "normal", "shape": f"chunk {shape.chunk}, warps {shape.warps}", "ms": ms}
            for shape, ms in shape_times(usual, device, args)
        ]
        del usual, half, patterns
    return [{"kind": "kernel", "model": case.name, "elements": sum(sizes), **result} for result in results]


def shape_times(tensors: list[Tensor], device: torch.device, args: argparse.Namespace) -> Iterator[tuple[Any, float]]:
    """Every launch shape that the kernel allows, with its time; nothing where Triton does not run."""
    if not triton_runs_on(device):
        return
    from halfstep.kernels.exponents_triton import ExponentCounter, LaunchShape

    expected = count_exponents(tensors).table
    for chunk in (8192, 16384, 32768):
        for warps in (1, 2, 4, 8):
            try:
                shape = LaunchShape(chunk, warps)
            except AssertionError:
                continue
            counter, rows = ExponentCounter(shape), list(range(len(tensors)))
            table = empty_table(len(tensors), device)
            counter.add(tensors, rows, None, table)
            if not torch.equal(table, expected):
                sys.exit(f"{shape} counts wrong.")

            def launch(counter: Any = counter, rows: list[int] = rows, table: Tensor = table) -> None:
                counter.add(tensors, rows, None, table)

            yield shape, milliseconds(launch, device, args)


def milliseconds(work: Callable[[], Any], device: torch.device, args: argparse.Namespace) -> float:
    """Median time of one call, on the device where it has a clock."""
    times = []
    for _ in range(2 if args.tiny else 20):
        synchronize(device)
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            work()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        else:
            begin = time.perf_counter()
            work()
            times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


# --- the program ----------------------------------------------------------------------------------------------------


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage="%(prog)s [options]"
    )
    parser.add_argument("--models", type=lambda text: text.split(","), default=MODELS, metavar="NAME,NAME")
    parser.add_argument("--row", action="append", metavar="NAME", help="only this row and its baseline; repeatable")
    parser.add_argument("--precision", default="bf16", help="of the Engine; torch's loop uses its format")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="length of one row's part of a round")
    parser.add_argument("--steps", type=int, help="number of steps of one row's part, instead of --seconds")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tiny", action="store_true", help="small forms of the models, for a CPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append one line per result")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--kernel", action="store_true")
    mode.add_argument("--autopsy", action="store_true")
    return parser.parse_args(argv)


def chosen_rows(names: list[str] | None) -> tuple[Row, ...]:
    """The rows of the command line with their baselines."""
    known = {row.name: row for row in (*ROWS, LONG)}
    unknown = [name for name in names or () if name not in known]
    if unknown:
        sys.exit(f"Unknown row {', '.join(map(repr, unknown))}. Known: {'; '.join(known)}.")
    wanted = {name for row in names or () for name in (row, known[row].baseline)}
    return tuple(row for row in known.values() if row.name in wanted) if names else ROWS


def main(argv: list[str] | None = None) -> None:
    """Run the chosen part on the chosen models."""
    args = parse(argv)
    logging.getLogger("halfstep").setLevel(logging.ERROR)  # no truth table for each engine, no events
    ignore_fallback_warnings()
    device, rows = pick_device(args.device), chosen_rows(args.row)
    unknown = [name for name in args.models if name not in CASES]
    if unknown:
        sys.exit(f"Unknown model {', '.join(unknown)}. Known: {', '.join(CASES)}.")
    print(f"{environment()}")
    for case in (CASES[name] for name in args.models):
        if args.kernel:
            records = measure_kernel(case, device, args)
            print(f"\n{case.name}, {records[0]['elements'] / 1e6:.1f} M elements\n\n| dtype | contents | shape | ms |\n|---|---|---|---|")  # fmt: skip
            for r in records:
                print(f"| {r['dtype']} | {r['contents']} | {r['shape']} | {r['ms']:.3f} |")
        elif args.autopsy:
            records = [measure_autopsy(case, device, args)]
            worst = max(records[0]["steps"])
            print(f"\n{case.name}: a step takes {records[0]['step_ms']:.1f} ms; autopsies took {', '.join(f'{s:.2f}' for s in records[0]['steps'])} steps", end=" ")  # fmt: skip
            print(f"({', '.join(records[0]['causes'])}); limit {AUTOPSY_LIMIT:g}, {'met' if worst <= AUTOPSY_LIMIT else 'MISSED'}")  # fmt: skip
        else:
            records = [measure(case, rows, device, args)]
            print_costs(records[0], rows)
        if args.json:
            with args.json.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(record) + "\n" for record in records)
        gc.collect()


if __name__ == "__main__":
    main()
