"""Several modules and loose parameters train in one Engine as one model with names."""

import pytest
import torch
from torch import nn

from engine_models import PRESETS
from halfstep.engine.engine import Engine
from halfstep.engine.members import as_module
from halfstep.errors import SettingError


class Agent(nn.Module):
    """The same members in one module, as a user would write without a list."""

    def __init__(self, actor, critic, log_alpha):
        super().__init__()
        self.actor, self.critic = actor, critic
        self.log_alpha = nn.Parameter(log_alpha.detach().clone())


def parts(seed=0):
    """An actor with batch norm, a critic and a temperature."""
    torch.manual_seed(seed)
    actor = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    return actor, nn.Linear(4, 1), torch.zeros(1, requires_grad=True)


def optimizers_of(actor, critic, log_alpha):
    """One optimizer for the modules, one for the temperature."""
    modules = [*actor.parameters(), *critic.parameters()]
    return [torch.optim.Adam(modules, lr=0.01), torch.optim.Adam([log_alpha], lr=0.01)]


def train(engine, actor, critic, log_alpha, steps=3):
    """A few steps on fixed data."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        with engine.forward():
            values = critic(actor(torch.randn(6, 4, generator=generator))).float()
            loss = (values.pow(2) * log_alpha.exp()).mean() / 64
        engine.backward(loss)
        engine.step()


@pytest.mark.parametrize("precision", PRESETS)
def test_members_train_like_one_module(precision):
    """A dict of members gives the weights that one module of the same members gives, bit for bit."""
    actor, critic, log_alpha = parts()
    optimizers = optimizers_of(actor, critic, log_alpha)
    engine = Engine({"actor": actor, "critic": critic, "log_alpha": log_alpha}, optimizers, precision, max_norm=1.0)
    train(engine, actor, critic, log_alpha)
    agent = Agent(*parts())
    other = Engine(agent, optimizers_of(agent.actor, agent.critic, agent.log_alpha), precision, max_norm=1.0)
    if "lean" not in precision:  # where a loose parameter stays in fp32 and one of a module does not
        train(other, agent.actor, agent.critic, agent.log_alpha)
        for name, master in other.masters().items():
            assert torch.equal(master, engine.masters()[name]), name
    assert list(engine.params) == list(other.params)
    assert engine.progress.applied == 3
    assert log_alpha.item() != 0


def test_a_list_numbers_its_members():
    """The names of a list start with the positions."""
    actor, critic, log_alpha = parts()
    engine = Engine([actor, critic, log_alpha], optimizers_of(actor, critic, log_alpha), "fp32")
    assert next(iter(engine.params)) == "0.0.weight"
    assert list(engine.params)[-2:] == ["1.bias", "2"]


@pytest.mark.parametrize("precision", ["bf16-lean", "fp16-lean", "bf16-lean,master=fp32"])
def test_loose_parameters_stay_fp32_and_modules_follow_the_policy(precision):
    """Lean presets round the modules' weights, except those that keep_fp32 names by their prefix."""
    actor, critic, log_alpha = parts()
    members = {"actor": actor, "critic": critic, "log_alpha": log_alpha}
    Engine(members, optimizers_of(actor, critic, log_alpha), f"{precision},keep_fp32=actor.2")
    assert {actor[0].weight.element_size(), critic.weight.element_size()} == {2}
    assert {log_alpha.dtype, actor[2].weight.dtype, actor[1].weight.dtype} == {torch.float32}


@pytest.mark.parametrize("precision", ["fp32", "bf16-lean"])
def test_members_are_saved_and_resumed_bit_for_bit(precision, tmp_path):
    """Weights, masters, moments, averages and buffers of every member come back, and training continues the same."""
    actor, critic, log_alpha = parts()
    members = {"actor": actor, "critic": critic, "log_alpha": log_alpha}
    engine = Engine(members, optimizers_of(actor, critic, log_alpha), precision, ema=0.9)
    train(engine, actor, critic, log_alpha, 2)
    engine.save(tmp_path / "a")
    train(engine, actor, critic, log_alpha, 2)
    fresh = parts(seed=7)
    resumed = Engine(dict(zip(members, fresh, strict=True)), optimizers_of(*fresh), precision, ema=0.9)
    resumed.load(tmp_path / "a")
    train(resumed, *fresh, 2)
    for name, master in engine.masters().items():
        assert torch.equal(master, resumed.masters()[name]), name
        assert torch.equal(engine.ema.averages[name], resumed.ema.averages[name]), name
    assert torch.equal(actor[1].running_mean, fresh[0][1].running_mean)


