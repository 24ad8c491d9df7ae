"""Split masters: every class of fp32 number against integer and float64 statements of the rule."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from halfstep.kernels.split import FP16_RESIDUAL_BOUND, is_rounding, join, split

BF16, FP16 = torch.bfloat16, torch.float16
# Offsets inside one bf16 step: exact, just above, around the tie, just below the next.
EDGES = (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF)


def from_bits(patterns):
    """fp32 numbers with these 32-bit patterns, written as non-negative integers."""
    patterns = torch.as_tensor(patterns, dtype=torch.int64)
    return torch.where(patterns >= 1 << 31, patterns - (1 << 32), patterns).to(torch.int32).view(torch.float32)


def bits(tensor):
    """The pattern of each element, as an integer of its own width."""
    return tensor.view({4: torch.int32, 2: torch.int16}[tensor.element_size()])


def random_masters(num, seed):
    generator = torch.Generator().manual_seed(seed)
    return from_bits(torch.randint(0, 1 << 32, (num,), generator=generator))


def every_bf16_step():
    """Each of the 65536 upper halves with each of the edge offsets: all classes of fp32 pattern."""
    upper = torch.arange(1 << 16, dtype=torch.int64)[:, None] << 16
    return from_bits((upper + torch.tensor(EDGES)).reshape(-1))


def assert_bf16_split_inverts(master):
    weight, low = split(master, BF16)
    back, nan = join(weight, low), master.isnan()
    assert (weight.dtype, low.dtype, back.dtype) == (BF16, torch.int16, torch.float32)
    assert torch.equal(bits(back)[~nan], bits(master)[~nan])
    assert (bits(weight)[nan] == 0x7FC0).all()
    assert (low[nan] == 0).all()
    assert back[nan].isnan().all()


@pytest.mark.parametrize("seed", range(3))
def test_bf16_split_inverts_random_patterns_bit_for_bit(seed):
    """A million random 32-bit patterns come back as they were; NaN comes back as the one NaN."""
    assert_bf16_split_inverts(random_masters(1 << 20, seed))


def test_bf16_split_inverts_every_class_of_pattern_bit_for_bit():
    """Zeros of both signs, subnormals, ties, the largest finite numbers, infinities and NaN, around every bf16 number."""
    assert_bf16_split_inverts(every_bf16_step())


@given(st.lists(st.integers(0, (1 << 32) - 1), min_size=1, max_size=20))
def test_bf16_split_inverts_any_pattern(patterns):
    """The law is true for random bit patterns."""
    assert_bf16_split_inverts(from_bits(patterns))


@given(st.floats(width=32, allow_nan=False))
def test_bf16_split_inverts_any_number(value):
    """The law is true for ordinary numbers."""
    assert_bf16_split_inverts(torch.tensor([value]))


def test_bf16_split_of_a_split_is_the_same_split():
    """Splitting what was joined gives the same two halves, so that doing nothing changes nothing."""
    master = every_bf16_step()
    master = master[~master.isnan()]
    weight, low = split(master, BF16)
    again = split(join(weight, low), BF16)
    assert torch.equal(bits(again[0]), bits(weight))
    assert torch.equal(again[1], low)


def test_bf16_weight_is_the_nearest_and_ties_go_away_from_zero():
    """Against float64 distances to the two neighbours, for every bf16 step of finite numbers."""
    master = every_bf16_step()
    master = master[master.isfinite()]
    pattern = bits(master).to(torch.int64) & 0x7FFFFFFF
    size, inner = master.abs().double(), from_bits(pattern & 0x7FFF0000).double()
    outer_pattern = (pattern & 0x7FFF0000) + 0x10000
    outer = torch.where(outer_pattern >= 0x7F800000, 2.0**128, from_bits(outer_pattern.clamp(max=0x7F7F0000)).double())
    expected = torch.where(size - inner < outer - size, inner, outer)
    expected = torch.where(expected >= 2.0**128, torch.inf, expected)
    weight = split(master, BF16)[0]
    assert torch.equal(weight.abs().double(), expected)
    assert torch.equal(weight.signbit(), master.signbit())


def test_bf16_weight_is_torchs_cast_except_on_ties():
    """torch rounds ties to even; everywhere else both are the nearest number."""
    master = random_masters(1 << 18, 7)
    master = master[~master.isnan() & (bits(master) & 0xFFFF != 0x8000)]
    assert torch.equal(bits(split(master, BF16)[0]), bits(master.to(BF16)))


def test_bf16_infinities_have_no_residual_and_the_overflow_band_still_inverts():
    """inf splits into inf and 0; a finite master above bf16's largest gives an inf weight but keeps its digits."""
    weight, low = split(torch.tensor([torch.inf, -torch.inf]), BF16)
    assert weight.tolist() == [torch.inf, -torch.inf]
    assert low.tolist() == [0, 0]
    largest = torch.tensor([torch.finfo(torch.float32).max])
    weight, low = split(largest, BF16)
    assert weight.isinf().all()
    assert torch.equal(join(weight, low), largest)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_a_weight_is_the_rounding_of_its_own_master_and_of_no_other(dtype):
    """True for what split makes, ties and overflows included; false for either neighbour and for the other sign."""
    master = torch.cat([every_bf16_step(), fp16_range_masters()])
    master = master[~master.isnan()]
    weight, _ = split(master, dtype)
    assert is_rounding(weight, master).all()
    for change in (1, -1, 1 << 15):
        other = bits(weight).to(torch.int32) ^ change if change > 1 else bits(weight).to(torch.int32) + change
        assert not is_rounding(other.to(torch.int16).view(dtype), master).any()


