"""Optimizer and scheduler states in another order than they were saved in."""

import copy
from collections import deque

import pytest
import torch
from torch import nn

from halfstep.engine.engine import Engine
from halfstep.errors import SettingError
from halfstep.kernels.layout import restore

PRESETS = ["fp32", "fp16", "bf16-lean", "bf16-lean,states=8bit"]
ORDER = [0, 1, 2]


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))


def params(net, index):
    return list(net[index].parameters())


def one_group(net, order):
    """One optimizer with one group, its parameters in this order of layers."""
    return torch.optim.AdamW([p for i in order for p in params(net, i)], lr=1e-2)


def groups(net, order):
    """One optimizer with a group for each layer; each has its own learning rate."""
    return torch.optim.AdamW(
        [{"params": params(net, i)[:: -1 if order != ORDER else 1], "lr": (i + 1) * 1e-3} for i in order]
    )


def several(net, order):
    """An optimizer for each layer; each has its own learning rate."""
    return [torch.optim.AdamW(params(net, i), lr=(i + 1) * 1e-3) for i in order]


def mixed(net, order):
    """Optimizers of different classes, one of them with two groups."""
    two = torch.optim.SGD([{"params": params(net, i), "lr": (i + 1) * 1e-2} for i in order if i], momentum=0.9)
    one = torch.optim.Adam(params(net, 0))
    return [one, two] if order == ORDER else [two, one]


def engine_of(build, order, precision, **options):
    net = model()
    return net, Engine(net, build(net, order), precision, **options)


def steps(net, engine, seeds):
    for seed in seeds:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
        with engine.forward():
            loss = net(x).float().square().mean()
        engine.backward(loss)
        engine.step()
    return engine.masters()


def facts(net, engine):
    """Masters, fp32 moments and the learning rate, by the names of the parameters."""
    names = {id(p): name for name, p in net.named_parameters()}
    values = {f"{name}.master": master for name, master in engine.masters().items()}
    for optimizer in engine.optimizers:
        for group in optimizer.param_groups:
            for p in group["params"]:
                entry = optimizer.state[p]
                moments = [k for k in entry if k.startswith(("exp", "momentum")) and not k.endswith("_scale")]
                values |= {f"{names[id(p)]}.{k}": restore(entry, k) for k in moments}
                values[f"{names[id(p)]}.lr"] = torch.tensor(group["lr"])
    return values


