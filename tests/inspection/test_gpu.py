"""An observed step on a GPU, whose backward runs in a thread of autograd's own."""

import pytest
import torch
from torch import nn

import halfstep
from halfstep.hardware.tf32 import tf32

pytestmark = pytest.mark.gpu


def train(observe):
    """Two steps of fp16 AMP with a fused optimizer; the second one observed or not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)).cuda()
    optimizer, scaler = (
        torch.optim.AdamW(model.parameters(), fused=True),
        torch.amp.GradScaler("cuda", init_scale=1024.0),
    )
    inspection = halfstep.inspect(model, optimizer, scaler)
    x = torch.randn(16, 64, device="cuda")

    def step():
        with torch.autocast("cuda", torch.float16):
            output = model(x)
        scaler.scale(output.float().square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    step()
    if observe:
        with inspection:
            step()
    else:
        step()
    return [p.detach().clone() for p in model.parameters()], inspection


def test_a_step_on_a_gpu_is_observed_without_changing_it():
    """Forward and backward products, gradients, loss and the fused step are seen, and the weights have the same bits."""
    plain, _ = train(observe=False)
    observed, inspection = train(observe=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, observed, strict=True))
    inspection.expect(
        master="fp32", states="fp32", compute="fp16", backward="fp16", loss="fp32", grads="fp32", step="applied"
    )


def test_tf32_is_told_from_fp32():
    """fp32 products are tf32 where torch's switch is on."""
    model = nn.Linear(64, 64).cuda()
    for enabled, form in ((True, "tf32"), (False, "fp32")):
        with tf32(enabled), halfstep.inspect(model) as inspection:
            model(torch.ones(16, 64, device="cuda")).sum().backward()
        inspection.expect(compute=form, backward=form)
