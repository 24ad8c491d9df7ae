"""One rank of training runs on shards, and of the curves of ddp, fsdp and ZeRO: every case prints one line of JSON.

usage: RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python tests/sharded_program.py FOLDER CASE...
"""

import contextlib
import json
import logging
import os
import random
import sys
import weakref
from pathlib import Path

import torch
import torch.distributed.fsdp

from halfstep.backends.group import open_group
from halfstep.backends.launch import read_launch
from halfstep.backends.ranks import ranks_of
from halfstep.checkpoint.rng import seed_everything
from halfstep.precision.policy import Policy
from halfstep.train import TrainConfig, train
from halfstep.train.recorder import SilentObserver
from halfstep.train.sharded import build_on_rank_0, shard_model
from launch_job import make_job
from launch_program import run
from rank_cases import hashed
from sharded_jobs import BUILT_ON, Model, PlainAttribute, ReadsValues, Uneven, curve_job, full_job

CURVE = {"batch": 8, "accumulate": 2, "steps": 50, "watch": None, "device": "cpu", "timeout": 60}
CURVE |= {"eval_every": 99, "save_every": 1000}  # neither but at the end
PRECISIONS = ("fp32", "bf16", "fp16")
FP16_FACTOR = 3000.0  # of the loss: the first scales overflow


@contextlib.contextmanager
def counted_units(model):
    """Whole parameters of the blocks that exist before each call of fully_shard."""
    whole = [weakref.ref(p) for block in model.blocks for p in block.linear.parameters()]
    counts, own = [], torch.distributed.fsdp.fully_shard

    def counting(*args, **kwargs):
        counts.append(sum(ref() is not None for ref in whole))
        return own(*args, **kwargs)

    torch.distributed.fsdp.fully_shard = counting
    try:
        yield counts
    finally:
        torch.distributed.fsdp.fully_shard = own


def initial(context, folder):
    """Whether each kind of model starts from the numbers of one process, and where it was built."""
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("halfstep").addHandler(handler)
    values = {}
    for kind in (Model, ReadsValues, PlainAttribute):
        BUILT_ON.clear()
        seed_everything(0)
        model = build_on_rank_0(full_job(kind), context, ranks_of(context, 60))
        built_on = list(BUILT_ON)
        with counted_units(model) as alive:
            shard_model(model, full_job(kind), context, Policy.parse("bf16-lean"))
        seed_everything(0)
        alone = kind()
        whole = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in model.named_parameters()}
        own = dict(alone.named_parameters())
        buffers = dict(model.named_buffers(remove_duplicate=False))
        values[kind.__name__] = {
            "equal": whole.keys() == own.keys() and all(hashed(whole[n]) == hashed(own[n]) for n in own),
            "buffers": all(hashed(buffers[n]) == hashed(b) for n, b in alone.named_buffers(remove_duplicate=False)),
            "shared": model.table is model.out.shared and model.head.weight is model.tied.weight,
            "flag": getattr(model.out.bias, "no_decay", False) and not model.frozen.requires_grad,
            "local": sum(p.to_local().numel() for p in model.parameters() if hasattr(p, "to_local")),
            "num_params": sum(p.numel() for p in model.parameters() if hasattr(p, "to_local")),
            "built_on": built_on,
            "alive": alive,
        }
    return values | {"messages": messages}


def resumes(context, folder):
    """A run with dropout, EMA, a metric and saves in the background, stopped by a signal to one rank and resumed."""
    settings = {"backend": "fsdp", "ema": 0.9, "async_save": True}
    undisturbed = run(context, folder / "undisturbed", **settings)
    os.environ["FAULT"] = "term:1:5"
    stopped = run(context, folder / "stopped", **settings)
    os.environ.pop("FAULT")
    resumed = run(context, folder / "stopped", resume=True, **settings)
    return {"undisturbed": undisturbed, "stopped": stopped, "resumed": resumed}


def uneven(context, folder):
    """Validation with different numbers of batches on each rank."""
    return run(context, folder / "uneven", make_job(dropout=0.0, data=Uneven), backend="fsdp", epochs=1)


