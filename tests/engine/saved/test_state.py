"""States between Engines that differ in wrappers, ties, keep_fp32 or the way they step."""

import contextlib
import copy
import math

import pytest
import torch
from torch import nn

from halfstep.checkpoint.directory import load_checkpoint
from halfstep.checkpoint.export import masters_of
from halfstep.engine.engine import Engine
from halfstep.engine.saved.checkpoint import nonfinite_weights
from halfstep.errors import SettingError
from tied_models import Tied, Wrapped, train, trained


@pytest.mark.parametrize("target", ["fp32", "bf16", "fp16-lean", "bf16-lean,master=fp32"])
def test_a_tied_weight_keeps_its_master_in_another_layout(target, tmp_path):
    """The other name of a tied weight does not bring its 16-bit rounding back."""
    engine = trained(Tied(), "bf16-lean")
    other = trained(Tied(), target, steps=0)
    other.load(engine.save(tmp_path / "saved"))
    tiny = 2.0**-40 if target == "fp16-lean" else 0.0
    assert all((other.masters()[name] - master).abs().max() <= tiny for name, master in engine.masters().items())


def test_averages_fit_a_model_with_other_wrappers(tmp_path):
    """An average of a model with a wrapped part continues in the same model without one, and back."""
    wrapped = nn.Sequential(nn.Embedding(16, 8), Wrapped(nn.Linear(8, 8)), nn.Linear(8, 16))
    other = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16))
    engine, twin = trained(wrapped, "bf16-lean", ema=0.9), trained(other, "bf16-lean", steps=0, ema=0.9)
    twin.load(engine.save(tmp_path / "there"))
    assert all(map(torch.equal, engine.ema.averages.values(), twin.ema.averages.values()))
    trained(wrapped, "bf16-lean", steps=0, ema=0.9).load(twin.save(tmp_path / "back"))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("bf16-lean,keep_fp32=head", "bf16-lean"),
        ("bf16-lean", "bf16-lean,keep_fp32=embed|head"),
        ("bf16-lean,compute_fp32=head", "bf16-lean"),
        ("bf16-lean,keep_fp32=head", "bf16-lean,compute_fp32=head"),
        ("fp32", "bf16-lean,compute_fp32=head"),
    ],
)
def test_a_run_continues_with_other_modules_in_fp32(source, target, tmp_path):
    """keep_fp32 and compute_fp32 may change between saving and loading, and the masters stay the same numbers."""
    engine, other = trained(Tied(), source), trained(Tied(), target, steps=0)
    other.load(engine.save(tmp_path / "saved"))
    assert all(torch.equal(other.masters()[name], master) for name, master in engine.masters().items())


@pytest.mark.parametrize("precision", ["fp32", "fp16,loss_scale=128"])
@pytest.mark.parametrize(("then", "now"), [({"foreach": True}, {}), ({}, {"foreach": True}), ({"fused": False}, {})])
def test_a_state_does_not_bring_its_way_of_stepping(precision, then, now, tmp_path):
    """Saved with foreach and loaded into a fused optimizer, or the other way round, training continues."""
    source, target = Tied(), Tied()
    engine = trained(source, precision, optimizer=torch.optim.AdamW(source.parameters(), **then))
    optimizer = torch.optim.AdamW(target.parameters(), **now)
    other = trained(target, precision, steps=0, optimizer=optimizer)
    way = {k: optimizer.param_groups[0][k] for k in ("fused", "foreach")}
    other.load(engine.save(tmp_path / "saved"))
    assert {k: optimizer.param_groups[0][k] for k in ("fused", "foreach")} == way
    train(target, other, 2)
    assert other.progress.applied == 6


def seeded():
    torch.manual_seed(0)
    return Tied()


EMA_PRESETS = ["fp32", "bf16-lean", "bf16-lean,master=fp32"]


