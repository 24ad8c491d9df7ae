"""Adoption: a lean optimizer takes over a stock one with its groups, schedulers and state."""

import copy
import itertools
import logging
import weakref

import pytest
import torch
from torch import nn

from halfstep.errors import SettingError
from halfstep.optim import AdamW, adopt
from halfstep.optim.adopt import ADOPTS, adopts
from optim_cases import BF16, FP16, FP32, give_grads, same, snapshot, weights

STOCK = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01, weight_decay=0.1, amsgrad=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, weight_decay=0.1),
}
every_stock = pytest.mark.parametrize("stock", STOCK.values(), ids=STOCK)


@every_stock
def test_adoption_shares_groups_and_state(stock, caplog):
    """Group dictionaries, their list and the state are the very same objects, and the change is logged."""
    caplog.set_level(logging.INFO, logger="halfstep")
    optimizer = stock(weights((3,), dtype=BF16))
    groups = optimizer.param_groups
    lean = adopt(optimizer, master="split", states="fp32")
    assert type(lean) is ADOPTS[type(optimizer)]
    assert (lean.master, lean.states) == ("split", "fp32")
    assert lean.param_groups is groups is optimizer.param_groups
    assert lean.param_groups[0] is groups[0]
    assert lean.state is optimizer.state
    name = type(optimizer).__name__
    assert f"{name} was adopted as halfstep.optim.{name} (master=split, states=fp32)." in caplog.text


@every_stock
def test_a_scheduler_bound_before_adoption_changes_the_rate_that_is_used(stock):
    """The scheduler is bound to the stock optimizer, changes the lean one's rate, and does not warn."""
    param = nn.Parameter(torch.ones(4))
    optimizer = stock([param])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 0.0 if t else 1.0)
    lean = adopt(optimizer, master="none", states="fp32")
    param.grad = torch.ones(4)
    lean.step()
    scheduler.step()
    assert lean.param_groups[0]["lr"] == 0.0
    before = param.detach().clone()
    param.grad = torch.ones(4)
    lean.step()
    assert torch.equal(param, before)


def test_a_scheduler_bound_after_adoption_works_too():
    """On the stock optimizer or on the lean one: both hold the same groups, and neither warns."""
    for pick in (0, 1):
        param = nn.Parameter(torch.ones(4, dtype=BF16))
        optimizer = torch.optim.SGD([param], lr=1.0)
        lean = adopt(optimizer, master="split", states="fp32")
        scheduler = torch.optim.lr_scheduler.StepLR((optimizer, lean)[pick], 1, gamma=0.5)
        param.grad = torch.ones_like(param)
        lean.step()
        scheduler.step()
        assert lean.param_groups[0]["lr"] == 0.5


def test_stepping_the_adopted_optimizer_raises():
    """Stepping the stock optimizer would bypass the masters; the message names the call to use."""
    param = nn.Parameter(torch.ones(2, dtype=BF16))
    optimizer = torch.optim.AdamW([param])
    adopt(optimizer, master="split", states="fp32")
    param.grad = torch.ones_like(param)
    with pytest.raises(SettingError, match=r"AdamW was adopted by halfstep.optim.AdamW.*engine.step\(\)"):
        optimizer.step()


@every_stock
def test_adoption_carries_the_state_over(stock):
    """A stock optimizer that has stepped continues where it was: moments and step counts are not reset."""
    ours, theirs = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5))
    a, b = stock([ours]), stock([theirs])
    for t in range(3):
        give_grads([ours], t)
        give_grads([theirs], t)
        a.step()
        b.step()
    lean = adopt(a, master="none", states="fp32")
    for t in range(3, 8):
        give_grads([ours], t)
        give_grads([theirs], t)
        lean.step()
        b.step()
    assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-7)


@every_stock
@pytest.mark.parametrize(("master", "states"), [*itertools.product(["split", "fp32"], ["fp32", "bf16", "8bit"])])
def test_an_optimizer_adopted_again_continues_where_it_was(stock, master, states):
    """A second Engine over the same optimizer takes over masters and moments bit for bit, in whatever layout they are."""
    runs = []
    for again in (False, True):
        params = weights((5, 7), (300,), dtype=BF16)
        optimizer = stock(params)
        optimizer.param_groups[0] |= {"amsgrad": False}  # not possible in 8 bits
        lean = adopt(optimizer, master=master, states=states)
        for t in range(8):
            if again and t == 5:
                lean = adopt(optimizer, master=master, states=states)
            give_grads(params, t)
            lean.step()
        runs.append((snapshot(lean), {n: v.dtype for n, v in lean.state[params[0]].items()}))
    assert runs[0][1] == runs[1][1]
    assert same(runs[0][0], runs[1][0])


