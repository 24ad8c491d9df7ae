"""HS132, HS176: states of scalers that are restored where there is no scaler."""

import pytest

from check_scripts import reported

RESUME = """\
import torch
from {module} import {cls}

def main(args):
    {create}
    model, optimizer = build(args)
    if args.resume:
        checkpoint = torch.load(args.resume)
        optimizer.load_state_dict(checkpoint["optimizer"])
        if {test}:
            scaler.load_state_dict(checkpoint["scaler"])
    for epoch in range(args.epochs):
        train_one_epoch(model, optimizer, scaler, torch.autocast)
        torch.save({{"optimizer": optimizer.state_dict(), {entry}}}, "x.pt")
"""
OWN, TORCH = ("mine", "NativeScaler"), ("torch.amp", "GradScaler")
LATER = "scaler = None\n    if args.amp:\n        scaler = {}()"
CHOSEN = "scaler = {}() if args.amp else None"
ALWAYS = "scaler = {}()"
HAS, FILLED = '"scaler" in checkpoint', 'checkpoint.get("scaler") is not None'
OR_NONE = '"scaler": scaler.state_dict() if scaler is not None else None'
AND = '"scaler": scaler and scaler.state_dict()'
ABSENT = '**({"scaler": scaler.state_dict()} if scaler is not None else {})'


def codes(names, create, test, entry):
    module, cls = names
    return reported(RESUME.format(module=module, cls=cls, create=create.format(cls), test=test, entry=entry))


@pytest.mark.parametrize("names", [OWN, TORCH])
@pytest.mark.parametrize("create", [LATER, CHOSEN])
@pytest.mark.parametrize("entry", [OR_NONE, AND])
def test_an_entry_that_is_none_is_restored_into_none(names, create, entry):
    """Every checkpoint has the key, with None where there is no scaler: the test of the key does not protect the restore."""
    assert "HS176" in codes(names, create, HAS, entry)


@pytest.mark.parametrize("names", [OWN, TORCH])
@pytest.mark.parametrize(
    ("create", "test", "entry"),
    [
        (LATER, FILLED, OR_NONE),
        (LATER, f"{HAS} and scaler is not None", OR_NONE),
        (LATER, HAS, ABSENT),
        (LATER.replace("args.amp", "True"), HAS, OR_NONE),
        (ALWAYS, HAS, OR_NONE),
        (CHOSEN, f"args.amp and {HAS}", OR_NONE),
    ],
)  # fmt: skip
def test_a_restore_that_cannot_meet_none(names, create, test, entry):
    """A test of the entry or the scaler, a key that only exists with a scaler, or a scaler in every run."""
    assert "HS176" not in codes(names, create, test, entry)


@pytest.mark.parametrize(
    ("test", "is_reported"),
    [
        ('"scaler" in checkpoint', True),
        ('"scaler" in checkpoint.keys()', True),
        ('checkpoint.get("scaler")', True),
        ('"scaler" in globals()', False),
        ('hasattr(state, "scaler")', False),
        ('"scaler" in names', False),
    ],
)
def test_a_key_of_the_checkpoint_binds_no_variable(test, is_reported):
    """`"scaler" in checkpoint` does not ask whether there is a variable `scaler`: the restore raises NameError."""
    text = "import torch\nfrom models import build\nmodel, optimizer = build(torch.bfloat16)\ncheckpoint = torch.load('x.pt')\n"
    text += f"if {test}:\n    scaler.load_state_dict(checkpoint['scaler'])\n"
    text += "for x in loader:\n    with torch.autocast('cuda', dtype=torch.bfloat16):\n        loss = model(x)\n    loss.backward()\n    optimizer.step()\n"
    assert ("HS132" in reported(text)) == is_reported