def test_evaluate_covers_every_member():
    """All members are in eval mode with the averages inside the block, and as they were after it."""
    actor, critic, log_alpha = parts()
    critic.eval()
    engine = Engine([actor, critic, log_alpha], optimizers_of(actor, critic, log_alpha), "fp32", ema=0.5)
    train(engine, actor, critic, log_alpha, 1)
    trained = log_alpha.detach().clone()
    with engine.evaluate(ema=True):
        assert not actor.training
        assert not critic.training
        assert torch.equal(log_alpha, engine.ema.averages["2"])
    assert actor.training
    assert not critic.training
    assert torch.equal(log_alpha, trained)


def test_a_skip_restores_the_buffers_of_every_member():
    """An overflowing forward changes nothing in any member."""
    actor, critic, log_alpha = parts()
    engine = Engine([actor, critic, log_alpha], optimizers_of(actor, critic, log_alpha), "fp32")
    before = [t.detach().clone() for t in (*actor.state_dict().values(), *critic.state_dict().values(), log_alpha)]
    with engine.forward():
        loss = critic(actor(torch.full((6, 4), float("inf")))).mean() * log_alpha.exp()
    engine.backward(loss)
    assert engine.step().skipped
    after = (*actor.state_dict().values(), *critic.state_dict().values(), log_alpha)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("resnet50", "not str"),
        (7, "not int"),
        ([], "is empty"),
        ({}, "is empty"),
        ({"a.b": nn.Linear(1, 1)}, "named 'a.b'"),
        ({1: nn.Linear(1, 1)}, "named 1"),
        ({"_orig_mod": nn.Linear(1, 1)}, "named '_orig_mod'"),
        ([nn.Linear(1, 1), "head"], "Member '1' .* is a str"),
        ([torch.zeros(2)], r"requires no gradient \(shape \(2,\)\)"),
        ([torch.zeros(2, requires_grad=True) * 2], "the result of a computation"),
        (torch.zeros(2, requires_grad=True), r"goes into a list: Engine\(\[parameter\]"),
    ],
)
def test_what_is_no_member_is_rejected_by_name(model, message):
    """Each message has the member and what to pass."""
    with pytest.raises(SettingError, match=message):
        as_module(model)


def test_the_same_member_twice_is_rejected():
    """One object under two names would be saved twice."""
    layer = nn.Linear(1, 1)
    with pytest.raises(SettingError, match="same object as 'a' and as 'b'"):
        as_module({"a": layer, "b": layer})


def test_a_wrapped_member_is_rejected_and_a_compiled_one_is_unwrapped(monkeypatch):
    """DistributedDataParallel reduces by itself, which an Engine of members does not follow."""
    layer = nn.Linear(1, 1)
    assert [name for name, _ in as_module([torch.compile(layer, backend="eager")]).named_parameters()] == [
        "0.weight",
        "0.bias",
    ]
    monkeypatch.setattr("halfstep.engine.members.find_ddp", lambda module: module)
    with pytest.raises(SettingError, match="Member 'actor' is in DistributedDataParallel"):
        as_module({"actor": layer})


def test_members_may_have_names_that_modules_use():
    """A member called "forward" or "module" is only a name."""
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    module = as_module({"forward": first, "training": second})
    assert len(list(module.parameters())) == 4
    assert "forward.weight" in module.state_dict()


def test_an_optimizer_with_a_parameter_outside_the_model_names_it():
    """The message has the position and shape, and leads to an Engine of both."""
    actor, _, log_alpha = parts()
    optimizer = torch.optim.Adam(
        [{"params": actor.parameters()}, {"params": [nn.Parameter(torch.zeros(2)), log_alpha]}]
    )
    with pytest.raises(
        SettingError, match=r"2 of 8 parameters.*\['params'\]\[1\] of shape \(1,\).*Engine\(\[model, parameter\]"
    ):
        Engine(actor, optimizer, "fp32")
    with pytest.raises(SettingError, match=r"1 of 1 parameters.*log_alpha"):
        Engine(actor, [torch.optim.Adam(actor.parameters()), torch.optim.Adam([log_alpha])], "fp32")


def test_members_are_compiled_one_by_one(monkeypatch):
    """compile=True compiles each module; the holder is never called."""
    compiled = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **_: compiled.append(self))
    monkeypatch.setattr(torch, "compile", lambda call, **_: compiled.append(call) or call)
    actor, critic, log_alpha = parts()
    Engine([actor, critic, log_alpha], optimizers_of(actor, critic, log_alpha), "fp32", compile=True)
    assert len(compiled) == 2
