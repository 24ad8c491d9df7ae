"""Final losses of the compressed optimizers next to their uncompressed parents: digits, several seeds, fp16, bf16 and fp32.

    torchrun --nproc-per-node 2 benchmarks/onebit_convergence.py [--seeds 5] [--epochs 10] [--precision fp16 bf16 fp32] [--json FILE]

A network of 2,410 parameters (64 inputs, 32 hidden units, 10 classes), because 16-bit products are slow on most CPUs, in the Engine with
backend="ddp". The parent of 1-bit Adam and 0/1 Adam is `OneBitAdam` that is never frozen, which is Adam without bias correction, and
that of 1-bit LAMB an unfrozen `OneBitLamb`. All rows of a seed have the same weights and batches. 1-bit optimizers freeze at 20 % of the
steps, 0/1 Adam at half of them, with local steps of up to 4. The loss is that of all training examples in fp32 after the last step.

A row is within seed noise if the mean difference to its parent, seed by seed, is at most twice its standard error, or at most the
standard deviation of the parent's losses over seeds.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from halfstep import Engine
from halfstep.jobs.data import DigitsLoader
from halfstep.optim import OneBitAdam, OneBitLamb, ZeroOneAdam

BATCH, BETAS, NEVER = 64, (0.9, 0.99), 10**9
PARENTS = {"1-bit Adam": "Adam", "0/1 Adam": "Adam", "1-bit LAMB": "LAMB"}


def _optimizer(name: str, params: Any, total: int) -> Any:
    common: dict[str, Any] = {"betas": BETAS, "allow_unverified": True}
    if name in {"Adam", "1-bit Adam"}:
        return OneBitAdam(params, lr=5e-3, freeze_step=NEVER if name == "Adam" else total // 5, **common)
    if name in {"LAMB", "1-bit LAMB"}:
        return OneBitLamb(params, lr=2e-2, freeze_step=NEVER if name == "LAMB" else total // 5, **common)
    schedule = {
        "var_freeze_step": total // 2,
        "var_update_scaler": 16,
        "local_step_scaler": 20,
        "local_step_clipper": 4,
    }
    return ZeroOneAdam(params, lr=5e-3, **schedule, **common)


def _loader(split: str, seed: int = 0, epoch: int = 0, *, whole: bool = False) -> DigitsLoader:
    place = {} if whole else {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    return DigitsLoader(split, BATCH // place.get("world_size", 1), seed=seed, epoch=epoch, **place)


def train(name: str, precision: str, seed: int, epochs: int) -> dict[str, float]:
    """One run; its final losses and accuracy."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 10))
    total = epochs * len(_loader("train", seed))
    optimizer = _optimizer(name, model.parameters(), total)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / (total / 10), max(0.01, 1 - step / total))
    )
    with Engine(model, optimizer, precision, backend="ddp", max_norm=1.0, scheduler=scheduler) as engine:
        for epoch in range(epochs):
            for x, y in _loader("train", seed, epoch):
                with engine.forward():
                    loss = F.cross_entropy(model(x).float(), y)
                engine.backward(loss)
                engine.step()
        dense = engine.backend.reductions.count  # type: ignore[attr-defined]
    result = {"dense": float(dense)}
    with torch.no_grad():
        for split in ("train", "val"):
            batches = [(model(x), y) for x, y in _loader(split, whole=True)]
            logits, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
            result[f"{split} loss"] = F.cross_entropy(logits, labels).item()
            result[f"{split} accuracy"] = (logits.argmax(-1) == labels).float().mean().item()
    return result


def verdict(own: list[float], parent: list[float]) -> tuple[float, float, bool]:
    """The mean difference, its standard error, and whether that is within seed noise."""
    differences = [a - b for a, b in zip(own, parent, strict=True)]
    mean, error = statistics.mean(differences), statistics.stdev(differences) / len(differences) ** 0.5
    return mean, error, mean <= max(2 * error, statistics.stdev(parent))


def main() -> None:
    """Train all rows and print a table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--precision", nargs="+", default=["fp16", "bf16", "fp32"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    logging.getLogger("halfstep").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows: list[dict[str, Any]] = []
    for precision in args.precision:
        found = {
            name: [train(name, precision, seed, args.epochs) for seed in range(args.seeds)]
            for name in ("Adam", "1-bit Adam", "0/1 Adam", "LAMB", "1-bit LAMB")
        }
        for name, runs in found.items():
            losses = [run["train loss"] for run in runs]
            row = {"precision": precision, "ranks": dist.get_world_size(), "row": name, "runs": runs}
            line = f"| {precision} | {dist.get_world_size()} | {name} | {statistics.mean(losses):.4f} +- {statistics.stdev(losses):.4f} | "
            line += f"{100 * statistics.mean(run['val accuracy'] for run in runs):.2f} % | "
            if name in PARENTS:
                mean, error, within = verdict(losses, [run["train loss"] for run in found[PARENTS[name]]])
                row |= {"difference": mean, "error": error, "within": within}
                line += f"{mean:+.4f} +- {error:.4f} | {'yes' if within else 'no'} |"
            else:
                line += "- | - |"
            rows.append(row)
            if dist.get_rank() == 0:
                print(line, flush=True)
    if dist.get_rank() == 0 and args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
