"""HS611 and HS612: where timesteps, positions and targets come from, and which formats they are cast to."""

import pytest

from check_scripts import findings

CAST = """\
import torch
def train(latents, dtype):
    {made}
    out = model(latents, {cast})
    loss_fn(out).backward()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("made", "cast", "is_reported"),
    [
        ("t = torch.randint(0, 1000, (4,))", "t.to(torch.bfloat16)", True),
        ("t = torch.randint(0, scheduler.config.num_train_timesteps, (4,))", "t.bfloat16()", True),
        ("t = torch.randint(1000, (4,))", "t.expand(8).to('cuda', torch.bfloat16)", True),
        ("t = scheduler.timesteps[index]", "t.to(dtype=torch.bfloat16)", True),
        ("latents = torch.randn(4, dtype=torch.bfloat16); t = scheduler.timesteps[i]", "t.to(latents.dtype)", True),
        ("t = torch.arange(seq_len)", "t.to(torch.bfloat16)", True),
        ("t = torch.randint(0, 1000, (4,))", "t.to(dtype)", False),
        ("t = torch.randint(0, 1000, (4,))", "t.half()", False),
        ("t = torch.arange(4096)", "t.half()", True),
        ("t = torch.randint(0, 200, (4,))", "t.bfloat16()", False),
        ("t = torch.rand(4)", "t.bfloat16()", False),
        ("t = torch.randint(0, 1000, (4,))", "t.bfloat16() / 1000", False),
        ("t = torch.arange(num_heads)", "t.bfloat16()", False),
    ],
)
def test_integers_beyond_those_of_the_format(made, cast, is_reported):
    """HS611 needs a source that shows how large the numbers are, and a format that the text decides."""
    text = CAST.format(made=made, cast=cast)
    assert [f.line for f in findings(text, "HS611")] == [4] * is_reported


def test_a_pipeline_may_repeat_the_rounding_of_training():
    """HS611 reports casts of timesteps where the model is trained."""
    text = CAST.format(made="t = torch.randint(0, 1000, (4,))", cast="t.bfloat16()")
    assert findings(text.replace("loss_fn(out).backward()", "show(out)"), "HS611") == []


FIT = """\
import torch
import torch.nn.functional as F
criterion = torch.nn.{criterion}()
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = model(x)
        {before}
        loss = {loss}
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("criterion", "before", "loss", "is_reported"),
    [
        ("MSELoss", "pass", "criterion(out.bfloat16(), y.bfloat16())", True),
        ("L1Loss", "pass", "criterion(out, y.to(torch.float16))", True),
        ("MSELoss", "pass", "F.smooth_l1_loss(out, y.half())", True),
        ("MSELoss", "y = y.float().to(torch.bfloat16)", "F.mse_loss(out, y)", True),
        ("MSELoss", "pass", "F.mse_loss(input=out, target=y.half())", True),
        ("MSELoss", "y = y.to(x.dtype)", "F.mse_loss(out, y)", False),
        ("MSELoss", "pass", "criterion(out.bfloat16(), y)", False),
        ("CrossEntropyLoss", "pass", "criterion(out, y.bfloat16())", False),
        ("MSELoss", "y = y.float()", "criterion(out, y)", False),
    ],
)
def test_targets_of_a_regression(criterion, before, loss, is_reported):
    """HS612 reports a cast of the target in training, at the loss or before it."""
    text = FIT.format(criterion=criterion, before=before, loss=loss)
    assert [f.line for f in findings(text, "HS612")] == [9] * is_reported
