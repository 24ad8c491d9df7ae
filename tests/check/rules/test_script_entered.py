"""Regions without a `with` block: entered by a call, left by a call, or never; and those that leave the model out."""

import pytest

from check_scripts import findings

BLOCK = """\
import torch
from contextlib import ExitStack

def train(model, optimizer, loader, use_amp, ctx):
{enter}
    for x, y in loader:
        loss = loss_fn(model(x), y)
        {leave}
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""
REGION = "torch.autocast('cuda', dtype=torch.bfloat16)"


def lines(text, *codes):
    """The lines of the findings of some rules."""
    return [f.line for f in findings(text, *codes)]


@pytest.mark.parametrize(
    "enter",
    [
        f"    {REGION}.__enter__()",
        f"    if use_amp:\n        {REGION}.__enter__()",
        f"    ctx = {REGION}\n    ctx.__enter__()",
        f"    try:\n        {REGION}.__enter__()\n    except RuntimeError:\n        pass",
        f"    stack = ExitStack()\n    stack.enter_context({REGION})",
        f"    stack = ExitStack()\n    _ = stack.enter_context({REGION})",
    ],
)
def test_what_follows_a_region_entered_by_hand_is_inside(enter):
    """HS140 and HS141 report backward and step below `__enter__` like those in a `with` block."""
    found = findings(BLOCK.format(enter=enter, leave="pass"), "HS140", "HS141")
    assert [f.code for f in found] == ["HS140", "HS141"]


@pytest.mark.parametrize(
    ("enter", "leave"),
    [
        ("    ctx = torch.no_grad()\n    ctx.__enter__()", "pass"),
        ("    ctx = open('log')\n    ctx.__enter__()", "pass"),
        (f"    with ExitStack() as stack:\n        stack.enter_context({REGION})\n        warm_up(model)", "pass"),
        (f"    stack = ExitStack()\n    stack.enter_context({REGION})\n    with stack: warm_up(model)", "pass"),
        (f"    stack = ExitStack()\n    stack.enter_context({REGION})\n    warm_up(model)\n    stack.close()", "pass"),
        (f"    ctx = {REGION}\n    ctx.__enter__()\n    warm_up(model)\n    ctx.__exit__(None, None, None)", "pass"),
    ],
)
def test_what_is_outside_a_region_entered_by_hand_is_not_inside(enter, leave):
    """A region ends with `__exit__` or the block of its ExitStack, and other contexts are none."""
    assert not findings(BLOCK.format(enter=enter, leave=leave), "HS140", "HS141")


def test_a_loss_of_a_region_entered_by_hand_needs_a_scale():
    """HS123 follows the loss out of a float16 region that `__exit__` leaves."""
    text = BLOCK.format(
        enter="    ctx = torch.autocast('cuda', dtype=torch.float16)", leave="ctx.__exit__(None, None, None)"
    )
    inside = text.replace("        loss = loss_fn", "        ctx.__enter__()\n        loss = loss_fn")
    assert len(findings(inside, "HS123")) == 1
    assert not findings(inside.replace("float16", "bfloat16"), "HS123")


ALONE = """\
import torch

def train(model, criterion, optimizer, scaler, loader):
    for x, y in loader:
        optimizer.zero_grad()
{forward}
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
"""
OUTSIDE = """\
        out = model(x)
        with torch.autocast('cuda', dtype=torch.float16):
            loss = {loss}
"""


@pytest.mark.parametrize(
    ("forward", "expected"),
    [
        (OUTSIDE.format(loss="criterion(out, y)"), [7]),
        (OUTSIDE.format(loss="torch.nn.functional.mse_loss(out.squeeze(1), y)"), [7]),
        (OUTSIDE.format(loss="criterion(out, y) + 0.1 * dice_loss(out, y).mean()"), [7]),
        (OUTSIDE.format(loss="sum(criterion(out, y).values())"), [7]),
        (OUTSIDE.format(loss="criterion(model(out), y)"), []),
        (OUTSIDE.format(loss="perceptual_loss(out, y)"), []),
        (OUTSIDE.format(loss="head(out, y)"), []),
        (OUTSIDE.format(loss="criterion(out, y)").replace("out = model(x)", "out = model(x.half())"), []),
        (
            OUTSIDE.format(loss="criterion(out, y)").replace(
                "        out = ", "        with region():\n            out = "
            ),
            [8],
        ),
        (
            "        with torch.autocast('cuda'):\n            out = model(x)\n            loss = criterion(out, y)\n",
            [],
        ),
        (
            "        with torch.autocast('cuda'):\n            out = model(x)\n"
            "        with torch.autocast('cuda'):\n            loss = criterion(out, y)\n",
            [],
        ),
    ],
)
def test_a_region_around_the_loss_alone_computes_nothing_in_16_bits(forward, expected):
    """HS134 reports a region that contains the loss function, with the model called above it."""
    assert lines(ALONE.format(forward=forward), "HS134") == expected


CONSTANT = """\
import torch
{flag}
scaler = torch.amp.GradScaler('cuda')
def train(model, optimizer, loader):
    for x, y in loader:
        optimizer.zero_grad()
        if {test}:
            with torch.autocast('cuda', dtype=torch.float16):
                loss = loss_fn(model(x), y)
        else:
            loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
