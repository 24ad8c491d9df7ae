"""HS176: scalers that may be None, and tests of them under other names."""

import pytest

from check_scripts import reported

LOOP = """\
import torch

def train(args, model, optimizer, loader):
    {create}
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16, enabled=args.amp):
            loss = model(x, y)
        if {test}:
            scaler.scale(loss).backward()
        else:
            loss.backward()
        {step}
"""
OPTIONAL = 'scaler = torch.amp.GradScaler("cuda") if args.amp else None'
ALWAYS = "scaler.step(optimizer)\n        scaler.update()"
EARLY = "if not args.amp:\n            optimizer.step()\n            continue\n        " + ALWAYS
GUARDED = "if {0}:\n            scaler.step(optimizer)\n            scaler.update()\n        else:\n            optimizer.step()"


@pytest.mark.parametrize("test", ["args.amp", "scaler is not None", "scaler"])
def test_a_step_without_the_test_of_the_backward_is_reported(test):
    """The backward tests the scaler, by its flag or by itself, and the step does not."""
    assert "HS176" in reported(LOOP.format(create=OPTIONAL, test=test, step=ALWAYS))


@pytest.mark.parametrize(
    "step", [GUARDED.format("args.amp"), GUARDED.format("scaler is not None"), GUARDED.format("use_amp"), EARLY]
)
def test_a_step_under_any_test_of_mixed_precision_is_accepted(step):
    """The flag, the scaler, a flag under another name, or a branch that leaves the iteration."""
    assert "HS176" not in reported(LOOP.format(create=OPTIONAL, test="args.amp", step=step))


def test_a_scaler_that_always_exists_is_accepted():
    """A disabled scaler is not None."""
    create = 'scaler = torch.amp.GradScaler("cuda", enabled=args.amp)'
    assert "HS176" not in reported(LOOP.format(create=create, test="args.amp", step=ALWAYS))
