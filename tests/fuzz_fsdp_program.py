"""One rank of random runs on shards: `python fuzz_fsdp_program.py FIRST_SEED NUM_SEEDS` on each.

Every rank makes the same calls with other data, weights and overflows, on an Engine with the backend "fsdp" and, with the
data of all ranks, on one with the backend "single". After each call both have the same decisions, scales, counters and
learning rates, norms and fp32 masters up to rounding, and copies of one value are equal on all ranks, bit for bit.
"""

import logging
import math
import os
import random
import sys
import tempfile
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import halfstep
from halfstep.backends import FSDP
from halfstep.optim.shards import is_sharded, local
from rank_cases import hashed

PRECISIONS = ("fp32", "bf16", "fp16,loss_scale=dynamic(init_scale=256;hysteresis=1;growth_interval=2)", "bf16-lean,grads=fp32",
              "fp16-lean,grads=fp32,loss_scale=dynamic(init_scale=256;hysteresis=1;growth_interval=2)")  # fmt: skip
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(
        p, lr=1e-3, eps=1e-2
    ),  # so that rounding does not decide the sign of an update
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, eps=1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3, eps=1e-2),
}
MOVES = ("micro_batch",) * 6 + ("close", "close", "evaluate", "reset", "reload", "set_lr", "forward_only", "remember", "rewind")  # fmt: skip


class Mismatch(AssertionError):
    """The two Engines disagree, or two ranks."""


