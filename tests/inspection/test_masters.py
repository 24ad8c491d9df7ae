"""Masters, wherever an optimizer keeps them."""

import pytest
import torch
from torch import nn

import halfstep
from halfstep.errors import ExpectationError


def model16():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).bfloat16()


def trained(model, optimizer):
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    return halfstep.inspect(model, optimizer)


def kinds(inspection):
    return inspection.as_dict()["facts"]["master"]["formats"]


@pytest.mark.parametrize(
    ("master", "kind", "size"), [("split", "split", 2.0), ("fp32", "fp32", 4.0), ("none", "none", 0.0)]
)
def test_masters_of_halfstep_are_known_before_and_after_the_first_step(master, kind, size):
    """The layout decides before the first step, the state afterwards."""
    model = model16()
    optimizer = halfstep.optim.AdamW(model.parameters(), master=master)
    assert kinds(halfstep.inspect(model, optimizer)) == {kind: 30}
    inspection = trained(model, optimizer)
    assert kinds(inspection) == {kind: 30}
    assert inspection.as_dict()["bytes_per_parameter"].get("master", 0.0) == size


class StateMaster(torch.optim.Optimizer):
    """Stores its masters in its state, as Transformer Engine's FusedAdam does."""

    name, dtype = "master_param", torch.float32

    def __init__(self, params):
        super().__init__(params, {})

    def step(self):
        for param in self.param_groups[0]["params"]:
            self.state[param][self.name] = param.detach().to(self.dtype)


class Kahan(StateMaster):
    """Stores what rounding has lost."""

    name, dtype = "kahan_comp", torch.bfloat16


class NarrowMaster(StateMaster):
    """Stores masters that are none."""

    name, dtype = "master", torch.bfloat16


@pytest.mark.parametrize(("kind", "form"), [(StateMaster, "fp32"), (Kahan, "kahan"), (NarrowMaster, "bf16")])
def test_a_state_may_be_the_master(kind, form):
    """States named after masters are masters in their own format; before the first step nobody knows."""
    model = model16()
    optimizer = kind(model.parameters())
    with pytest.raises(ExpectationError, match="no state yet"):
        halfstep.inspect(model, optimizer).expect(master="fp32")
    inspection = trained(model, optimizer)
    assert kinds(inspection) == {form: 30}
    inspection.expect(states="none", master=form)


def test_copies_in_the_groups_are_masters():
    """A hand-written loop that steps fp32 copies has masters; one that forgot a layer lacks those of that layer."""
    model = model16()
    copies = [p.detach().float().requires_grad_() for p in model.parameters()]
    assert kinds(halfstep.inspect(model, torch.optim.AdamW(copies))) == {"fp32": 30}
    flat = torch.cat([copy.detach().flatten() for copy in copies]).requires_grad_()
    assert kinds(halfstep.inspect(model, torch.optim.AdamW([flat]))) == {"fp32": 30}
    missing = halfstep.inspect(model, torch.optim.AdamW(copies[:2]))
    assert kinds(missing) == {"fp32": 20, "none": 10}
    with pytest.raises(ExpectationError, match="1.weight, 1.bias"):
        missing.expect(master="fp32")


def test_parameters_of_another_model_are_no_masters():
    """An fp32 discriminator of the same shapes does not make up for the missing masters of a bf16 generator."""
    generator, discriminator = model16(), model16().float()
    optimizers = [torch.optim.AdamW(net.parameters()) for net in (generator, discriminator)]
    assert kinds(halfstep.inspect(generator, optimizers)) == {"none": 30}


def test_masters_of_some_weights_only():
    """fp32 norms stepped directly, next to fp32 copies of the 16-bit layers."""
    model = nn.Sequential(nn.Linear(4, 4).bfloat16(), nn.LayerNorm(4))
    copies = [p.detach().float().requires_grad_() for p in model[0].parameters()]
    inspection = halfstep.inspect(model, torch.optim.AdamW([*copies, *model[1].parameters()]))
    assert kinds(inspection) == {"fp32": 28}


def test_copies_in_attributes_are_masters():
    """Apex's FusedAdam(master_weights=True) and amp's stash keep lists of fp32 tensors next to the groups."""
    model = model16()
    copies = [p.detach().float() for p in model.parameters()]
    apex = torch.optim.AdamW(model.parameters())
    apex.param_groups_master = [{"params": copies}]
    assert kinds(halfstep.inspect(model, apex)) == {"fp32": 30}
    amp = torch.optim.AdamW(model.parameters())
    amp._amp_stash = type("Stash", (), {})()
    amp._amp_stash.all_fp32_from_fp16_params = copies
    assert kinds(halfstep.inspect(model, amp)) == {"fp32": 30}


def test_only_trained_weights_need_a_master():
    """A frozen 16-bit base with fp32 adapters has fp32 masters; a weight that no optimizer has is not trained."""
    model = nn.Sequential(
        nn.Linear(4, 4).bfloat16().requires_grad_(requires_grad=False), nn.Linear(4, 2), nn.Linear(2, 2)
    )
    inspection = halfstep.inspect(model, torch.optim.AdamW(model[1].parameters()))
    inspection.expect(master="fp32", weights="fp32", frozen="bf16|fp32")
    assert inspection.result.num_parameters == 10


def test_16_bit_weights_without_an_optimizer_are_not_judged():
    """Whether there is a master depends on the optimizer, which has to be passed."""
    with pytest.raises(ExpectationError, match="pass the optimizer"):
        halfstep.inspect(model16()).expect(master="none")
    halfstep.inspect(model16().float()).expect(master="fp32")


def test_an_optimizer_that_the_engine_runs_over_masters():
    """Adafactor over fp32 masters has them, whether the Engine or the stock optimizer is inspected."""
    model = model16().float()
    optimizer = torch.optim.Adafactor(model.parameters())
    engine = halfstep.Engine(model, optimizer, "bf16-lean")
    for target in (engine, model):
        halfstep.inspect(target, optimizer).expect(master="fp32", weights="bf16")
    engine.close()
