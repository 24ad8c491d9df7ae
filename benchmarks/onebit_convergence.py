"""Final losses of the compressed optimizers next to their uncompressed parents, over several seeds, in parts.

    python benchmarks/onebit_convergence.py [--job digits chars] [--optimizer NAME ...] [--precision fp16 bf16 fp32] [--ranks 2 4] [--seeds 5]
        [--device cpu] [--record FILE]
    python benchmarks/onebit_convergence.py --table [--record FILE]

Every run appends a line of JSON to the record, and runs that are in it already are not repeated, so parts can be run at different times.
`--table` compares what the record has. Ranks are gloo processes of this machine; with `--device cuda` they share its first GPU.

    digits   a network of 2,410 parameters (64 inputs, 32 hidden units, 10 classes) on the embedded digits, 10 epochs
    chars    a transformer over characters (2 blocks of width 32, context 32) on the English of Python's `pydoc_data.topics`, 300 steps

Models are small because 16-bit products are slow on most CPUs. Parents are `OneBitAdam` and `OneBitLamb` that are never frozen: Adam without bias
correction, and LAMB. All optimizers of a seed start with the same weights and train the same batches, 64 examples over all ranks, with a linear warm-up
over 10 % of the steps and a linear decay. beta2 is 0.95. The variance is frozen after 20 % of the steps in 1-bit Adam, 40 % in 1-bit LAMB and 50 % in
0/1 Adam, which has local steps of up to 4 after that. The first version had beta2 0.99 and froze LAMB at 20 %; it was changed after its result had been
seen. The result depends on both: the record in benchmarks/results/ lists all settings that were tried. The loss is that of a fixed set of
examples in fp32 after the last step, with the weights of rank 0.

A difference is within seed noise if its mean over seeds, pair by pair, is at most twice its standard error.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import logging
import os
import platform
import socket
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import Engine
from halfstep.jobs.data import DigitsLoader
from halfstep.optim import OneBitAdam, OneBitLamb, ZeroOneAdam

BATCH, BETAS, NEVER = 64, (0.9, 0.95), 10**9  # the batch is that of all ranks
EPOCHS, STEPS, CONTEXT, WIDTH = 10, 300, 32, 32
FROZEN_AFTER = {"1-bit Adam": 0.2, "0/1 Adam": 0.5, "1-bit LAMB": 0.4}  # of all steps
PARENTS = {"1-bit Adam": "Adam", "0/1 Adam": "Adam", "1-bit LAMB": "LAMB"}
Batch = tuple[Tensor, Tensor]


class Digits:
    """The embedded digits and a small network."""

    rates = {"Adam": 5e-3, "LAMB": 2e-2}  # noqa: RUF012 - a constant

    def model(self) -> nn.Module:
        """A network with one hidden layer."""
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 10))

    def batches(self, seed: int) -> Iterator[Batch]:
        """Those of this rank, epoch after epoch."""
        for epoch in range(EPOCHS):
            yield from self._loader("train", dist.get_rank(), dist.get_world_size(), seed=seed, epoch=epoch)

    def num_steps(self) -> int:
        """Of all epochs."""
        return EPOCHS * len(self._loader("train", dist.get_rank(), dist.get_world_size()))

    def examples(self) -> Batch:
        """All training examples."""
        inputs, labels = zip(*self._loader("train", 0, 1), strict=True)
        return torch.cat(inputs), torch.cat(labels)

    def _loader(self, split: str, rank: int, world_size: int, **order: int) -> DigitsLoader:
        return DigitsLoader(split, BATCH // world_size, rank=rank, world_size=world_size, **order)


class Chars:
    """The next character of an English text, by a small transformer."""

    rates = {"Adam": 3e-3, "LAMB": 1e-2}  # noqa: RUF012 - a constant

    def __init__(self) -> None:
        text = "\n".join(topics[name] for name in sorted(topics))
        self._alphabet = sorted(set(text))
        index = {char: i for i, char in enumerate(self._alphabet)}
        self._text = torch.tensor([index[char] for char in text])

    def model(self) -> nn.Module:
        """Two blocks with causal attention."""
        return _Transformer(len(self._alphabet))

    def batches(self, seed: int) -> Iterator[Batch]:
        """Windows at random places; every rank has its own part of the batch."""
        source, size = torch.Generator().manual_seed(seed), BATCH // dist.get_world_size()
        for _ in range(STEPS):
            starts = torch.randint(len(self._text) - CONTEXT - 1, (BATCH,), generator=source)
            yield self._windows(starts[dist.get_rank() * size :][:size])

    def num_steps(self) -> int:
        """A fixed number."""
        return STEPS

    def examples(self) -> Batch:
        """512 windows, the same for all seeds."""
        return self._windows(
            torch.randint(len(self._text) - CONTEXT - 1, (512,), generator=torch.Generator().manual_seed(-1))
        )

    def _windows(self, starts: Tensor) -> Batch:
        places = starts.unsqueeze(1) + torch.arange(CONTEXT)
        return self._text[places], self._text[places + 1]


class _Transformer(nn.Module):
    def __init__(self, num_chars: int) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(num_chars, WIDTH), nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, 2, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(2)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, num_chars)

    def forward(self, chars: Tensor) -> Tensor:
        """The logits of every next character."""
        x = self.embedding(chars) + self.places
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT, device=x.device, dtype=x.dtype)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        logits: Tensor = self.head(self.norm(x))
        return logits


JOBS: dict[str, Any] = {"digits": Digits, "chars": Chars}


def _optimizer(name: str, params: Any, rates: dict[str, float], total: int) -> Any:
    common: dict[str, Any] = {"betas": BETAS, "allow_unverified": True, "lr": rates[PARENTS.get(name, name)]}
    if name == "0/1 Adam":
        schedule = {
            "var_freeze_step": int(FROZEN_AFTER[name] * total),
            "var_update_scaler": 16,
            "local_step_scaler": 20,
            "local_step_clipper": 4,
        }
        return ZeroOneAdam(params, **schedule, **common)
    kind = OneBitAdam if PARENTS.get(name, name) == "Adam" else OneBitLamb
    return kind(params, freeze_step=int(FROZEN_AFTER[name] * total) if name in PARENTS else NEVER, **common)


def train(job: Any, name: str, precision: str, seed: int, device: str) -> dict[str, float]:
    """One run: its final loss and accuracy, and how often gradients were reduced densely."""
    torch.manual_seed(seed)
    model, total = job.model().to(device), job.num_steps()
    optimizer = _optimizer(name, model.parameters(), job.rates, total)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / (total / 10), max(0.01, 1 - step / total))
    )
    with Engine(model, optimizer, precision, backend="ddp", max_norm=1.0, scheduler=scheduler) as engine:
        skips = 0
        for x, y in job.batches(seed):
            with engine.forward():
                loss = F.cross_entropy(model(x.to(device)).flatten(0, -2).float(), y.flatten().to(device))
            engine.backward(loss)
            skips += engine.step().skipped
        dense = engine.backend.reductions.count  # type: ignore[attr-defined]
    x, y = job.examples()
    with torch.no_grad():
        logits = model.eval()(x.to(device)).flatten(0, -2).float().cpu()
    accuracy = (logits.argmax(-1) == y.flatten()).float().mean().item()
    return {
        "loss": F.cross_entropy(logits, y.flatten()).item(),
        "accuracy": accuracy,
        "dense": dense,
        "steps": total,
        "skips": skips,
    }


# --- the record ---------------------------------------------------------------------------------------------------------


def read_record(path: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    """The runs of a record by job, precision, number of ranks, optimizer and seed."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    runs = [json.loads(line) for line in lines]
    return {(run["job"], run["precision"], run["ranks"], run["optimizer"], run["seed"]): run for run in runs}


