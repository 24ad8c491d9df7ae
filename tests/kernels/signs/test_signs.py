"""Packed signs: the format against a statement in Python integers, and the kernel against the reference, bit for bit."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfstep.kernels.available import triton_runs_on
from halfstep.kernels.signs.signs import pack_signs, reference_pack, reference_unpack, unpack_signs

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
needs_kernel = pytest.mark.skipif(
    not triton_runs_on(DEVICE), reason="needs a GPU, or Triton's interpreter (TRITON_INTERPRET=1)"
)
SPECIAL = [0.0, -0.0, math.inf, -math.inf, 1e-45, -1e-45, 3.0, -3.0]


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=8, max_size=8))
def test_a_byte_has_the_first_number_in_its_highest_bit(numbers):
    """Bit 7 - i is 1 exactly if number i is 0 or more."""
    expected = sum(1 << (7 - i) for i, number in enumerate(numbers) if number >= 0)
    assert reference_pack(torch.tensor(numbers)).tolist() == [expected]


def test_every_byte_comes_back():
    """All 256 bytes unpack to signs that pack to the same bytes."""
    packed = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    assert torch.equal(pack_signs(unpack_signs(packed)), packed)


def test_special_values():
    """Both zeros are +1 and NaN is -1."""
    values = torch.tensor([*SPECIAL, *[math.nan] * 8], device=DEVICE)
    signs = unpack_signs(pack_signs(values))
    assert signs[:8].tolist() == [1, 1, 1, -1, 1, -1, 1, -1]
    assert (signs[8:] == -1).all()


@pytest.mark.parametrize("num_bytes", [1, 3, 1025])
def test_a_cpu_gives_the_bits_of_the_reference(num_bytes):
    """The integers and the table of a CPU, special values included, in both directions."""
    values = torch.randn(8 * num_bytes, generator=torch.Generator().manual_seed(num_bytes))
    values[:8] = torch.tensor(SPECIAL)
    packed = pack_signs(values)
    assert torch.equal(packed, reference_pack(values))
    assert torch.equal(unpack_signs(packed), reference_unpack(packed))


@needs_kernel
@pytest.mark.parametrize("num_bytes", [1, 3, 1023, 1024, 1025, 2500])
def test_the_kernel_equals_the_reference(num_bytes):
    """Sizes around a block, special values included, in both directions."""
    generator = torch.Generator().manual_seed(num_bytes)
    values = torch.randn(8 * num_bytes, generator=generator)
    values[:8] = torch.tensor(SPECIAL)
    packed = pack_signs(values.to(DEVICE))
    assert torch.equal(packed.cpu(), reference_pack(values))
    assert torch.equal(unpack_signs(packed).cpu(), reference_unpack(packed.cpu()))


def test_nothing_packs_to_nothing():
    """An empty tensor is an empty message."""
    assert pack_signs(torch.zeros(0)).shape == (0,)
    assert unpack_signs(torch.zeros(0, dtype=torch.uint8)).shape == (0,)
