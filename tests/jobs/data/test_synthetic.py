import pytest
import torch

from halfstep.errors import SettingError
from halfstep.jobs.data import SyntheticImages


def make(split="train", batch_size=4, **options):
    """A loader of tiny images."""
    return SyntheticImages(split, batch_size, **{"image_size": 16, "num_classes": 5, "num_batches": 6, **options})


def collect(loader):
    """All batches of one pass."""
    return list(loader)


def equal(first, second):
    """Whether two lists of batches are the same, bit for bit."""
    return len(first) == len(second) and all(
        torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(first, second, strict=True)
    )


def test_batches_have_shape_labels_and_unit_deviation():
    """Images have the statistics of normalized photographs: zero mean, unit standard deviation; labels are in range."""
    images, labels = next(iter(make(batch_size=256)))
    assert images.shape == (256, 3, 16, 16)
    assert images.dtype == torch.float32
    assert set(labels.tolist()) == set(range(5))
    assert abs(images.mean()) < 0.15
    assert abs(images.std() - 1) < 0.1


def test_epochs_have_a_fixed_length():
    """An epoch has 100 batches for train and 10 for val by default."""
    assert [len(SyntheticImages(split, 1, image_size=4)) for split in ("train", "val")] == [100, 10]
    assert len(collect(make())) == 6


def test_batches_depend_on_seed_epoch_split_and_rank_alone():
    """The same settings give the same images without the global generator; any other settings give other images."""
    first = collect(make(seed=1))
    state = torch.get_rng_state()
    assert equal(first, collect(make(seed=1)))
    assert torch.equal(state, torch.get_rng_state())
    for other in (
        {"seed": 2},
        {"seed": 1, "epoch": 1},
        {"seed": 1, "split": "val"},
        {"seed": 1, "rank": 1, "world_size": 2},
    ):
        assert not equal(first, collect(make(**other)))


def test_classes_can_be_learned_and_carry_over_to_val():
    """Images of one class are similar: the class means of the training images classify validation images."""
    train = collect(make(num_batches=40, batch_size=16))
    images, labels = (torch.cat(parts) for parts in zip(*train, strict=True))
    means = torch.stack([images[labels == c].mean(0) for c in range(5)]).flatten(1)
    val_images, val_labels = next(iter(make("val", batch_size=100)))
    guess = (val_images.flatten(1) @ means.T - means.square().sum(1) / 2).argmax(1)
    assert (guess == val_labels).float().mean() > 0.9


@pytest.mark.parametrize("stop", [1, 5, 6])
def test_resuming_continues_with_exactly_the_following_batches(stop):
    """A position is enough to resume, because any batch can be generated without the ones before it."""
    every = collect(make(seed=4, epoch=2))
    loader = make(seed=4, epoch=2)
    for _, _batch in zip(range(stop), loader, strict=False):
        state = loader.state_dict()
    fresh = make(seed=4)
    fresh.load_state_dict(state)
    assert equal(every[stop:], collect(fresh))
    assert fresh.epoch == 3


def test_a_position_of_other_images_is_rejected():
    """A position saved with another image size raises an error."""
    with pytest.raises(SettingError, match="image_size=16, but image_size is now 8"):
        make(image_size=8).load_state_dict(make().state_dict())


def test_the_meta_device_gives_shapes():
    """On the meta device the loader yields shapes only, as the planner needs them."""
    images, labels = next(iter(make(device="meta")))
    assert (images.device.type, images.shape, labels.shape) == ("meta", (4, 3, 16, 16), (4,))


def test_invalid_sizes_are_rejected():
    """Every size must be at least 1, and split and rank must exist."""
    with pytest.raises(SettingError, match="num_batches=0 must all be at least 1"):
        make(num_batches=0)
    with pytest.raises(SettingError, match="Unknown split"):
        make("test")
    with pytest.raises(SettingError, match="rank=1"):
        make(rank=1)


@pytest.mark.gpu
def test_images_are_generated_on_the_gpu():
    """Images are on the GPU, and the same seed gives the same images."""
    assert equal(collect(make(device="cuda")), collect(make(device="cuda")))
    assert next(iter(make(device="cuda")))[0].device.type == "cuda"
