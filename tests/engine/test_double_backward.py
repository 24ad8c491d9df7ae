"""Second derivatives inside the forward region: a gradient penalty through modules that stay in fp32, against fp64."""

import pytest
import torch
from torch import nn

import halfstep


class Critic(nn.Module):
    """Layers of several kinds; `again` shares the weight of `middle`."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(8, 16), nn.LayerNorm(16)
        self.convolution = nn.Conv1d(2, 2, 3, padding=1)
        self.middle, self.again = nn.Linear(16, 16), nn.Linear(16, 16, bias=False)
        self.again.weight = self.middle.weight
        self.head = nn.Linear(16, 1)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        x = x + torch.tanh(self.convolution(x.view(-1, 2, 8))).flatten(1)
        return self.head(torch.tanh(self.again(torch.tanh(self.middle(self.norm(x))))))


def penalised(model, x, autocast):
    """A critic's loss with a penalty on the norm of its gradient; `autocast` as torch advises or as people write it."""
    x = x.clone().requires_grad_()
    score = model(x)
    with torch.autocast("cpu", enabled=autocast):
        (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
    return score.mean() + 10 * (slope.norm(dim=1) - 1).square().mean()


def batch():
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def exact():
    """The gradients in fp64."""
    model = Critic().double()
    penalised(model, batch().double(), autocast=False).backward()
    return {name: param.grad for name, param in model.named_parameters()}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("settings", ["", ",keep_fp32=middle", ",compute_fp32=middle", ",keep_fp32=first|norm|head"])
@pytest.mark.parametrize("preset", ["bf16", "fp16", "bf16-lean", "fp16-lean"])
def test_a_gradient_penalty_has_the_gradients_of_fp64(preset, settings, autocast, exact):
    """Within a few roundings of the format, and with no error about dtypes."""
    model = Critic()
    scaler = halfstep.LossScaler(init_scale=64.0) if "fp16" in preset else None
    engine = halfstep.Engine(model, torch.optim.SGD(model.parameters(), lr=0.0), preset + settings, scaler=scaler)
    with engine.forward():
        loss = penalised(model, batch(), autocast)
    engine.backward(loss)
    epsilon = torch.finfo(torch.float16 if scaler else torch.bfloat16).eps
    for name, param in model.named_parameters():
        error = (param.grad.double() / (64.0 if scaler else 1.0) - exact[name]).norm() / exact[name].norm()
        assert error < 6 * epsilon, name
    engine.close()
