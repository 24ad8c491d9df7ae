"""What a backend costs with one rank: Engine(backend="ddp") and "fsdp" next to "single", and torch's own wrappers.

    python benchmarks/bench_backends.py [--model vit_large_patch16_224] [--row NAME ...] [--compile] [--rounds 5] [--seconds 0.5] [--json FILE]
    python benchmarks/bench_backends.py --tiny       small models anywhere, over gloo; its times mean nothing

One process with a process group of one rank (NCCL on a GPU), so that nothing travels and what remains is the work around it: hooks,
buckets and their copies, gathered and freed parameters, messages of the decision. All rows are one precision and live in one
process; a round times every row once, as in bench_zoo.py. "ddp" sends nothing to itself by default; "ddp, reducing" reduces all the
same, as every rank of a larger run does.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from bench_zoo import _rate, _synchronize
from zoo_gradients import build_model
from zoo_models import CASES
from zoo_results import ratio_of
from zoo_rows import LR, MAX_NORM

from halfstep import Engine
from halfstep.backends import FSDP, Backend, DataParallel
from halfstep.backends.context import RunContext
from halfstep.hardware.accelerator import pick_device
from halfstep.hardware.environment import environment
from halfstep.hardware.onednn import ignore_fallback_warnings
from halfstep.train.stream import to_device

BAR = 0.97  # of the speed of the single backend
ROWS: dict[str, Callable[[], Backend | str]] = {
    "single": lambda: "single",
    "ddp": DataParallel,
    "ddp, reducing": lambda: DataParallel(reduce_alone=True),
    "fsdp": FSDP,
}


class _Row:
    """One engine around its own copy of the model."""

    def __init__(self, backend: Backend | str, template: nn.Module, loss_of: Callable[[nn.Module], Tensor], args: Any):
        self.model = copy.deepcopy(template)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR)
        self.engine = Engine(
            self.model, optimizer, args.precision, max_norm=MAX_NORM, compile=args.compile, backend=backend
        )
        self._loss_of = loss_of

    def step(self) -> Tensor:
        """One update."""
        with self.engine.forward():
            loss = self._loss_of(self.model)
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach()


def measure(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Rates of every row, in rounds."""
    case = CASES[args.model]
    batch_size = case.batch_size(tiny=args.tiny)
    job, context = case.job(tiny=args.tiny), RunContext(device, batch_size=batch_size)
    template = build_model(job, context)
    batch = to_device(next(iter(job.call("data", context, split="train", epoch=0))), device)

    def loss_of(model: nn.Module) -> Tensor:
        return job.call("loss", context, model=model, batch=batch, split="train", epoch=0)

    names = args.row or list(ROWS)
    rows = {name: _Row(ROWS[name](), template, loss_of, args) for name in names}
    num_steps = 1 if args.tiny else 4
    for row in rows.values():
        for _ in range(3):
            row.step()
    _synchronize(device)
    rates: dict[str, list[float]] = {name: [] for name in names}
    for index in range(args.rounds):
        for name in names[index % len(names) :] + names[: index % len(names)]:
            rates[name].append(_rate(rows[name], num_steps, batch_size, device))
    record = {
        "model": case.name, "batch": batch_size, "precision": args.precision, "compile": args.compile, "environment": environment(),
        "rows": [{"name": name, "rates": rates[name]} for name in names],
    }  # fmt: skip
    record["ratios"] = [ratio_of(record, name, names[0]) for name in names[1:]]
    for row in rows.values():
        row.engine.close()
    return record


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_large_patch16_224", choices=CASES)
    parser.add_argument("--row", action="append", choices=ROWS, help="the first is the baseline; repeatable")
    parser.add_argument("--precision", default="bf16-lean")
    parser.add_argument("--compile", nargs="?", const=True, default=False, help="whole models, or `--compile blocks`")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    logging.getLogger("halfstep").setLevel(logging.WARNING)
    ignore_fallback_warnings()
    device = pick_device("auto")
    os.environ.setdefault("LOCAL_RANK", "0")
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo", init_method=f"file://{folder}/store", rank=0, world_size=1
        )
        try:
            record = measure(args, device)
        finally:
            dist.destroy_process_group()
    print(f"{record['model']}, batch {record['batch']}, {record['precision']}, compile={record['compile']}")
    for row in record["rows"]:
        print(f"  {row['name']:16} {sorted(row['rates'])[len(row['rates']) // 2]:10.1f}/s")
    for ratio in record["ratios"]:
        verdict = "met" if ratio["high"] >= BAR else "MISSED"
        print(
            f"  {ratio['row']} / {ratio['baseline']}: {ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f}), bar {BAR}: {verdict}"
        )
    if args.json:
        with args.json.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
