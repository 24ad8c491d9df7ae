"""One rank of a run: its process group, and what it measures together with the others.

A process that no other rank waits for (`single`) has no group, and every function here returns its own values.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from halfstep.backends.context import RunContext
from halfstep.backends.fsdp import FSDP
from halfstep.backends.group import open_group, pick_rank_device
from halfstep.backends.launch import read_launch
from halfstep.backends.ranks import ranks_of
from halfstep.comparison.measurements import Measurements
from halfstep.comparison.settings import CompareSettings
from halfstep.comparison.spec import TrialSpec
from halfstep.jobs.job import Job
from halfstep.train.build import batch_per_rank

__all__ = ["Member", "backend_of", "join_ranks", "single_member"]


class Member:
    """The context of this rank and its messages to the others; alone where there are none."""

    def __init__(self, context: RunContext, timeout_seconds: float = 600) -> None:
        self.context = context
        self.ranks = ranks_of(context, timeout_seconds)

    @property
    def several(self) -> bool:
        """Whether there are other ranks."""
        return self.ranks.several

    @property
    def is_main(self) -> bool:
        """Whether this rank writes the run file."""
        return self.ranks.is_main

    def wait(self) -> None:
        """Wait until every rank is here."""
        self.ranks.gather(None)

    def digest(self, own: str) -> str:
        """The digest of all ranks, from that of each."""
        digests = self.ranks.gather(own)
        return own if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()

    def mean_losses(self, losses: list[float], weights: list[int]) -> list[float]:
        """The losses of all ranks step by step, weighted by their examples; a rank without examples does not count."""
        if not self.several:
            return losses
        everyone = self.ranks.gather((losses, weights))
        means = []
        for step in range(min(len(own) for own, _ in everyone)):
            pairs = [(own[step], sizes[step]) for own, sizes in everyone if sizes[step]]
            means.append(sum(loss * size for loss, size in pairs) / sum(size for _, size in pairs))
        return means

    def any_of(self, masks: dict[str, Tensor]) -> dict[str, Tensor]:
        """Where a mask is set on any rank; all ranks have the same names."""
        if not self.several:
            return masks
        numbers = {name: mask.to(torch.uint8) for name, mask in masks.items()}
        for number in numbers.values():
            dist.all_reduce(number, dist.ReduceOp.MAX, group=self.context.process_group)
        return {name: number != 0 for name, number in numbers.items()}

    def combine(self, measured: Measurements) -> Measurements:
        """The measurements of the run: memory of the largest rank, and what was found about skipped steps on any."""
        if not self.several:
            return measured
        everyone = self.ranks.gather(measured.as_dict())
        peaks = [values["peak_bytes"] for values in everyone]
        largest = Measurements.from_dict(everyone[peaks.index(max(peaks))])
        causes = {
            (cause.step, cause.rank, cause.sentence): cause
            for values in everyone
            for cause in Measurements.from_dict(values).skip_causes or ()
        }
        return replace(
            measured,
            peak_bytes=max(peaks),
            base_bytes=largest.base_bytes,
            allocated=largest.allocated,
            rank_peaks=tuple(peaks),
            skip_causes=tuple(causes.values()) or None,
        )


def single_member(spec: TrialSpec) -> Member:
    """The only process of a run."""
    return Member(RunContext.single(spec.settings.device, seed=spec.seed, batch_size=spec.batch))


@contextlib.contextmanager
def join_ranks(spec: TrialSpec) -> Iterator[Member]:
    """This process as a rank of its run, inside the process group; or alone."""
    settings = spec.settings
    if settings.strategy == "single":
        yield single_member(spec)
        return
    launch = read_launch()
    device = pick_rank_device(launch, settings.device)
    with open_group(launch, device, timeout_seconds=settings.timeout, always=True) as context:
        batch = batch_per_rank(spec.batch, context.world_size)
        yield Member(replace(context, seed=spec.seed, batch_size=batch), settings.timeout)


def backend_of(settings: CompareSettings, job: Job) -> Any:
    """The Engine's backend for a row of Halfstep's own."""
    return FSDP(shard=job.shard) if settings.strategy == "fsdp" and job.shard else settings.strategy
