import hashlib
import json
from importlib import resources

import pytest
import torch
import torch.nn.functional as F

from halfstep.errors import HalfstepError, SettingError
from halfstep.jobs.data import DigitsLoader, Order, digits, load_digits
from halfstep.jobs.targets import load_target


def collect(loader):
    """All batches of one pass."""
    return [(images.clone(), labels.clone()) for images, labels in loader]


def equal(first, second):
    """Whether two lists of batches are the same, bit for bit."""
    return len(first) == len(second) and all(
        torch.equal(a, b) for one, two in zip(first, second, strict=True) for a, b in zip(one, two, strict=True)
    )


def test_the_split_is_fixed_and_stratified():
    """1,437 and 360 images, with a fifth of every digit for validation to within one image."""
    train, val = load_digits("train"), load_digits("val")
    assert train.images.shape == (1437, 1, 8, 8)
    assert val.images.shape == (360, 1, 8, 8)
    num_train, num_val = train.labels.bincount(), val.labels.bincount()
    assert ((num_train + num_val) / 5 - num_val).abs().max() < 1
    fingerprint = hashlib.sha256(val.images.numpy().tobytes() + val.labels.numpy().tobytes()).hexdigest()
    assert fingerprint.startswith("3ed630ff821b66ec")


def test_no_image_is_in_both_splits():
    """The splits partition the file: together they have its pixel sum."""
    train, val = load_digits("train"), load_digits("val")
    total = ((train.images + 1) * 8).sum() + ((val.images + 1) * 8).sum()
    assert total == 561_718
    assert train.images.min() == -1
    assert train.images.max() == 1


def test_the_file_is_described_with_its_checksum():
    """DIGITS.md states the checksum and the licence of the file that is shipped."""
    text = resources.files("halfstep.jobs.data").joinpath("DIGITS.md").read_text()
    assert digits.SHA256 in text
    assert "CC BY 4.0" in text


def test_a_modified_or_missing_file_is_rejected(monkeypatch):
    """A damaged installation raises an error instead of training on other data."""
    monkeypatch.setattr(digits, "SHA256", "0" * 64)
    with pytest.raises(HalfstepError, match="was modified: its SHA-256 is not 0000.*; reinstall"):
        digits._read()
    monkeypatch.setattr(digits, "FILE", "gone.csv.gz")
    with pytest.raises(HalfstepError, match="gone.csv.gz is missing"):
        digits._read()


def test_an_unknown_split_is_rejected():
    """The splits are train and val."""
    for make in (load_digits, lambda split: DigitsLoader(split, 8)):
        with pytest.raises(SettingError, match="Unknown split 'test'. .*Known: train, val"):
            make("test")


def test_batches_depend_on_seed_and_epoch_alone():
    """Two loaders agree regardless of the global generator; another seed or epoch gives another order."""
    first = collect(DigitsLoader("train", 64, seed=1))
    torch.manual_seed(99)
    state = torch.get_rng_state()
    assert equal(first, collect(DigitsLoader("train", 64, seed=1)))
    assert torch.equal(state, torch.get_rng_state())
    assert not equal(first, collect(DigitsLoader("train", 64, seed=2)))
    assert not equal(first, collect(DigitsLoader("train", 64, seed=1, epoch=1)))


def test_train_drops_the_short_last_batch_and_val_keeps_it():
    """Train has equal batches; val has every image once, in file order, without noise."""
    train, val = DigitsLoader("train", 64), DigitsLoader("val", 64)
    assert [len(labels) for _, labels in train] == [64] * 22
    assert len(train) == 22
    assert [len(labels) for _, labels in val] == [64] * 5 + [40]
    images = torch.cat([x for x, _ in val])
    assert torch.equal(images, load_digits("val").images)


def test_training_noise_differs_between_epochs():
    """The same image looks slightly different in the next epoch."""
    loader = DigitsLoader("train", 1437)
    first, second = collect(loader), collect(loader)
    spread = [torch.cat([x for x, _ in epoch]).std() for epoch in (first, second)]
    clean = load_digits("train").images.std()
    assert all(abs(s**2 - clean**2 - 0.09) < 0.01 for s in spread)


def test_iterating_continues_with_the_next_epoch():
    """One loader iterated twice yields the batches of two loaders of epochs 0 and 1."""
    loader = DigitsLoader("train", 64, seed=3)
    twice = collect(loader) + collect(loader)
    assert loader.epoch == 2
    assert equal(
        twice, collect(DigitsLoader("train", 64, seed=3)) + collect(DigitsLoader("train", 64, seed=3, epoch=1))
    )


@pytest.mark.parametrize("stop", [0, 1, 10, 21, 22, 23, 30])
def test_resuming_continues_with_exactly_the_following_batches(stop):
    """At any point of two epochs, a new loader with the loaded position yields the rest."""
    reference = DigitsLoader("train", 64, seed=3)
    every = collect(reference) + collect(reference)
    first = DigitsLoader("train", 64, seed=3)
    num_batches = 0
    state = first.state_dict()
    while num_batches < stop:
        for _ in first:
            num_batches += 1
            state = json.loads(json.dumps(first.state_dict()))
            if num_batches == stop:
                break
    second = DigitsLoader("train", 64, seed=3)
    second.load_state_dict(state)
    rest = []
    while second.epoch < 2:
        rest += collect(second)
    assert equal(every[stop:], rest)


