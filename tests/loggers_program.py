"""Runs that log to W&B or trackio, in a process of their own: both libraries change the environment and print."""

import json
import math
import random
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

from halfstep.integrations.loggers import TrackioLogger, WandbLogger, parse_logger
from halfstep.jobs.job import Job
from halfstep.train import TrainConfig, train
from halfstep.train.writer import Histogram
from halfstep.watching.events import Event

SKIP = Event("skip", 3, "skipped, gradients not finite in head.weight.", {"consecutive": 1})


def small_job(bad=None):
    """Six steps of a small model, one of them with a NaN."""
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(48, 6, generator=g), torch.randint(0, 3, (48,), generator=g)
    if bad is not None:
        x[8 * bad, 2] = math.nan
    return Job(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3)),
        data=lambda batch_size: list(zip(x.split(batch_size), y.split(batch_size), strict=True)),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
    )


def run(out, *writers, bad=None, steps=6, resume=False):
    """Train in fp16."""
    config = TrainConfig(batch=8, steps=steps, watch=2, device="cpu")
    return train(small_job(bad), config, precision="fp16", out=out, writers=writers, resume=resume)


def wandb_rows(folder):
    """The history of the offline runs of W&B in a folder: blocks of 32 KiB with the records of LevelDB's log format."""
    from wandb.proto import wandb_internal_pb2

    rows = []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        data, position, parts = file.read_bytes(), 7, b""
        while position + 7 <= len(data):
            left = 32768 - position % 32768
            if left < 7:  # too short for a header
                position += left
                continue
            size, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
            parts += data[position + 7 : position + 7 + size]
            position += 7 + size
            if kind in {1, 4}:  # a whole record, or its last part
                record = wandb_internal_pb2.Record()
                record.ParseFromString(parts)
                parts = b""
                if record.WhichOneof("record_type") == "history":
                    items = record.history.item
                    rows.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
    return rows


def write_backwards(logger):
    """Write steps that go back; no value drawn afterwards may depend on it."""
    logger.scalars({"train/loss": 5.0}, 5)
    state = random.getstate()
    logger.scalars({"train/loss": 6.0}, 6)
    logger.histogram("exponents/a", Histogram((0.0, 1.0, 2.0), (3, 4)), 6)
    logger.text("truth", "a table", 6)
    logger.scalars({"train/loss": 3.0}, 3)
    assert random.getstate() == state


def log_to_wandb(out):
    """A run with a resume; steps that go back; and an outlet in a run that is open."""
    import wandb

    run(out / "run", parse_logger("wandb:mine"), steps=4, bad=1)
    run(out / "run", parse_logger("wandb:mine"), steps=6, bad=1, resume=True)
    back = WandbLogger("mine")
    write_backwards(back)
    back.close()
    (out / "theirs").mkdir()
    own = wandb.init(project="theirs", dir=str(out / "theirs"))
    outlet = WandbLogger()
    outlet(SKIP)
    outlet.close()
    stays_open = wandb.run is own
    own.finish()
    wandb.teardown()  # its service writes the files in the background
    rows = {"run": wandb_rows(out / "run"), "back": wandb_rows(out), "outlet": wandb_rows(out / "theirs")}
    return rows | {"stays_open": stays_open}


def log_to_trackio(out):
    """A run with a resume, an outlet that starts a run, and one in a run that is open."""
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    run(out / "run", parse_logger("trackio:mine"), steps=4, bad=1)
    run(out / "run", parse_logger("trackio:mine"), steps=6, bad=1, resume=True)
    alone = TrackioLogger("alone")
    write_backwards(alone)
    alone(SKIP)
    alone.close()
    sys.stdout, stdout = sys.stderr, sys.stdout
    trackio.init(project="theirs", embed=False)
    outlet = TrackioLogger()
    outlet(SKIP)
    outlet.close()
    trackio.log({"own": 1})
    trackio.finish()
    sys.stdout = stdout
    projects = ("mine", "alone", "theirs")
    return {p: [SQLiteStorage.get_logs(p, name) for name in SQLiteStorage.get_runs(p)] for p in projects}


if __name__ == "__main__":
    results = {"wandb": log_to_wandb, "trackio": log_to_trackio}[sys.argv[1]](Path(sys.argv[2]))
    print(json.dumps(results))
