"""Mixup and CutMix."""

import pytest
import torch
import torch.nn.functional as F

from halfstep.errors import SettingError
from halfstep.jobs.data.mixing import Mixing

LABELS = torch.tensor([0, 1, 2, 3, 0])


def pictures():
    """Five images whose pixels are all their index plus 1, so that every pixel shows where it is from."""
    return torch.arange(1.0, 6.0).view(5, 1, 1, 1).expand(5, 3, 8, 8).clone()


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.8, 1.0), (0.8, 0.0), (0.0, 1.0)])
def test_labels_add_up_to_1_and_follow_the_pixels(mixup, cutmix):
    """Label probabilities are the shares of the pixels' origin, for Mixup and for CutMix, and add up to 1."""
    mixing = Mixing(mixup, cutmix, 4)
    for seed in range(30):
        images, targets = mixing(pictures(), LABELS, seed)
        assert images.shape == (5, 3, 8, 8)
        assert targets.shape == (5, 4)
        torch.testing.assert_close(targets.sum(1), torch.ones(5))
        assert targets.min() >= 0
        # Image 0 (pixels 1, class 0) is mixed with image 4 (pixels 5, class 0), image 1 (2) with image 3 (4).
        share = (4 - images[1].mean()) / 2
        torch.testing.assert_close(targets[1], torch.tensor([0.0, share, 0.0, 1 - share]), atol=1e-5, rtol=0)
        torch.testing.assert_close(targets[0], torch.tensor([1.0, 0.0, 0.0, 0.0]))
        assert images.min() >= 1
        assert images.max() <= 5


def test_cutmix_copies_one_rectangle():
    """CutMix leaves every pixel outside one rectangle as it was, and copies the pixels inside from the other image."""
    sizes = set()
    for seed in range(30):
        images, _ = Mixing(0.0, 1.0, 4)(pictures(), LABELS, seed)
        copied = images[1, 0] == 4
        assert (copied | (images[1, 0] == 2)).all()
        rows, columns = copied.any(1), copied.any(0)
        assert copied.sum() == rows.sum() * columns.sum()
        sizes.add(int(copied.sum()))
    assert len(sizes) > 5


def test_mixing_is_a_function_of_the_seed():
    """Equal seeds mix equally, both kinds occur, and the global random state is not used."""
    mixing = Mixing(0.8, 1.0, 4)
    state = torch.get_rng_state()
    results = [mixing(pictures(), LABELS, seed) for seed in (*range(20), 0)]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(results[0][0], results[-1][0])
    kinds = {len(images[1].unique()) > 1 or images[1, 0, 0, 0].item() in {2.0, 4.0} for images, _ in results}
    assert kinds == {True, False}


def test_no_mixing_keeps_plain_labels():
    """With both kinds off, images and labels are returned as they are."""
    images, labels = Mixing(0.0, 0.0, 4)(pictures(), LABELS, 0)
    assert torch.equal(images, pictures())
    assert torch.equal(labels, LABELS)


def test_smoothing_of_mixed_labels_is_that_of_the_source():
    """Cross-entropy with label smoothing on probabilities equals the one with smoothed targets."""
    torch.manual_seed(0)
    logits, targets = torch.randn(5, 4), Mixing(0.8, 1.0, 4)(pictures(), LABELS, 3)[1]
    smoothed = 0.9 * targets + 0.1 / 4
    expected = -(smoothed * logits.log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(F.cross_entropy(logits, targets, label_smoothing=0.1), expected)


@pytest.mark.parametrize("values", [(-0.1, 1.0, 4), (0.8, -1.0, 4), (0.8, 1.0, 0)])
def test_impossible_settings_are_rejected(values):
    """A negative alpha, or no class, is an error."""
    with pytest.raises(SettingError, match="at least 0"):
        Mixing(*values)


@pytest.mark.gpu
def test_mixing_on_a_gpu_equals_mixing_on_the_cpu():
    """The share and the rectangle are drawn on the host, so both devices mix the same pixels."""
    images, labels = torch.rand(4, 3, 8, 8), torch.tensor([0, 1, 2, 0])
    for seed in range(6):
        expected = Mixing(0.8, 1.0, 3)(images.clone(), labels, seed)
        result = Mixing(0.8, 1.0, 3)(images.cuda(), labels.cuda(), seed)
        torch.testing.assert_close([part.cpu() for part in result], list(expected))
