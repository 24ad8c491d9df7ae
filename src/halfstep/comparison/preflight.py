"""Checks before anything is compared: which machine this is, and whether the job can be compared at all.

The preflight runs in its own process and takes one fp32 step. It catches mistakes that would otherwise show up in every
row at once, and those that would not show up at all: a job whose weights or batches differ from one process to the next
compares apples with oranges, and one that ignores the batch size has a different throughput than its user thinks.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from halfstep.backends.context import RunContext
from halfstep.checkpoint.rng import seed_everything
from halfstep.comparison.clock import largest_resident_bytes
from halfstep.comparison.settings import CompareSettings
from halfstep.comparison.survey import Survey
from halfstep.comparison.training_loop import build_parts
from halfstep.errors import SettingError
from halfstep.hardware.accelerator import pick_device
from halfstep.hardware.environment import environment
from halfstep.hardware.measure import measure_matmuls
from halfstep.hardware.probe import probe
from halfstep.hardware.tf32 import set_tf32
from halfstep.jobs.job import Job, trainable
from halfstep.jobs.targets import Target
from halfstep.train.build import batch_per_rank
from halfstep.train.stream import DataStream, batch_size_of, fingerprint, to_device

__all__ = ["DEFAULT_BATCH", "run_preflight"]

DEFAULT_BATCH = 64


@dataclass(frozen=True)
class _JobFacts:
    """What one step shows about a job."""

    same_weights: bool
    same_batches: bool
    num_params: int
    samples: int | None
    flops_per_step: int | None


def run_preflight(target: Target, settings: CompareSettings) -> Survey:
    """Survey machine and job; raises what would fail in every row."""
    device = _usable_device(settings.device)
    _check_devices(device, settings)
    if settings.gpu is not None and device.type != "cpu":
        raise SettingError(
            f"gpu={settings.gpu!r} has no effect here: on a {device.type} device the peak memory of that device is measured. Remove "
            "it, or add --set device=cpu."
        )
    batch = settings.batch or dict(target.defaults).get("batch", DEFAULT_BATCH)
    hardware = probe()
    facts, schedules = _one_step(target.job, settings, batch, device)
    return Survey(
        target=target.name,
        source=target.source,
        data_dir=target.data_dir,
        batch=batch,
        device=device.type,
        machine=hardware.name if device.type in {hardware.kind, "cuda"} else device.type,
        support={name: (hardware.support[name], hardware.support.why(name)) for name in hardware.support},
        environment=environment(),
        threads=torch.get_num_threads() if device.type == "cpu" else None,
        matmul=tuple(dataclasses.asdict(m) for m in measure_matmuls(seconds=1.0)) if _measurable(device) else (),
        resident_bytes=largest_resident_bytes(),
        has_metric=target.job.metric is not None,
        notes=tuple(_notes(facts, batch, unscheduled=target.job.scheduler is not None and not schedules)),
        settings=settings,
        **dataclasses.asdict(facts),
    )


def _usable_device(name: str) -> torch.device:
    try:
        device = pick_device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise SettingError(
            f"device={name!r} cannot be used here ({str(error).splitlines()[0]}); write auto, cpu or cuda."
        ) from error
    return device


def _check_devices(device: torch.device, settings: CompareSettings) -> None:
    """Raise if there is not one device for each rank; CPU ranks share theirs."""
    count = settings.ranks if device.type == "cpu" else torch.accelerator.device_count()
    if settings.ranks > count:
        raise SettingError(
            f"--ranks {settings.ranks} needs as many {device.type} devices, and torch sees {count} "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')}). Use --ranks {count}, or --set device=cpu."
        )


def _measurable(device: torch.device) -> bool:
    """`measure_matmuls` measures the machine's accelerator if it has one."""
    return device.type != "cpu" or not torch.accelerator.is_available()


def _one_step(job: Job, settings: CompareSettings, batch: int, device: torch.device) -> tuple[_JobFacts, bool]:
    """One fp32 forward and backward: the properties of the job that a comparison depends on, and whether it has a schedule.

    On several ranks it is the part of rank 0, and what it counts is multiplied.
    """
    num_ranks = settings.ranks
    own = batch_per_rank(batch, num_ranks)
    run = RunContext(device, world_size=num_ranks, seed=settings.seed, batch_size=own)
    if device.type == "cuda":
        set_tf32(False)
    digests = []
    for _ in range(2):
        seed_everything(settings.seed)
        parts = build_parts(job, run)
        weights = fingerprint([p for _, p in trainable(parts.model)])
        raw = next(iter(DataStream(job, run, split="train").batches(0)))
        digests.append((weights, fingerprint(raw)))
    counter = FlopCounterMode(display=False)
    flops: int | None = None
    try:
        parts.model.train()
        with counter:
            loss = job.call("loss", run, model=parts.model, batch=to_device(raw, device), epoch=0, split="train")
            loss.backward()
        _validate_once(job, parts.model, run)
        flops = counter.get_total_flops() * num_ranks
    except torch.OutOfMemoryError:
        pass  # lower precisions may fit; the notes name it
    (first_weights, first_batch), (second_weights, second_batch) = digests
    samples = batch_size_of(raw)
    facts = _JobFacts(
        same_weights=first_weights == second_weights,
        same_batches=first_batch == second_batch,
        num_params=sum(p.numel() for _, p in trainable(parts.model)),
        samples=None if samples is None else samples * num_ranks,
        flops_per_step=flops,
    )
    return facts, parts.scheduler is not None


def _validate_once(job: Job, model: nn.Module, run: RunContext) -> None:
    """One validation batch. Validation comes last in a run, and a mistake in it must not cost the training before it."""
    stream = DataStream(job, run, split="val")
    if not job.has_validation or not stream.exists(0):
        return
    raw = next(iter(stream.batches(0)))
    model.eval()
    with torch.no_grad():
        for name in ("loss", "metric") if job.metric is not None else ("loss",):
            job.call(name, run, model=model, batch=to_device(raw, run.device), epoch=0, split="val")


def _notes(facts: _JobFacts, batch: int, *, unscheduled: bool) -> list[str]:
    notes = []
    if unscheduled:
        notes.append(
            "The job's scheduler is stepped with validation results, and a comparison validates once, after training: every row "
            "trained with the initial learning rate."
        )
    if not facts.same_weights:
        notes.append(
            "The job is not deterministic: the same seed gave different initial weights twice. Speed and memory are comparable, "
            "losses and gradients are not. Initialize weights from torch's generator, which is seeded for every run."
        )
    if not facts.same_batches:
        notes.append(
            "The job is not deterministic: the same seed gave a different first batch twice. Speed and memory are comparable, "
            "losses and gradients are not. Shuffle with torch's generator, or add a `seed` argument to the job's data function."
        )
    if facts.samples is not None and facts.samples != batch:
        notes.append(
            f"The job ignores the batch size: {batch} was requested, but its batches contain {facts.samples} examples. Samples per "
            "second count the actual examples; add a `batch_size` argument to the job's data function to change it."
        )
    if facts.flops_per_step is None:
        notes.append("One fp32 step does not fit in memory here, so its operations could not be counted.")
    return notes
