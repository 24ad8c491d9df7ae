"""Data that gives every rank the same examples is recognised by its first batch, its samplers and what it names."""

import logging

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset
from torch.utils.data.distributed import DistributedSampler

from halfstep.backends.context import RunContext
from halfstep.backends.ranks import ranks_of
from halfstep.errors import SettingError
from halfstep.jobs.job import Job
from halfstep.train.distinct import check_distinct, check_sampler, samplers_of

EXAMPLES = torch.arange(8)


class Channel:
    """Two ranks, of which the other answers what it was given; None repeats this rank's answer."""

    num_ranks, rank = 2, 0

    def __init__(self, other=None):
        self.other = other

    def gather(self, value):
        return [value, value if self.other is None else self.other]


class Endless(IterableDataset):
    """Data without a length."""

    def __iter__(self):
        return iter(EXAMPLES)


def job(data):
    return Job(model=lambda: torch.nn.Linear(1, 1), data=data, loss=lambda model: None, optimizer=lambda params: None)


UNAWARE, AWARE = job(list), job(lambda rank: [])


def test_equal_first_batches_are_an_error():
    """Unless the data names `rank`: then a warning."""
    with pytest.raises(
        SettingError, match="gave ranks 0 and 1 the same first batch: every example would count 2 times"
    ):
        check_distinct(UNAWARE, [], "abc", Channel())
    check_distinct(UNAWARE, [], "abc", Channel(("def", None)))


def test_equal_first_batches_of_data_that_names_rank_are_a_warning(caplog):
    """The data may be constant on purpose."""
    with caplog.at_level(logging.WARNING, "halfstep"):
        check_distinct(AWARE, [], "abc", Channel())
    assert "the same first batch" in caplog.text


def test_ranks_without_a_batch_are_not_compared():
    """Two ranks that have no data are not equal data."""
    check_distinct(UNAWARE, [], None, Channel())


def test_a_loader_over_the_whole_dataset_is_an_error_however_it_is_shuffled():
    """Its first batches differ; a part of the dataset, a sampler for ranks and an iterable dataset pass."""
    with pytest.raises(SettingError, match="gives every one of the 2 ranks a DataLoader over all 8 samples"):
        check_distinct(UNAWARE, DataLoader(EXAMPLES, 2, shuffle=True), "abc", Channel(("def", 8)))
    check_distinct(AWARE, DataLoader(Subset(EXAMPLES, range(4)), 2), "abc", Channel(("def", 4)))
    sampler = DistributedSampler(EXAMPLES, 2, 0)
    check_distinct(UNAWARE, DataLoader(EXAMPLES, 2, sampler=sampler), "abc", Channel(("def", None)))
    check_distinct(UNAWARE, DataLoader(Endless(), 2), "abc", Channel(("def", None)))


def test_a_sampler_of_another_rank_is_an_error():
    """Also with one process, which would train on a part of the data."""
    loader = DataLoader(EXAMPLES, 2, sampler=DistributedSampler(EXAMPLES, 4, 1))
    with pytest.raises(SettingError, match="for rank 1 of 4, but this is rank 0 of 1"):
        check_sampler(UNAWARE, loader, RunContext())
    check_sampler(UNAWARE, loader, RunContext(rank=1, world_size=4))


def test_samplers_are_found_once():
    """A DataLoader's sampler is also its batch sampler's; other iterables have none."""
    loader = DataLoader(EXAMPLES, 2)
    assert samplers_of(loader) == [loader.sampler, loader.batch_sampler]
    assert samplers_of([1, 2]) == []


def test_one_process_sends_no_messages():
    """Neither does a context of several ranks without a process group."""
    assert not ranks_of(RunContext()).several
    assert not ranks_of(RunContext(world_size=2)).several
