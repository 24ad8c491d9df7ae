"""HS123 with a value of a setting: the region and the branch without a scaler follow the same value."""

import pytest

from halfstep.check.files.document import read_document
from halfstep.check.files.source import Settings
from halfstep.check.runner import check_document
from halfstep.check.select import Selection


def lines(text, code):
    """The lines at which a rule reports something, with every value of a setting."""
    document = read_document("train.py", text.encode(), "python")
    return [f.line for f in check_document(document, Settings(), Selection()) if f.code == code]


LOOP = """\
import contextlib
import torch
{head}

def train(model, loader, optimizer, scaler, cfg, device):
    amp_enabled = bool(cfg["amp"] and device.type == "cuda")
    for x, y in loader:
        optimizer.zero_grad()
        with {region}:
            loss = criterion(model(x), y)
        if amp_enabled:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()

def validate(model, loader, cfg, device):
    enabled = bool(cfg["amp"] and device.type == "cuda")
    model.eval()
    with torch.no_grad(), {other}:
        return [model(x) for x, _ in loader]
"""
FACTORY = """\
def autocast_context(device, enabled=True):
    if device.type == "cuda" and enabled:
        return torch.autocast("cuda", dtype=torch.float16)
    return contextlib.nullcontext()
"""
PASSED = """\
def autocast_context(device, enabled=True):
    return torch.autocast(device.type, dtype=torch.float16, enabled=enabled)
"""
NAMED = """\
def half(low, device):
    if not low:
        return contextlib.nullcontext()
    return torch.autocast("cuda", dtype=torch.float16)
"""


@pytest.mark.parametrize(
    ("head", "region", "other", "expected"),
    [
        (FACTORY, "autocast_context(device, amp_enabled)", "autocast_context(device, enabled)", []),
        (FACTORY, "autocast_context(device, enabled=amp_enabled)", "autocast_context(device, enabled=enabled)", []),
        (PASSED, "autocast_context(device, amp_enabled)", "autocast_context(device, enabled)", []),
        (NAMED, "half(amp_enabled, device)", "half(enabled, device)", []),
        (FACTORY, "autocast_context(device)", "autocast_context(device, enabled)", [20]),
        (FACTORY, "autocast_context(device, True)", "autocast_context(device, enabled)", [20]),
        (PASSED, "autocast_context(device)", "autocast_context(device, enabled)", [18]),
        (NAMED, "half(True, device)", "half(enabled, device)", [20]),
        (NAMED, "half(not amp_enabled, device)", "half(enabled, device)", [20]),
    ],
)
def test_the_arguments_of_a_region_decide_what_it_enters(head, region, other, expected):
    """A function of the file that returns a region only for a flag enters nothing where the flag is off."""
    assert lines(LOOP.format(head=head, region=region, other=other), "HS123") == expected


GLOBAL = """\
import contextlib
from dataclasses import dataclass
import torch

@dataclass
class Config:
    use_amp: bool = True

CFG = Config()
amp_enabled = bool(CFG.use_amp and device.type == "cuda")

def region():
    if {test}:
        return torch.autocast("cuda", dtype=torch.float16)
    return contextlib.nullcontext()

def train(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda", enabled=amp_enabled)
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        with region():
            loss = criterion(model(x), y)
        if amp_enabled:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
    {last}()
"""


@pytest.mark.parametrize(
    ("test", "last", "expected"),
    [
        ("amp_enabled", "model.eval", []),
        ("amp_enabled and torch.cuda.is_available()", "model.eval", []),
        ("torch.cuda.is_available()", "model.eval", [29]),
        ("device.type == 'cuda'", "print", [29]),
    ],
)
def test_a_variable_of_the_module_decides_what_a_region_enters(test, last, expected):
    """`model.eval()` is no `eval(...)`, which may change every variable of the module."""
    assert lines(GLOBAL.format(test=test, last=last), "HS123") == expected


OPTIONAL = """\
import torch
from torch.cuda.amp import GradScaler, autocast

class Base:
    def __init__(self, config):
        self.scaler = GradScaler() if config.use_amp and self.device.type == "cuda" else None

class Trainer(Base):
    def train_step(self, x, y):
        self.optimizer.zero_grad()
        with autocast(enabled={enabled}):
            loss = self.criterion(self.model(x), y)
        if self.scaler:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            loss.backward()
            self.optimizer.step()
"""


@pytest.mark.parametrize(
    ("enabled", "expected"),
    [
        ("self.scaler is not None", []),
        ("bool(self.scaler is not None)", []),
        ("not (self.scaler is None)", []),
        ("self.training and self.scaler is not None", []),
        ("self.scaler is None", [18]),
        ("True", [18]),
    ],
)
def test_a_region_that_asks_for_the_scaler_is_off_without_it(enabled, expected):
    """`autocast(enabled=self.scaler is not None)` is disabled where the scaler is None, also in a class of another base."""
    assert lines(OPTIONAL.format(enabled=enabled), "HS123") == expected