@pytest.mark.parametrize("precision", EMA_PRESETS)
@pytest.mark.parametrize("blocks", [[True], [True, True], [True, False], [False, True]], ids=str)
def test_what_is_saved_inside_an_evaluation_is_the_trained_run(precision, blocks, tmp_path):
    """In any nesting of evaluate(): state, masters, checkpoint and export have the trained weights, and training continues."""
    engine, twin = (trained(seeded(), precision, ema=0.9) for _ in range(2))
    wanted = copy.deepcopy(twin.state_dict())
    masters = {name: master.clone() for name, master in twin.masters().items()}
    with contextlib.ExitStack() as stack:
        for ema in blocks:
            stack.enter_context(engine.evaluate(ema=ema))
        inside = copy.deepcopy(engine.state_dict())
        inner = engine.masters()
        engine.save(tmp_path / "saved")
        shown = dict(engine.params)["inner.weight"].detach().clone()
    for name, weight in wanted["model"].items():
        assert torch.equal(inside["model"][name], weight)
    assert all(torch.equal(inner[name], master) for name, master in masters.items())
    exported = masters_of(load_checkpoint(tmp_path / "saved"))
    assert all(torch.equal(exported[name], master) for name, master in masters.items())
    averages = engine.ema.averages["inner.weight"].to(shown.dtype)
    assert torch.equal(shown, averages) == blocks[-1]
    train(engine.model, engine, 2)
    train(twin.model, twin, 2)
    assert all(torch.equal(engine.masters()[name], master) for name, master in twin.masters().items())


@pytest.mark.parametrize("precision", EMA_PRESETS)
def test_a_state_loaded_inside_an_evaluation_stays_after_it(precision):
    """evaluate(ema=True) puts back the loaded weights, not those it found, also if an exception ends it."""
    engine, source = trained(Tied(), precision, ema=0.9), trained(Tied(), precision, steps=6, ema=0.9)
    with pytest.raises(ZeroDivisionError), engine.evaluate(ema=True):
        engine.load_state_dict(copy.deepcopy(source.state_dict()))
        raise ZeroDivisionError
    assert all(torch.equal(engine.masters()[name], master) for name, master in source.masters().items())


