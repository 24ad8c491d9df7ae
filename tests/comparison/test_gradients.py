"""First gradients against fp32's."""

import math

import pytest
import torch

from halfstep.comparison.gradients import compare_gradients, save_gradients


def named(*grads):
    found = []
    for i, grad in enumerate(grads):
        param = torch.nn.Parameter(torch.zeros(len(grad), dtype=grad.dtype))
        param.grad = grad
        found.append((f"layer.{i}", param))
    return found


def test_the_same_gradients_have_cosine_one(tmp_path):
    """Whatever scale each side carries, it is taken out first."""
    grads = torch.randn(50)
    save_gradients(tmp_path / "g", named(grads * 4), 4.0)
    found = compare_gradients(tmp_path / "g", named(grads * 8), 8.0)
    assert found["cosine"] == pytest.approx(1)
    assert found["relative_error"] == pytest.approx(0, abs=1e-7)
    assert found["vanished"] == 0


def test_a_known_angle(tmp_path):
    """(1, 0) against (1, 1) is 45 degrees, and one element vanished."""
    save_gradients(tmp_path / "g", named(torch.tensor([1.0, 1.0])), 1.0)
    found = compare_gradients(tmp_path / "g", named(torch.tensor([1.0, 0.0])), 1.0)
    assert found["cosine"] == pytest.approx(math.sqrt(0.5))
    assert found["relative_error"] == pytest.approx(math.sqrt(0.5))
    assert found["vanished"] == 1


def test_names_of_wrappers_do_not_matter(tmp_path):
    """A compiled model's `_orig_mod.` is taken off on both sides."""
    save_gradients(tmp_path / "g", named(torch.ones(3)), 1.0)
    wrapped = [(f"_orig_mod.{name}", param) for name, param in named(torch.ones(3))]
    assert compare_gradients(tmp_path / "g", wrapped, 1.0)["cosine"] == pytest.approx(1)


def test_an_overflow_or_nothing_is_no_number(tmp_path):
    """An inf gives NaN, and so do gradients that are all zero."""
    save_gradients(tmp_path / "g", named(torch.ones(3)), 1.0)
    assert math.isnan(compare_gradients(tmp_path / "g", named(torch.tensor([math.inf, 1.0, 1.0])), 1.0)["cosine"])
    assert math.isnan(compare_gradients(tmp_path / "g", named(torch.zeros(3)), 1.0)["cosine"])
