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


WRITTEN = """\
import torch
import torch.nn.functional as F
{setup}
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = model(x)
    {before}
    loss = {loss}
    loss.backward()
    optimizer.step()
"""
OPTIONS = "options = dict(dtype=torch.{}, device='cuda')"
CHOSEN = "dtype = torch.bfloat16 if args.bf16 else torch.float32"
LINEAR = "model = torch.nn.Linear(3, 1)"


def written(setup, before, loss):
    return findings(WRITTEN.format(setup=setup, before=before, loss=loss), "HS612")


@pytest.mark.parametrize(
    ("setup", "before", "loss", "line"),
    [
        ("", "pass", "((out - y.bfloat16()) ** 2).mean()", 9),
        ("", "pass", "(out.half() - y.half()).pow(2).mean()", 9),
        ("", "y = y.to(torch.bfloat16)", "(out - y).abs().mean()", 9),
        ("", "error = out - y.bfloat16()", "torch.square(error).mean()", 8),
        ("", "error = y.bfloat16() - out", "my_huber_loss(error, 1.0).mean()", 8),
        (OPTIONS.format("bfloat16"), "y = y.to(**options)", "F.mse_loss(out, y)", 9),
        (CHOSEN, "pass", "F.mse_loss(out.to(dtype), y.to(dtype))", 9),
        ("dtype = tools.str_to_dtype('bfloat16')", "pass", "F.mse_loss(out.to(dtype), y.to(dtype))", 9),
        (LINEAR, "pass", "F.mse_loss(out, y.to(out.dtype))", 9),
        (LINEAR + ".bfloat16()", "y = y.to(dtype=out.dtype)", "F.mse_loss(out, y)", 9),
    ],
)
def test_other_ways_to_round_a_target(setup, before, loss, line):
    """HS612 knows squares and absolute values of a difference, the dtype of an output, dtypes among options and chosen ones."""
    assert [f.line for f in written(setup, before, loss)] == [line]


@pytest.mark.parametrize(
    ("setup", "before", "loss"),
    [
        ("", "pass", "((out.float() - y) ** 2).mean()"),
        ("", "x2 = x.bfloat16()", "((out - x2) ** 2).mean()"),
        ("", "pass", "(out - y.half()).mean()"),
        (OPTIONS.format("float32"), "y = y.to(**options)", "F.mse_loss(out, y)"),
        (CHOSEN, "y = y.to(dtype)", "F.mse_loss(out, y)"),
        ("dtype = tools.str_to_dtype(args.dtype)", "pass", "F.mse_loss(out.to(dtype), y.to(dtype))"),
        (LINEAR, "out = out.float()", "F.mse_loss(out, y.to(out.dtype))"),
        ("", "pass", "F.mse_loss(out, y.to(out.dtype))"),
    ],
)
def test_targets_that_may_keep_their_bits(setup, before, loss):
    """HS612 is silent where no cast is of the target, or its dtype is float32, of the data, or not known."""
    assert written(setup, before, loss) == []
