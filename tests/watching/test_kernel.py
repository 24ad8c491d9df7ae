"""A Watch through the Triton kernel, in its interpreter or on a GPU: every sample equals that of the torch reference."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import halfstep
from halfstep.engine.engine import Engine
from halfstep.kernels.available import triton_runs_on

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

pytestmark = [
    pytest.mark.skipif(not triton_runs_on(DEVICE), reason="needs a GPU, or Triton's interpreter (TRITON_INTERPRET=1)"),
    # numpy, which the interpreter computes with, on NaN
    pytest.mark.filterwarnings("ignore:invalid value encountered in cast"),
]


@pytest.fixture(autouse=True)
def wide_tiles(monkeypatch):
    """The interpreter's time is per operation and not per element: programs of 1024 threads."""
    if DEVICE.type == "cpu":
        from halfstep.kernels import exponents_triton

        monkeypatch.setattr(exponents_triton, "SHAPE", exponents_triton.LaunchShape(warps=32))


def model():
    """Weights over the whole range of exponents, subnormals, zeros and both signs of them."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 24, bias=False), nn.Tanh(), nn.Linear(24, 3, bias=False))
    with torch.no_grad():
        net[0].weight[:, 0] = torch.linspace(-140, 3, 24).exp2()
        net[0].weight[:, 1] = 0.0
        net[0].weight[:, 2] = -0.0
    return net.to(DEVICE)


def inputs(step, bad):
    x = torch.randn(4, 12, generator=torch.Generator().manual_seed(step))
    if bad:
        x[0, 3] = math.inf
    return x.to(DEVICE)


def engine_samples(precision, **options):
    """Two steps of an Engine, the second with an overflow."""
    net = model()
    watch = halfstep.Watch(every=1, activations=True)
    engine = Engine(net, torch.optim.AdamW(net.parameters(), lr=1e-3), precision, watch=watch, **options)
    for step in range(2):
        with engine.forward():
            loss = net(inputs(step, bad=step == 1)).square().mean()
        engine.backward(loss)
        engine.step()
    engine.close()
    return list(watch.samples)


def loop_samples():
    """Two steps of a loop with torch's scaler, whose scale is no power of two."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=1000.0)
    watch = halfstep.Watch(net, every=1, activations=True).attach(optimizer, scaler)
    for step in range(2):
        optimizer.zero_grad()
        scaler.scale(net(inputs(step, bad=step == 1)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    watch.close()
    return list(watch.samples)


CASES = {
    "fp16": lambda: engine_samples("fp16"),
    "bf16-lean": lambda: engine_samples("bf16-lean"),
    "release": lambda: engine_samples("bf16-lean", gradient_release=True),
    "attached": loop_samples,
}


@pytest.mark.parametrize("case", CASES)
def test_the_kernel_counts_what_the_reference_counts(case, monkeypatch):
    """Gradients, weights and activations, element for element, with inf and NaN in one step."""
    by_kernel = CASES[case]()
    calls = []

    def count_torch(device):
        calls.append(device)
        return False

    monkeypatch.setattr("halfstep.kernels.exponents.triton_runs_on", count_torch)
    by_torch = CASES[case]()
    assert calls
    assert [s.step for s in by_kernel] == [s.step for s in by_torch] == [1, 2]
    assert [s.skipped for s in by_kernel] == [s.skipped for s in by_torch] == [False, True]
    for one, other in zip(by_kernel, by_torch, strict=True):
        for group in ("gradient_rows", "weight_rows", "activation_rows"):
            ours, theirs = getattr(one, group), getattr(other, group)
            assert ours.names == theirs.names
            assert len(ours)
            assert np.array_equal(ours.table, theirs.table), (one.step, group)
    assert by_kernel[1].gradient_rows.num_nonfinite()
