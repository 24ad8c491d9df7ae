"""HS134 where an option chooses between a branch with autocast and one without, and the scaler stays enabled."""

import pytest

from check_scripts import findings, reported

LOOP = """\
import torch

def train(model, loader, optimizer, loss_fn, args):
    scaler = torch.amp.GradScaler("cuda"{enabled})
    for x, y in loader:
        optimizer.zero_grad()
        if {test}:
            with torch.autocast("cuda", dtype=torch.float16):
                out = model(x)
        else:
            {plain}
        loss = loss_fn(out.float(), y)
        {backward}
"""
SCALED = "scaler.scale(loss).backward()\n        scaler.step(optimizer)\n        scaler.update()"
EITHER = """\
if args.amp:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()"""
HALF = "with torch.autocast('cuda', dtype=torch.float16):\n                out = model(x)"


def test_scaler_of_both_branches():
    """HS134 as advice at the backward: the branch without autocast needs no scale."""
    text = LOOP.format(enabled="", test="args.amp", plain="out = model(x)", backward=SCALED)
    assert [(f.code, f.line, f.severity) for f in findings(text)] == [("HS134", 13, "advice")]


@pytest.mark.parametrize(
    ("enabled", "test", "plain", "backward"),
    [
        (", enabled=args.amp", "args.amp", "out = model(x)", SCALED),
        ("", "args.amp", "out = model(x)", EITHER),
        ("", "args.amp", HALF, SCALED),
        ("", "args.amp", "raise ValueError('mixed precision only')", SCALED),
    ],
)
def test_scalers_that_follow_the_branch(enabled, test, plain, backward):
    """No finding where the option also switches the scaler, or every branch computes in 16 bits."""
    assert "HS134" not in reported(LOOP.format(enabled=enabled, test=test, plain=plain, backward=backward))
