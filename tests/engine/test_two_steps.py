"""Optimizers that need two gradients per update work through the pattern of docs/engine.md, and are rejected with it otherwise."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from engine_models import LEAN, PRESETS, Net, batches, build
from halfstep.engine.engine import Engine
from halfstep.errors import SettingError


class Sam(torch.optim.Optimizer):
    """The usual SAM: a base optimizer, and two steps around a second forward."""

    def __init__(self, params, base, rho=0.05, **settings):
        super().__init__(params, {"rho": rho, **settings})
        self.base_optimizer = base(self.param_groups, **settings)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self):
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            self.state[p]["old"] = p.detach().clone()
            p.add_(p.grad * (self.param_groups[0]["rho"] / (norm + 1e-12)))

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.state[p]["old"])
        self.base_optimizer.step()

    def step(self, closure=None):
        raise AssertionError("SAM requires a closure")


class Closing(torch.optim.SGD):
    """An optimizer whose step() cannot be called without a closure."""

    def step(self, closure):
        super().step(closure)


def sam_step(model, engine, batch, rho=0.05):
    """The pattern of docs/engine.md; returns the masters after the weights were restored, and the result."""
    x, y = batch
    with engine.forward():
        loss = F.cross_entropy(model(x), y)
    engine.backward(loss)
    engine.unscale()
    old = {}
    with torch.no_grad():
        norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    if not norm.isfinite():
        return {name: master.clone() for name, master in engine.masters().items()}, engine.step()
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                old[p] = p.detach().clone()
                p.add_(p.grad.to(p.dtype) * (rho / (norm + 1e-12)).to(p.dtype))
    engine.reset_window()
    with engine.forward():
        loss = F.cross_entropy(model(x), y)
    engine.backward(loss)
    with torch.no_grad():
        for p, value in old.items():
            p.copy_(value)
    restored = {name: master.clone() for name, master in engine.masters().items()}
    return restored, engine.step()


def test_the_pattern_is_sam():
    """In fp32 the pattern gives the weights of the two-step optimizer, up to rounding."""
    torch.manual_seed(0)
    ours, theirs = (nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    sam = Sam(theirs.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    engine = Engine(ours, torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9, foreach=True), "fp32")
    for x, y in batches(4):
        sam_step(ours, engine, (x, y))
        F.cross_entropy(theirs(x), y).backward()
        sam.first_step()
        theirs.zero_grad()
        F.cross_entropy(theirs(x), y).backward()
        sam.second_step()
        theirs.zero_grad()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("precision", sorted({*PRESETS, *LEAN}))
def test_restoring_the_weights_restores_the_masters(precision):
    """Also where a weight is only the upper half of its master, the old value is restored exactly and then updated."""
    model, _, engine = build(precision, schedule=False)
    for batch in batches(3):
        before = {name: master.clone() for name, master in engine.masters().items()}
        restored, result = sam_step(model, engine, batch, rho=0.5)
        assert all(torch.equal(before[name], restored[name]) for name in before)
        after = engine.masters()
        changed = [name for name in before if not torch.equal(before[name], after[name])]
        assert bool(changed) != result.skipped
    assert engine.progress.attempts == 3


@pytest.mark.parametrize("precision", ["bf16", "bf16-lean"])
def test_without_a_perturbation_the_pattern_is_a_plain_step(precision):
    """With rho = 0 the second gradient is the first, and the run equals one without the pattern."""
    models = []
    for pattern in (True, False):
        model, _, engine = build(precision, model=nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)))
        for x, y in batches(3):
            if pattern:
                sam_step(model, engine, (x, y), rho=0.0)
            else:
                with engine.forward():
                    loss = F.cross_entropy(model(x), y)
                engine.backward(loss)
                engine.step()
        models.append(engine.masters())
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


def test_optimizers_with_two_steps_or_a_closure_are_rejected_with_the_pattern():
    """The message names the optimizer, its base optimizer, and the calls to write."""
    model = Net()
    with pytest.raises(
        SettingError, match=r"Sam .*first_step\(\) and second_step\(\).*SGD, its base_optimizer,.*reset_window"
    ):
        Engine(model, Sam(model.parameters(), torch.optim.SGD, lr=0.1), "fp32")
    with pytest.raises(SettingError, match=r"Closing .*needs a closure.*Two-step optimizers"):
        Engine(model, Closing(model.parameters(), lr=0.1), "bf16")
    with pytest.raises(SettingError, match="LBFGS calls the model again"):
        Engine(model, torch.optim.LBFGS(model.parameters()), "fp32")
    sam = Sam(model.parameters(), torch.optim.SGD, lr=0.1)
    assert Engine(model, sam.base_optimizer, "fp32").optimizers


@pytest.mark.parametrize("precision", ["fp32", "fp16", "fp16-lean"])
def test_an_overflow_in_the_first_pass_skips_and_restores_the_buffers(precision):
    """A first gradient that is not finite ends the update there: nothing changes, not even batch norm's averages."""
    model, _, engine = build(precision, schedule=False)
    x, y = batches(1)[0]
    sam_step(model, engine, (x, y))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    x[0, 0] = float("inf")
    _, result = sam_step(model, engine, (x, y))
    assert result.skipped
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
