"""Validation: loss and metric over the validation split."""

from __future__ import annotations

import torch
from torch import nn

from halfstep.backends.context import RunContext
from halfstep.checkpoint.rng import restore_rng, rng_state
from halfstep.engine.engine import Engine
from halfstep.jobs.job import Job
from halfstep.train.stream import DataStream, batch_size_of, to_device

__all__ = ["validate"]


def validate(
    job: Job, run: RunContext, model: nn.Module, engine: Engine, data: DataStream, epoch: int
) -> dict[str, float]:
    """Mean loss and metric, weighted by batch size; with EMA weights if the engine has them.

    Random numbers that validation draws (iterating a DataLoader draws one) are restored, so that when and how often a
    run is validated does not change its training.
    """
    random_numbers = rng_state()
    loss_sum = torch.zeros((), device=run.device, dtype=torch.float64)
    metric_sum = torch.zeros((), device=run.device, dtype=torch.float64)
    total = 0
    arguments = {"model": model, "epoch": epoch, "split": "val"}
    with engine.evaluate(ema=engine.ema is not None):
        for raw in data.batches(epoch):
            batch = to_device(raw, run.device)
            size = batch_size_of(batch, run.batch_size)
            loss_sum += job.call("loss", run, batch=batch, **arguments).detach().double() * size
            if job.metric is not None:
                metric = torch.as_tensor(job.call("metric", run, batch=batch, **arguments), device=run.device)
                metric_sum += metric.double() * size
            total += size
    restore_rng(random_numbers)
    values = {"loss": (loss_sum / total).item()}
    if job.metric is not None:
        values["metric"] = (metric_sum / total).item()
    return values
