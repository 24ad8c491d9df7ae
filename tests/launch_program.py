"""One rank of training runs: every case prints what happened on this rank as one line of JSON.

usage: RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python tests/launch_program.py FOLDER
"""

import hashlib
import json
import os
import random
import sys
from pathlib import Path

import torch

from halfstep.backends.group import open_group
from halfstep.backends.launch import read_launch
from halfstep.backends.ranks import ranks_of
from halfstep.checkpoint.directory import load_checkpoint
from halfstep.errors import HalfstepError
from halfstep.train import TrainConfig, train
from launch_job import Data, make_job

CONFIG = {"batch": 8, "epochs": 2, "save_every": 3, "watch": None, "device": "cpu", "timeout": 60}


class Broken(Data):
    """One batch of rank 1 is infinite."""

    def __iter__(self):
        for number, (x, y) in enumerate(super().__iter__()):
            yield (x * float("inf") if number == 4 and self.rank == 1 else x), y


def digest(outcome):
    """A hash of the weights of the latest checkpoint."""
    weights = load_checkpoint(outcome.checkpoint).weights
    return hashlib.sha256(b"".join(weights[name].float().numpy().tobytes() for name in sorted(weights))).hexdigest()


def run(context, out, job=None, *, resume=False, **changed):
    """What one run reports on this rank."""
    try:
        outcome = train(
            job or make_job(),
            TrainConfig(**(CONFIG | changed)),
            precision="fp32",
            out=out,
            resume=resume,
            ranks=context,
        )
    except HalfstepError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    values = {"steps": outcome.steps, "stopped_by": outcome.stopped_by, "digest": digest(outcome)}
    return values | {"validation": outcome.validation, "loss": outcome.loss, "random": random.random()}


def cases(context, folder):
    """The name and the result of every case."""
    rank = context.rank
    yield "undisturbed", run(context, folder / "undisturbed")
    yield "exact", run(context, folder / "exact", make_job(dropout=0.0))
    os.environ["FAULT"] = "term:1:5"
    yield "stopped", run(context, folder / "stopped")
    os.environ.pop("FAULT")
    yield "resumed", run(context, folder / "stopped", resume=True)
    yield "other setting", run(context, folder / "setting", max_norm=1.0 + rank)
    wider = make_job(model=lambda rank: torch.nn.Linear(8, 2 + rank))
    yield "other model", run(context, folder / "model", wider)
    yield "odd batch", run(context, folder / "odd", batch=7)
    (folder / "file").touch(exist_ok=True)
    yield "unwritable", run(context, folder / "file" / "run")
    broken = make_job(data=Broken)
    yield "overflow", run(context, folder / "overflow", broken, watch=100, epochs=1)
    ranks = ranks_of(context, 60)
    yield "sums", {"sums": ranks.sums(1.0, rank), "largest": ranks.largest(rank), "from_main": ranks.broadcast(rank)}


def main():
    """Print the cases of this rank."""
    launch = read_launch()
    with open_group(launch, torch.device("cpu"), timeout_seconds=60) as context:
        for name, result in cases(context, Path(sys.argv[1])):
            print(json.dumps({"case": name} | result), flush=True)


if __name__ == "__main__":
    main()
