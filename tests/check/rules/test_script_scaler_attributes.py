"""HS100: how a file shows that a variable is a scaler of torch."""

import pytest

from check_scripts import findings

READ = """\
import torch
from typing import Optional
from torch.amp import GradScaler

{before}

def train(model, loader, {param}):
    for x in loader:
        loss = model(x)
        scaler.scale(loss).backward()
        log({name})

{after}
"""
MAKE = "def make(amp):\n    return GradScaler('cuda') if amp else None"


@pytest.mark.parametrize(
    ("before", "param", "after", "expected"),
    [
        ("", "scaler: GradScaler", "", True),
        ("", "scaler: Optional[torch.amp.GradScaler] = None", "", True),
        ("", "scaler: 'GradScaler' | None", "", False),
        ("", "scaler: GradScaler | NativeScaler", "", False),
        ("", "scaler", "", False),
        ("", "scaler", "s = GradScaler('cuda')\ntrain(model, loader, s)", True),
        (MAKE, "scaler", "train(model, loader, make(True))", True),
        (MAKE, "scaler", "train(model, loader, make(True))\ntrain(model, loader, other)", False),
        (MAKE, "amp, scaler=None", "scaler = make(True)", False),
    ],
)
def test_a_parameter_is_a_scaler_by_its_annotation_or_by_all_calls(before, param, after, expected):
    """An annotation decides, else what every call of the file passes, also from a function that returns a scaler or None."""
    text = READ.format(before=before, param=param, after=after, name="scaler.loss_scale")
    assert bool(findings(text, "HS100")) is expected
    assert not findings(text.replace("scaler.loss_scale", "scaler.get_scale()"), "HS100")


ATTRIBUTE = """\
import torch

def make(amp):
    scaler = torch.amp.GradScaler("cuda", enabled=amp)
    return {returned}

class Trainer:
    def __init__(self, amp):
        self.scaler = make(amp)

    def log(self):
        return self.scaler.last_scale
"""


@pytest.mark.parametrize(
    ("returned", "expected"), [("scaler", True), ("Wrapper(scaler)", False), ("scaler, amp", False)]
)
def test_an_attribute_that_a_function_of_the_file_creates(returned, expected):
    """What a function returns is a scaler if the function creates one and returns it as it is."""
    assert bool(findings(ATTRIBUTE.format(returned=returned), "HS100")) is expected
