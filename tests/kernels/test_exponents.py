"""Exponents of elements against numpy's float64, for every dtype, bit pattern and divisor; every implementation has the same cases."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_sync import no_synchronisation
from halfstep.errors import SettingError
from halfstep.kernels.available import triton_runs_on
from halfstep.kernels.exponents import (
    BIN_OF_1,
    INF,
    LARGEST,
    NAN,
    NUM_BINS,
    NUM_COLUMNS,
    SMALLEST,
    ZEROS,
    count_exponents,
    empty_table,
    reference_rows,
)

CPU = torch.device("cpu")
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
DIVISORS = [None, 1.0, 2.0**16, 3.0, 0.1, 1.9999999, 1e-40, 2.0**-149, 3.4028235e38, 65536.0 * 1.5]
INTERPRETED = triton_runs_on(CPU)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),
    # numpy, which Triton's interpreter computes with, on signalling NaN
    pytest.mark.filterwarnings("ignore:invalid value encountered in cast"),
]


@pytest.fixture(autouse=True)
def wide_tiles(request, monkeypatch):
    """The interpreter's time is per operation and not per element: programs of 1024 threads, unless a test needs the real shape."""
    if INTERPRETED and "real_shape" not in request.fixturenames:
        from halfstep.kernels import exponents_triton

        monkeypatch.setattr(exponents_triton, "SHAPE", exponents_triton.LaunchShape(warps=32))


@pytest.fixture
def real_shape():
    """Leaves the launch shape as it is."""


def expected_row(tensor, divisor=None):
    """A row of the table from float64 arithmetic: every 32-bit number and quotient of two has an exact exponent there."""
    x = np.abs(tensor.double().numpy().reshape(-1))
    row = np.zeros(NUM_COLUMNS, dtype=np.int64)
    row[NAN], row[INF], row[ZEROS] = np.isnan(x).sum(), np.isinf(x).sum(), (x == 0).sum()
    x = x[np.isfinite(x) & (x > 0)]
    _, exponents = np.frexp(x / (1.0 if divisor is None else abs(float(np.float32(divisor)))))
    bins = np.clip(exponents - 1 + BIN_OF_1, 0, NUM_BINS - 1)
    row[:NUM_BINS] = np.bincount(bins, minlength=NUM_BINS)
    if x.size:
        row[LARGEST] = np.float32(x.max()).view(np.int32)
        row[SMALLEST] = 2**32 - int(np.float32(x.min()).view(np.int32))
    return row


def random_patterns(dtype, count, seed):
    """Random bit patterns: all exponents, subnormals, NaN with any payload, both infinities, both zeros."""
    generator = torch.Generator().manual_seed(seed)
    bytes_ = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    patterns = bytes_.view(INTEGERS[dtype.itemsize]).clone()
    edges = torch.tensor([0, 1, -1, 2], dtype=torch.int64).to(patterns.dtype)
    patterns[: min(count, 4)] = edges[:count]
    return patterns.view(dtype)


