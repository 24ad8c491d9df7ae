"""The five rules against published traces and independent re-statements."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep.kernels.scale_update import COUNTERS, new_counters, scale_update
from halfstep.precision.loss_scale import SEMANTICS, LossScale
from scaler_rules import RULES


def replay(rule, trace, device="cpu"):
    """The scales and the hysteresis left after each step of a trace."""
    scale = torch.tensor(rule.init_scale, device=device)
    counters = new_counters(rule, device)
    scales, left = [], []
    for overflow in trace:
        scale_update(scale, counters, torch.tensor(float(overflow), device=device), rule)
        scales.append(float(scale))
        left.append(int(counters[COUNTERS.index("hysteresis_left")]))
    return scales, left


def log2(scales):
    return [round(math.log2(s)) for s in scales]


PUBLISHED = [int(c) for c in "01010110000011"]


@pytest.mark.parametrize(
    ("semantics", "expected"),
    [
        ("torch", "16 15 15 14 14 13 12 12 12 12 13 13 12 11"),
        ("apex", "16 16 16 16 16 16 15 15 15 15 16 16 16 15"),
        ("megatron", "16 16 16 15 15 14 13 13 13 13 14 14 14 13"),
        ("deepspeed", "16 16 16 15 15 14 13 13 13 13 13 14 14 13"),
        ("deepspeed-consecutive", "16 16 16 16 16 16 15 15 15 15 15 16 16 15"),
    ],
)
def test_published_trace(semantics, expected):
    """One trace of overflows gives the five published trajectories."""
    rule = LossScale.dynamic(semantics=semantics, growth_interval=4)
    assert log2(replay(rule, PUBLISHED)[0]) == [int(x) for x in expected.split()]


def test_deepspeed_golden_trace_with_hysteresis():
    """DeepSpeed's own run: window 3, hysteresis 2, refilled on growth only."""
    rule = LossScale.dynamic(growth_interval=3)
    scales, left = replay(rule, [c == "x" for c in "......x.x....xx....."])
    assert scales == [65536.0] * 3 + [131072.0] * 5 + [65536.0] * 4 + [131072.0] * 2 + [65536.0] * 4 + [131072.0] * 2
    assert left == [2] * 6 + [1] * 6 + [2] + [1] * 5 + [2, 2]


def test_deepspeed_golden_trace_consecutive():
    """DeepSpeed's own run: the same trace with consecutive_hysteresis."""
    rule = LossScale.dynamic(semantics="deepspeed-consecutive", growth_interval=3)
    scales, left = replay(rule, [c == "x" for c in "......x.x....xx....."])
    assert scales == [65536.0] * 3 + [131072.0] * 9 + [262144.0] * 2 + [131072.0] * 4 + [262144.0] * 2
    assert left == [2] * 6 + [1, 2, 1, 2, 2, 2, 2, 1, 1, 2, 2, 2, 2, 2]


def test_deepspeed_golden_trace_at_the_floor():
    """DeepSpeed's own run without raising: the scale waits at the floor and grows again after window + 1 steps."""
    rule = LossScale.dynamic(init_scale=4.0, growth_interval=3, hysteresis=1)
    assert replay(rule, [c == "x" for c in "xxxx...."])[0] == [2, 1, 1, 1, 1, 1, 1, 2]