def same(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("precision", PRESETS)
@pytest.mark.parametrize("build", [one_group, groups, several, mixed])
def test_a_state_follows_its_names_into_any_order(build, precision):
    """Parameters, groups and optimizers in another order: masters, moments and rates are those of the saved names."""
    net, engine = engine_of(build, ORDER, precision)
    steps(net, engine, range(3))
    other_net, other = engine_of(build, [2, 0, 1], precision)
    other.load_state_dict(copy.deepcopy(engine.state_dict()))
    assert same(facts(net, engine), facts(other_net, other))
    ours, theirs = steps(net, engine, [7]), steps(other_net, other, [7])
    assert all(torch.allclose(ours[name], theirs[name], rtol=1e-3, atol=1e-5) for name in ours)


@pytest.mark.parametrize(("source", "target"), [("fp32", "bf16-lean"), ("bf16-lean,states=8bit", "fp32")])
@pytest.mark.parametrize("build", [one_group, groups, several, mixed])
def test_a_state_follows_its_names_into_another_layout(build, source, target, tmp_path):
    """The same through a checkpoint of another precision."""
    net, engine = engine_of(build, ORDER, source)
    steps(net, engine, range(2))
    other_net, other = engine_of(build, [1, 2, 0], target)
    other.load(engine.save(tmp_path / "saved"))
    assert same(facts(net, engine), facts(other_net, other))


@pytest.mark.parametrize("precision", ["fp32", "bf16-lean"])
def test_schedulers_follow_their_optimizers_and_groups(precision):
    """Each scheduler gets the state of its optimizer, with base rates in the order of the groups."""

    def build(order):
        net = model()
        first, second = mixed(net, order)[:: 1 if order == ORDER else -1]
        schedules = [
            torch.optim.lr_scheduler.StepLR(first, 2, 0.5),
            torch.optim.lr_scheduler.SequentialLR(
                second,
                [torch.optim.lr_scheduler.LinearLR(second, 0.1), torch.optim.lr_scheduler.ExponentialLR(second, 0.9)],
                [2],
            ),
        ]
        flip = 1 if order == ORDER else -1
        return net, Engine(net, [first, second][::flip], precision, scheduler=schedules[::flip])

    net, engine = build(ORDER)
    other_net, other = build([2, 1, 0])
    steps(net, engine, range(3))
    other.load_state_dict(copy.deepcopy(engine.state_dict()))
    for seed in range(4):
        assert same(
            {k: v for k, v in facts(net, engine).items() if k.endswith("lr")},
            {k: v for k, v in facts(other_net, other).items() if k.endswith("lr")},
        )
        steps(net, engine, [seed])
        steps(other_net, other, [seed])


def test_a_scheduler_whose_state_has_unknown_lists_is_not_reordered():
    """A list that may have one value per group raises where the groups changed places."""

    class Own:
        def __init__(self, optimizer):
            self.optimizer, self.rates = optimizer, [1, 2, 3]

        def step(self):
            pass

        def state_dict(self):
            return {"rates": self.rates}

        def load_state_dict(self, state):
            self.rates = state["rates"]

    def build(order):
        net = model()
        optimizer = groups(net, order)
        return Engine(net, optimizer, "fp32", scheduler=Own(optimizer))

    build(ORDER).load_state_dict(build(ORDER).state_dict())
    with pytest.raises(SettingError, match=r"Own has 'rates' with 3 values"):
        build([2, 1, 0]).load_state_dict(build(ORDER).state_dict())


def rejected(source, target, message):
    net, engine = source
    steps(net, engine, range(2))
    other_net, other = target
    steps(other_net, other, [5])
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(SettingError, match=message):
        other.load_state_dict(engine.state_dict())
    after = other.state_dict()
    assert all(torch.equal(before["model"][name], after["model"][name]) for name in before["model"])
    assert str(before["optimizers"]) == str(after["optimizers"])
    assert str(before["schedulers"]) == str(after["schedulers"])


@pytest.mark.parametrize("precision", ["fp32", "bf16-lean"])
def test_other_parameters_groups_and_optimizers_are_rejected_by_name(precision):
    """What is divided otherwise raises with the names that differ, and nothing changes."""

    def cut(net, order):
        return torch.optim.AdamW([{"params": params(net, 0) + params(net, 1)}, {"params": params(net, 2)}])

    def other_cut(net, order):
        return torch.optim.AdamW([{"params": params(net, 0)}, {"params": params(net, 1) + params(net, 2)}])

    def fewer(net, order):
        return torch.optim.AdamW(params(net, 0))

    rejected(
        engine_of(cut, ORDER, precision),
        engine_of(other_cut, ORDER, precision),
        r"Group 0 differs.*only in the state: 1.bias, 1.weight",
    )
    rejected(
        engine_of(one_group, ORDER, precision),
        engine_of(fewer, ORDER, precision),
        r"only in the state: 1.bias, 1.weight, 2.bias and 1 more",
    )
    rejected(engine_of(several, ORDER, precision), engine_of(one_group, ORDER, precision), "3 optimizers")


@pytest.mark.parametrize("precision", ["fp32", "bf16-lean"])
@pytest.mark.parametrize(("saved", "own"), [("Adam", "AdamW"), ("AdamW", "Adam"), ("AdamW", "SGD"), ("SGD", "AdamW")])
@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "older state"])
def test_a_state_of_another_optimizer_class_is_rejected(precision, saved, own, recorded):
    """The message names both classes; an older state has no class, and then its entries decide where they can."""
    classes = {
        n: lambda net, _, n=n: getattr(torch.optim, n)(net.parameters(), lr=1e-2) for n in ("Adam", "AdamW", "SGD")
    }
    source, target = engine_of(classes[saved], ORDER, precision), engine_of(classes[own], ORDER, precision)
    if recorded:
        rejected(source, target, f"saved by {saved}, and this engine has {own}")
    elif own == "SGD":
        steps(*source, [1])
        state = {k: v for k, v in source[1].state_dict().items() if k != "optimizer_classes"}
        with pytest.raises(SettingError, match="which SGD does not use"):
            target[1].load_state_dict(state)


def test_a_state_of_another_scheduler_class_is_rejected():
    """StepLR does not load into CosineAnnealingLR."""

    def build(schedule):
        net = model()
        optimizer = one_group(net, ORDER)
        return net, Engine(net, optimizer, "fp32", scheduler=schedule(optimizer))

    schedules = torch.optim.lr_scheduler
    rejected(
        build(lambda o: schedules.StepLR(o, 2)),
        build(lambda o: schedules.CosineAnnealingLR(o, 9)),
        "CosineAnnealingLR.*which has StepLR",
    )


def test_states_without_the_newer_keys_load():
    """A state of an earlier version has no classes, no extra states and full names, and still loads by name."""
    newer = {"optimizer_classes", "scheduler_classes", "scheduler_optimizers", "extra_state", "params"}
    net, engine = engine_of(groups, ORDER, "bf16-lean")
    steps(net, engine, range(2))
    other_net, other = engine_of(groups, [2, 1, 0], "bf16-lean")
    other.load_state_dict({k: v for k, v in copy.deepcopy(engine.state_dict()).items() if k not in newer})
    assert same(facts(net, engine), facts(other_net, other))


