"""Final losses of the compressed optimizers next to their uncompressed parents, over several seeds, in parts.

    python benchmarks/onebit_convergence.py [--job digits chars] [--optimizer NAME ...] [--precision fp16 bf16 fp32] [--ranks 2 4] [--seed 0 1 2 3 4]
        [--device cpu] [--record FILE]
    python benchmarks/onebit_convergence.py --table [--record FILE]

Every run appends a line of JSON to the record, and runs that are in it already are not repeated, so parts can be run at different times.
`--table` compares what the record has. Ranks are gloo processes of this machine; with `--device cuda` they share its first GPU.

    digits   a network of 2,410 parameters (64 inputs, 32 hidden units, 10 classes) on the embedded digits
    chars    a transformer over characters (2 blocks of width 32, context 32) on the English of Python's `pydoc_data.topics`

Models are small because 16-bit products are slow on most CPUs. Parents are `OneBitAdam` and `OneBitLamb` that are never frozen: Adam without bias
correction, and LAMB. All optimizers of a seed start with the same weights and train the same batches, 64 examples over all ranks, with a linear warm-up
over 10 % of the steps and a linear decay.

The settings follow the paper of 1-bit Adam in proportion, and were fixed before their first result: there BERT's variance has beta2 0.999, a horizon of 1,000
steps, and is frozen after 23,000 of 118,000 steps: after 20 % of the steps and about 20 horizons. Here beta2 is 0.95, a horizon of 20 steps, and the freeze of
all three comes after 400 of 2,000 steps; 0/1 Adam has local steps of up to 4 soon after that. Three variants were added when results were known, to find what
a difference comes from: "0/1 Adam, paper", whose interval between synchronisations grows as slowly as in the paper of 0/1 Adam, which doubles it every 32,678 of
118,000 steps, up to 16; "0/1 Adam, kappa 100", which updates its variance 225 times before the freeze where kappa 16 does so 74 times; and "1-bit LAMB, freeze
800". Runs of 220 steps, in which nothing has settled when it is frozen,
are in benchmarks/results/onebit_convergence_cpu_2026-11-17.md. The loss is that of a fixed set of examples in fp32 after the last step, with the weights of
rank 0.

Seed noise is what a difference of means between two sets of runs stays within if they differ in nothing but their seeds: two-sample Student's t, 95 %, as in
bench_training.py. The table also has the paired difference and its standard error, which can resolve much less.
"""

from __future__ import annotations

import argparse
import datetime as dt
import itertools
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
from halfstep.comparison.estimate import student_t
from halfstep.jobs.data import DigitsLoader
from halfstep.optim import OneBitAdam, OneBitLamb, ZeroOneAdam

BATCH, BETAS, NEVER = 64, (0.9, 0.95), 10**9  # the batch is that of all ranks
STEPS, CONTEXT, WIDTH = 2000, 32, 32
FREEZE = STEPS // 5
_ZERO_ONE = {"var_freeze_step": FREEZE, "var_update_scaler": 16, "local_step_scaler": 20, "local_step_clipper": 4}
_PACE = {"local_step_scaler": STEPS * 32_678 // 118_000, "local_step_clipper": 16}
OPTIMIZERS: dict[str, tuple[Any, dict[str, int]]] = {
    "Adam": (OneBitAdam, {"freeze_step": NEVER}),
    "LAMB": (OneBitLamb, {"freeze_step": NEVER}),
    "1-bit Adam": (OneBitAdam, {"freeze_step": FREEZE}),
    "1-bit LAMB": (OneBitLamb, {"freeze_step": FREEZE}),
    "1-bit LAMB, freeze 800": (OneBitLamb, {"freeze_step": 2 * FREEZE}),
    "0/1 Adam": (ZeroOneAdam, _ZERO_ONE),
    "0/1 Adam, paper": (ZeroOneAdam, _ZERO_ONE | _PACE),
    "0/1 Adam, kappa 100": (ZeroOneAdam, _ZERO_ONE | {"var_update_scaler": 100}),
}
PARENTS = {name: "LAMB" if "LAMB" in name else "Adam" for name in OPTIMIZERS if name not in {"Adam", "LAMB"}}
Batch = tuple[Tensor, Tensor]


class Digits:
    """The embedded digits and a small network."""

    rates = {"Adam": 2e-3, "LAMB": 1e-2}  # noqa: RUF012 - a constant

    def model(self) -> nn.Module:
        """A network with one hidden layer."""
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 10))

    def batches(self, seed: int) -> Iterator[Batch]:
        """Those of this rank, epoch after epoch."""
        rank, size = dist.get_rank(), dist.get_world_size()
        epochs = (self._loader("train", rank, size, seed=seed, epoch=epoch) for epoch in itertools.count())
        yield from itertools.islice(itertools.chain.from_iterable(epochs), STEPS)

    def examples(self) -> Batch:
        """All training examples."""
        inputs, labels = zip(*self._loader("train", 0, 1), strict=True)
        return torch.cat(inputs), torch.cat(labels)

    def _loader(self, split: str, rank: int, world_size: int, **order: int) -> DigitsLoader:
        return DigitsLoader(split, BATCH // world_size, rank=rank, world_size=world_size, **order)


class Chars:
    """The next character of an English text, by a small transformer."""

    rates = {"Adam": 2e-3, "LAMB": 1e-2}  # noqa: RUF012 - a constant

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


def _optimizer(name: str, params: Any, rates: dict[str, float]) -> Any:
    kind, settings = OPTIMIZERS[name]
    return kind(params, betas=BETAS, allow_unverified=True, lr=rates[PARENTS.get(name, name)], **settings)


def train(job: Any, name: str, precision: str, seed: int, device: str) -> dict[str, float]:
    """One run: its final loss and accuracy, and how often gradients were reduced densely."""
    torch.manual_seed(seed)
    model = job.model().to(device)
    optimizer = _optimizer(name, model.parameters(), job.rates)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / (STEPS / 10), max(0.01, 1 - step / STEPS))
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
        "steps": STEPS,
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
            for seed in args.seed:
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
        "| job | precision | ranks | optimizer | seeds | loss | accuracy | dense steps | difference to parent | seed noise | within | paired |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
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
        lines.append(line + (_verdict(pairs) if len(pairs) > 1 else "- | - | - | - |"))
    return "\n".join(lines)


def _verdict(pairs: list[tuple[float, float]]) -> str:
    differences = [own - parent for own, parent in pairs]
    mean, count = statistics.mean(differences), len(pairs)
    variance = sum(statistics.variance(losses) for losses in zip(*pairs, strict=True))
    noise = student_t(2 * count - 2) * (variance / count) ** 0.5
    verdict = "yes" if abs(mean) <= noise else "no, lower" if mean < 0 else "no, higher"
    return f"{mean:+.4f} | {noise:.4f} | {verdict} | +- {statistics.stdev(differences) / count**0.5:.4f} |"


def main() -> None:
    """Start the ranks, or print the table; with --is-rank, be one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--job", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--optimizer", nargs="+", choices=PARENTS, default=["1-bit Adam", "0/1 Adam", "1-bit LAMB"])
    parser.add_argument("--precision", nargs="+", default=["fp16", "bf16", "fp32"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--seed", type=int, nargs="+", default=list(range(5)))
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
