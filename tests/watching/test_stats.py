"""Shares of elements that a format cannot represent, against casts by torch, and the record of a run file."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfstep.errors import SettingError
from halfstep.kernels.exponents import BIN_OF_1, count_exponents
from halfstep.precision.formats import torch_dtype
from halfstep.watching.stats import StatsTable, TensorStats

FORMATS = ["fp16", "bf16", "fp32", "fp8_e4m3fn", "fp8_e5m2"]
numbers = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=40)


def table_of(tensors, divisor=None):
    """What a sample of these tensors is after its way to the host."""
    counts = count_exponents(tensors, None if divisor is None else torch.tensor(divisor))
    names = [f"t{i}" for i in range(len(tensors))]
    numels = np.array([t.numel() for t in tensors])
    return StatsTable(names, numels, counts.table.numpy(), divisor or 1.0)


def stats_of(values, divisor=None):
    return table_of([torch.tensor(values, dtype=torch.float32)], divisor).row(0)


@pytest.mark.parametrize("fmt", ["fp16", "bf16", "fp8_e5m2"])
@given(numbers)
def test_flushed_elements_are_those_that_a_cast_turns_into_0(fmt, values):
    """The share equals what torch's own cast does, except for exactly half of the smallest subnormal."""
    tensor = torch.tensor(values, dtype=torch.float32)
    tensor = tensor[tensor.abs() != math.ldexp(1, {"fp16": -25, "bf16": -134, "fp8_e5m2": -17}[fmt])]
    nonzero = tensor[tensor != 0]
    flushed = (nonzero.to(torch_dtype(fmt)).float() == 0).sum().item()
    assert stats_of(tensor.tolist()).flushed(fmt) == (flushed / len(nonzero) if len(nonzero) else 0.0)


@pytest.mark.parametrize("fmt", FORMATS)
def test_each_limit_of_a_format_is_where_the_format_has_it(fmt):
    """Numbers just below and at each limit are on different sides of it."""
    info = torch.finfo(torch_dtype(fmt))
    half = info.smallest_normal * info.eps / 2  # of the smallest subnormal
    tiny, top = info.smallest_normal, 2.0 ** (math.frexp(info.max)[1])
    below = 1 - 2.0**-10
    if fmt != "fp32":
        stats = stats_of([half * below, half, tiny * below, tiny, 1.0])
        assert (stats.flushed(fmt), stats.subnormal(fmt)) == (0.2, 0.4)
        if top < 2.0**63:
            assert stats_of([top * below, top, 2 * top, 1.0]).beyond(fmt) == 0.5
    else:
        stats = stats_of([tiny * below, tiny, 2.0**-149, 1e38])
        assert (stats.flushed(fmt), stats.subnormal(fmt), stats.beyond(fmt)) == (0.0, 0.5, 0.0)


def test_shares_of_loss_scaled_gradients_are_those_of_true_gradients():
    """Counted while multiplied by 65536, underflow is judged after the division, without rounding."""
    true = [2.0**-26, 2.0**-25, 2.0**-20, 1.0]
    scaled = stats_of([65536 * x for x in true], 65536.0)
    assert scaled == stats_of(true)
    assert scaled.flushed("fp16") == 0.25
    assert (scaled.largest, scaled.smallest) == (1.0, 2.0**-26)


def test_special_values_are_counted_apart():
    """NaN, inf and zeros are no part of the shares by format."""
    stats = stats_of([math.nan, math.inf, -math.inf, 0.0, 1.0, 2.0**-30])
    assert (stats.nan, stats.inf, stats.nonfinite, stats.zeros, stats.nonzero) == (1, 2, 3, 1, 2)
    assert stats.share_of_zeros == pytest.approx(1 / 6)
    assert stats.flushed("fp16") == 0.5


def test_a_tensor_without_numbers_has_shares_of_0():
    """Nothing is divided by 0 for empty tensors and tensors of zeros."""
    for values in ([], [0.0, 0.0], [math.nan]):
        stats = stats_of(values)
        assert (stats.flushed("fp16"), stats.subnormal("bf16"), stats.beyond("fp16")) == (0.0, 0.0, 0.0)
        assert (stats.percentile(50), stats.largest, stats.smallest) == (None, 0.0, 0.0)
    table = table_of([torch.empty(0), torch.zeros(2)])
    assert table.flushed("fp16").tolist() == [0.0, 0.0]
    assert table.share_of_zeros.tolist() == [0.0, 1.0]


@given(numbers.filter(any), st.floats(0, 100))
def test_percentiles_are_exponents_of_sorted_elements(values, q):
    """The exponent of the element at that position of the sorted magnitudes."""
    magnitudes = sorted(abs(v) for v in values if v)
    position = max(1, math.ceil(len(magnitudes) * q / 100))
    expected = math.frexp(magnitudes[position - 1])[1] - 1
    assert stats_of(values).percentile(q) == min(expected, 63)


def test_percentiles_beyond_100_are_rejected():
    """A share is not a percentage."""
    with pytest.raises(SettingError, match="100"):
        stats_of([1.0]).percentile(101)


@given(st.lists(numbers, max_size=4))
def test_merged_statistics_are_those_of_the_joined_tensors(parts):
    """A module is the concatenation of its parameters."""
    merged = TensorStats.merge("t0", [stats_of(part) for part in parts])
    assert merged == stats_of([x for part in parts for x in part])


@given(numbers)
def test_records_survive_json(values):
    """Statistics are the same after a way through the run file."""
    stats = stats_of([*values, math.nan, math.inf])
    record = json.loads(json.dumps(stats.to_record()))
    assert TensorStats.from_record(record) == stats
    assert all(record["exponents"].values())


def test_a_table_answers_as_its_rows_do():
    """Arrays over all tensors equal the properties of each tensor."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(50, generator=generator) * s for s in (1e-9, 1.0, 1e6)]
    tensors[1][:7] = torch.tensor([math.nan, math.inf, 0, 0, 0, 1e-42, 1e38])
    table = table_of(tensors, 8.0)
    for i, stats in enumerate(table):
        assert table[stats.name] == stats
        for name in ("nonfinite", "nonzero", "share_of_zeros", "largest", "smallest"):
            assert getattr(table, name)[i] == getattr(stats, name)
        for fmt in FORMATS:
            for name in ("flushed", "subnormal", "beyond"):
                assert getattr(table, name)(fmt)[i] == getattr(stats, name)(fmt)
    assert len(table) == 3


def test_formats_without_a_fixed_range_are_rejected():
    """Blocks that share a scale, and fp64, whose limits are outside the bins."""
    from halfstep.precision.formats import FP64

    for fmt in ("8bit", FP64):
        with pytest.raises(SettingError, match="not known"):
            stats_of([1.0]).flushed(fmt)


def test_statistics_print_in_one_line():
    """Name, range, median and special values."""
    text = str(stats_of([math.nan, 0.0, 0.0, 0.5, 1.0, 4.0]))
    assert text == "t0: 6 elements, 0.5 to 4, median 2^0, 1 NaN, 2 zeros"
    assert stats_of([0.25]).bins[BIN_OF_1 - 2] == 1