def trains(context, folder):
    """A model that has everything, with 16-bit weights."""
    steps = Steps()
    config = TrainConfig(batch=8, epochs=2, watch=None, device="cpu", backend="fsdp", ema=0.9)
    train(full_job(), config, precision="bf16-lean", out=folder / "trains", ranks=context, observer=steps)
    return {"losses": steps.losses, "parameters": steps.rows["parameters"]}


def rejected(context, folder):
    """What cannot run is an error on every rank."""

    def fails(rank):
        if rank == 0:
            raise ValueError("no such file")
        return Model()

    over_params = full_job(loss=lambda model, batch, params: sum(p.square().sum() for p in params))
    jobs = {"rank 0": full_job(fails), "params": over_params, "shard": full_job(shard="layers.*")}
    return {name: run(context, folder / name, job, backend="fsdp")["error"] for name, job in jobs.items()}


class Steps(SilentObserver):
    """Notes the loss, the loss scale and the decision of every step of this rank."""

    def __init__(self):
        self.losses, self.decisions, self.rows = [], [], {}

    def started(self, engine, total_steps):
        """The run starts."""
        self.rows = dict(engine.truth().rows)

    def stepped(self, line):
        """The result of a step has arrived."""
        self.losses.append(line.loss)
        self.decisions.append((line.skipped, line.scale))


def curve(out, precision, *, order=None, context=None, **settings):
    """One run of the job that backends are compared with."""
    steps = Steps()
    is_fp16 = precision == "fp16"
    config = TrainConfig(**(CURVE | settings | ({"steps": 25} if is_fp16 else {})))
    job = curve_job(order, factor=FP16_FACTOR if is_fp16 else 1.0)
    train(job, config, precision=precision, out=out, ranks=context, observer=steps)
    return {"losses": steps.losses, "decisions": steps.decisions, "backend": steps.rows.get("backend")}


def curves(context, folder):
    """Every precision on both backends."""
    return {
        f"{backend} {precision}": curve(folder / f"{backend}-{precision}", precision, context=context, backend=backend)
        for backend in ("ddp", "fsdp")
        for precision in PRECISIONS
    }


def zero_curves(context, folder):
    """Every precision on every ZeRO stage, with buckets and partitions smaller than the model."""
    values = {}
    for stage in (0, 1, 2, 3):
        path, own = folder / f"zero{stage}.json", folder / f"zero{stage}-{context.rank}.json"
        zero = {"stage": stage, "reduce_bucket_size": 60}
        if stage == 3:
            zero |= {"stage3_param_persistence_threshold": 0}  # every weight is partitioned, small ones too
        own.write_text(json.dumps({"zero_optimization": zero}))
        own.replace(path)  # both ranks write the same
        settings = {"backend": "deepspeed", "ds_config": str(path)}
        for precision in PRECISIONS:
            out = folder / f"zero{stage}-{precision}"
            values[f"zero{stage} {precision}"] = curve(out, precision, context=context, **settings)
    return values


def moved(context, folder):
    """Runs without dropout that start on one backend or number of ranks and resume on another; `from-single` is there already."""
    values, job = {}, make_job(dropout=0.0)
    for start, end in (("single", "fsdp"), ("ddp", "fsdp"), ("fsdp", "ddp")):
        out = folder / f"from-{start}"
        if start != "single":
            run(context, out, job, backend=start, steps=6)
        values[start] = run(context, out, job, resume=True, backend=end)
    run(context, folder / "to-single", job, backend="fsdp", steps=6)
    return values


def resumed(context, folder):
    """The run that two ranks have stopped, on this number of ranks."""
    return run(context, folder / "to-four", make_job(dropout=0.0), resume=True, backend="fsdp")


def main():
    """Print the cases of this rank."""
    with open_group(read_launch(), torch.device("cpu"), timeout_seconds=60) as context:
        for name in sys.argv[2:]:
            result = globals()[name](context, Path(sys.argv[1]))
            print(json.dumps({"case": name, "random": random.random()} | result), flush=True)


if __name__ == "__main__":
    main()