@settings(max_examples=150, deadline=None)
@given(
    semantics=st.sampled_from(SEMANTICS),
    trace=st.lists(st.booleans(), max_size=60),
    interval=st.integers(1, 6),
    hysteresis=st.integers(1, 4),
    init=st.integers(-3, 20),
    room=st.tuples(st.integers(0, 8), st.integers(0, 8)),
    growth=st.sampled_from([2.0, 4.0, 1.5]),
    backoff=st.sampled_from([0.5, 0.25]),
)
def test_random_traces_follow_an_independent_statement_of_each_rule(
    semantics, trace, interval, hysteresis, init, room, growth, backoff
):
    """Scale and hysteresis follow the re-stated rule on any trace, clamped at floor and cap."""
    hysteresis = 1 if semantics == "torch" else hysteresis
    floor, cap = 2.0 ** (init - room[0]), 2.0 ** (init + room[1])
    rule = LossScale.dynamic(
        semantics=semantics, init_scale=2.0**init, growth_factor=growth, backoff_factor=backoff,
        growth_interval=interval, hysteresis=hysteresis, min_scale=floor, max_scale=cap,
    )  # fmt: skip
    stated = RULES[semantics](2.0**init, growth, backoff, interval, hysteresis, floor, cap)
    scales, left = replay(rule, trace)
    for overflow, scale, now_left in zip(trace, scales, left, strict=True):
        stated.update(overflow)
        assert scale == pytest.approx(stated.scale, rel=1e-6)
        assert floor <= scale <= cap
        assert semantics == "torch" or now_left == stated.left


@settings(max_examples=60, deadline=None)
@given(
    trace=st.lists(st.booleans(), max_size=40),
    interval=st.integers(1, 5),
    growth=st.floats(1.01, 8),
    backoff=st.floats(0.05, 0.99),
)
def test_torch_semantics_equal_torchs_own_kernel_bit_for_bit(trace, interval, growth, backoff):
    """Inside the borders the torch rule is torch's kernel, for any factors."""
    rule = LossScale.dynamic(
        semantics="torch", growth_factor=growth, backoff_factor=backoff, growth_interval=interval,
        min_scale=1e-30, max_scale=math.inf,
    )  # fmt: skip
    scale, tracker = torch.tensor(rule.init_scale), torch.tensor(0, dtype=torch.int32)
    ours, _ = replay(rule, trace)
    for overflow, expected in zip(trace, ours, strict=True):
        torch._amp_update_scale_(scale, tracker, torch.tensor(float(overflow)), growth, backoff, interval)
        assert float(scale) == expected


def test_growth_past_fp32_keeps_the_last_finite_scale():
    """Without a cap the scale stops at fp32's end instead of becoming inf."""
    rule = LossScale.dynamic(semantics="torch", init_scale=2.0**126, growth_interval=1, max_scale=math.inf)
    assert log2(replay(rule, [0] * 5)[0]) == [127] * 5


@pytest.mark.parametrize("flag", [1.0, 2.0, -1.0, math.inf, math.nan])
def test_any_flag_but_zero_is_an_overflow(flag):
    """A sum of flags over devices, or a NaN flag, is an overflow too."""
    rule = LossScale.dynamic(hysteresis=1)
    assert replay(rule, [flag])[0] == [32768.0]


def test_static_and_no_scale_count_but_do_not_move():
    """Without a dynamic rule only the counters advance."""
    for mode in ("static", "none"):
        rule = LossScale(mode=mode, init_scale=8.0)
        scale, counters = torch.tensor(8.0), new_counters(rule)
        for flag in (1.0, 0.0, 1.0, 1.0):
            scale_update(scale, counters, torch.tensor(flag), rule)
        named = dict(zip(COUNTERS, counters.tolist(), strict=True))
        assert (float(scale), named["updates"], named["skips"], named["consecutive_skips"]) == (8.0, 4, 3, 2)


@pytest.mark.gpu
def test_update_can_be_captured_in_a_cuda_graph():
    """The update runs inside a CUDA graph and replays to the same trajectory."""
    rule = LossScale.dynamic(growth_interval=3)
    scale, counters = torch.tensor(65536.0, device="cuda"), new_counters(rule, "cuda")
    flag = torch.zeros((), device="cuda")
    scale_update(scale.clone(), counters.clone(), flag, rule)  # warm-up
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scale_update(scale, counters, flag, rule)
    trace = [c == "x" for c in "......x.x....xx....."]
    scales = []
    for overflow in trace:
        flag.fill_(float(overflow))
        graph.replay()
        scales.append(float(scale))
    assert scales == replay(rule, trace)[0]