@pytest.mark.parametrize("dtype", [BF16, FP16, torch.float64], ids=str)
def test_moments_of_any_dtype_become_those_of_the_policy(dtype):
    """A stock optimizer that stepped 16-bit weights has 16-bit moments; adopted, they are fp32, as in the policy."""
    param = nn.Parameter(torch.ones(5, dtype=dtype))
    optimizer = torch.optim.AdamW([param])
    param.grad = torch.ones_like(param)
    optimizer.step()
    before = optimizer.state[param]["exp_avg"].clone()
    lean = adopt(optimizer, master="split", states="fp32")
    assert lean.state[param]["exp_avg"].dtype is FP32
    assert torch.equal(lean.state[param]["exp_avg"], before.float())


@every_stock
def test_adopted_state_is_stored_as_in_the_policy(stock):
    """A stepped stock optimizer's moments become bf16 under states=bf16, and its 16-bit weights get a master."""
    param = nn.Parameter(torch.ones(5, dtype=BF16))
    optimizer = stock([param])
    param.grad = torch.ones_like(param)
    optimizer.step()
    lean = adopt(optimizer, master="split", states="bf16")
    param.grad = torch.ones_like(param)
    lean.step()
    assert lean.state[param]["low"].dtype is torch.int16
    moments = [name for name in lean.moments if name in lean.state[param]]
    assert moments
    assert {lean.state[param][name].dtype for name in moments} == {BF16}