def test_a_position_after_the_last_batch_ends_the_epoch():
    """A position saved between the last batch and the end of the loop resumes with no batches left."""
    loader = DigitsLoader("val", 100)
    for _ in loader:
        state = loader.state_dict()
    fresh = DigitsLoader("val", 100)
    fresh.load_state_dict(state)
    assert (fresh.epoch, collect(fresh), fresh.epoch) == (0, [], 1)


def test_abandoning_an_epoch_restarts_it():
    """After a loop that ended early, the next one starts at the epoch's first batch."""
    loader = DigitsLoader("train", 64)
    first = next(iter(loader))
    next(iter(loader))
    assert equal([first], collect(loader)[:1])


def test_set_epoch_moves_but_keeps_a_loaded_position():
    """Setting the current epoch after a resume keeps the position; setting another goes to its start."""
    loader = DigitsLoader("train", 64)
    loader.load_state_dict({**loader.state_dict(), "epoch": 4, "examples": 20 * 64})
    loader.set_epoch(4)
    assert len(collect(loader)) == 2
    loader.set_epoch(7)
    assert loader.state_dict()["epoch"] == 7
    assert len(collect(loader)) == 22


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 9}, "version 9"),
        ({"seed": 5}, "seed=5, but seed is now 0"),
        ({"num_examples": 9}, "num_examples=9, but num_examples is now 1437"),
        ({"loader": "Other"}, "loader='Other'"),
        ({"examples": 1438}, "examples=1438 is outside"),
        ({"epoch": -1}, "epoch=-1"),
        ({"examples": "x"}, "examples='x'"),
    ],
)
def test_a_position_of_other_data_is_rejected(change, message):
    """A state that would continue with other batches raises an error that names the difference."""
    loader = DigitsLoader("train", 64)
    with pytest.raises(SettingError) as caught:
        loader.load_state_dict({**loader.state_dict(), **change})
    assert message in str(caught.value)


def test_processes_share_the_batches_of_one():
    """Two processes together get, batch by batch, the batches of one with twice the batch size."""
    one = collect(DigitsLoader("train", 64, seed=2))
    halves = [collect(DigitsLoader("train", 32, seed=2, rank=rank, world_size=2)) for rank in (0, 1)]
    joined = [tuple(torch.cat(pair) for pair in zip(a, b, strict=True)) for a, b in zip(*halves, strict=True)]
    assert equal(one, joined)


@pytest.mark.parametrize("num_examples", range(4, 70, 3))
@pytest.mark.parametrize("world_size", [1, 3, 4])
@pytest.mark.parametrize("batch_size", [2, 5])
def test_validation_covers_every_example_once_on_equal_numbers_of_batches(num_examples, world_size, batch_size):
    """No example is lost or repeated, and every process has the same number of batches."""
    orders = [Order(num_examples, batch_size, "val", 0, rank, world_size) for rank in range(world_size)]
    batches = [order.batches(0) for order in orders]
    assert len({len(b) for b in batches}) == 1
    assert {order.num_batches for order in orders} == {len(batches[0])}
    assert sorted(int(i) for local in batches for batch in local for i in batch) == list(range(num_examples))
    assert all(1 <= len(batch) <= batch_size for local in batches for batch in local)


def test_invalid_settings_are_rejected():
    """A rank outside the world, an empty batch and a batch larger than the data raise errors with the numbers."""
    with pytest.raises(SettingError, match="rank=2 must be between 0 and world_size - 1 = 1"):
        DigitsLoader("train", 8, rank=2, world_size=2)
    with pytest.raises(SettingError, match="batch_size=0 must be at least 1"):
        DigitsLoader("train", 0)
    with pytest.raises(SettingError, match=r"has 1437 examples.*batch_size=800 with 2 process.* needs 1600"):
        DigitsLoader("train", 800, world_size=2)
    assert len(DigitsLoader("val", 800)) == 1


@pytest.fixture
def one_thread():
    """One torch thread: tiny operations do not benefit from more, and on a busy machine 3 s become 150."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_digits_reaches_97_percent_in_fp32():
    """The embedded job learns: at least 97 % validation accuracy after 20 epochs."""
    job = load_target("digits").job
    torch.manual_seed(0)
    model = job.call("model")
    optimizer = job.call("optimizer", model=model)
    scheduler = job.call("scheduler", optimizer=optimizer)
    train, val = (job.call("data", split=split, seed=0) for split in ("train", "val"))
    start = job.call("loss", model=model, batch=next(iter(val))).item()
    for _ in range(20):
        for batch in train:
            job.call("loss", model=model, batch=batch).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    with torch.no_grad():
        right = sum(float(job.call("metric", model=model, batch=batch)) * len(batch[1]) for batch in val)
        end = F.cross_entropy(model(load_digits("val").images), load_digits("val").labels)
    assert right / 360 >= 0.97
    assert end < start / 5
