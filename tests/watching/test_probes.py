"""Ranges that are measured on the device."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfstep.watching.probes import Probes, Range

FLOATS = st.lists(st.floats(width=32), min_size=1, max_size=20)


@given(FLOATS)
def test_a_probe_is_finite_exactly_if_every_element_is(values):
    """No inf or NaN is missed, whatever the other elements are, and none is invented."""
    probes = Probes()
    probes.add(torch.tensor(values))
    (measured,) = probes.read()
    assert measured.finite == all(map(math.isfinite, values))
    assert (measured.value == "nan") == any(map(math.isnan, values))


@given(FLOATS.filter(lambda values: all(map(math.isfinite, values))))
def test_the_range_of_finite_numbers_is_exact(values):
    """Smallest and largest element, unrounded."""
    probes = Probes()
    probes.add(torch.tensor(values))
    (measured,) = probes.read()
    assert (measured.low, measured.high) == (min(values), max(values))


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e5m2, torch.complex64]
)
def test_every_floating_dtype_is_measured(dtype):
    """16-bit, 8-bit, 64-bit and complex numbers, in one read."""
    probes = Probes()
    numbers = [probes.add(torch.tensor([-2.0, 3.0]).to(dtype)), probes.add(torch.tensor([1.0, math.inf]).to(dtype))]
    first, second = (probes.read()[number] for number in numbers)
    assert (first.low, first.high, first.finite) == (-2.0, 3.0, True)
    assert second.value == "inf"


def test_a_number_beyond_fp32_is_finite_in_fp64():
    """Reading back does not round an fp64 range to inf."""
    probes = Probes()
    probes.add(torch.tensor([1e300], dtype=torch.float64))
    assert probes.read()[0].high == 1e300


def test_what_has_no_floating_numbers_is_not_measured():
    """Integers, booleans, empty tensors and tensors without memory."""
    probes = Probes()
    for tensor in (torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.bool), torch.empty(0)):
        assert probes.add(tensor) is None
    assert probes.add(torch.empty(2, device="meta")) is None
    assert probes.read() == []


def test_sparse_gradients_are_measured_by_their_values():
    """The gradient of a sparse embedding."""
    probes = Probes()
    probes.add(torch.sparse_coo_tensor([[1, 3]], [2.0, math.nan], (5,), check_invariants=True))
    assert probes.read()[0].value == "nan"


def test_a_range_is_shown_with_name_shape_and_dtype():
    """As an autopsy prints it."""
    assert str(Range("float16", (4, 6), -1.5, 70.25, "head.weight")) == "head.weight 4x6 float16 in [-1.5, 70.25]"