def run_rank(args: argparse.Namespace) -> None:
    """Train on this rank what the record lacks; rank 0 appends to it."""
    logging.getLogger("halfstep").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=dt.timedelta(seconds=600))
    known = [read_record(args.record)]
    dist.broadcast_object_list(known)  # rank 0 may write before another rank reads
    names = dict.fromkeys(each for name in args.optimizer for each in (PARENTS.get(name, name), name))
    place = {
        "machine": f"{platform.machine()}, {args.device}",
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    for job_name in args.job:
        job = JOBS[job_name]()
        for precision in args.precision:
            for seed in range(args.seeds):
                for name in names:
                    key = (job_name, precision, dist.get_world_size(), name, seed)
                    if key in known[0]:
                        continue
                    run = dict(zip(("job", "precision", "ranks", "optimizer", "seed"), key, strict=True))
                    run |= train(job, name, precision, seed, args.device) | place
                    if dist.get_rank() == 0:
                        with args.record.open("a", encoding="utf-8") as file:
                            file.write(json.dumps(run) + "\n")
    dist.destroy_process_group()


def launch(num_ranks: int) -> None:
    """Start this program on so many ranks with the same arguments."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(num_ranks),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, *sys.argv, "--is-rank"]
    ranks = [subprocess.Popen(command, env=os.environ | address | {"RANK": str(rank)}) for rank in range(num_ranks)]
    codes = [rank.wait() for rank in ranks]
    if any(codes):
        raise SystemExit(f"A rank failed: exit codes {codes}.")


def table(record: dict[tuple[Any, ...], dict[str, Any]]) -> str:
    """Means over the seeds of each optimizer, and the difference to its parent over the seeds that both have."""
    lines = [
        "| job | precision | ranks | optimizer | seeds | loss | accuracy | dense steps | difference to parent | within 2 standard errors |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for job, precision, ranks, name in dict.fromkeys(key[:4] for key in sorted(record)):
        runs = {key[4]: run for key, run in record.items() if key[:4] == (job, precision, ranks, name)}
        losses = [run["loss"] for run in runs.values()]
        spread = f" +- {statistics.stdev(losses):.4f}" if len(losses) > 1 else ""
        accuracy = 100 * statistics.mean(run["accuracy"] for run in runs.values())
        some = next(iter(runs.values()))
        line = f"| {job} | {precision} | {ranks} | {name} | {len(runs)} | {statistics.mean(losses):.4f}{spread} | {accuracy:.1f} % | "
        line += f"{some['dense']} of {some['steps']} | "
        parents = [(job, precision, ranks, PARENTS.get(name), seed) for seed in runs]
        pairs = [(runs[key[4]]["loss"], record[key]["loss"]) for key in parents if key in record]
        lines.append(line + (_verdict([own - parent for own, parent in pairs]) if len(pairs) > 1 else "- | - |"))
    return "\n".join(lines)


def _verdict(differences: list[float]) -> str:
    mean, error = statistics.mean(differences), statistics.stdev(differences) / len(differences) ** 0.5
    verdict = "yes" if abs(mean) <= 2 * error else "no, lower" if mean < 0 else "no, higher"
    return f"{mean:+.4f} +- {error:.4f} | {verdict} |"


def main() -> None:
    """Start the ranks, or print the table; with --is-rank, be one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--job", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--optimizer", nargs="+", choices=PARENTS, default=list(PARENTS))
    parser.add_argument("--precision", nargs="+", default=["fp16", "bf16", "fp32"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--record", type=Path, default=Path("onebit_convergence.jsonl"))
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--is-rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.is_rank:
        run_rank(args)
        return
    if not args.table:
        for num_ranks in args.ranks:
            launch(num_ranks)
    print(table(read_record(args.record)))


if __name__ == "__main__":
    main()
