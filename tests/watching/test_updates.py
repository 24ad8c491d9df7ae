"""Updates: their size relative to the weights, and the share that rounding removes."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from halfstep.watching.updates import MIN_STEPS, MOST_ELEMENTS, UpdateProbe, UpdateStats, has_master, spread


def observe(params, change, step=1, probe=None, state_of=lambda _: {}, gradients=None):
    """The statistics of one update, by name; `change` is called between the two looks."""
    probe = probe or UpdateProbe(params, state_of)
    probe.start()
    change()
    gradients = {name: torch.ones_like(p) for name, p in params.items()} if gradients is None else gradients
    rows, since = probe.finish(step, gradients)
    values = zip(probe.names, probe.dtypes, probe.masters, rows.tolist(), strict=True)
    return {name: UpdateStats.from_row(name, dtype, master, row, since) for name, dtype, master, row in values}


@given(st.integers(1, 5 * MOST_ELEMENTS))
def test_the_spread_is_even_and_bounded(numel):
    """At most 16,384 elements at equal distances, the first included, and all of a smaller tensor."""
    positions = spread(torch.arange(numel)).numpy()
    assert len(positions) <= MOST_ELEMENTS
    assert positions[0] == 0
    if numel <= MOST_ELEMENTS:
        assert len(positions) == numel
        return
    (stride,) = set(np.diff(positions))
    assert stride % 2 == 1  # visits every column of a matrix whose width is a power of two
    assert positions[-1] + stride >= numel
    assert len(positions) >= MOST_ELEMENTS // 3


def test_every_column_of_a_wide_matrix_is_visited():
    """A stride that divides the width would only see a few columns."""
    columns = torch.arange(1024).expand(4096, 1024)
    assert len(spread(columns).unique()) == 1024


def test_the_ratio_is_that_of_the_norms():
    """An update of 1 % of each weight has the ratio 0.01."""
    params = {"w": torch.randn(40, 50, generator=torch.Generator().manual_seed(0))}
    stats = observe(params, lambda: params["w"].mul_(1.01))["w"]
    assert stats.ratio == pytest.approx(0.01, rel=1e-4)
    assert stats.moving == 2000
    assert stats.lost == 0


def test_updates_below_half_an_ulp_of_bf16_are_lost():
    """1 + 2^-10 is 1 in bf16; with a gradient that is a lost update, without one it is none."""
    params = {"w": torch.ones(100, dtype=torch.bfloat16)}
    gradient = torch.ones(100)
    gradient[:40] = 0
    stats = observe(params, lambda: params["w"].add_(2.0**-10), gradients={"w": gradient})["w"]
    assert (stats.moving, stats.lost, stats.ratio, stats.master) == (60, 1.0, 0.0, False)


@pytest.mark.parametrize("entry", ["low", "master"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_with_a_master_nothing_is_lost(dtype, entry):
    """What the optimizer works on is compared, so a 16-bit weight that stays the same has lost nothing."""
    import halfstep

    weight = nn.Parameter(torch.ones(64, dtype=dtype))
    optimizer = halfstep.optim.SGD([weight], lr=2.0**-14, master="split" if entry == "low" else "fp32")
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    before = weight.detach().clone()
    stats = observe({"w": weight}, optimizer.step, state_of=optimizer.state.__getitem__)["w"]
    assert torch.equal(before, weight)
    assert stats.master
    assert stats.lost == 0
    assert stats.ratio == pytest.approx(2.0**-14, rel=1e-3)


def test_stuck_elements_have_not_moved_since_an_earlier_sample():
    """An element that takes any update in between is not stuck, even if it loses this one."""
    params = {"w": torch.ones(10, dtype=torch.bfloat16)}
    probe = UpdateProbe(params, lambda _: {})
    assert observe(params, lambda: None, 1, probe)["w"].stuck is None
    params["w"][:3] += 1
    stats = observe(params, lambda: None, 4, probe)["w"]
    assert (stats.lost, stats.stuck, stats.since) == (1.0, 0.7, 1)
    assert observe(params, lambda: None, 1 + MIN_STEPS, probe)["w"].since == 1
    assert observe(params, lambda: None, 2 + MIN_STEPS, probe)["w"].since == 1 + MIN_STEPS


@given(
    st.lists(st.tuples(st.sampled_from(["fp32", "bf16", "fp16"]), st.integers(1, 40)), min_size=1, max_size=6),
    st.integers(0, 1000),
)
def test_each_tensor_gets_its_own_sums(kinds, seed):
    """Whatever the dtypes and sizes, gathered sums equal those of each tensor alone, computed in float64."""
    g = torch.Generator().manual_seed(seed)
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    params = {f"p{i}": torch.randn(n, generator=g).to(dtypes[kind]) for i, (kind, n) in enumerate(kinds)}
    grads = {name: torch.randint(0, 2, p.shape, generator=g).float() for name, p in params.items()}
    old = {name: p.clone() for name, p in params.items()}

    def change():
        for p in params.values():
            p.add_(torch.randn(p.shape, generator=g).to(p.dtype), alpha=0.01)

    for name, stats in observe(params, change, gradients=grads).items():
        before, after = old[name].double(), params[name].double()
        moving = grads[name] != 0
        lost = int((moving & (before == after)).sum())
        assert stats.moving == int(moving.sum())
        assert stats.lost == pytest.approx(lost / max(int(moving.sum()), 1))
        size = before.norm().item()
        assert stats.ratio == pytest.approx(
            (after - before).norm().item() / size if size else stats.ratio, rel=1e-5, abs=1e-12
        )


def test_complex_empty_and_sparse_tensors_pass():
    """Tensors without an order of magnitude are left out, and a sparse gradient is no evidence."""
    table = nn.Embedding(6, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    params = {"c": torch.ones(3, dtype=torch.complex64), "e": torch.ones(0), "t": table.weight}
    stats = observe(params, lambda: None, gradients={"t": table.weight.grad})
    assert list(stats) == ["t"]
    assert stats["t"].moving == 0


def test_a_weight_of_zeros_has_a_ratio():
    """The first update of zero-initialised weights has no finite ratio; no update at all is 0."""
    assert math.isnan(UpdateStats.from_row("b", "fp32", True, (1.0, 0.0, 3.0, 0.0, 0.0), None).ratio)
    assert UpdateStats.from_row("b", "fp32", True, (0.0, 0.0, 3.0, 3.0, 0.0), None).ratio == 0


def test_what_counts_as_a_master():
    """fp32 weights are their own master; 16-bit ones need an entry in the optimizer's state."""
    assert has_master(torch.ones(1), {})
    assert not has_master(torch.ones(1).half(), {"exp_avg": 1})
    assert has_master(torch.ones(1).half(), {"low": torch.ones(1)})
    assert has_master(torch.ones(1).half(), {"kahan_comp": torch.ones(1)})
    assert not has_master(torch.ones(2).half(), {"error": torch.ones(()), "exp_avg": torch.ones(2)})
