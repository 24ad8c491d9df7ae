"""What was reported on public code without being wrong, and the twin of each that is."""

import pytest

from check_scripts import findings

BRANCHES = """\
import torch
def region(args):
    return {{"device_type": "cuda", "enabled": args.amp, "dtype": torch.float16}}
def train(model, loader, optimizer, scaler, args):
    for x, y in loader:
        with torch.autocast(**region(args)):
            loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
@torch.no_grad()
def evaluate(model, loader, args=None):
    model.eval()
    for x, y in loader:
        if {test}:
            with torch.autocast(**region(args)):
                out = model(x)
        else:
            out = model(x)
"""


@pytest.mark.parametrize(
    ("test", "expected"),
    [
        ("args is not None and args.amp", []),
        ("args and args.amp", []),
        ("y is not None and args.amp", [20]),
    ],
)
def test_the_branch_without_mixed_precision_of_optional_settings(test, expected):
    """A test that settings were passed at all does not say that the other branch runs with mixed precision."""
    assert [f.line for f in findings(BRANCHES.format(test=test), "HS149")] == expected