train(model, optimizer, loader)
"""


@pytest.mark.parametrize(
    ("flag", "test", "expected"),
    [
        ("autocast_on = False", "autocast_on", [3]),
        ("FULL = True", "not FULL", [3]),
        ("autocast_on = True", "autocast_on", []),
        ("autocast_on = args.autocast", "autocast_on", []),
        ("autocast_on = False; autocast_on = args.autocast", "autocast_on", []),
        ("", "args.autocast", []),
    ],
)
def test_regions_behind_a_constant_that_is_off_are_never_entered(flag, test, expected):
    """HS134 reports a scaler whose regions all wait for a constant of the file that is off."""
    assert lines(CONSTANT.format(flag=flag, test=test), "HS134") == expected


TWO_TESTS = """\
import torch

class Trainer:
    def __init__(self, cfg):
        self.use_amp = {region}
        self.dtype = torch.bfloat16 if cfg.precision == "bf16" else torch.float16
        self.scaler = torch.amp.GradScaler("cuda", enabled={scaler})

    def fit(self):
        for x, y in self.loader:
            self.optimizer.zero_grad()
            with torch.autocast("cuda", dtype=self.dtype, enabled=self.use_amp):
                loss = self.loss(self.model(x), y)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
"""
IS_FLOAT16 = "self.dtype == torch.float16"


@pytest.mark.parametrize(
    ("region", "scaler"),
    [
        ('cfg.precision != "no"', IS_FLOAT16),
        ('cfg.precision not in ("no", "fp32")', f"({IS_FLOAT16})"),
        ('cfg.precision in ("fp16", "bf16")', "cfg.precision != 'bf16' or cfg.precision == 'no'"),
        ('cfg.precision == "fp16" or cfg.precision == "bf16"', "cfg.precision in ('fp16', 'no')"),
    ],
)
def test_a_value_of_the_setting_enables_the_scaler_and_not_the_region(region, scaler):
    """Both switches come from one setting, by tests that disagree for the value without mixed precision."""
    assert [f.line for f in findings(TWO_TESTS.format(region=region, scaler=scaler), "HS134")] == [7]


@pytest.mark.parametrize(
    ("region", "scaler"),
    [
        ('cfg.precision != "no"', f"self.use_amp and {IS_FLOAT16}"),
        ('cfg.precision != "no"', "cfg.precision == 'fp16'"),
        ("cfg.amp", IS_FLOAT16),
        ('cfg.precision in ("fp16", "bf16")', IS_FLOAT16),
    ],
)
def test_switches_that_agree_for_every_value_that_the_file_names(region, scaler):
    """One implies the other, or they come from different settings."""
    assert findings(TWO_TESTS.format(region=region, scaler=scaler), "HS134") == []


def test_a_dtype_that_the_model_receives_may_be_what_computes_in_16_bits():
    """With `model.to(self.dtype)` the scaler is enabled for the dtype of the weights."""
    text = TWO_TESTS.format(region='cfg.precision != "no"', scaler=IS_FLOAT16)
    text = text.replace("        self.scaler = ", "        self.model = build().to(self.dtype)\n        self.scaler = ")
    assert findings(text, "HS134") == []


PARALLEL = """\
import torch
model = torch.nn.DataParallel(Net()).cuda()
for x in loader:
    with torch.autocast({device}, dtype=torch.bfloat16):
        loss = model(x).mean()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(("device", "expected"), [("'cuda'", ["HS147"]), ("device", ["HS147"]), ("'cpu'", [])])
def test_the_replicas_of_a_gpu_ignore_a_region_for_the_cpu(device, expected):
    """HS147: DataParallel passes on whether autocast for CUDA is enabled, which a region for the CPU does not change."""
    assert [f.code for f in findings(PARALLEL.format(device=device), "HS147")] == expected
