"""A load that fails leaves the engine as it was."""

import copy

import pytest
import torch
from torch import nn

from halfstep.engine.engine import Engine
from halfstep.errors import SettingError

PRESETS = ["fp32", "bf16-lean", "bf16-lean,master=fp32,states=8bit"]


class Extra(nn.Linear):
    """A module with extra state that can be made to fail."""

    fails = False
    extra: object = 0

    def get_extra_state(self):
        return {"extra": self.extra}

    def set_extra_state(self, state):
        self.extra = state["extra"]
        if self.fails:
            raise RuntimeError("no such extra state")


class FailingSGD(torch.optim.SGD):
    """An optimizer that changes its tensors in place and fails at the end."""

    fails = False

    def load_state_dict(self, state_dict):
        for entry in self.state.values():
            entry["momentum_buffer"].zero_()
        super().load_state_dict(state_dict)
        if self.fails:
            raise RuntimeError("no such momentum")


class FailingStepLR(torch.optim.lr_scheduler.StepLR):
    """A scheduler that fails when it is half loaded."""

    fails = False

    def load_state_dict(self, state_dict):
        self.last_epoch = 10**6
        if self.fails:
            raise RuntimeError("no such schedule")
        super().load_state_dict(state_dict)


def build(precision, optimizer=torch.optim.AdamW, **options):
    torch.manual_seed(0)
    net = nn.Sequential(Extra(6, 6), Extra(6, 6), nn.BatchNorm1d(6))
    chosen = optimizer(net.parameters(), lr=1e-2, **options)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(chosen, 0.9), FailingStepLR(chosen, 3)]
    return net, Engine(net, chosen, precision, scheduler=schedulers, ema=0.9)


def steps(net, engine, seeds):
    for seed in seeds:
        with engine.forward():
            loss = net(torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))).float().square().mean()
        engine.backward(loss)
        engine.step()


def flat(tree, path=""):
    """The leaves of a state by their paths; tensors as bytes."""
    if isinstance(tree, dict):
        return {k: v for key, item in tree.items() for k, v in flat(item, f"{path}.{key}").items()}
    if isinstance(tree, list | tuple):
        return {k: v for key, item in enumerate(tree) for k, v in flat(item, f"{path}.{key}").items()}
    if isinstance(tree, torch.Tensor):
        return {path: (str(tree.dtype), tree.float().tolist())}
    return {path: str(tree)}


def put(tree, path, value):
    """A copy of a state with one place changed; `path` ends in a key."""
    tree = copy.deepcopy(tree)
    place = tree
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return tree


def damaged(state, name):
    averages = state["ema"]["averages"]
    first, number = next(iter(averages)), next(iter(state["optimizers"][0]["state"]))
    moment = next(k for k in state["optimizers"][0]["state"][number] if k.startswith(("exp_avg", "momentum")))
    changes = {
        "average of another shape": (["ema", "averages", first], torch.ones(5)),
        "no averages": (["ema"], None),
        "moment of another shape": (["optimizers", 0, "state", number, moment], torch.ones(3, 2)),
        "no counters": (["counters"], {}),
        "no schedulers": (["schedulers"], []),
        "broken scaler": (["scaler"], {}),
        "no groups": (["optimizers", 0, "param_groups"], []),
        "other extra state": (["extra_state"], {"9._extra_state": 1}),
        "weight of another shape": (["model", "0.weight"], torch.ones(5)),
    }
    return put(state, *changes[name])


DAMAGE = [
    "average of another shape",
    "no averages",
    "moment of another shape",
    "no counters",
    "no schedulers",
    "broken scaler",
    "no groups",
    "other extra state",
    "weight of another shape",
]


@pytest.mark.parametrize("precision", [*PRESETS, "fp16"])
def test_a_damaged_state_changes_nothing(precision):
    """Whatever part of a state does not fit, the engine is bit for bit as it was, and a good state loads after it."""
    net, engine = build(precision)
    steps(net, engine, range(2))
    good = copy.deepcopy(engine.state_dict())
    steps(net, engine, [5])
    before = flat(engine.state_dict())
    for name in DAMAGE:
        with pytest.raises(SettingError):
            engine.load_state_dict(damaged(good, name))
        assert flat(engine.state_dict()) == before, name
    engine.load_state_dict(good)
    assert flat(engine.state_dict()["model"]) == flat(good["model"])


@pytest.mark.parametrize("precision", PRESETS)
@pytest.mark.parametrize("part", ["scheduler", "module"])
@pytest.mark.parametrize("converted", [False, True], ids=["same layout", "another layout"])
def test_a_failure_in_foreign_code_is_reverted(precision, part, converted):
    """A scheduler or a module that raises in the middle of a load: all that was loaded before it is taken back."""
    net, engine = build(precision)
    steps(net, engine, range(2))
    source_net, source = build("bf16" if converted else precision)
    steps(source_net, source, [7, 8, 9])
    source_net[0].extra = 5
    broken = engine.schedulers[1] if part == "scheduler" else net[1]
    broken.fails = True
    before, groups = flat(engine.state_dict()), engine.optimizers[0].param_groups[0]
    with pytest.raises(SettingError, match=r"raised .*no such.*The engine is as it was before"):
        engine.load_state_dict(source.state_dict())
    assert flat(engine.state_dict()) == before
    assert engine.optimizers[0].param_groups[0] is groups
    broken.fails = False
    twin_net, twin = build(precision)
    steps(twin_net, twin, range(4))
    steps(net, engine, [2, 3])
    assert flat(engine.state_dict()["model"]) == flat(twin.state_dict()["model"])
    assert flat(engine.state_dict()["optimizers"]) == flat(twin.state_dict()["optimizers"])


def test_an_optimizer_that_changes_its_state_in_place_is_reverted_too():
    """An optimizer with a load_state_dict of its own has its tensors copied first."""
    net, engine = build("fp32", FailingSGD, momentum=0.9)
    steps(net, engine, range(2))
    state = copy.deepcopy(engine.state_dict())
    steps(net, engine, [2])
    before = flat(engine.state_dict())
    engine.optimizers[0].fails = True
    with pytest.raises(SettingError, match="optimizer FailingSGD raised RuntimeError: no such momentum"):
        engine.load_state_dict(state)
    engine.optimizers[0].fails = False
    assert flat(engine.state_dict()) == before


def test_extra_states_of_modules_are_saved_and_restored(tmp_path):
    """Any plain tree, tensors of any shape included, and other objects are rejected with their path."""
    net, engine = build("bf16-lean")
    net[0].extra = {"seen": (1, 2.5, None), "table": torch.arange(3)}
    engine.save(tmp_path / "saved")
    other_net, other = build("bf16-lean")
    other_net[0].extra = torch.ones(7)
    other.load(tmp_path / "saved")
    assert other_net[0].extra["seen"] == (1, 2.5, None)
    assert other_net[0].extra["table"].tolist() == [0, 1, 2]
    assert other_net[1].extra == 0
    net[0].extra = object()
    with pytest.raises(SettingError, match=r"extra_state.*0\._extra_state.*builtins.object"):
        engine.save(tmp_path / "again")
