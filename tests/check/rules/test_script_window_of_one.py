"""HS180, HS181: windows of one micro-batch, in which nothing accumulates until someone changes the number."""

import pytest

from check_scripts import findings

LOOP = """\
import torch
from torch.amp import GradScaler
{setting}
def train(model, optimizer, loader{param}):
    scaler = GradScaler("cuda")
    for i, (x, y) in enumerate(loader):
        {start}
        with torch.autocast("cuda", dtype=torch.float16):
            loss = torch.nn.functional.mse_loss(model(x), y){divided}
        scaler.scale(loss).backward()
        if (i + 1) % GRAD_ACCUM == 0:
            scaler.step(optimizer)
            scaler.update()
            {end}
"""
CLEAR = "optimizer.zero_grad()"


@pytest.mark.parametrize(
    ("setting", "param", "severity"),
    [
        ("GRAD_ACCUM = 1", "", "advice"),
        ("GRAD_ACCUM: int = 1", "", "advice"),
        ("GRAD_ACCUM = 4", "", "warning"),
        ("GRAD_ACCUM = 1\nGRAD_ACCUM = 8", "", "warning"),
        ("GRAD_ACCUM = 1 if small else 8", "", "warning"),
        ("GRAD_ACCUM = int(os.environ['ACCUM'])", "", "warning"),
        ("", ", GRAD_ACCUM=1", "warning"),  # a caller may pass another
    ],
)
def test_a_window_of_one_is_advice(setting, param, severity):
    """With one micro-batch per step nothing is discarded and nothing too large; the message says from when on it is."""
    for code, start, divided, end in (("HS181", CLEAR, " / GRAD_ACCUM", "pass"), ("HS180", "pass", "", CLEAR)):
        text = LOOP.format(setting=setting, param=param, start=start, divided=divided, end=end)
        (finding,) = findings(text, code)
        assert finding.severity == severity
        assert ("once `GRAD_ACCUM` is above 1" in finding.message) == (severity == "advice")