@pytest.mark.parametrize("precision", ["fp32", "fp16-lean", "bf16-lean,master=fp32"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_weights_are_not_saved_unless_requested(precision, value, tmp_path):
    """The message names the tensors and counts; frozen ones count too, and nothing is written."""
    model = Tied()
    model.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    engine = trained(model, precision)
    model.inner.weight.data[0, :3] = value
    model.frozen.data[1] = value
    with pytest.raises(SettingError, match=r"frozen \(1 of 3\).*inner.weight \(3 of 64\)"):
        engine.save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    engine.save(tmp_path / "saved", allow_nonfinite=True)
    model.inner.weight.data.fill_(1), model.frozen.data.fill_(1)
    if "master=fp32" in precision:
        engine.optimizers[0].state[model.inner.weight]["master"][0, 0] = value
        with pytest.raises(SettingError, match=r"inner.weight \(its master\) \(1 of 64\)"):
            engine.save(tmp_path / "again")


def test_buffers_may_be_infinite(tmp_path):
    """A mask of -inf is a normal buffer."""
    model = Tied()
    model.register_buffer("mask", torch.full((2, 2), -torch.inf))
    trained(model, "bf16-lean").save(tmp_path / "saved")


def test_a_checkpoint_is_replaced_on_request(tmp_path):
    """save(overwrite=True) replaces the last one; without it the old one stays."""
    engine = trained(Tied(), "fp32")
    engine.save(tmp_path / "last", epoch=1)
    with pytest.raises(SettingError, match="overwrite=True"):
        engine.save(tmp_path / "last", epoch=2)
    engine.save(tmp_path / "last", overwrite=True, epoch=3)
    assert engine.load(tmp_path / "last") == {"epoch": 3}


class Named(nn.Module):
    """A model with a submodule called `module`, as wrappers call theirs."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.module = nn.Linear(8, 16)
        self.weight = nn.Parameter(torch.ones(16, 16) / 16)

    def forward(self, x):
        return self.module(self.embed(x)) @ self.weight


@pytest.mark.parametrize("precision", ["fp32", "bf16-lean"])
@pytest.mark.parametrize(("there", "back"), [(False, False), (True, False), (False, True)])
def test_a_submodule_called_module_loses_nothing(precision, there, back, tmp_path):
    """Saved and loaded with and without a wrapper around the model, and exported, every tensor has its own name."""
    source, target = (Wrapped(Named()) if wrap else Named() for wrap in (there, back))
    engine = trained(source, precision, ema=0.9)
    path = engine.save(tmp_path / "saved")
    names = {"embed.weight", "module.weight", "module.bias", "weight"}
    assert engine.state_dict()["model"].keys() == masters_of(load_checkpoint(path)).keys() == names
    other = trained(target, precision, steps=0, ema=0.9)
    other.load(path)
    ours, theirs = list(engine.masters().values()), list(other.masters().values())
    assert len(ours) == 4
    assert all(map(torch.equal, ours, theirs))
    assert all(map(torch.equal, engine.ema.averages.values(), other.ema.averages.values()))


def test_a_reset_window_forgets_its_copy_of_the_buffers():
    """After an abandoned window, a skipped step restores the buffers of its own start, not those of the abandoned one."""
    model = nn.Sequential(nn.Embedding(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 16))
    engine = trained(model, "fp32", steps=1)
    x = torch.arange(16)
    with engine.forward():
        loss = model(x).sum()
    engine.backward(loss)
    engine.reset_window()
    start = {name: b.clone() for name, b in model.named_buffers()}
    with engine.forward():
        loss = model(x).sum() * torch.inf
    engine.backward(loss)
    assert engine.step().skipped
    assert all(torch.equal(b, start[name]) for name, b in model.named_buffers())


@pytest.mark.parametrize("precision", ["bf16-lean", "fp16-lean", "bf16-lean,master=fp32"])
def test_a_weight_that_was_frozen_when_it_was_saved_is_loaded_as_it_was(precision):
    """It has no master in the state, and the one of the weight that was here before does not stay."""
    frozen, target = seeded(), Tied()
    frozen.inner.requires_grad_(False)
    engine, other = trained(frozen, precision), trained(target, precision)
    other.load_state_dict(copy.deepcopy(engine.state_dict()))
    assert torch.equal(target.inner.weight, frozen.inner.weight)
    assert torch.equal(other.masters()["inner.weight"], frozen.inner.weight.float())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_parameters_are_checked_and_buffers_are_not(value):
    """A buffer may contain -inf, such as a mask; a weight may not."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model.register_buffer("mask", torch.full((2,), -math.inf))
    with Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32") as engine:
        assert nonfinite_weights(engine.state_dict()) == {}
        with torch.no_grad():
            model[1].weight[1, 0] = value
        assert nonfinite_weights(engine.state_dict()) == {"1.weight": "1 of 4"}


def sgd_step(model, engine, size=1.0):
    """One step whose gradient is `size` for every weight."""
    with engine.forward():
        loss = model(torch.ones(1, 2)).float().sum()
    engine.backward(loss * size)
    return engine.step()


@pytest.mark.parametrize("skips", [False, True], ids=["", "after a skipped first step"])
@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_momentum_survives_precisions_that_count_steps_and_ones_that_do_not(skips, dampening):
    """A state passes from lean through torch's SGD, which counts no steps, and back; every step is that of one run in fp32."""

    def build(precision):
        model = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5, dampening=dampening)
        return model, Engine(model, optimizer, precision)

    reference, expected = build("fp32")
    model, engine = build("bf16-lean")
    if skips:
        sgd_step(model, engine, math.inf)
    for precision in ("fp32", "bf16-lean", "bf16-lean,states=8bit", "fp32"):
        state = copy.deepcopy(engine.state_dict())
        model, engine = build(precision)
        engine.load_state_dict(state)
        for _ in range(2):
            sgd_step(model, engine)
            sgd_step(reference, expected)
        assert torch.allclose(engine.masters()["weight"], reference.weight, rtol=1e-2), precision


def test_masters_beyond_the_range_of_fp16_are_rejected_and_nothing_changes():
    """A weight of 1e5 would be inf in fp16, and no later step could undo that."""
    model = nn.Linear(2, 1)
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32")
    with torch.no_grad():
        model.weight[0, 0] = 1e5
    other = nn.Linear(2, 1)
    target = Engine(other, torch.optim.SGD(other.parameters(), lr=0.1), "fp16-lean")
    before = copy.deepcopy(target.state_dict()["model"])
    with pytest.raises(SettingError, match=r"Parameter weight has a value of 1e\+05, outside the range of fp16"):
        target.load_state_dict(engine.state_dict())
    assert all(torch.equal(value, before[name]) for name, value in target.state_dict()["model"].items())
