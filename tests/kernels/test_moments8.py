"""8-bit moments: the bounds they state, and that they are right on average."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfstep.kernels.moments8 import BLOCK, _noise_at, decode, encode_signed, encode_unsigned, num_blocks

ONE = torch.tensor(1.0)
values = st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=700)


def distance(x, scale, levels):
    return 2 * (x.abs() * scale).sqrt() / levels + scale / levels**2


def scales_of(x, scales):
    return scales.repeat_interleave(BLOCK)[: x.numel()]


@given(values)
def test_a_signed_value_is_off_by_at_most_half_the_distance_between_codes(numbers):
    """The first moment is within its stated bound, and signs are preserved."""
    x = torch.tensor(numbers)
    codes, scales = encode_signed(x)
    back = decode(codes, scales)
    assert codes.dtype is torch.int8
    assert codes.shape == x.shape
    assert len(scales) == num_blocks(len(x))
    assert ((back - x).abs() <= 0.5 * distance(x, scales_of(x, scales), 127) * 1.001 + 1e-30).all()
    assert (back * x >= 0).all()


@given(values, st.integers(1, 10**6))
def test_an_unsigned_value_is_off_by_at_most_the_distance_and_never_becomes_zero(numbers, step):
    """The second moment is within its stated bound; a value above zero stays above zero."""
    x = torch.tensor(numbers).abs()
    codes, scales = encode_unsigned(x, torch.tensor(float(step)))
    back = decode(codes, scales)
    assert codes.dtype is torch.uint8
    assert ((back - x).abs() <= distance(x, scales_of(x, scales), 255) * 1.001 + 1e-30).all()
    assert ((codes == 0) == (x == 0)).all()


def test_the_random_numbers_are_uniform_over_steps_and_places_and_independent():
    """Means, small chances and correlations over 4,096 steps of 300 places, and the other way round, are those of chance."""
    places = torch.randint(0, 2**31, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    over_steps = torch.stack([_noise_at(torch.full((4096,), p), torch.arange(1, 4097)) for p in places])
    over_places = torch.stack([_noise_at(torch.arange(4096), torch.full((4096,), s)) for s in range(1, 301)])
    for x in (over_steps.double(), over_places.double()):
        assert x.min() >= 0
        assert x.max() < 1
        means = (x.mean(1) - 0.5) * (12 * 4096) ** 0.5
        assert means.std() == pytest.approx(1, abs=0.2)
        assert means.abs().max() < 5
        assert (x < 0.002).double().sum(1).mean() == pytest.approx(8.192, rel=0.1)
        for lag in (1, 2, 7, 256):
            together = ((x[:, lag:] - 0.5) * (x[:, :-lag] - 0.5)).mean(1) * 12 * 4096**0.5
            assert together.std() == pytest.approx(1, abs=0.2)
            assert together.abs().max() < 5


def test_the_largest_value_of_a_block_is_kept():
    """The scale is exact, so the largest magnitude comes back as it was."""
    x = torch.randn(4 * BLOCK, generator=torch.Generator().manual_seed(0))
    back = decode(*encode_signed(x)).reshape(-1, BLOCK)
    rows = x.reshape(-1, BLOCK)
    at = rows.abs().argmax(dim=1, keepdim=True)
    assert torch.allclose(back.gather(1, at), rows.gather(1, at), rtol=1e-6, atol=0)


@pytest.mark.parametrize("start", [(k / 255) ** 2 for k in (128, 26, 8)])
def test_random_rounding_is_right_on_average_and_nearest_would_freeze(start):
    """A value that shrinks by a thousandth per step follows; rounded to the nearest code it would not move."""
    x = torch.full((20 * BLOCK,), start)
    x[::BLOCK] = 1.0
    codes, scales = encode_unsigned(x, ONE)
    for step in range(1, 501):
        now = decode(codes, scales) * 0.999
        now[::BLOCK] = 1.0
        codes, scales = encode_unsigned(now, torch.tensor(float(step)))
    rest = decode(codes, scales).reshape(-1, BLOCK)[:, 1:]
    assert rest.mean().item() == pytest.approx(start * 0.999**500, rel=0.06)
    root = (torch.tensor(start * 0.999)).sqrt() * 255
    assert root.round() == (torch.tensor(start).sqrt() * 255).round()


def test_codes_are_the_same_in_every_run_and_differ_between_steps():
    """The noise is a hash of place and step, nothing else."""
    x = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    a, b, c = (encode_unsigned(x, torch.tensor(s))[0] for s in (3.0, 3.0, 4.0))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_nothing_and_zeros_are_fine():
    """Empty tensors, zero blocks and shapes survive."""
    empty = torch.zeros(0, 3)
    assert decode(*encode_signed(empty)).shape == (0, 3)
    zeros = torch.zeros(5, 7)
    assert torch.equal(decode(*encode_unsigned(zeros, ONE)), zeros)
    assert torch.equal(decode(*encode_signed(zeros)), zeros)