def test_adoption_takes_old_states_with_plain_numbers_and_none():
    """Checkpoints of old torch hold the step as a number, and SGD's buffer may be None."""
    param = nn.Parameter(torch.ones(2))
    adam = torch.optim.Adam([param])
    adam.state[param] = {"step": 7, "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}
    lean = adopt(adam, master="none", states="fp32")
    param.grad = torch.ones(2)
    lean.step()
    assert lean.state[param]["step"] == 8
    sgd = torch.optim.SGD([param], momentum=0.9)
    sgd.state[param] = {"momentum_buffer": None}
    lean = adopt(sgd, master="none", states="fp32")
    lean.step()
    assert torch.equal(lean.state[param]["momentum_buffer"], torch.ones(2))


def test_decoupled_weight_decay_of_a_stock_adam_is_kept():
    """torch.optim.Adam(decoupled_weight_decay=True) is AdamW, before and after adoption."""
    ours, theirs = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    options = {"lr": 0.1, "weight_decay": 0.5, "decoupled_weight_decay": True}
    lean = adopt(torch.optim.Adam([ours], **options), master="none", states="fp32")
    stock = torch.optim.Adam([theirs], **options)
    for optimizer, param in ((lean, ours), (stock, theirs)):
        param.grad = torch.ones(3)
        optimizer.step()
    assert torch.allclose(ours, theirs)


def test_optimizers_without_masters_are_rejected():
    """Other classes, subclasses included, are rejected by name, and the message lists the alternatives."""

    class Own(torch.optim.AdamW):
        pass

    for optimizer in (torch.optim.Muon(weights((2, 2))), Own(weights((2,)))):
        assert not adopts(optimizer)
        with pytest.raises(
            SettingError, match=f"{type(optimizer).__name__} has none.*Adam, AdamW.*SGD.*halfstep.optim"
        ):
            adopt(optimizer, master="split", states="fp32")
    assert adopts(torch.optim.SGD(weights((2,))))


def test_a_lean_optimizer_takes_the_policys_settings():
    """master='policy' and states='policy' are filled in; the same object comes back."""
    optimizer = AdamW(weights((2,), dtype=BF16))
    assert adopt(optimizer, master="fp32", states="bf16") is optimizer
    assert (optimizer.master, optimizer.states) == ("fp32", "bf16")
    assert adopt(optimizer, master="fp32", states="bf16") is optimizer


@pytest.mark.parametrize(("master", "states"), [("split", "8bit"), ("fp32", "bf16"), ("fp32", "fp32")])
def test_a_lean_optimizer_that_has_stepped_continues_in_the_policys_layout(master, states):
    """States from before there was a policy are converted: masters exactly, moments as the layout rounds them."""
    params = weights((5, 7), (9,), dtype=BF16)
    optimizer = AdamW(params, lr=0.01)
    for t in range(3):
        give_grads(params, t)
        optimizer.step()
    masters = [optimizer.master_of(p).clone() for p in params]
    adopt(optimizer, master=master, states=states)
    assert all(torch.equal(optimizer.master_of(p), m) for p, m in zip(params, masters, strict=True))
    give_grads(params, 3)
    optimizer.step()
    fresh = adopt(AdamW(weights((5, 7), (9,), dtype=BF16), lr=0.01), master=master, states=states)
    give_grads(fresh.param_groups[0]["params"], 3)
    fresh.step()
    entries = [{n: v.dtype for n, v in o.state[o.param_groups[0]["params"][0]].items()} for o in (optimizer, fresh)]
    assert entries[0] == entries[1]


@pytest.mark.parametrize("own", [{"master": "fp32"}, {"states": "bf16"}])
def test_a_lean_optimizer_that_contradicts_the_policy_is_rejected(own):
    """The message shows both values and both ways out, and nothing has been changed."""
    optimizer = AdamW(weights((2,), dtype=BF16), **own)
    ((name, value),) = own.items()
    with pytest.raises(SettingError, match=f"built with {name}='{value}'.*policy has {name}=.*write {name}={value}"):
        adopt(optimizer, master="split", states="fp32")
    assert getattr(optimizer, name) == value
    assert {"master": optimizer.master, "states": optimizer.states} == {"master": "policy", "states": "policy"} | own


def test_groups_added_after_adoption_are_seen_by_both_and_take_the_users_settings():
    """add_param_group on either optimizer reaches the other, with the rate the stock optimizer was built with."""
    first, second, third = weights((2,), (2,), (2,), dtype=BF16)
    optimizer = torch.optim.AdamW([first], lr=0.25, betas=(0.5, 0.6))
    lean = adopt(optimizer, master="split", states="fp32")
    optimizer.add_param_group({"params": [second]})
    lean.add_param_group({"params": [third]})
    assert len(lean.param_groups) == len(optimizer.param_groups) == 3
    assert [group["lr"] for group in lean.param_groups] == [0.25, 0.25, 0.25]
    assert [group["betas"] for group in lean.param_groups] == [(0.5, 0.6)] * 3
    give_grads([first, second, third], 0)
    lean.step()
    assert all("low" in lean.state[p] for p in (first, second, third))


@every_stock
def test_loading_into_the_adopted_optimizer_reaches_the_lean_one(stock):
    """The groups stay the same dictionaries, the state stays shared, and masters and moments are those of the state."""
    params = weights((5, 7), (9,), dtype=BF16)
    optimizer = stock(params)
    lean = adopt(optimizer, master="split", states="fp32")
    for t in range(3):
        give_grads(params, t)
        lean.step()
    saved, values = copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for p in params]
    masters, groups = [lean.master_of(p).clone() for p in params], lean.param_groups[0]
    give_grads(params, 9)
    lean.step()
    for p, value in zip(params, values, strict=True):
        p.data.copy_(value)
    saved["param_groups"][0]["lr"] = 0.125
    optimizer.load_state_dict(saved)
    assert lean.param_groups[0] is groups is optimizer.param_groups[0]
    assert groups["lr"] == 0.125
    assert optimizer.state is lean.state
    assert all(torch.equal(lean.master_of(p), master) for p, master in zip(params, masters, strict=True))
    assert all(lean.state[p]["step"] == 3 for p in params)


def test_a_state_that_does_not_fit_an_adopted_optimizer_changes_nothing():
    """A load that fails in its last entry leaves groups, masters and moments as they were."""
    params = weights((5, 7), (9,), dtype=BF16)
    optimizer = torch.optim.AdamW(params, lr=0.01)
    lean = adopt(optimizer, master="split", states="8bit")
    give_grads(params, 0)
    lean.step()
    before, saved = snapshot(lean), copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 5.0
    saved["state"][1]["low"] = saved["state"][1]["low"].to(BF16)
    with pytest.raises(SettingError, match="'low'"):
        optimizer.load_state_dict(saved)
    assert same(before, snapshot(lean))
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert optimizer.state is lean.state


def test_an_adopted_optimizer_whose_engine_is_gone_loads_by_itself():
    """Nothing keeps the lean optimizer alive, and the stock one loads as torch does."""
    param = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([param], lr=0.5, momentum=0.9)
    lean = adopt(optimizer, master="none", states="fp32")
    gone = weakref.ref(lean)
    del lean
    assert gone() is None
    optimizer.load_state_dict(optimizer.state_dict() | {"state": {0: {"momentum_buffer": torch.full((3,), 2.0)}}})
    assert optimizer.state[param]["momentum_buffer"].tolist() == [2.0] * 3
