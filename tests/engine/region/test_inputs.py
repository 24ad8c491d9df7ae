"""Inputs of a lean model that several first layers round: one 16-bit copy, of the right values."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from halfstep import Engine
from halfstep.engine.region.rule import Rule, rule_in_thread


class Branches(nn.Module):
    """Two convolutions of the same image."""

    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 4, 1)
        self.seen = []
        for conv in (self.wide, self.narrow):
            conv.register_forward_hook(lambda _, args, __: self.seen.append(args[0]))

    def forward(self, x):
        return (self.wide(x) + self.narrow(x)).mean(dim=(2, 3))


def engine_of(model, **options):
    return Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), options.pop("precision", "bf16-lean"), **options)


def test_two_layers_share_one_copy_of_the_image():
    """Both get the same 16-bit tensor, and autograd saves it once."""
    model = Branches()
    saved = []
    with engine_of(model) as engine:
        with (
            engine.forward(),
            torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t),
        ):
            loss = model(torch.randn(2, 3, 8, 8)).float().pow(2).mean()
        engine.backward(loss)
        engine.step()
    first, second = model.seen
    assert first is second
    assert first.dtype is torch.bfloat16
    assert saved.count(first.data_ptr()) == 2


def test_results_are_those_of_separate_copies():
    """Loss and gradients are bit-identical to a model whose layers round for themselves."""
    image = torch.randn(2, 3, 8, 8)
    results = []
    template = Branches()
    for shares in (True, False):
        model = copy.deepcopy(template)
        with engine_of(model) as engine:
            if not shares:
                for conv in (model.wide, model.narrow):
                    conv._forward_pre_hooks.clear()
            with engine.forward():
                loss = model(image).float().pow(2).mean()
            engine.backward(loss)
            results.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_an_image_that_was_changed_or_replaced_is_rounded_again():
    """A write in place, and a new tensor that may be in the freed one's memory, are not taken for the first."""
    model = Branches()
    with engine_of(model) as engine, engine.forward(), torch.no_grad():
        x = torch.zeros(1, 3, 8, 8)
        model(x)
        x += 1
        model(x)
        for value in (2.0, 3.0):
            model(torch.full((1, 3, 8, 8), value))
    assert [seen.float().mean().item() for seen in model.seen[::2]] == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("key", ["keep_fp32", "compute_fp32"])
def test_a_layer_in_fp32_gets_the_fp32_image(key):
    """Layers that the policy keeps in fp32 are not given a rounded input."""
    model = Branches()
    model.unused = nn.Conv2d(3, 4, 1)  # so that two layers are left that could share
    with engine_of(model, precision=f"bf16-lean,{key}=wide") as engine, engine.forward(), torch.no_grad():
        model(torch.randn(1, 3, 8, 8))
    wide, narrow = model.seen
    assert wide.dtype is torch.float32
    assert narrow.dtype is torch.bfloat16


def test_outside_a_lean_region_nothing_is_rounded():
    """After close() no hook is left; an fp32 preset has none; and a hook acts in regions only."""
    model = Branches()
    with engine_of(model, precision="bf16"):
        assert not model.wide._forward_pre_hooks
    with engine_of(model):
        assert model.wide._forward_pre_hooks
        (hook,) = model.wide._forward_pre_hooks.values()
        x = torch.randn(1, 3, 8, 8)
        assert hook(model.wide, (x,)) is None
        with rule_in_thread(Rule.LEAN, None):  # without autocast, as inside a module that computes in fp32
            assert hook(model.wide, (x,)) is None
    assert not model.wide._forward_pre_hooks


def test_a_model_with_one_such_layer_has_no_hook():
    """There is nothing to share."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.LazyLinear(2))
    model(torch.randn(1, 3, 8, 8))
    with engine_of(model):
        assert not any(m._forward_pre_hooks for m in model.modules())


class Patches(nn.Module):
    """Patches of an image and a projection of them."""

    def __init__(self):
        super().__init__()
        self.unfold, self.project = nn.Unfold(3, padding=1), nn.Linear(27, 4)

    def forward(self, x):
        self.patches = self.unfold(x)
        return self.project(self.patches.mT)


def test_an_image_is_rounded_before_it_is_unfolded():
    """The patches have 16 bits, and the values of those that the layer after them would round."""
    model, image = Patches(), torch.randn(2, 3, 8, 8)
    with engine_of(model) as engine, engine.forward():
        model(image)
    assert model.patches.dtype is torch.bfloat16
    assert torch.equal(model.patches, model.unfold(image).bfloat16())
    assert not model.unfold._forward_pre_hooks


def test_what_a_module_in_fp32_unfolds_stays_fp32():
    """As do inputs that gradients flow to, whose gradient would be rounded."""
    model = nn.Sequential(Patches())
    with engine_of(model, precision="bf16-lean,compute_fp32=0") as engine, engine.forward(), torch.no_grad():
        model(torch.randn(1, 3, 8, 8))
    assert model[0].patches.dtype is torch.float32
    model = Patches()
    with engine_of(model) as engine, engine.forward():
        model(torch.randn(1, 3, 8, 8, requires_grad=True))
    assert model.patches.dtype is torch.float32
