"""The Lion reference: one step against float64, and the cases where a sign decides."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfstep.kernels.lion import LionSettings, lion_update

EPS32 = torch.finfo(torch.float32).eps

any_settings = st.builds(
    LionSettings,
    lr=st.sampled_from([1e-5, 1e-3, 0.1]),
    betas=st.tuples(st.sampled_from([0.0, 0.5, 0.9]), st.sampled_from([0.0, 0.99, 0.999])),
    weight_decay=st.sampled_from([0.0, 1e-2, 0.3]),
    maximize=st.booleans(),
)


@given(any_settings, st.integers(0, 9999), st.integers(-20, 6))
def test_one_step_is_float64s_within_a_few_ulp(settings, seed, exponent):
    """Weights and moment of one step differ from float64 by a few ulp of their largest term."""
    generator = torch.Generator().manual_seed(seed)
    p, g, m = (torch.randn(64, generator=generator) for _ in range(3))
    g, m = g * 2.0**exponent, m * 2.0**exponent
    master, moment = lion_update(p, g, m, settings)
    (b1, b2), lr = settings.betas, settings.lr
    wide = -g.double() if settings.maximize else g.double()
    direction = b1 * m.double() + (1 - b1) * wide
    expected = p.double() * (1 - lr * settings.weight_decay) - lr * direction.sign()
    size = torch.maximum(m.abs(), g.abs()).double()
    clear = direction.abs() > 4 * EPS32 * size  # nearer to zero, rounding may decide the sign
    assert master.dtype is moment.dtype is torch.float32
    assert ((master.double() - expected).abs() <= 4 * EPS32 * (p.abs().double() + lr))[clear].all()
    assert ((moment.double() - (b2 * m.double() + (1 - b2) * wide)).abs() <= 4 * EPS32 * size).all()


def test_a_direction_of_zero_leaves_the_weight():
    """The sign of zero is zero: without a gradient and a moment only weight decay moves the weight."""
    settings = LionSettings(0.1, (0.9, 0.99), 0.5)
    master, moment = lion_update(torch.ones(2), torch.tensor([0.0, 1.0]), torch.zeros(2), settings)
    assert torch.allclose(master, torch.tensor([0.95, 0.85]))
    assert moment[0] == 0


def test_inputs_are_left_alone():
    """The reference returns new tensors, so that a skipped step can keep the old ones."""
    tensors = [torch.randn(5) for _ in range(3)]
    before = [t.clone() for t in tensors]
    lion_update(*tensors, LionSettings(0.1, (0.9, 0.99), 0.1, maximize=True))
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1), torch.tensor(0.1, dtype=torch.float64)], ids=repr)
def test_results_are_fp32_in_the_shape_of_the_inputs(lr):
    """A parameter of no dimensions must not become float64 by promotion, even with a float64 learning rate."""
    for new in lion_update(*(torch.rand(()) for _ in range(3)), LionSettings(lr, (0.9, 0.99), 0.1)):
        assert new.dtype is torch.float32
        assert new.shape == ()
