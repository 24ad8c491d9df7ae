"""HS156 where a schedule advances, and no line steps the optimizer."""

import pytest

from check_scripts import findings

UNUSED = """\
import torch
class Trainer:
    def __init__(self, model, loader):
        self.optimizer = model.configure_optimizers(lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer)
    def train(self, model, loader):
        for x in loader:
            {first}
            with torch.autocast('cuda', dtype=torch.bfloat16):
                loss = model(x)
            loss.backward()
            {last}
            self.scheduler.step()
"""
CLEAR = "self.optimizer.zero_grad()"


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [
        (CLEAR, "pass", [(11, "error")]),
        ("pass", CLEAR, [(11, "error")]),
        (CLEAR, "self.optimizer.step()", []),
        (CLEAR, "advance(self.optimizer)", []),
        ("pass", "pass", []),
    ],
)
def test_gradients_that_no_step_uses_are_cleared_before_or_after_the_backward(first, last, expected):
    """Where a schedule advances and no line steps the optimizer, it does not matter on which side of the backward zero_grad is."""
    assert [(f.line, f.severity) for f in findings(UNUSED.format(first=first, last=last), "HS156")] == expected
