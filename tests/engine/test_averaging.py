"""torch's AveragedModel next to a lean Engine: it averages fp32 masters, whenever it was made."""

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from halfstep import Engine


def build_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    model[0].bias.requires_grad_(False)
    return model


def averages_of(precision, *, before, steps=8, **options):
    """Train for some steps and average after each; returns the averages, those of an fp32 copy of the masters, the engine."""
    model = build_model()
    averaged = AveragedModel(model, **options) if before else None
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.01), precision=precision)
    averaged = averaged or AveragedModel(model, **options)
    shadow = build_model()
    exact = AveragedModel(shadow, **options)
    torch.manual_seed(1)
    for _ in range(steps):
        with engine.forward():
            loss = model(torch.randn(4, 6)).float().square().mean()
        engine.backward(loss)
        engine.step()
        averaged.update_parameters(model)
        shadow.load_state_dict(model.state_dict() | engine.masters())
        exact.update_parameters(shadow)
    return averaged, exact, engine


@pytest.mark.parametrize("before", [True, False], ids=["made before", "made after"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"multi_avg_fn": get_ema_multi_avg_fn(0.99)},
        {"avg_fn": lambda a, p, n: a + (p - a) / (n + 1), "use_buffers": True},
    ],
    ids=["mean", "ema", "function"],
)
@pytest.mark.parametrize("precision", ["bf16-lean", "fp16-lean,master=fp32"])
def test_averages_of_a_lean_model_are_fp32_and_follow_its_masters(precision, options, before):
    """No dtype mismatch, no stalled 16-bit averages: the averages that an fp32 model with these values would have."""
    averaged, exact, engine = averages_of(precision, before=before, **options)
    for average, other in zip(averaged.module.parameters(), exact.module.parameters(), strict=True):
        assert average.dtype is torch.float32
        assert torch.allclose(average, other, rtol=1e-6, atol=1e-7)
    assert engine.params["0.weight"].element_size() == 2
    with engine.evaluate():
        assert averaged(torch.randn(2, 6)).isfinite().all()


def test_other_models_are_averaged_as_torch_does():
    """An fp32 model, and a model whose Engine is closed, are none of the Engine's business."""
    averages_of("bf16-lean", before=True)[2].close()
    plain = build_model()
    other = AveragedModel(plain)
    other.update_parameters(plain)
    assert all(torch.equal(a, p) for a, p in zip(other.module.parameters(), plain.parameters(), strict=True))
    half = build_model().bfloat16()
    copy = AveragedModel(half)
    copy.update_parameters(half)
    assert copy.module[0].weight.dtype is torch.bfloat16
