"""Gradient release on a GPU: no wait inside backward, one stream's gradients freed in its order, several devices."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import halfstep
from gpu_sync import no_synchronisation
from halfstep.engine import release
from halfstep.engine.engine import Engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node"),  # of the side stream, which is the point of a test
]
WIDTH = 256
BUCKET = 2 * 4 * WIDTH * WIDTH  # two layers


class Streams(nn.Module):
    """Every other layer runs on a side stream."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))
        self.side = torch.cuda.Stream()

    def forward(self, x):
        main = torch.cuda.current_stream()
        for number, layer in enumerate(self.layers):
            if number % 2 == 0:
                x = torch.tanh(layer(x))
                continue
            self.side.wait_stream(main)
            with torch.cuda.stream(self.side):
                x = torch.tanh(layer(x))
            main.wait_stream(self.side)
        return x


class Devices(nn.Module):
    """The second half of the layers is on another device."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH).to(f"cuda:{number // 4}") for number in range(8))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.device)))
        return x.to("cuda:0")


def train(build, precision, optimizer, *, released, steps=10):
    """An Engine and its model after some steps."""
    torch.manual_seed(0)
    model = build().cuda() if build is not Devices else build()
    engine = Engine(model, optimizer(model.parameters(), lr=1e-2), precision, gradient_release=released)
    x, y = torch.randn(64, WIDTH, device="cuda"), torch.randint(0, WIDTH, (64,), device="cuda")
    for _ in range(steps):
        step(model, engine, x, y)
    return model, engine, x, y


def step(model, engine, x, y):
    with engine.forward():
        loss = F.cross_entropy(model(x), y)
    engine.backward(loss)
    return engine.step()


@pytest.mark.parametrize("precision", ["bf16", "bf16-lean", "bf16-lean,states=8bit"])
def test_no_bucket_waits_for_the_device(monkeypatch, precision):
    """torch reports no synchronising call in backward and step, also after a change of the learning rate."""
    monkeypatch.setattr(release, "BUCKET_BYTES", BUCKET)
    model, engine, x, y = train(Streams, precision, halfstep.optim.AdamW, released=True)
    torch.cuda.synchronize()
    with no_synchronisation():
        for _ in range(3):
            step(model, engine, x, y)
            engine.optimizers[0].param_groups[0]["lr"] *= 0.5


@pytest.mark.parametrize("build", [Streams, Devices])
def test_streams_and_devices_give_the_ordinary_updates(monkeypatch, build):
    """Layers on a side stream, or on a second device, end where they end without release."""
    if build is Devices and torch.cuda.device_count() < 2:
        pytest.skip("Requires: [two CUDA devices]")
    monkeypatch.setattr(release, "BUCKET_BYTES", BUCKET)
    ends = []
    for released in (False, True):
        _, engine, _, _ = train(build, "fp32", halfstep.optim.SGD, released=released)
        ends.append(engine.masters())
    for name, master in ends[0].items():
        torch.testing.assert_close(ends[1][name], master, rtol=1e-4, atol=1e-6, msg=name)
