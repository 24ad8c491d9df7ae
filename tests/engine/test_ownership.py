"""What the user may do with an optimizer while an Engine steps it."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from halfstep.engine.engine import Engine
from halfstep.errors import SettingError
from halfstep.optim import AdamW

PRESETS = ["fp32", "fp16", "bf16-lean", "bf16-lean,states=8bit", "bf16-lean,master=fp32"]


def build(precision, optimizer=torch.optim.AdamW, **options):
    torch.manual_seed(0)
    net = nn.Linear(6, 6)
    chosen = optimizer(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(chosen, 2, 0.5)
    return net, chosen, Engine(net, chosen, precision, scheduler=scheduler, **options)


def steps(net, engine, seeds):
    for seed in seeds:
        with engine.forward():
            loss = (net(torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))).float() - 1).square().mean()
        engine.backward(loss)
        engine.step()
    return {name: master.clone() for name, master in engine.masters().items()}


def same(ours, theirs):
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("precision", PRESETS)
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, AdamW], ids=["stock", "halfstep"])
def test_a_state_loaded_through_the_users_optimizer_is_the_one_that_is_used(precision, optimizer):
    """Model and optimizer restored by their own methods after Engine(...): the run repeats bit for bit."""
    net, chosen, engine = build(precision, optimizer)
    steps(net, engine, range(2))
    saved = copy.deepcopy(
        (net.state_dict(), chosen.state_dict(), engine.schedulers[0].state_dict(), engine.scaler.state_dict())
    )
    first = steps(net, engine, range(2, 5))
    groups = chosen.param_groups[0] if "lean" in precision else None
    net.load_state_dict(saved[0])
    chosen.load_state_dict(saved[1])
    engine.schedulers[0].load_state_dict(saved[2])
    engine.scaler.load_state_dict(saved[3])
    again = steps(net, engine, range(2, 5))
    assert same(first, again)
    assert groups is None or chosen.param_groups[0] is groups is engine.optimizers[0].param_groups[0]
    assert chosen.param_groups[0]["lr"] == engine.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-2 * 0.25)


@pytest.mark.parametrize("precision", PRESETS)
def test_a_state_of_plain_torch_loads_after_the_engine_was_built(precision):
    """Moments come in, the masters of the weights stay, and the way of stepping does too."""
    torch.manual_seed(0)
    net = nn.Linear(6, 6)
    plain = torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=True)
    net(torch.ones(1, 6)).sum().backward()
    plain.step()
    state = copy.deepcopy(plain.state_dict())
    twin = copy.deepcopy(net)
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    engine = Engine(twin, optimizer, precision)
    before = {name: master.clone() for name, master in engine.masters().items()}
    optimizer.load_state_dict(state)
    assert same(before, engine.masters())
    assert float(engine.optimizers[0].state[twin.weight]["step"]) == 1
    steps(twin, engine, [0])
    assert float(engine.optimizers[0].state[twin.weight]["step"]) == 2


@pytest.mark.parametrize("precision", ["fp32", "bf16-lean"])
def test_step_and_state_hooks_of_the_users_optimizer_run(precision):
    """Hooks registered before or after Engine(...) run once each, with the user's optimizer as their argument."""
    torch.manual_seed(0)
    net, calls = nn.Linear(6, 6), []
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    optimizer.register_step_pre_hook(lambda o, *_: calls.append(("pre", o)))
    engine = Engine(net, optimizer, precision)
    optimizer.register_step_post_hook(lambda o, *_: calls.append(("post", o)))
    optimizer.register_state_dict_pre_hook(lambda o: calls.append(("state", o)))
    optimizer.register_load_state_dict_pre_hook(lambda o, _: calls.append(("load", o)))
    optimizer.register_load_state_dict_post_hook(lambda o: calls.append(("loaded", o)))
    steps(net, engine, [0])
    engine.load_state_dict(engine.state_dict())
    assert [name for name, _ in calls] == ["pre", "post", "state", "load", "loaded"]
    assert all(o is optimizer for _, o in calls)


def test_hooks_that_would_not_run_are_rejected():
    """With gradient release there is no step; a pre-hook may not change the arguments of an adopted step."""
    net = nn.Linear(6, 6)
    optimizer = torch.optim.AdamW(net.parameters())
    handle = optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(SettingError, match="step hooks.*gradient_release"):
        Engine(net, optimizer, "bf16-lean", gradient_release=True)
    assert net.weight.dtype is torch.float32
    handle.remove()
    optimizer.register_step_pre_hook(lambda o, args, kwargs: (args, kwargs))
    engine = Engine(net, optimizer, "bf16-lean")
    with pytest.raises(SettingError, match="returned new arguments"):
        steps(net, engine, [0])


@pytest.mark.parametrize("precision", ["fp32", "bf16-lean"])
def test_groups_cannot_be_added_while_an_engine_steps_the_optimizer(precision):
    """On the user's optimizer or the Engine's; after close(), or when the Engine is gone, they can."""
    _, optimizer, engine = build(precision)
    late = {"params": [nn.Parameter(torch.ones(2))]}
    for target in (optimizer, engine.optimizers[0]):
        with pytest.raises(SettingError, match=r"add_param_group\(\).*engine.close\(\)"):
            target.add_param_group(late)
    assert len(optimizer.param_groups) == 1
    engine.close()
    optimizer.add_param_group(late)
    _, optimizer, engine = build(precision)
    del engine
    gc.collect()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert len(optimizer.param_groups) == 2


def test_a_lean_state_is_not_stepped_as_if_it_were_torchs():
    """8-bit codes or low halves in a stock optimizer's state raise under a precision that would misread them."""
    net, optimizer, engine = build("bf16-lean,states=8bit")
    steps(net, engine, range(2))
    twin = nn.Linear(6, 6)
    stock = torch.optim.AdamW(twin.parameters())
    stock.load_state_dict(optimizer.state_dict())
    with pytest.raises(SettingError, match="state of a lean run.*Engine.load"):
        Engine(twin, stock, "bf16")


@pytest.mark.parametrize("precision", ["fp32", "bf16-lean"])
def test_an_owned_optimizer_is_freed_at_once(precision):
    """Forwarding makes no reference cycles, neither around the stock optimizer nor around the lean one."""
    Engine(*build(precision)[:2], precision).close()  # what is made once in a process stays
    gc.collect()
    gc.disable()
    try:
        net = nn.Linear(6, 6)
        optimizer = torch.optim.AdamW(net.parameters())
        engine = Engine(net, optimizer, precision)
        references = [weakref.ref(o) for o in (net.weight, optimizer, engine.optimizers[0])]
        del net, optimizer, engine
        assert all(reference() is None for reference in references)
    finally:
        gc.enable()
