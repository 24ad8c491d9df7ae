"""Numbers with their uncertainty."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep.comparison import estimate
from halfstep.comparison.estimate import Estimate, curve_distance, from_groups, from_values, paired_ratio, smooth

times = st.floats(1e-4, 10)
groups = st.lists(st.lists(times, min_size=1, max_size=6), min_size=1, max_size=4)
few = settings(max_examples=15)  # each example is a bootstrap


@few
@given(groups)
def test_an_interval_contains_its_value(values):
    """Low, value and high are positive and in this order; one repeat stays within its measured range."""
    estimate = from_groups(values)
    assert 0 < estimate.low <= estimate.value <= estimate.high
    assert estimate.count == len(values)
    alone = from_groups(values[:1])
    assert min(values[0]) <= alone.low <= alone.high <= max(values[0])


@pytest.mark.parametrize(
    ("repeats", "between", "within"), [(2, 0.02, 0.02), (3, 0.02, 0.02), (3, 0.03, 0.005), (5, 0, 0.02)]
)
def test_an_interval_of_95_percent_is_one(repeats, between, within, monkeypatch):
    """In 95 % of simulated comparisons with known noise of processes and turns, the interval covers the true ratio."""
    monkeypatch.setattr(estimate, "_RESAMPLES", 100)
    rng = random.Random(0)
    hits = 0
    for _ in range(200):
        processes = [rng.lognormvariate(math.log(1.5), between) for _ in range(repeats)]
        ratios = [[process * rng.lognormvariate(0, within) for _ in range(12)] for process in processes]
        interval = from_groups(ratios)
        hits += interval.low <= 1.5 <= interval.high
    assert hits / 200 >= 0.92  # 95 %, minus the sampling error of 200 trials


@few
@given(groups, st.data())
def test_a_ratio_ignores_disturbances_of_both_rows(values, data):
    """Slowing a slice down by any factor in both rows does not change their ratio."""
    load = [[data.draw(st.floats(1, 10)) for _ in group] for group in values]
    slowed = [[v * f for v, f in zip(g, fs, strict=True)] for g, fs in zip(values, load, strict=True)]
    ratio = paired_ratio(
        [[v * 3 * f for v, f in zip(g, fs, strict=True)] for g, fs in zip(values, load, strict=True)], slowed
    )
    assert ratio.value == pytest.approx(3)
    assert (ratio.low, ratio.high) == (pytest.approx(3), pytest.approx(3))


def test_the_same_figures_give_the_same_interval():
    """A rebuilt report is identical."""
    values = [[1.0, 2.0, 3.0], [2.0, 2.5]]
    assert from_groups(values) == from_groups(values)


def test_nothing_measured_has_no_estimate():
    """Empty groups, NaN and unpaired values give None."""
    assert from_groups([]) is None
    assert from_groups([[], []]) is None
    assert from_values([math.nan]) is None
    assert paired_ratio([[1.0]], [[]]) is None


def test_a_mean_has_students_interval():
    """Three values 1, 2, 3: the mean is 2, and 4.303 standard errors are 2.484."""
    estimate = from_values([1.0, 2.0, 3.0])
    assert estimate.value == 2
    assert estimate.high - estimate.value == pytest.approx(4.303 / math.sqrt(3), rel=1e-3)
    assert not estimate.excludes(0)
    assert from_values([1.0, 1.1, 1.2]).excludes(0)


def test_one_value_excludes_nothing():
    """Without a second run there is no interval, and nothing is beyond noise."""
    assert not from_values([5.0]).excludes(0)


def test_many_values_use_the_normal_point():
    """Beyond the table of Student's t, the factor is 1.96."""
    estimate = from_values([0.0, 1.0] * 20)
    assert (estimate.high - estimate.low) / 2 == pytest.approx(1.96 * 0.5064 / math.sqrt(40), rel=1e-3)


def test_a_rate_reverses_the_interval():
    """The shortest time is the highest rate."""
    assert Estimate(2.0, 1.0, 4.0, 3).over(8.0) == Estimate(4.0, 2.0, 8.0, 3)


curves = st.lists(st.floats(0, 10), min_size=1, max_size=80)


@given(curves, curves)
def test_distance_is_a_distance(one, other):
    """It is zero to itself, symmetric and never negative."""
    assert curve_distance(one, one) == 0
    assert curve_distance(one, other) == curve_distance(other, one)
    assert curve_distance(one, other) >= 0


@given(curves, st.floats(-5, 5))
def test_a_shifted_curve_is_as_far_as_the_shift(curve, shift):
    """Smoothing does not change a constant difference."""
    assert curve_distance(curve, [v + shift for v in curve]) == pytest.approx(abs(shift), abs=1e-9)


def test_smoothing_averages_over_batches():
    """An alternating curve becomes a flat one."""
    assert smooth([0.0, 1.0] * 40) == [0.5] * 20


def test_a_curve_that_is_not_finite_has_no_distance():
    """A curve with NaN and an empty curve have no distance."""
    assert curve_distance([1.0, math.nan], [1.0, 1.0]) is None
    assert curve_distance([], [1.0]) is None
