"""Which samples a batch consists of: exact for torch's samplers, None where it cannot be known, and never at the run's expense."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from halfstep.checkpoint.rng import rng_state
from halfstep.jobs.data.digits import DigitsLoader, load_digits
from halfstep.train.order import SampleOrder

NUM = 23


class Augmented(Dataset):
    """Returns its index, and draws from every generator like an augmentation."""

    def __len__(self):
        return NUM

    def __getitem__(self, index):
        return index, torch.rand(()), random.random()


SAMPLERS = {
    "sequential": dict,
    "shuffle": lambda: {"shuffle": True},
    "short last batch dropped": lambda: {"shuffle": True, "drop_last": True},
    "generator": lambda: {"shuffle": True, "generator": torch.Generator().manual_seed(3)},
    "sampler with a generator": lambda: {"sampler": RandomSampler(range(NUM), generator=torch.Generator())},
    "replacement": lambda: {"sampler": RandomSampler(range(NUM), replacement=True, num_samples=30)},
    "subset": lambda: {"sampler": SubsetRandomSampler([3, 1, 4, 15, 9, 2, 6])},
    "distributed": lambda: {"sampler": DistributedSampler(range(NUM), 2, 1, seed=3)},
    "weighted": lambda: {"sampler": WeightedRandomSampler(torch.arange(1.0, NUM + 1), 30)},
}


def loader(kind, batch_size=4, **options):
    kind_options = SAMPLERS[kind]()
    return DataLoader(Augmented(), batch_size, **kind_options, **options)


def epochs(data, count):
    """The batches of some epochs, each with the order that was created before it."""
    for epoch in range(count):
        if isinstance(data.sampler, DistributedSampler):
            data.sampler.set_epoch(epoch)
        order = SampleOrder(data, epoch, rng_state())
        yield order, [tuple(batch[0].tolist()) for batch in data]


@pytest.mark.parametrize("kind", SAMPLERS)
def test_the_samples_are_those_that_were_drawn(kind):
    """Every batch of two epochs, asked for afterwards and in any order, and None beyond the end."""
    torch.manual_seed(0)
    drawn = list(epochs(loader(kind), 2))
    assert len(set(map(str, (batches for _, batches in drawn)))) == (1 if kind == "sequential" else 2)
    for order, batches in reversed(drawn):
        for index in reversed(range(len(batches))):
            assert order.samples(index) == batches[index]
        assert order.samples(len(batches)) is None


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(sorted(SAMPLERS)), st.integers(1, 9), st.integers(0, 2**40), st.integers(0, 8))
def test_asking_changes_nothing(kind, batch_size, seed, at):
    """The random numbers of the run and of the loader, and the batches that follow, are those of a run in which nobody asks."""
    results = []
    for asks in (False, True):
        torch.manual_seed(seed)
        random.seed(seed)
        data, values = loader(kind, batch_size), []
        for epoch in range(2):
            order = SampleOrder(data, epoch, rng_state())
            for index, batch in enumerate(data):
                values.append([each.tolist() for each in batch])
                if asks and index == at:
                    order.samples(index)
        results.append((values, torch.rand(3).tolist(), random.random()))
    assert results[0] == results[1]


@pytest.mark.parametrize("persistent", [False, True])
def test_worker_processes_draw_the_same_order(persistent):
    """Workers that stay alive draw no new seed in the second epoch."""
    torch.manual_seed(1)
    for order, batches in epochs(loader("shuffle", num_workers=1, persistent_workers=persistent), 2):
        assert [order.samples(i) for i in range(len(batches))] == batches


class Stateful(Sampler):
    """A sampler that counts its epochs."""

    def __init__(self):
        self.epoch = 0

    def __iter__(self):
        self.epoch += 1
        return iter(range(self.epoch))

    def __len__(self):
        return self.epoch


class Own(BatchSampler):
    """A batch sampler of the user's."""


@pytest.mark.parametrize(
    "data",
    [
        DataLoader(Augmented(), 2, sampler=Stateful()),
        DataLoader(Augmented(), batch_sampler=Own(range(4), 2, drop_last=False)),
        DataLoader(Augmented(), batch_size=None),
        DataLoader([1, 2, 3], 2, num_workers=1, in_order=False),
        [[1], [2]],
    ],
    ids=["own sampler", "own batch sampler", "no batches", "any order", "a list"],
)
def test_an_order_that_cannot_be_known_is_none(data):
    """Samplers that may have a state are not asked."""
    assert SampleOrder(data, 0, rng_state()).samples(0) is None


def test_halfsteps_loaders_compute_their_samples():
    """The digits: the labels of the samples are those of the batch."""
    data = DigitsLoader("train", 32, seed=4, epoch=2)
    order, labels = SampleOrder(data, 2, rng_state()), load_digits("train").labels
    for index, (_, targets) in zip(range(3), data, strict=False):
        assert torch.equal(labels[list(order.samples(index))], targets)