def ulp(weight, fraction_bits, bias):
    """The ulp of each 16-bit number in float64, and of a subnormal that of the smallest normal."""
    exponent = (bits(weight).to(torch.int32) >> fraction_bits) & ((1 << (15 - fraction_bits)) - 1)
    return torch.ldexp(torch.ones(weight.shape, dtype=torch.float64), exponent.clamp(min=1) - bias - fraction_bits)


@pytest.mark.parametrize(
    ("dtype", "fraction_bits", "bias", "largest_low"), [(BF16, 7, 127, 1 << 15), (FP16, 10, 15, 1 << 14)]
)
def test_any_weight_with_any_residual_joins_within_half_a_ulp_of_the_weight(dtype, fraction_bits, bias, largest_low):
    """All 65536 weights, as somebody else may set them, next to residuals of other weights: finite stays finite and close."""
    weight = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    generator = torch.Generator().manual_seed(0)
    spread = torch.randint(-largest_low, largest_low, (5,), generator=generator).tolist()
    top = min(largest_low, (1 << 15) - 1)
    for value in (-largest_low, 1 - largest_low, -257, -1, 0, 1, 256, top - 1, top, *spread):
        master = join(weight, torch.full(weight.shape, value, dtype=torch.int16))
        finite, nan = weight.isfinite(), weight.isnan()
        assert master[finite].isfinite().all()
        distance = (master.double() - weight.double()).abs()[finite]
        assert (distance <= ulp(weight, fraction_bits, bias)[finite] / 2).all()
        assert master[nan].isnan().all()
        assert not master[~nan].isnan().any()


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_a_zeroed_weight_stays_within_the_smallest_number_of_zero(dtype):
    """Pruning writes zeros next to residuals of either sign; the master is then at most half the smallest 16-bit number."""
    low = split(torch.randn(1 << 12), dtype)[1]
    for zero in (0.0, -0.0):
        master = join(torch.full(low.shape, zero, dtype=dtype), low)
        assert (master.abs() <= torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / 2).all()


@pytest.mark.parametrize("seed", range(2))
def test_fp16_weight_is_torchs_cast(seed):
    """The weight of an fp16 split is the number torch would compute with, inf for what is too large."""
    master = random_masters(1 << 19, seed)
    expected = master.to(FP16)
    weight, low = split(master, FP16)
    number = ~master.isnan()
    assert low.dtype is torch.int16
    assert torch.equal(bits(weight)[number], bits(expected)[number])
    assert weight[~number].isnan().all()
    assert (low[~weight.isfinite()] == 0).all()


def fp16_range_masters():
    """Random fp32 numbers in fp16's range, and both sides of every fp16 number and of every tie between two."""
    generator = torch.Generator().manual_seed(3)
    exponent = torch.randint(-28, 16, (1 << 18,), generator=generator)
    fraction = 1 + torch.randint(0, 1 << 23, (1 << 18,), generator=generator) * 2.0**-23
    values = torch.ldexp(fraction.float(), exponent)
    halves = torch.arange(0x7C00, dtype=torch.int64).to(torch.int16).view(FP16).float()
    ties = (halves[:-1] + halves[1:]) / 2
    centres = torch.cat([halves[1:], ties])
    sides = [centres, torch.nextafter(centres, torch.tensor(torch.inf)), torch.nextafter(centres, torch.tensor(0.0))]
    all_values = torch.cat([values, *sides])
    return torch.cat([all_values, -all_values])


def test_fp16_split_is_exact_for_normal_weights():
    """Where the fp16 weight is a normal number, the master keeps all of its fp32 digits."""
    master = fp16_range_masters()
    weight, low = split(master, FP16)
    normal = (weight.abs() >= 2.0**-14) & weight.isfinite()
    assert normal.sum() > 1 << 18
    assert torch.equal(join(weight, low)[normal], master[normal])


