"""A small job with dropout for runs on several ranks, and faults that the environment asks for.

FAULT is `WHAT:RANK:STEP[:ATTEMPT]`, or several of them with commas: in that attempt of the launch (by default the first, 0), the
rank kills itself, hangs, raises or terminates itself when it computes the loss of that step of its process.
"""

import os
import signal
import time

import torch
import torch.nn.functional as F

import halfstep

EXAMPLES = {"train": 64, "val": 22}


class Data:
    """The batches of one rank: slices of one order, which depends on seed and epoch alone."""

    def __init__(self, batch_size, split, seed, epoch, rank, world_size):
        generator = torch.Generator().manual_seed(1000 * seed + epoch + (500 if split == "val" else 0))
        x = torch.randn(EXAMPLES[split], 8, generator=generator)
        self._all, self._size = (x, (x.sum(1) > 0).long()), batch_size * world_size
        self.rank, self._world_size = rank, world_size

    def __len__(self):
        return len(self._all[0].split(self._size))

    def __iter__(self):
        for batch in zip(*(part.split(self._size) for part in self._all), strict=True):
            yield tuple(part.tensor_split(self._world_size)[self.rank] for part in batch)


class Faults:
    """Counts the steps of this process and does what FAULT asks for."""

    def __init__(self):
        self.steps = 0

    def step(self):
        self.steps += 1
        here = [os.environ.get("RANK"), str(self.steps), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")]
        faults = [(*fault.split(":"), "0")[:4] for fault in os.environ.get("FAULT", "none:0:0").split(",")]
        what = next((what for what, *place in faults if place == here), None)
        if what is None:
            return
        if what == "hang":
            time.sleep(600)
        if what == "raise":
            raise ValueError("sample 17 is broken")
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "term": signal.SIGTERM}[what])


def make_job(*, dropout=0.1, **changed):
    """The job; fields may be replaced."""
    faults = Faults()

    def loss(model, batch, split):
        if split == "train":
            faults.step()
        return F.cross_entropy(model(batch[0]), batch[1])

    def model():
        layers = torch.nn.Linear(8, 16), torch.nn.Dropout(dropout), torch.nn.ReLU(), torch.nn.Linear(16, 2)
        return torch.nn.Sequential(*layers)

    fields = {
        "model": model,
        "data": Data,
        "loss": loss,
        "optimizer": lambda params: torch.optim.AdamW(params, lr=1e-2),
        "metric": lambda model, batch: (model(batch[0]).argmax(-1) == batch[1]).float().mean(),
    }
    return halfstep.Job(**(fields | changed))


job = make_job()
