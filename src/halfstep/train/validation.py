"""Validation: loss and metric over the validation split."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from halfstep.backends.context import RunContext
from halfstep.backends.ranks import Ranks
from halfstep.checkpoint.rng import restore_rng, rng_state
from halfstep.engine.engine import Engine
from halfstep.events import log_warning
from halfstep.jobs.job import Job
from halfstep.train.stream import DataStream, batch_size_of, to_device

__all__ = ["MAX_UNSIZED_BATCHES", "ValidationStopped", "padded_batches", "validate"]

MAX_UNSIZED_BATCHES = 1000  # of data without a length, which may be endless


class ValidationStopped(Exception):
    """A signal ended the validation before it had a result."""


def validate(
    job: Job,
    run: RunContext,
    model: nn.Module,
    engine: Engine,
    data: DataStream,
    epoch: int,
    *,
    limit: int | None = None,
    stopped: Callable[[], bool] = lambda: False,
    ranks: Ranks | None = None,
) -> dict[str, float]:
    """Mean loss and metric, weighted by batch size; with EMA weights if the engine has them.

    Every rank computes its batches, and the means are over all of them. Their numbers may differ, unless the forward itself
    exchanges messages (FSDP): then a rank that has none left repeats its last batch with weight 0.

    At most `limit` batches are used; None means all, or `MAX_UNSIZED_BATCHES` of data without a length. Returns nothing for
    a job without validation data; raises ValidationStopped once `stopped()` is true. Random numbers that validation draws
    (iterating a DataLoader draws one) are restored, so that when and how often a run is validated does not change its
    training.
    """
    ranks = ranks or Ranks()
    random_numbers = rng_state()
    try:
        if not job.has_validation or not data.exists(epoch):
            return {}
        loss_sum = torch.zeros((), device=run.device, dtype=torch.float64)
        metric_sum = torch.zeros((), device=run.device, dtype=torch.float64)
        total, halted = 0, False
        together = ranks.several and engine.backend.shards
        arguments = {"model": model, "epoch": epoch, "split": "val"}
        with engine.evaluate(ema=engine.ema is not None):
            batches = _limited(data, epoch, limit)
            for raw, counts in padded_batches(batches, ranks, stopped) if together else _all(batches):
                if not together and (halted := stopped()):
                    break
                batch = to_device(raw, run.device)
                size = batch_size_of(batch, run.batch_size) if counts else 0
                loss = job.call("loss", run, batch=batch, **arguments).detach()
                metric = None if job.metric is None else job.call("metric", run, batch=batch, **arguments)
                if size == 0:
                    continue  # a mean over no examples is NaN
                loss_sum += loss.double() * size
                if metric is not None:
                    metric_sum += torch.as_tensor(metric, device=run.device).double() * size
                total += size
    finally:
        restore_rng(random_numbers)
    sums = [loss_sum.item(), metric_sum.item(), float(total), float(halted or (together and stopped()))]
    all_loss, all_metric, all_total, num_stopped = ranks.sums(*sums)
    if num_stopped:
        raise ValidationStopped
    values = {"loss": all_loss / all_total}
    if job.metric is not None:
        values["metric"] = all_metric / all_total
        if not math.isfinite(values["metric"]):
            log_warning(f"The validation metric is {values['metric']}, so it cannot rank the checkpoint of this epoch.")
    return values


def _limited(data: DataStream, epoch: int, limit: int | None) -> Iterator[Any]:
    """The validation batches; a warning if there are more of them than are used."""
    size = data.num_batches(epoch)
    most = limit if limit is not None else size if size is not None else MAX_UNSIZED_BATCHES
    for number, raw in enumerate(data.batches(epoch)):
        if number == most:
            if limit is None:  # a limit that the user set needs no warning
                reason = "its data has no length" if size is None else f"len() of its data is {size}"
                log_warning(
                    f"Validation used the first {most} batches, because {reason} and there are more. "
                    "Set the number of batches with --set eval_batches=N."
                )
            return
        yield raw


def _all(batches: Iterator[Any]) -> Iterator[tuple[Any, bool]]:
    return ((raw, True) for raw in batches)


def padded_batches(
    batches: Iterator[Any], ranks: Ranks, stopped: Callable[[], bool] = lambda: False
) -> Iterator[tuple[Any, bool]]:
    """The batches, and once they have ended the last one again without effect, until those of all ranks have ended."""
    raw, more = None, True
    while True:
        following = next(batches, _END) if more else _END
        more = following is not _END
        raw = following if more else raw
        num_left, num_stopped = ranks.sums(float(more), float(stopped()))
        if num_left == 0 or num_stopped > 0:
            return
        yield raw, more


_END = object()
