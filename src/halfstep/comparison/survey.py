"""What is looked at before anything is compared: the machine, and whether the job can be compared at all.

The survey runs in a process of its own and takes one fp32 step. It finds the mistakes that would otherwise show in
every row at once, and those that would not show at all: a job whose weights or batches differ from one process to the
next compares apples with pears, and one that ignores the batch size has another throughput than its user thinks.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from halfstep.backends.context import RunContext
from halfstep.checkpoint.rng import seed_everything
from halfstep.comparison.clock import largest_resident_bytes
from halfstep.comparison.loops import build_parts
from halfstep.comparison.settings import CompareSettings
from halfstep.comparison.trial import batch_size_of
from halfstep.errors import SettingError
from halfstep.hardware.accelerator import pick_device
from halfstep.hardware.environment import environment
from halfstep.hardware.measure import measure_matmuls
from halfstep.hardware.probe import probe
from halfstep.hardware.tf32 import set_tf32
from halfstep.jobs.job import Job, trainable
from halfstep.jobs.targets import Target
from halfstep.train.stream import DataStream, fingerprint, to_device

__all__ = ["DEFAULT_BATCH", "survey"]

DEFAULT_BATCH = 64


def survey(target: Target, settings: CompareSettings) -> dict[str, Any]:
    """Machine, job and notes, as plain values."""
    device = _usable_device(settings.device)
    batch = settings.batch or dict(target.defaults).get("batch", DEFAULT_BATCH)
    hardware = probe()
    notes: list[str] = []
    step = _one_step(target.job, settings, batch, device, notes)
    return {
        "target": target.name,
        "source": target.source,
        "data_dir": target.data_dir,
        "batch": batch,
        "device": device.type,
        "machine": hardware.name if device.type in {hardware.kind, "cuda"} else device.type,
        "support": {name: [hardware.support[name], hardware.support.why(name)] for name in hardware.support},
        "environment": environment(),
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "matmul": [dataclasses.asdict(m) for m in measure_matmuls(seconds=1.0)] if _measurable(device) else [],
        "resident_bytes": largest_resident_bytes(),
        "has_metric": target.job.metric is not None,
        "notes": notes,
        **step,
    }


def _usable_device(name: str) -> torch.device:
    try:
        device = pick_device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise SettingError(
            f"device={name!r} cannot be used here ({str(error).splitlines()[0]}); write auto, cpu or cuda."
        ) from error
    return device


def _measurable(device: torch.device) -> bool:
    """`measure_matmuls` measures the machine's accelerator if it has one."""
    return device.type != "cpu" or not torch.accelerator.is_available()


def _one_step(
    job: Job, settings: CompareSettings, batch: int, device: torch.device, notes: list[str]
) -> dict[str, Any]:
    """One fp32 forward and backward: its operations, and what the job does that a comparison has to know."""
    run = RunContext(device, seed=settings.seed, batch_size=batch)
    if device.type == "cuda":
        set_tf32(False)
    prints = []
    for _ in range(2):
        seed_everything(settings.seed)
        parts = build_parts(job, run)
        weights = fingerprint([p for _, p in trainable(parts.model)])
        raw = next(iter(DataStream(job, run, split="train").batches(0)))
        prints.append((weights, fingerprint(raw)))
    found: dict[str, Any] = {
        "same_weights": prints[0][0] == prints[1][0],
        "same_batches": prints[0][1] == prints[1][1],
        "num_params": sum(p.numel() for _, p in trainable(parts.model)),
        "samples": batch_size_of(raw),
        "flops_per_step": None,
    }
    _note(found, batch, notes)
    counter = FlopCounterMode(display=False)
    try:
        parts.model.train()
        with counter:
            loss = job.call("loss", run, model=parts.model, batch=to_device(raw, device), epoch=0, split="train")
            loss.backward()
        _validate_once(job, parts.model, run)
    except torch.OutOfMemoryError:
        notes.append("One fp32 step does not fit in memory here, so its operations could not be counted.")
    else:
        found["flops_per_step"] = counter.get_total_flops()
    return found


def _validate_once(job: Job, model: Any, run: RunContext) -> None:
    """One batch of validation, which comes last in a run: what is wrong with it must not cost the training before it."""
    raw = next(iter(DataStream(job, run, split="val").batches(0)))
    model.eval()
    with torch.no_grad():
        for name in ("loss", "metric") if job.metric is not None else ("loss",):
            job.call(name, run, model=model, batch=to_device(raw, run.device), epoch=0, split="val")


def _note(found: dict[str, Any], batch: int, notes: list[str]) -> None:
    if not found["same_weights"]:
        notes.append(
            "The job is not deterministic: the same seed gave different initial weights twice. Speed and memory are comparable, "
            "losses and gradients are not. Draw initial weights from torch's generator, which is seeded for every run."
        )
    if not found["same_batches"]:
        notes.append(
            "The job is not deterministic: the same seed gave a different first batch twice. Speed and memory are comparable, "
            "losses and gradients are not. Shuffle by torch's generator, or name the argument `seed` in the job's data."
        )
    samples = found["samples"]
    if samples is not None and samples != batch:
        notes.append(
            f"The job ignores the batch size: batches of {batch} were asked for and hold {samples}. Samples per second count "
            f"what the batches hold; name the argument `batch_size` in the job's data to change it."
        )
