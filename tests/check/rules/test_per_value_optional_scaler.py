"""A scaler that one value of a setting leaves None, and what the file decides by that None."""

import pytest

from halfstep.check.files.document import read_document
from halfstep.check.files.source import Settings
from halfstep.check.runner import check_document
from halfstep.check.select import Selection

LOOP = """\
import contextlib
import torch
from torch.amp import GradScaler, autocast

def main(args, model, loader, optimizer):
    {made}
    for x in loader:
        optimizer.zero_grad()
        with {region}:
            loss = model(x).mean()
        if {test}:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
"""
MADE = 'scaler = GradScaler("cuda") if args.use_amp else None'
BASE = """\
import torch
from torch.amp import GradScaler, autocast

class Base:
    def __init__(self, config):
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.scaler = GradScaler("cuda") if config.use_amp and self.device.type == "cuda" else None

class Gan(Base):
    def train_step(self, x):
        self.optimizer.zero_grad()
        with autocast("cuda"{enabled}):
            loss = self.model(x).mean()
        if self.scaler:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            loss.backward()
            self.optimizer.step()
"""


def unscaled(text):
    """The findings of HS123, by the runner, which checks each value."""
    document = read_document("train.py", text.encode(), "python")
    found = [f for f in check_document(document, Settings(), Selection()) if f.code == "HS123"]
    return [(f.severity, f.message.partition(",")[0]) for f in found]


@pytest.mark.parametrize(
    "made",
    [
        MADE,
        'scaler = None\n    if args.use_amp:\n        scaler = GradScaler("cuda")',
        'if args.use_amp:\n        scaler = GradScaler("cuda")\n    else:\n        scaler = None',
    ],
)
@pytest.mark.parametrize(
    "region",
    [
        'autocast("cuda", enabled=scaler is not None)',
        'autocast("cuda", enabled=bool(scaler))',
        'autocast("cuda") if scaler is not None else contextlib.nullcontext()',
    ],
)
@pytest.mark.parametrize("test", ["scaler", "scaler is not None"])
def test_a_region_that_the_scaler_enables(made, region, test):
    """Without the setting there is neither a scaler nor autocast."""
    assert unscaled(LOOP.format(made=made, region=region, test=test)) == []


def test_a_region_that_the_scaler_of_a_base_class_enables():
    """The attribute is set in one class and read in another that extends it."""
    assert unscaled(BASE.format(enabled=", enabled=self.scaler is not None")) == []


@pytest.mark.parametrize("region", ['autocast("cuda")', 'autocast("cuda", enabled=scaler is None)'])
def test_a_region_that_stays_without_the_scaler(region):
    """Where it is always on, or on without the scaler alone, the loss is not scaled."""
    assert unscaled(LOOP.format(made=MADE, region=region, test="scaler is not None"))


def test_a_region_that_stays_without_the_scaler_of_a_base_class():
    """The setting decides the scaler in the base class, and not the region of the class that extends it."""
    assert unscaled(BASE.format(enabled="")) == [("error", "with use_amp=False")]