def test_fp16_split_below_the_normal_range_is_within_its_bound():
    """Subnormal fp16 weights keep their master to 2^-40, and some reach that bound."""
    master = fp16_range_masters()
    tiny = torch.cat([master[master.abs() < 2.0**-14], torch.tensor([2.0**-40, 3 * 2.0**-41, 1e-30, 0.0])])
    error = (join(*split(tiny, FP16)).double() - tiny.double()).abs()
    assert FP16_RESIDUAL_BOUND == 2.0**-40
    assert error.max() <= FP16_RESIDUAL_BOUND
    assert error.max() > FP16_RESIDUAL_BOUND / 2


@given(st.floats(-65504, 65504, width=32))
def test_fp16_split_follows_its_law_for_any_number(value):
    """Exact where the weight is normal, within 2^-40 where it is not."""
    master = torch.tensor([value])
    weight, low = split(master, FP16)
    error = abs(join(weight, low).double().item() - value)
    assert error <= (0 if abs(weight.item()) >= 2.0**-14 else FP16_RESIDUAL_BOUND)


def test_fp16_split_keeps_infinities_and_nan():
    """inf stays inf and NaN stays NaN; neither leaves a residual."""
    weight, low = split(torch.tensor([torch.inf, -torch.inf, torch.nan, 1e9]), FP16)
    back = join(weight, low)
    assert back[[0, 1, 3]].tolist() == [torch.inf, -torch.inf, torch.inf]
    assert back[2].isnan()
    assert (low == 0).all()


def test_fp16_split_keeps_the_sign_of_zero():
    """A negative zero comes back negative: its bits are part of the master."""
    back = join(*split(torch.tensor([0.0, -0.0]), FP16))
    assert back.signbit().tolist() == [False, True]


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (7,), (2, 3, 5)], ids=str)
def test_split_keeps_the_shape(dtype, shape):
    """Scalars, empty tensors and any number of dimensions come back in their shape."""
    master = torch.randn(shape)
    weight, low = split(master, dtype)
    assert weight.shape == low.shape == master.shape
    assert torch.equal(join(weight, low), master)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.t(),
        lambda t: t[:, ::3],
        lambda t: t[1:].flip(0),
        lambda t: t[:1].expand(4, -1),
        lambda t: t.reshape(2, 3, 2, 4).to(memory_format=torch.channels_last),
    ],
    ids=["transposed", "strided", "flipped", "expanded", "channels_last"],
)
def test_split_takes_any_memory_layout(dtype, view):
    """Elements are split in logical order, not in memory order."""
    master = view(torch.randn(6, 8))
    dense = master.clone(memory_format=torch.contiguous_format)
    weight, low = split(master, dtype)
    assert torch.equal(weight, split(dense, dtype)[0])
    assert torch.equal(join(weight, low), dense)
    assert torch.equal(join(weight.t() if weight.dim() == 2 else weight, low.t() if low.dim() == 2 else low),
                       dense.t() if dense.dim() == 2 else dense)  # fmt: skip


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_split_keeps_channels_last(dtype):
    """A convolution's channels_last weight stays so: it decides which kernels run."""
    master = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    weight, low = split(master, dtype)
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert low.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("default", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_split_does_not_depend_on_the_default_dtype(default, dtype):
    """People build 16-bit models under another default dtype; the split is the same there."""
    master = torch.tensor([1.0001, 3.3e-5, -70.7, 1e-7], dtype=torch.float32)
    expected = split(master, dtype)
    torch.set_default_dtype(default)
    try:
        weight, low = split(master, dtype)
        back = join(weight, low)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(bits(weight), bits(expected[0]))
    assert torch.equal(low, expected[1])
    assert torch.equal(back, join(*expected))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_split_is_the_same_on_a_gpu(dtype):
    """Bit for bit what the CPU gives, for random patterns and for every class of pattern."""
    master = torch.cat([random_masters(1 << 20, 5), every_bf16_step(), fp16_range_masters()])
    master = master[~master.isnan()]
    weight, low = split(master, dtype)
    on_gpu = split(master.cuda(), dtype)
    assert torch.equal(bits(on_gpu[0].cpu()), bits(weight))
    assert torch.equal(on_gpu[1].cpu(), low)
    assert torch.equal(bits(join(*on_gpu).cpu()), bits(join(weight, low)))


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("shape", [(), (0,), (3, 5)])
def test_a_split_without_numbers_has_the_formats_of_a_real_one(shape, dtype):
    """A plan splits fake tensors: shapes, dtypes and strides are those of real parts, also of a transposed master."""
    real = split(torch.zeros(shape).T if len(shape) == 2 else torch.zeros(shape), dtype)
    with FakeTensorMode():
        fake = split(torch.zeros(shape).T if len(shape) == 2 else torch.zeros(shape), dtype)
    assert [(t.shape, t.dtype) for t in fake] == [(t.shape, t.dtype) for t in real]
    assert [t.stride() for t in fake] == [t.stride() for t in real]
