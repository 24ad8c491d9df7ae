"""HS165: losses of a script's own that sum what a model returns in float16."""

import pytest

from check_scripts import findings

SCRIPT = """\
import torch
from torch import nn
class Dice(nn.Module):
    def forward(self, pred, target):
        pred = torch.sigmoid(pred){cast}
        return 1 - 2 * (pred * target).sum() / ({total} + target.sum())
class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.dice = Dice()
    def forward(self, pred, target):
        return self.dice(pred, target)
def dice_loss(pred, target):
    flat = pred.reshape(-1)
    return 1 - (flat * target).sum() / torch.sum(flat)
criterion = {criterion}
model, scaler = create(), torch.amp.GradScaler("cuda")
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.{dtype}):
        out = model(x)
        {inside}
    {outside}
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
PLAIN = {
    "cast": "",
    "total": "pred.sum()",
    "criterion": "Dice()",
    "dtype": "float16",
    "inside": "pass",
    "outside": "loss = criterion(out, y)",
}


@pytest.mark.parametrize(
    ("changed", "is_reported"),
    [
        ({}, True),
        ({"criterion": "Both().cuda()"}, True),
        ({"outside": "loss = dice_loss(out, y)"}, True),
        ({"outside": "loss = criterion(out.float(), y)"}, False),
        ({"cast": ".float()"}, False),
        ({"total": "pred.sum(dtype=torch.float32)"}, False),
        ({"total": "(pred * target).sum()"}, False),  # a product with targets of float32 is float32
        ({"total": "(pred > 0.5).sum()"}, False),
        ({"dtype": "bfloat16"}, False),  # has the range of float32
        ({"inside": "loss = criterion(out, y)", "outside": "pass"}, False),
        ({"criterion": "library.Dice()"}, False),
    ],
)
def test_a_loss_that_sums_outputs_after_the_region(changed, is_reported):
    """Autocast computes a sum in float32; after the region it has the format of the outputs, and the largest number is 65504."""
    text = SCRIPT.format(**PLAIN | changed)
    lines = [n for n, line in enumerate(text.splitlines(), 1) if line.startswith("    loss =")]
    assert [f.line for f in findings(text, "HS165")] == lines * is_reported