class Net(nn.Module):
    """Three blocks of 5 features, of which no number of ranks has equal parts, and a scalar."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 5), nn.Tanh()) for _ in range(3))
        self.head, self.scale = nn.Linear(5, 2), nn.Parameter(torch.ones(()))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x) * self.scale


class Pair:
    """An Engine on shards and one over all data."""

    def __init__(self, rng):
        self.rng, self.rank, self.num_ranks = rng, dist.get_rank(), dist.get_world_size()
        self.precision, self.kind = rng.choice(PRECISIONS), rng.choice(list(OPTIMIZERS))
        self.accumulate, self.max_norm = rng.choice([1, 2, 3]), rng.choice([None, 0.5])
        self.ema, self.weighted = rng.choice([None, 0.5]), rng.random() < 0.5
        self.units = rng.choice([(), "blocks.*", "blocks.1"])
        self.recompute = rng.choice([None, None, "cheap"])
        self.lr, self.in_window, self.memory = None, 0, None
        self.runs = self.build()

    def __str__(self):
        shown = {key: value for key, value in vars(self).items() if isinstance(value, str | int | float | tuple)}
        return str(shown)

    def build(self):
        """Both Engines."""
        runs = []
        for backend, factor in ((FSDP(shard=self.units), 1), ("single", self.num_ranks)):
            torch.manual_seed(7)
            model = Net()
            engine = halfstep.Engine(
                model,
                OPTIMIZERS[self.kind](model.parameters()),
                self.precision,
                accumulate=self.accumulate * factor,
                max_norm=self.max_norm,
                ema=self.ema,
                recompute=self.recompute,
                backend=backend,
            )
            runs.append((model, engine, (self.rank,) if factor == 1 else range(self.num_ranks)))
        return runs

    def micro_batch(self):
        """One micro-batch of each rank: a weight for each, perhaps two losses, perhaps an infinite one on one rank."""
        seed, losses = self.rng.randrange(10**6), self.rng.choice([1, 1, 2])
        weights = [self.rng.choice([0.0, 1.0, 3, 17.5]) for _ in range(self.num_ranks)]
        odd = self.rng.randrange(self.num_ranks) if self.rng.random() < 0.15 else None
        if odd is not None:
            weights[odd] = 2.0  # a bad micro-batch that counts nothing may be skipped or not
        for model, engine, ranks in self.runs:
            for rank in ranks:
                generator = torch.Generator().manual_seed(seed + rank)
                x, y = torch.randn(3, 5, generator=generator), torch.randn(3, 2, generator=generator)
                with engine.forward():
                    out = model(x)
                    parts = [(out - y).square().mean(), out.float().sin().mean()][:losses]
                for number, part in enumerate(parts):
                    bad = part * math.inf if rank == odd else part
                    weight = weights[rank] if self.weighted else None
                    engine.backward(bad, weight, retain_graph=number + 1 < losses)
                if rank != ranks[-1]:
                    engine.step()
        self.in_window += 1
        if self.in_window == self.accumulate and self.rng.random() < 0.2:
            self.unscale()
        if self.in_window == self.accumulate or self.rng.random() < 0.15:
            self.finish(last=self.in_window < self.accumulate)
        else:
            for _, engine, _ in self.runs:
                engine.step()

    def finish(self, *, last):
        """Close the window and compare what it did."""
        ours, theirs = [engine.step(last=last) for _, engine, _ in self.runs]
        self.in_window = 0
        outcome = [(r.boundary, r.skipped, r.scale, r.step, r.lr) for r in (ours, theirs)]
        if outcome[0] != outcome[1]:
            raise Mismatch(f"outcome {outcome}")
        far = abs(ours.grad_norm - theirs.grad_norm) if not ours.skipped else 0.0
        if far > self.share() * (theirs.grad_norm + 1e-3):
            raise Mismatch(f"norm {ours.grad_norm}, of one process {theirs.grad_norm}")

    def close(self):
        """End a window early, also without a micro-batch since the last step."""
        if self.in_window:
            self.finish(last=True)

    def unscale(self):
        """Divide the gradients and halve them, before the step that follows a micro-batch."""
        for _, engine, _ in self.runs:
            engine.unscale()
            for param in engine.params.values():
                if param.grad is not None:
                    local(param.grad).mul_(0.5)

    def evaluate(self):
        """The outputs of both, of weights or EMA."""
        x, ema, outputs = torch.linspace(-1, 1, 5).expand(2, 5), self.ema is not None and self.rng.random() < 0.5, []
        for model, engine, _ in self.runs:
            with engine.evaluate(ema=ema):
                outputs.append(model(x).float())
        if not torch.allclose(*outputs, atol=5 * self.share(), rtol=self.share()):
            raise Mismatch(f"outputs {outputs}")

    def reset(self):
        """Drop the window."""
        for _, engine, _ in self.runs:
            engine.reset_window()
        self.in_window = 0

    def forward_only(self):
        """A forward that nobody uses."""
        for model, engine, _ in self.runs:
            with engine.forward():
                model(torch.ones(1, 5))

    def set_lr(self):
        """Another learning rate."""
        self.lr = self.rng.choice([1e-3, 3e-3])
        for _, engine, _ in self.runs:
            for optimizer in engine.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = self.lr

    def reload(self):
        """Save and continue in new Engines; in half of the cases each reads the other's checkpoint."""
        crossed = self.rng.random() < 0.5
        self.reset()
        with tempfile.TemporaryDirectory() as own:
            folders = [own]
            dist.broadcast_object_list(folders)
            paths = [Path(folders[0]) / "shards", Path(own) / f"single-{self.rank}"]
            for (_, engine, _), path in zip(self.runs, paths, strict=True):
                engine.save(path)
            if crossed:  # all ranks read the single run of rank 0
                paths = [Path(folders[0]) / "single-0", paths[0]]
            dist.barrier()
            self.runs = self.build()
            for (_, engine, _), path in zip(self.runs, paths, strict=True):
                engine.load(path)
            dist.barrier()

    def remember(self):
        """Take the state of a moment."""
        if not self.in_window:
            folders = [tempfile.mkdtemp()]
            dist.broadcast_object_list(folders)
            paths = [Path(folders[0]) / "shards", Path(folders[0]) / f"single-{self.rank}"]
            for (_, engine, _), path in zip(self.runs, paths, strict=True):
                engine.save(path)
            dist.barrier()
            self.memory = paths

    def rewind(self):
        """Load it into the same Engines; the window in progress is dropped."""
        if self.memory is not None:
            for (_, engine, _), path in zip(self.runs, self.memory, strict=True):
                engine.load(path)
            self.in_window = 0

    def share(self):
        """The rounding that the layouts allow, relative to the largest number."""
        return 1e-5 if self.precision == "fp32" else 5e-3

    def compare(self):
        """Masters and EMA with one process, and copies on all ranks with each other."""
        (_, ours, _), (_, theirs, _) = self.runs
        pairs = [(ours.masters(), theirs.masters())]
        if self.ema is not None:
            pairs.append((ours.ema.averages, theirs.ema.averages))
        for mine, single in pairs:
            for name, value in single.items():
                whole = mine[name].full_tensor() if is_sharded(mine[name]) else mine[name]
                if float((whole - value).abs().max()) > self.share() * (1 + float(value.abs().max())):
                    raise Mismatch(f"{name} is {whole.tolist()}, of one process {value.tolist()}")
        counters = [(e.progress.attempts, e.progress.applied, e.scaler.get_scale()) for e in (ours, theirs)]
        if counters[0] != counters[1]:
            raise Mismatch(f"counters {counters}")
        copies = hashed(*(p for p in ours.params.values() if not is_sharded(p)))
        texts = [None] * self.num_ranks
        dist.all_gather_object(texts, f"{copies} {counters}")
        if len(set(texts)) > 1:
            raise Mismatch(f"the ranks differ: {texts}")


def main(first, number):
    """Run these seeds; the first that fails ends the program with its moves."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    logging.getLogger("halfstep").setLevel(logging.ERROR)
    for seed in range(first, first + number):
        rng, moves = random.Random(seed), []
        pair = Pair(rng)
        try:
            for _ in range(14):
                moves.append(rng.choice(MOVES))
                getattr(pair, moves[-1])()
                pair.compare()
        except Exception:
            print(f"seed {seed}, rank {dist.get_rank()}: {pair}\n{moves}\n{traceback.format_exc()}", flush=True)
            os._exit(1)  # without waiting for the other ranks, which may be inside a collective
        for _, engine, _ in pair.runs:
            engine.close()
    print(f"rank {dist.get_rank()}: {number} runs", flush=True)
    dist.barrier()
    os._exit(0)  # gloo may abort while it is taken down, if the other rank's connections close first


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
