"""The order of examples over ranks: one global order, and a position that is valid for any number of ranks."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep.jobs.data.loader import Order, OrderedLoader


class Numbers(OrderedLoader):
    """Batches of the example indices themselves."""

    def __init__(self, num_examples, batch_size, rank=0, world_size=1, *, split="train", drop_last=True):
        super().__init__(Order(num_examples, batch_size, split, 7, rank, world_size, drop_last), {})

    def _batches(self, epoch, first):
        yield from self._rows(epoch)[first:]


def ranks_of(num_examples, batch_size, world_size, **options):
    return [Numbers(num_examples, batch_size, rank, world_size, **options) for rank in range(world_size)]


def take(loaders, num_batches=None):
    """The next global batches: for each, the examples of all ranks; a rank that ended adds nothing."""
    iterators = [iter(loader) for loader in loaders]
    taken = []
    while num_batches is None or len(taken) < num_batches:
        parts = [next(iterator, torch.empty(0, dtype=torch.int64)) for iterator in iterators]
        if not any(len(part) for part in parts):
            break
        taken.append(torch.cat(parts).tolist())
    return taken


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_share_the_batches_of_one_process(world_size, drop_last):
    """Rank r has the r-th slice of each batch of one process with a W times larger batch, the short last one included."""
    single = take([Numbers(50, 3 * world_size, drop_last=drop_last)])
    assert take(ranks_of(50, 3, world_size, drop_last=drop_last)) == single
    assert sum(map(len, single)) == (50 - 50 % (3 * world_size) if drop_last else 50)
    sizes = [[len(rows) for rows in loader._rows(0)] for loader in ranks_of(50, 3, world_size, drop_last=drop_last)]
    lasts = [each[-1] if len(each) == len(sizes[0]) else 0 for each in sizes]
    assert max(lasts) - min(lasts) <= 1


@settings(max_examples=60, deadline=None)
@given(
    st.integers(12, 90), st.sampled_from(["train", "val"]), st.booleans(), st.integers(0, 9),
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), min_size=2, max_size=4),
)  # fmt: skip
def test_moving_between_numbers_of_ranks_loses_and_repeats_nothing(num_examples, split, drop_last, num_batches, moves):
    """A few batches on each of several (batch_size, world_size): together a prefix of the epoch's order, in order."""
    whole = [i for batch in take([Numbers(num_examples, 1, split=split)]) for i in batch]
    used, state = [], None
    for batch_size, world_size in moves:
        loaders = ranks_of(num_examples, batch_size, world_size, split=split, drop_last=drop_last)
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        used += [i for batch in take(loaders, num_batches) for i in batch]
        if loaders[0].epoch:
            break
        state = json.loads(json.dumps(loaders[0].state_dict()))
        assert state["examples"] == len(used)
    assert used == whole[: len(used)]
    loaders = ranks_of(num_examples, 1, 1, split=split)
    if state is not None and state["examples"] == len(used):
        loaders[0].load_state_dict(state)
        assert used + [i for batch in take(loaders) for i in batch] == whole


def test_batches_keep_their_numbers_if_the_global_batch_stays():
    """From 2 ranks to 4 with the same global batch; another global batch starts at the position."""
    pair = ranks_of(50, 6, 2)
    take(pair, 2)
    state = pair[0].state_dict()
    four = ranks_of(50, 3, 4)
    for loader in four:
        loader.load_state_dict(state)
    assert (four[0].batch, len(four[0])) == (2, 4)
    assert take(four) == take([Numbers(50, 12)])[2:]
    other = Numbers(50, 10)
    other.load_state_dict(state)
    assert (other.batch, len(other)) == (3, 5)  # 10, 10 and 4 examples are used; 20 of 26 follow
    whole = [i for batch in take([Numbers(50, 2)]) for i in batch]
    assert other.sample_indices(0, 3) == whole[24:34]


def test_all_ranks_have_the_same_position():
    """What rank 0 saves is what every rank would."""
    loaders = ranks_of(50, 3, 4)
    take(loaders, 2)
    assert len({json.dumps(loader.state_dict()) for loader in loaders}) == 1
    assert loaders[0].state_dict()["examples"] == 24
