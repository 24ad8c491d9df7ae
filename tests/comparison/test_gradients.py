"""The first gradients compared with those of fp32."""

import math

import pytest
import torch

from halfstep.comparison.gradients import compare_gradients, save_gradients


def named(*grads):
    return [(f"layer.{i}", grad) for i, grad in enumerate(grads)]


def test_the_same_gradients_have_cosine_one(tmp_path):
    """The loss scale of each side is divided out."""
    grads = torch.randn(50)
    save_gradients(tmp_path / "g", named(grads * 4), 4.0)
    difference = compare_gradients(tmp_path / "g", named(grads * 8), 8.0)
    assert difference.cosine == pytest.approx(1)
    assert difference.relative_error == pytest.approx(0, abs=1e-7)
    assert difference.vanished == 0


def test_a_known_angle(tmp_path):
    """(1, 0) against (1, 1) is 45 degrees, and one element vanished."""
    save_gradients(tmp_path / "g", named(torch.tensor([1.0, 1.0])), 1.0)
    difference = compare_gradients(tmp_path / "g", named(torch.tensor([1.0, 0.0])), 1.0)
    assert difference.cosine == pytest.approx(math.sqrt(0.5))
    assert difference.relative_error == pytest.approx(math.sqrt(0.5))
    assert difference.vanished == 1


def test_names_of_wrappers_do_not_matter(tmp_path):
    """The `_orig_mod.` of a compiled model is removed on both sides."""
    save_gradients(tmp_path / "g", named(torch.ones(3)), 1.0)
    wrapped = [(f"_orig_mod.{name}", param) for name, param in named(torch.ones(3))]
    assert compare_gradients(tmp_path / "g", wrapped, 1.0).cosine == pytest.approx(1)


def test_overflow_and_zero_gradients_have_no_cosine(tmp_path):
    """An inf gives NaN, and so do gradients that are all zero."""
    save_gradients(tmp_path / "g", named(torch.ones(3)), 1.0)
    assert math.isnan(compare_gradients(tmp_path / "g", named(torch.tensor([math.inf, 1.0, 1.0])), 1.0).cosine)
    assert math.isnan(compare_gradients(tmp_path / "g", named(torch.zeros(3)), 1.0).cosine)