def test_a_tied_weight_is_recognized_under_any_of_its_names():
    """The name that an optimizer's state has for a tied weight depends on the order in which modules were registered."""

    def build(order):
        torch.manual_seed(0)
        net = nn.ModuleDict({name: nn.Linear(6, 6, bias=False) for name in order})
        net["a"].weight = net["b"].weight
        net.forward = lambda x: net["c"](net["b"](net["a"](x)))
        return net, Engine(net, torch.optim.AdamW(net.parameters(), lr=1e-2), "bf16-lean")

    (net, engine), (other_net, other) = build("abc"), build("cba")
    steps(net, engine, range(2))
    other.load_state_dict(copy.deepcopy(engine.state_dict()))
    assert torch.equal(engine.masters()["a.weight"], other.masters()["b.weight"])
    moments = [e.optimizers[0].state[n["a"].weight]["exp_avg"] for n, e in ((net, engine), (other_net, other))]
    assert torch.equal(*moments)


def test_a_state_with_more_than_entries_and_groups_needs_the_saved_order():
    """What an optimizer stores next to its numbered entries may depend on their order, so it is not guessed."""

    class Slow(torch.optim.SGD):
        def state_dict(self):
            return super().state_dict() | {"slow": [p.detach() for p in self.param_groups[0]["params"]]}

    def build(net, order):
        return Slow([p for i in order for p in params(net, i)], lr=1e-2)

    state = engine_of(build, ORDER, "fp32")[1].state_dict()
    engine_of(build, ORDER, "fp32")[1].load_state_dict(state)
    with pytest.raises(SettingError, match="layout of its own"):
        engine_of(build, [2, 1, 0], "fp32")[1].load_state_dict(state)


class Opaque(torch.optim.SGD):
    """An optimizer whose state has a layout of its own."""

    def state_dict(self):
        return {"inner": super().state_dict()}

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict["inner"])


def test_a_state_with_a_layout_of_its_own_needs_the_saved_order(tmp_path):
    """It loads into the same order, bit for bit, and is rejected in another or in another layout."""

    def build(net, order):
        return Opaque([p for i in order for p in params(net, i)], lr=1e-2, momentum=0.9)

    net, engine = engine_of(build, ORDER, "fp32")
    steps(net, engine, range(2))
    path = engine.save(tmp_path / "saved")
    other_net, other = engine_of(build, ORDER, "fp32")
    other.load(path)
    ours, theirs = steps(net, engine, [3]), steps(other_net, other, [3])
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    with pytest.raises(SettingError, match="layout of its own.*in the order in which it was saved"):
        engine_of(build, [1, 0, 2], "fp32")[1].load(path)


def test_an_optimizer_that_could_not_be_loaded_again_is_rejected_when_it_is_saved(tmp_path):
    """The error comes with the reason while the run still exists, and training continues as if nothing had happened."""

    class Broken(Opaque):
        def load_state_dict(self, state_dict):
            self.param_groups[0]["lr"] = 99.0
            raise KeyError("slow")

    def build(net, order):
        return Broken(net.parameters(), lr=1e-2, momentum=0.9)

    net, engine = engine_of(build, ORDER, "fp32")
    twin_net, twin = engine_of(build, ORDER, "fp32")
    steps(net, engine, [0])
    steps(twin_net, twin, [0])
    with pytest.raises(SettingError, match=r"Broken cannot load the state.*KeyError.*slow"):
        engine.save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    ours, theirs = steps(net, engine, [1]), steps(twin_net, twin, [1])
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_states_that_torch_would_cast_are_restored_as_they_were():
    """Integers, strings and deques in an optimizer's state are again what they were."""

    class Counting(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})

        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    entry = self.state[p]
                    entry["count"] = entry.get("count", torch.zeros_like(p, dtype=torch.int64)) + 2**40 + 1
                    entry["mode"] = "signed"
                    entry["past"] = deque(entry.get("past", [1]), maxlen=2)
                    p.data -= p.grad.sign() * 1e-2 * (entry["count"] % 2)

    net, engine = engine_of(lambda n, _: Counting(n.parameters()), ORDER, "fp32")
    steps(net, engine, range(2))
    other_net, other = engine_of(lambda n, _: Counting(n.parameters()), ORDER, "fp32")
    other.load_state_dict(copy.deepcopy(engine.state_dict()))
    ours, theirs = engine.optimizers[0].state[net[0].weight], other.optimizers[0].state[other_net[0].weight]
    assert torch.equal(ours["count"], theirs["count"])
    assert theirs["count"].dtype is torch.int64
    assert theirs["mode"] == "signed"
    assert theirs["past"].maxlen == 2


def test_a_scheduler_that_cannot_load_is_rejected_when_it_is_saved():
    """Saved without load_state_dict(), its state would be lost at the first resume."""

    class Half:
        def step(self):
            pass

        def state_dict(self):
            return {}

    net = model()
    engine = Engine(net, one_group(net, ORDER), "fp32", scheduler=Half())
    with pytest.raises(SettingError, match="scheduler Half has no load_state_dict"):
        engine.state_dict()
