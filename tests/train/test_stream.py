"""The data of a run and its position."""

import dataclasses
import random

import pytest
import torch

from halfstep.backends.context import RunContext
from halfstep.checkpoint.rng import restore_rng, rng_state
from halfstep.errors import HalfstepError
from halfstep.jobs.job import Job
from halfstep.train.stream import DataStream, batch_size_of, fingerprint, to_device


def job(data):
    return Job(model=lambda: torch.nn.Linear(1, 1), data=data, loss=lambda model: None, optimizer=lambda params: None)


def stream(data, **context):
    return DataStream(job(data), RunContext(batch_size=2, **context), split="train")


def shuffled(batch_size):
    """A plain DataLoader, which shuffles with torch's global generator and has no position."""
    return torch.utils.data.DataLoader(torch.arange(20), batch_size=batch_size, shuffle=True)


def augmented(batch_size):
    """Batches that also draw random numbers."""
    for batch in shuffled(batch_size):
        yield batch + random.random() + torch.rand(())


class Positioned:
    """A loader with its own position."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        while self.at < 10:
            self.at += 1
            yield torch.tensor([self.at])
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


@pytest.mark.parametrize(
    "data", [shuffled, augmented, Positioned, lambda batch_size, epoch: shuffled(batch_size)],
    ids=["shuffled", "augmented", "positioned", "per-epoch"],
)  # fmt: skip
@pytest.mark.parametrize("stop", [1, 4, 9])
def test_a_restored_stream_gives_the_batches_that_would_have_followed(data, stop):
    """Stop anywhere in the second epoch, draw other random numbers, restore: the same batches follow."""
    torch.manual_seed(1)
    random.seed(1)
    first = stream(data)
    list(first.batches(0))
    batches = first.batches(1)
    for _ in range(stop):
        next(batches)
        torch.rand(3)  # the model's dropout
    state, rng = first.state(), rng_state()
    expected = [b.clone() for b in batches]

    torch.rand(100)
    again = stream(data)
    again.restore(state)
    restore_rng(rng)
    assert all(torch.equal(a, b) for a, b in zip(expected, again.batches(1), strict=True))


def test_data_that_cannot_be_repeated_raises():
    """The first batch drawn again must equal the original one."""
    state = {"n": 0}

    def changing():
        state["n"] += 1
        return [torch.full((2,), state["n"])] * 5

    first = stream(changing)
    batches = first.batches(0)
    next(batches)
    next(batches)
    again = stream(changing)
    again.restore(first.state())
    with pytest.raises(HalfstepError, match="cannot be repeated"):
        next(again.batches(0))


def test_data_that_became_shorter_raises():
    """An epoch with fewer batches than were already used is an error."""
    first = stream(lambda: [torch.zeros(1)] * 5)
    batches = first.batches(0)
    for _ in range(4):
        next(batches)
    again = stream(lambda: [torch.zeros(1)] * 2)
    again.restore(first.state())
    with pytest.raises(HalfstepError, match="now has only 2"):
        next(again.batches(0))


def test_a_loader_without_position_cannot_restore_one():
    """A checkpoint with a loader state needs a loader that can load it."""
    first = stream(Positioned)
    next(first.batches(0))
    again = stream(lambda: [torch.zeros(1)] * 5)
    again.restore(first.state())
    with pytest.raises(HalfstepError, match="has state_dict"):
        next(again.batches(0))


def test_an_empty_loader_raises():
    """It would otherwise loop forever without training."""
    with pytest.raises(HalfstepError, match="gave no batches"):
        list(stream(list).batches(0))


def test_fingerprints_distinguish_batches():
    """Tensor values, dtypes, shapes and plain values all count."""
    a = (torch.tensor([1.0, 2.0]), {"id": 3})
    same = (torch.tensor([1.0, 2.0]), {"id": 3})
    assert fingerprint(a) == fingerprint(same)
    others = [(torch.tensor([1.0, 2.5]), {"id": 3}), (torch.tensor([1, 2]), {"id": 3}), (torch.tensor([[1.0, 2.0]]), {"id": 3}),
              (torch.tensor([1.0, 2.0]), {"id": 4})]  # fmt: skip
    assert len({fingerprint(b) for b in [a, *others]}) == 5


def test_only_tensors_move_to_the_device():
    """Strings and numbers in a batch are not changed."""
    moved = to_device({"x": torch.ones(1), "name": "a"}, torch.device("meta"))
    assert moved["x"].device.type == "meta"
    assert moved["name"] == "a"


class Opaque:
    """A batch with the default repr, which has only its address."""

    def __init__(self, x):
        self.x = x


@dataclasses.dataclass
class Shown:
    """A batch whose repr has its attributes, one of which is opaque."""

    x: float
    other: object


def test_addresses_are_not_part_of_a_fingerprint():
    """Objects of user classes are distinguished by their content, not by their address."""
    one = torch.ones(3)
    assert fingerprint(Opaque(one)) == fingerprint(Opaque(one.clone()))
    assert fingerprint(Opaque(one)) != fingerprint(Opaque(one + 1))
    assert fingerprint(Shown(1.0, object())) == fingerprint(Shown(1.0, object()))
    assert fingerprint(Shown(1.0, object())) != fingerprint(Shown(2.0, object()))
    assert fingerprint([one.to_sparse()]) == fingerprint([one.clone().to_sparse()])


def test_data_without_a_length_has_no_number_of_batches():
    """Lists and DataLoaders have a length; generators and DataLoaders over an IterableDataset do not, but can be iterated."""

    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield from torch.arange(6)

    assert stream(lambda: [1, 2, 3]).num_batches(0) == 3
    assert stream(shuffled).num_batches(0) == 10
    assert stream(augmented).num_batches(0) is None
    iterable = stream(lambda batch_size: torch.utils.data.DataLoader(Endless(), batch_size))
    assert iterable.num_batches(0) is None
    assert len(list(iterable.batches(0))) == 3


def test_examples_are_counted_by_the_first_tensor():
    """The first tensor with dimensions decides; without one the default counts."""
    assert batch_size_of({"x": [torch.zeros(3, 2)], "n": 5}, 9) == 3
    assert batch_size_of([torch.zeros(0, 2)], 9) == 0
    assert batch_size_of([1, "a", torch.tensor(2.0)], 9) == 9


def test_the_first_epoch_of_a_resumed_run_is_set():
    """A run that resumes between epochs builds its loader there: a loader that does not name `epoch` must not start at epoch 0."""

    class Epochs:
        epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            yield torch.tensor([self.epoch])

    assert [batch.tolist() for batch in stream(Epochs).batches(3)] == [[3]]
