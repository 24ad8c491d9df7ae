"""States between Engines that differ in wrappers, ties, keep_fp32 or the way they step."""

import pytest
import torch
from torch import nn

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
    ("source", "target"), [("bf16-lean,keep_fp32=head", "bf16-lean"), ("bf16-lean", "bf16-lean,keep_fp32=embed|head")]
)
def test_a_run_continues_with_other_modules_in_fp32(source, target, tmp_path):
    """keep_fp32 may change between saving and loading, and the masters stay the same numbers."""
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