def check(tensors, divisor=None, tables=None):
    """Counts of the tensors equal float64's, whichever implementation runs here."""
    as_tensor = None if divisor is None else torch.tensor(divisor, dtype=torch.float32)
    counts = count_exponents(tensors, as_tensor, tables)
    expected = np.stack([expected_row(t, divisor) for t in tensors])
    np.testing.assert_array_equal(counts.table.numpy(), expected)
    return counts


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_counts_of_random_bit_patterns_are_those_of_float64(dtype):
    """Every exponent, subnormals, zeros, NaN and inf of every dtype, for divisors of all kinds."""
    for seed, divisor in enumerate((0.1, 1e-40) if INTERPRETED else DIVISORS):
        check([random_patterns(dtype, 3000, seed)], divisor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("real_shape")
def test_the_launch_shape_of_a_gpu_counts_the_same(dtype):
    """More steps of a program's loop than the other tests make, and rows of the width that a GPU has."""
    check([(torch.randn(5000, generator=torch.Generator().manual_seed(9)) * 1e-4).to(dtype)], 1000.0)


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
@pytest.mark.parametrize(("warps", "dtype"), [(1, torch.float32), (2, torch.bfloat16)], ids=str)
@pytest.mark.usefixtures("real_shape")
def test_full_counters_of_a_thread_are_exact(warps, dtype, monkeypatch):
    """As many elements in one bin as a thread can count, nearly as many, and as many in the bin of zeros."""
    from halfstep.kernels import exponents_triton

    monkeypatch.setattr(exponents_triton, "SHAPE", exponents_triton.LaunchShape(warps=warps))
    tensor = torch.full((32_768,), 0.3).to(dtype)
    check([tensor])
    if dtype is torch.bfloat16:
        tensor.view(-1, 8)[:, 3] = 0
        tensor[:500] = 5.0
        check([tensor])


@pytest.mark.skipif(INTERPRETED, reason="the interpreter needs minutes for hypothesis")
@given(st.sampled_from(DTYPES), st.floats(width=32, allow_nan=False, allow_infinity=False), st.integers(0, 10**6))
@settings(max_examples=200)
def test_any_divisor_gives_the_exponent_of_the_exact_quotient(dtype, divisor, seed):
    """Subnormal, negative and full-precision divisors included; 0 counts as 1."""
    tensor = random_patterns(dtype, 200, seed)
    tensor[50:60] = torch.tensor(divisor, dtype=torch.float32).to(dtype)  # quotients at and around 1
    counts = count_exponents([tensor], torch.tensor(divisor, dtype=torch.float32))
    np.testing.assert_array_equal(counts.table.numpy()[0], expected_row(tensor, divisor or 1.0))


def test_quotients_next_to_powers_of_two_are_on_the_right_side():
    """Neighbours of d * 2^k, above and below, are in neighbouring bins, for divisors of any fraction."""
    for divisor in (1.0, 1.0000001, 1.5, 1.9999999, 0.1, 2.0**-140, 1e-40):
        d = np.float32(divisor)
        points = [np.float32(float(d) * 2.0**k) for k in (-3, 0, 1, 20)]
        near = [np.nextafter(p, np.float32(side), dtype=np.float32) for p in points for side in (0, np.inf)]
        check([torch.from_numpy(np.array([*points, *near], dtype=np.float32))], divisor)


@pytest.mark.parametrize("bad", [0.0, -0.0, math.inf, -math.inf, math.nan])
def test_a_divisor_that_no_step_can_use_counts_as_1(bad):
    """0, inf and NaN leave the exponents as they are."""
    tensor = torch.tensor([0.0, 1.0, 3.0, 1e-40])
    counts = count_exponents([tensor], torch.tensor(bad))
    np.testing.assert_array_equal(counts.table.numpy()[0], expected_row(tensor))


def test_columns_are_what_they_are_called():
    """Bins, special values and extremes of a tensor that can be checked by hand."""
    tensor = torch.tensor([[1.0, -1.5, 0.25], [0.0, -0.0, math.inf], [math.nan, -6.0, 2.0**-149]])
    counts = count_exponents([tensor], torch.tensor(4.0))
    assert counts.special.tolist() == [[1, 1, 2]]
    assert counts.extremes.tolist() == [[6.0, 2.0**-149]]
    bins = {i - BIN_OF_1: n for i, n in enumerate(counts.bins[0].tolist()) if n}
    assert bins == {-2: 2, -4: 1, 0: 1, -151: 1}
    assert (counts.bins.dtype, counts.special.dtype, counts.extremes.dtype) == (torch.int64, torch.int64, torch.float32)
    assert counts.divisor.item() == 4.0


def test_extremes_of_a_tensor_without_numbers_are_0():
    """Zeros, infinities and NaN only, or nothing at all."""
    tensors = [torch.zeros(3), torch.tensor([math.inf, math.nan]), torch.empty(0), torch.empty(0, 3)]
    counts = check(tensors)
    assert counts.extremes.tolist() == [[0.0, 0.0]] * 4
    assert count_exponents([]).table.shape == (0, NUM_COLUMNS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_tensors_longer_than_a_chunk_are_counted_completely(dtype):
    """Several chunks, an incomplete last one, and an address that no vector load accepts."""
    count = 70_001
    normal = (torch.randn(count, generator=torch.Generator().manual_seed(1)) * 1e-3).to(dtype)
    check([normal, normal[1:40_000], normal[3:5]])


def test_chunks_with_one_unusual_element_are_exact():
    """Where all but one element fit a kernel's window, the last one may be anything."""
    base = torch.randn(2048, generator=torch.Generator().manual_seed(2))
    for value in (0.0, math.inf, math.nan, 2.0**-149, 1e-30, 1e30):
        tensor = base.clone()
        tensor[1500] = value
        check([tensor], 3.0)


def test_inf_and_nan_next_to_the_largest_numbers_are_not_numbers():
    """Divided by a divisor with a fraction, an inf has the exponent of a number; it is counted as inf all the same."""
    values = torch.full((40,), 3e38)
    values[7] = math.inf
    values.view(torch.int32)[9] = 0x7F800001  # a NaN just above inf
    check([values, values[10:], values[:8]], 1.5)


def test_elements_just_outside_a_window_are_counted():
    """Whole windows of the kernel below the largest element, one binade more and one less."""
    check([torch.tensor([1.0, 2.0**-e]) for e in (27, 28, 30, 31, 32, 62)])


def test_constant_tensors_do_not_overflow_a_counter():
    """All elements in one bin: the fullest that any counter becomes."""
    for value in (1.0, 0.0, -(2.0**-130)):
        check([torch.full((33_000,), value), torch.full((66_000,), value, dtype=torch.bfloat16)])


def test_all_binades_of_a_format_are_counted():
    """The same number of elements in each binade of fp32, from the first subnormal to the largest number."""
    values = torch.from_numpy(np.ldexp(1.0, np.arange(-149, 128)).astype(np.float32))
    counts = check([values.repeat(7)])
    assert counts.bins[0, BIN_OF_1 - 149 : BIN_OF_1 + 63].eq(7).all()
    assert counts.bins[0, -1] == 7 * 65  # 2^63 and above


def test_many_tensors_of_many_dtypes_have_their_own_rows():
    """Rows are in the order of the tensors, whatever the grouping by dtype, at every call with the same tables."""
    tables = {}
    for turn in range(2):
        generator = torch.Generator().manual_seed(turn)
        tensors = [torch.randn(5 + 7 * i, generator=generator).to(DTYPES[i % 3]) for i in range(7)]
        tensors.insert(4, torch.empty(0))
        tensors += [torch.ones(3, dtype=torch.float64), random_patterns(torch.bfloat16, 10, turn)]
        check(tensors, 2.0**10, tables)
    check(tensors[::2], 2.0**10, tables)


def test_strided_tensors_count_each_element_once():
    """Transposed, sliced, expanded and channels-last tensors count what they show."""
    base = torch.randn(6, 8, generator=torch.Generator().manual_seed(3))
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    check([base.t(), base[:, ::2], base[::2], torch.tensor(2.0).expand(5), image, image[:, 1:], base[2:3, 1:2]])


def test_sparse_and_complex_tensors_count_their_parts():
    """Stored values of sparse tensors, real and imaginary parts of complex ones."""
    sparse = torch.sparse_coo_tensor([[0, 2]], torch.tensor([4.0, 0.0]), (4,), check_invariants=True)
    values = torch.tensor([1 + 2j, 0 - 8j])
    counts = count_exponents([sparse, values, values.conj()])
    expected = [torch.tensor([4.0, 0.0]), torch.view_as_real(values), torch.view_as_real(values)]
    np.testing.assert_array_equal(counts.table.numpy(), np.stack([expected_row(t) for t in expected]))


def test_fp64_is_counted_exactly():
    """Exponents that only fp64 has are in the outer bins, quotients are those of exact fractions."""
    values = random_patterns(torch.float64, 2000, 5)
    values[100:1000] = torch.randn(900, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    divisor = 0.1
    d = Fraction(float(np.float32(divisor)))
    expected = np.zeros(NUM_BINS, dtype=np.int64)
    for x in values.abs().tolist():
        if math.isfinite(x) and x > 0:
            q = Fraction(x) / d
            e = q.numerator.bit_length() - q.denominator.bit_length()
            e -= q < Fraction(2) ** e
            expected[min(max(e + BIN_OF_1, 0), NUM_BINS - 1)] += 1
    counts = count_exponents([values], torch.tensor(divisor))
    np.testing.assert_array_equal(counts.bins[0].numpy(), expected)


def test_parameters_are_counted_without_a_graph():
    """Leaves that require gradients can be counted in the middle of training."""
    parameter = torch.nn.Parameter(torch.ones(4))
    assert not count_exponents([parameter]).table.requires_grad


def test_integers_are_rejected():
    """A tensor without exponents is an error that names its dtype."""
    with pytest.raises(SettingError, match="torch.int64"):
        count_exponents([torch.arange(3)])


def test_the_reference_adds_to_a_table():
    """Rows accumulate, and extremes combine, when a tensor comes in parts."""
    table = empty_table(1, CPU)
    parts = [torch.tensor([1.0, 8.0]), torch.tensor([0.5, 0.0])]
    for part in parts:
        reference_rows([part], [0], None, table)
    np.testing.assert_array_equal(table.numpy()[0], expected_row(torch.cat(parts)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_equals_the_reference_on_a_gpu(dtype):
    """Large random, normal, sparse-looking and strided tensors: the same table from the kernel and on the CPU."""
    tensors = [random_patterns(dtype, n, n) for n in (1, 7, 4096, 100_003)]
    tensors += [(torch.randn(300_000) * s).to(dtype) for s in (1e-6, 1.0, 100.0)]
    tensors += [tensors[-1][1:], torch.zeros(100_000, dtype=dtype), torch.full((200_000,), 0.5).to(dtype)]
    tensors[-3][::3] = 0
    for divisor in (None, 2.0**16, 0.1):
        d = None if divisor is None else torch.tensor(divisor)
        on_gpu = count_exponents([t.cuda() for t in tensors], None if d is None else d.cuda())
        np.testing.assert_array_equal(on_gpu.table.cpu().numpy(), np.stack([expected_row(t, divisor) for t in tensors]))


@pytest.mark.gpu
def test_counting_does_not_wait_for_the_gpu():
    """The second call with the same tables has no synchronising operation."""
    tensors, tables = [torch.randn(1000, device="cuda", dtype=d) for d in (torch.float32, torch.bfloat16)], {}
    divisor = torch.tensor(8.0, device="cuda")
    count_exponents(tensors, divisor, tables)
    with no_synchronisation():
        count_exponents(tensors, divisor, tables)
