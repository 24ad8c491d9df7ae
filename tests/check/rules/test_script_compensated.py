"""HS151: an optimizer of the file that keeps what rounding took from the weights loses no updates."""

import pytest

from check_scripts import reported

TEXT = """\
import torch

class Descent(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {{"lr": lr}})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                rest = self.state[p].setdefault("c", torch.zeros_like(p))
                delta = -group["lr"] * p.grad.float()
                {update}

model = Net().cuda().bfloat16()
optimizer = Descent(model.parameters(), lr=1e-3)
for x, y in loader:
    loss = loss_fn(model(x.bfloat16()), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    "update",
    [
        "want = p.float() + delta + rest; p.copy_(want); rest.copy_(want - p.float())",
        "rest.add_(delta); before = p.clone(); p.add_(rest); rest.add_(before.sub_(p))",
        "rest.add_(delta); before = p.clone(); p.data.add_(rest); rest += before - p.data",
    ],
)
def test_what_rounding_takes_is_kept(update):
    """The difference between the sum and the stored weight goes into the next step."""
    assert "HS151" not in reported(TEXT.format(update=update))


@pytest.mark.parametrize("update", ["p.add_(delta)", "delta = delta - p * 0.01; p.copy_(p + delta)"])
def test_a_plain_update_keeps_nothing(update):
    """Decay is no compensation."""
    assert "HS151" in reported(TEXT.format(update=update))
