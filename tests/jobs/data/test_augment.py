"""RandAugment."""

import random

import numpy as np
import pytest

from halfstep.errors import SettingError
from halfstep.jobs.data.augment import FILL, OPERATIONS, RandAugment

Image = pytest.importorskip("PIL.Image", reason="Requires: [pillow]")


def picture(size=(24, 16)):
    """An RGB image of random pixels."""
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("share", [0.0, 0.45, 0.9, 1.0])
def test_every_operation_keeps_size_and_mode(name, share):
    """Each of the 15 operations returns an RGB image of the same size at every strength, in both directions."""
    operation = OPERATIONS[name]
    for amount in (share, -share) if operation.has_direction else (share,):
        result = operation.apply(picture(), amount)
        assert (result.size, result.mode) == ((24, 16), "RGB")


def test_operations_do_what_their_names_say():
    """The strength of each operation, against arithmetic on the pixels."""
    image = picture()
    pixels = np.asarray(image)
    assert len(OPERATIONS) == 15

    def apply(name, share):
        return np.asarray(OPERATIONS[name].apply(image, share))

    assert np.array_equal(apply("invert", 0.9), 255 - pixels)
    assert np.array_equal(apply("posterize", 0.9), pixels & 0b10000000)  # 4 - int(3.6) = 1 bit
    assert apply("posterize", 1.0).max() == 0
    assert np.array_equal(apply("solarize", 1.0), 255 - pixels)
    assert np.array_equal(apply("solarize", 0.5), np.where(pixels < 128, pixels, 255 - pixels))
    added = np.minimum(255, pixels.astype(int) + 99)
    assert np.array_equal(apply("solarize_add", 0.9), np.where(pixels < 128, added, pixels))
    np.testing.assert_allclose(apply("brightness", -0.9), pixels * 0.19, atol=1)
    moved = apply("translate_x", 1 / 2.7)  # 0.45 * 24 / 2.7 = 4 pixels
    np.testing.assert_allclose(moved[:, :20], pixels[:, 4:], atol=1)
    assert (moved[:, 20:] == FILL).all()
    for name in ("rotate", "shear_x", "shear_y", "colour", "contrast", "sharpness"):
        assert np.array_equal(apply(name, 0.0), pixels), name
        assert not np.array_equal(apply(name, 0.9), pixels), name


def test_augmentation_is_a_function_of_the_seed():
    """Equal seeds give equal images, different seeds different ones, and one image in four is unchanged."""
    augment = RandAugment()
    first, second = (np.asarray(augment(picture(), random.Random(7))) for _ in range(2))
    assert np.array_equal(first, second)
    results = [np.asarray(augment(picture(), random.Random(seed))).tobytes() for seed in range(200)]
    unchanged = results.count(np.asarray(picture()).tobytes())
    assert 30 <= unchanged <= 80  # both operations are left out with probability 1/4
    assert len(set(results)) > 100
    assert np.array_equal(RandAugment(num_operations=0)(picture(), random.Random(0)), picture())


@pytest.mark.parametrize("options", [{"magnitude": 11}, {"deviation": -1}, {"num_operations": -1}])
def test_impossible_settings_are_rejected(options):
    """A magnitude outside 0 to 10, or a negative number, is an error with the values."""
    with pytest.raises(SettingError, match=next(iter(options))):
        RandAugment(**options)
