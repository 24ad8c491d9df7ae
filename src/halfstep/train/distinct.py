"""Whether every rank has its own part of the training data.

Data that does not know about ranks gives every rank the same examples: W ranks then do the work of one, W times. Two things
show it: the first batches of two ranks are equal, or each rank has a DataLoader over all samples of the same dataset (whose shuffled
first batches differ). Data that names `rank` or `world_size` may be right nevertheless, so it only gets a warning.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from halfstep.backends.context import RunContext
from halfstep.backends.ranks import Ranks
from halfstep.errors import SettingError
from halfstep.events import log_warning
from halfstep.jobs.job import Job, read_arguments

__all__ = ["check_distinct", "check_sampler", "samplers_of"]

_REMEDY = (
    "Name `rank` and `world_size` in the job's data and give each rank its part, e.g. DataLoader(dataset, batch_size, "
    "sampler=DistributedSampler(dataset, world_size, rank, seed=seed)), or for an IterableDataset itertools.islice(examples, rank, None, world_size)."
)


def samplers_of(loader: Any) -> list[Any]:
    """The samplers of a DataLoader, or of anything built like one."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    candidates = (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    return list({id(each): each for each in candidates if each is not None}.values())


def check_sampler(job: Job, loader: Any, run: RunContext) -> None:
    """Raise if a DistributedSampler was built for another rank or number of ranks."""
    for sampler in samplers_of(loader):
        if isinstance(sampler, DistributedSampler) and (sampler.rank, sampler.num_replicas) != (
            run.rank,
            run.world_size,
        ):
            raise SettingError(
                f"{job.describe('data')} has a DistributedSampler for rank {sampler.rank} of {sampler.num_replicas}, but this is rank {run.rank} of "
                f"{run.world_size}. Pass them on: DistributedSampler(dataset, num_replicas=world_size, rank=rank)."
            )


def check_distinct(job: Job, loader: Any, first: str | None, ranks: Ranks) -> None:
    """Compare the ranks' data by the fingerprint of their first batch; None for a rank without one."""
    entire = _samples_of_all(loader)
    answers = ranks.gather((first, entire))
    prints = [each for each, _ in answers if each is not None]
    equal, whole = len(set(prints)) < len(prints), entire is not None and all(each == entire for _, each in answers)
    names = read_arguments(job.data).names
    aware = "rank" in names or "world_size" in names
    if equal:
        pair = [rank for rank, (each, _) in enumerate(answers) if each is not None and prints.count(each) > 1][:2]
        problem = f"{job.describe('data')} gave ranks {pair[0]} and {pair[1]} the same first batch"
    elif whole and not aware:
        problem = f"{job.describe('data')} gives every one of the {ranks.num_ranks} ranks a DataLoader over all {entire} samples"
    else:
        return
    if aware:
        log_warning(f"{problem}. If the data is not constant on purpose, ranks repeat each other's work. {_REMEDY}")
    else:
        raise SettingError(f"{problem}: every example would count {ranks.num_ranks} times in an epoch. {_REMEDY}")


def _samples_of_all(loader: Any) -> int | None:
    """The size of the dataset, if the loader goes over all of it."""
    if not isinstance(loader, DataLoader) or not any(
        type(each) in {RandomSampler, SequentialSampler} for each in samplers_of(loader)
    ):
        return None
    try:
        return len(loader.dataset)  # type: ignore[arg-type]
    except TypeError:
        return None
