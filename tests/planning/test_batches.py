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


def test_dimensions_that_grow_go_on():
    """What grows with the batch is scaled, whichever dimension it is; the rest stays."""

    def data(batch_size):
        yield torch.zeros(batch_size, 3, 8), torch.zeros(5, batch_size), torch.zeros(2 * batch_size)

    assert shapes(data, 1000) == [(1000, 3, 8), (5, 1000), (2000,)]


def test_large_batches_are_never_loaded():
    """Only two small batches are drawn, whatever size is asked."""
    drawn = []

    def data(batch_size):
        drawn.append(batch_size)
        yield torch.zeros(batch_size, 2)

    found = look_at_data(small_job(data=data), CONTEXT)
    assert (
        found.at(10**9)[0].device.type == "meta"
        if isinstance(found.at(4), list)
        else found.at(10**9).shape == (10**9, 2)
    )
    assert drawn == [2, 3]


def test_integers_are_repeated():
    """Token ids, masks and labels keep the numbers of the small batch; floating-point numbers are not made up."""

    def data(batch_size):
        yield torch.arange(batch_size), torch.ones(3, batch_size, dtype=torch.bool), torch.zeros(batch_size)

    ids, mask, values = look_at_data(small_job(data=data), CONTEXT).at(5)
    assert ids.tolist() == [0, 1, 0, 1, 0]
    assert mask.shape == (3, 5)
    assert mask.all()
    assert values.device.type == "meta"


def test_ragged_batches_are_drawn_at_their_size():
    """Where lengths change with the batch, the batch of the asked size is loaded, and that is said."""

    def data(batch_size):
        yield torch.zeros(batch_size, 10 + batch_size % 2)

    found = look_at_data(small_job(data=data), CONTEXT)
    assert found.at(7).shape == (7, 11)
    assert "change with more" in found.notes[0]


def test_data_that_ignores_the_size_is_told():
    """Data with a batch size of its own is planned as it is, with a note."""
    found = look_at_data(small_job(data=lambda: [torch.zeros(12, 2)]), CONTEXT)
    assert found.at(99).shape == (12, 2)
    assert "no notice" in found.notes[0]


def test_empty_data_is_refused():
    """Data without a batch is an error that says so."""
    with pytest.raises(SettingError, match="no batch"):
        look_at_data(small_job(data=list), CONTEXT)


def test_random_numbers_are_given_back():
    """Looking at the data does not change what training will draw."""
    torch.manual_seed(1)
    before = torch.get_rng_state()
    look_at_data(small_job(), CONTEXT)
    assert torch.equal(before, torch.get_rng_state())


def test_lists_beside_tensors_grow_with_the_batch():
    """Names of files or captions are repeated, so that large batches need not be loaded."""
    drawn = []

    def data(batch_size):
        drawn.append(batch_size)
        names = [f"{i}.png" for i in range(batch_size)]
        yield {"image": torch.zeros(batch_size, 3), "name": names, "crop": [4, 4]}

    found = look_at_data(small_job(data=data), CONTEXT)
    batch = found.at(5)
    assert batch["image"].shape == (5, 3)
    assert batch["name"] == ["0.png", "1.png", "0.png", "1.png", "0.png"]
    assert batch["crop"] == [4, 4]
    assert (found.notes, drawn) == ((), [2, 3])
