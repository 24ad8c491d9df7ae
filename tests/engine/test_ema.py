"""The moving average of the masters."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from halfstep.engine.ema import Ema
from halfstep.errors import SettingError
from halfstep.optim import AdamW

STEP, SKIP = torch.zeros(()), torch.ones(())


def plain(param):
    return param.detach()


def bits(tensor):
    return tensor.view(torch.int32).clone()


@given(st.lists(st.booleans(), min_size=1, max_size=30), st.sampled_from([0.5, 0.9, 0.999]), st.integers(0, 99))
def test_the_average_follows_the_recursion_in_float64(skips, decay, seed):
    """average += (1 - decay)(master - average) at every step that happened, and nothing at the others."""
    generator = torch.Generator().manual_seed(seed)
    param = nn.Parameter(torch.randn(7, generator=generator))
    ema = Ema({"w": param}, decay, plain)
    exact = param.detach().double()
    for skipped in skips:
        param.data = torch.randn(7, generator=generator)
        ema.update(SKIP if skipped else STEP)
        if not skipped:
            exact = exact + (1 - decay) * (param.detach().double() - exact)
    assert ema.averages["w"].dtype is torch.float32
    assert torch.allclose(ema.averages["w"].double(), exact, rtol=0, atol=len(skips) * 1e-6)


@pytest.mark.parametrize(
    ("average", "master"),
    [
        ([1.5, -2.0, 1e-42], [3.0, 1.0, 2.0]),
        ([-0.0, 0.0, -0.0], [-0.0, -0.0, 1.0]),
        ([1.0, 2.0, 3.0], [torch.nan, torch.inf, -torch.inf]),
        ([3e38, -3e38, 1.0], [-3e38, 3e38, 1.0]),
        ([torch.inf, -torch.inf, torch.nan], [1.0, 2.0, 3.0]),
    ],
    ids=["numbers", "zeros of both signs", "bad masters", "largest", "bad averages"],
)
def test_a_flagged_update_leaves_every_bit(average, master):
    """A skipped step leaves the average as it was, whatever master and average hold."""
    param = nn.Parameter(torch.tensor(average))
    ema = Ema({"w": param}, 0.99, plain)
    param.data = torch.tensor(master)
    before = bits(ema.averages["w"])
    ema.update(SKIP)
    assert torch.equal(bits(ema.averages["w"]), before)


def test_the_average_does_not_alias_the_weights():
    """Training continues without touching the average, and the average without touching the weights."""
    param = nn.Parameter(torch.ones(3))
    ema = Ema({"w": param}, 0.5, plain)
    param.data.fill_(3.0)
    assert ema.averages["w"].tolist() == [1.0] * 3
    ema.update(STEP)
    assert ema.averages["w"].tolist() == [2.0] * 3
    assert param.tolist() == [3.0] * 3


@pytest.mark.parametrize("master", ["split", "fp32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_average_follows_lean_masters_not_their_roundings(master, dtype):
    """Updates far below a 16-bit ulp show in the average."""
    param = nn.Parameter(torch.ones(4, dtype=dtype))
    optimizer = AdamW([param], lr=1e-5, weight_decay=0.0, master=master)
    optimizer.start_master(param, None)
    ema = Ema({"w": param}, 0.5, optimizer.master_of)
    exact = torch.ones(4, dtype=torch.float64)
    for _ in range(10):
        param.grad = torch.ones_like(param)
        optimizer.step()
        ema.update(STEP)
        exact = exact + 0.5 * (optimizer.master_of(param).double() - exact)
    assert torch.equal(param, torch.ones(4, dtype=dtype))
    assert ema.averages["w"].dtype is torch.float32
    assert torch.allclose(ema.averages["w"].double(), exact, rtol=0, atol=1e-6)
    assert (ema.averages["w"] < 1 - 5e-5).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_swapped_holds_the_averages_and_restores_the_weights(dtype):
    """Inside the block the parameters are the averages, after it bit for bit what they were, also after an error."""
    param = nn.Parameter(torch.randn(5).to(dtype))
    ema = Ema({"w": param}, 0.9, lambda p: p.detach().float())
    ema.averages["w"].copy_(torch.randn(5))
    before, address = param.detach().clone(), param.data_ptr()
    with ema.swapped():
        assert torch.equal(param, ema.averages["w"].to(dtype))
        assert param.data_ptr() == address
    assert torch.equal(param, before)
    with pytest.raises(ZeroDivisionError), ema.swapped():
        raise ZeroDivisionError
    assert torch.equal(param, before)
    assert param.requires_grad


def test_swapping_does_not_touch_lean_masters():
    """Evaluation on the averages leaves weight, residual and master as they were."""
    param = nn.Parameter(torch.randn(5).bfloat16())
    optimizer = AdamW([param], master="split")
    param.grad = torch.ones_like(param)
    optimizer.step()
    ema = Ema({"w": param}, 0.9, optimizer.master_of)
    before = optimizer.master_of(param).clone()
    ema.averages["w"].zero_()
    with ema.swapped():
        assert not param.any()
    assert torch.equal(optimizer.master_of(param), before)


def test_state_round_trip():
    """Averages are copied into a fresh object; its own decay stays."""
    params = {"a": nn.Parameter(torch.randn(3)), "b": nn.Parameter(torch.randn(2, 2))}
    ema = Ema(params, 0.9, plain)
    for p in params.values():
        p.data.add_(1)
    ema.update(STEP)
    saved = ema.state_dict()
    assert saved["decay"] == 0.9
    fresh = Ema({name: nn.Parameter(torch.zeros_like(p)) for name, p in params.items()}, 0.5, plain)
    fresh.load_state_dict(saved)
    assert all(torch.equal(fresh.averages[name], ema.averages[name]) for name in params)
    assert all(fresh.averages[name] is not ema.averages[name] for name in params)
    assert fresh.decay == 0.5


def test_the_trained_weights_come_back_inside_and_changes_to_them_stay():
    """Within `swapped`, `swapped_back` has the trained weights; nested blocks of either kind end where they began."""
    param = nn.Parameter(torch.ones(3))
    ema = Ema({"w": param}, 0.9, plain)
    ema.averages["w"].fill_(5)
    with ema.swapped_back():
        assert param.tolist() == [1.0] * 3
    with ema.swapped():
        with ema.swapped_back():
            assert param.tolist() == [1.0] * 3
            with ema.swapped():
                assert param.tolist() == [5.0] * 3
            param.data.fill_(2)  # as loading a state does
        assert param.tolist() == [5.0] * 3
        with ema.swapped():
            assert param.tolist() == [5.0] * 3
        assert param.tolist() == [5.0] * 3
        with pytest.raises(ZeroDivisionError), ema.swapped_back():
            raise ZeroDivisionError
        assert param.tolist() == [5.0] * 3
    assert param.tolist() == [2.0] * 3
    assert ema.trained is None


def test_averages_of_another_shape_are_rejected():
    """A shape that would broadcast is not accepted, and nothing has been loaded."""
    ema = Ema({"a": nn.Parameter(torch.zeros(2)), "b": nn.Parameter(torch.zeros(2))}, 0.9, plain)
    with pytest.raises(SettingError, match=r"EMA of b has the shape \(1,\) and the parameter \(2,\)"):
        ema.load_state_dict({"averages": {"a": torch.ones(2), "b": torch.ones(1)}})
    assert not ema.averages["a"].any()


def test_averages_of_other_parameters_are_rejected():
    """The message names what does not fit, and nothing has been loaded."""
    ema = Ema({"a": nn.Parameter(torch.zeros(2))}, 0.9, plain)
    with pytest.raises(SettingError, match="other parameters than this model: a, b"):
        ema.load_state_dict({"decay": 0.9, "averages": {"b": torch.ones(2)}})
    assert not ema.averages["a"].any()


@pytest.mark.parametrize("decay", [0, 1, 1.5, -0.1, float("nan"), "0.9", True, None])
def test_a_decay_outside_0_and_1_is_rejected(decay):
    """The message repeats the value."""
    with pytest.raises(SettingError, match="must be a decay between 0 and 1"):
        Ema({}, decay, plain)
