"""Batches of any size from two small ones."""

import pytest
import torch

from halfstep.backends.context import RunContext
from halfstep.errors import SettingError
from halfstep.planning.batches import look_at_data
from planning_jobs import small_job

CONTEXT = RunContext()


def shapes(data, size):
    """The shapes of a batch of `size`."""
    batch = look_at_data(small_job(data=data), CONTEXT).at(size)
    return [tuple(t.shape) for t in batch]


def test_growing_dimensions_are_extrapolated():
    """A dimension that grows with the batch is scaled, whichever it is; the others stay."""

    def data(batch_size):
        yield torch.zeros(batch_size, 3, 8), torch.zeros(5, batch_size), torch.zeros(2 * batch_size)

    assert shapes(data, 1000) == [(1000, 3, 8), (5, 1000), (2000,)]


def test_large_batches_are_never_loaded():
    """Only two small batches are loaded, whatever size is requested."""
    loaded = []

    def data(batch_size):
        loaded.append(batch_size)
        yield torch.zeros(batch_size, 2)

    data_batches = look_at_data(small_job(data=data), CONTEXT)
    assert (
        data_batches.at(10**9)[0].device.type == "meta"
        if isinstance(data_batches.at(4), list)
        else data_batches.at(10**9).shape == (10**9, 2)
    )
    assert loaded == [2, 3]


def test_integers_are_repeated():
    """Token ids, masks and labels repeat the values of the small batch; floating-point tensors have no data."""

    def data(batch_size):
        yield torch.arange(batch_size), torch.ones(3, batch_size, dtype=torch.bool), torch.zeros(batch_size)

    ids, mask, values = look_at_data(small_job(data=data), CONTEXT).at(5)
    assert ids.tolist() == [0, 1, 0, 1, 0]
    assert mask.shape == (3, 5)
    assert mask.all()
    assert values.device.type == "meta"


def test_ragged_batches_are_loaded_at_the_requested_size():
    """If lengths change with the batch, the batch of the requested size is loaded, with a note."""

    def data(batch_size):
        yield torch.zeros(batch_size, 10 + batch_size % 2)

    data_batches = look_at_data(small_job(data=data), CONTEXT)
    assert data_batches.at(7).shape == (7, 11)
    assert "depend on more" in data_batches.notes[0]


def test_data_that_ignores_the_size_has_a_note():
    """Data with a fixed batch size is planned at that size, with a note."""
    data_batches = look_at_data(small_job(data=lambda: [torch.zeros(12, 2)]), CONTEXT)
    assert data_batches.at(99).shape == (12, 2)
    assert "ignores batch_size" in data_batches.notes[0]


def test_empty_data_is_rejected():
    """Data that yields no batch raises."""
    with pytest.raises(SettingError, match="no batch"):
        look_at_data(small_job(data=list), CONTEXT)


def test_random_number_state_is_restored():
    """Looking at the data does not change the random numbers of training."""
    torch.manual_seed(1)
    before = torch.get_rng_state()
    look_at_data(small_job(), CONTEXT)
    assert torch.equal(before, torch.get_rng_state())


def test_lists_grow_with_the_batch():
    """Names of files or captions are repeated, so that large batches need not be loaded."""
    loaded = []

    def data(batch_size):
        loaded.append(batch_size)
        names = [f"{i}.png" for i in range(batch_size)]
        yield {"image": torch.zeros(batch_size, 3), "name": names, "crop": [4, 4]}

    data_batches = look_at_data(small_job(data=data), CONTEXT)
    batch = data_batches.at(5)
    assert batch["image"].shape == (5, 3)
    assert batch["name"] == ["0.png", "1.png", "0.png", "1.png", "0.png"]
    assert batch["crop"] == [4, 4]
    assert (data_batches.notes, loaded) == ((), [2, 3])
