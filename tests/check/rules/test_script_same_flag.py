"""HS102, HS105 and HS123: a flag, or a variable that changes, decides two things that look independent."""

import pytest

from check_scripts import findings
from halfstep.check.files.document import read_document
from halfstep.check.files.source import Settings
from halfstep.check.runner import check_document
from halfstep.check.select import Selection


def lines(text, code):
    """The lines at which a rule reports something."""
    return [f.line for f in findings(text, code)]


CONSTANT = """\
import torch
from torch.amp import GradScaler, autocast
AMP = True
scaler = {scaler}
for x, y in loader:
    optimizer.zero_grad()
    with autocast("cuda", enabled={enabled}):
        loss = criterion(model(x), y)
    if {test}:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    else:
        loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("scaler", "enabled", "test", "expected"),
    [
        ('GradScaler("cuda") if AMP else None', "AMP", "AMP", []),
        ('GradScaler("cuda") if AMP else None', "AMP", "scaler is not None", []),
        ('GradScaler("cuda")', "AMP", "AMP", []),
        ('GradScaler("cuda")', "True", "AMP", [14]),
        ('GradScaler("cuda")', "AMP", "scale_loss", [14]),
    ],
)
def test_a_constant_enables_the_region_and_the_scaler(scaler, enabled, test, expected):
    """Whoever sets `AMP = False` disables both; another flag disables the scaler alone."""
    assert lines(CONSTANT.format(scaler=scaler, enabled=enabled, test=test), "HS123") == expected


SET = """\
import torch
cuda = torch.cuda.is_available()
{flags}
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    optimizer.zero_grad()
    if {low}:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(model(x), y)
    else:
        loss = criterion(model(x), y)
    if {test}:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    else:
        loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("flags", "low", "test", "expected"),
    [
        (
            "if cuda:\n    low = True\n    scaled = True\nelse:\n    low = False\n    scaled = False",
            "low",
            "scaled",
            [],
        ),
        ("low, scaled = False, False\nif cuda:\n    low, scaled = True, True", "low", "scaled", []),
        ("low, plain = False, True\nif cuda:\n    low, plain = True, False", "low", "not plain", []),
        ("kind, scaled = 'fp32', False\nif cuda:\n    kind, scaled = 'fp16', True", "kind == 'fp16'", "scaled", []),
        # Float16 without the scaler in a branch of its own, or two flags that are set apart.
        (
            "if cuda:\n    low = True\n    scaled = True\nelse:\n    low = True\n    scaled = False",
            "low",
            "scaled",
            [22],
        ),
        ("low, scaled = False, False\nif cuda:\n    low = True\nif big:\n    scaled = True", "low", "scaled", [21]),
        ("low, scaled = False, False\nif cuda:\n    low, scaled = True, big", "low", "scaled", [19]),
    ],
)
def test_two_flags_that_the_same_lines_set(flags, low, test, expected):
    """Where each line that sets one sets the other, only their pairs of values occur."""
    assert lines(SET.format(flags=flags, low=low, test=test), "HS123") == expected


OPTIONAL = """\
import torch
def train(context, config, loader):
    optimizer, scaler = context.optimizer, {scaler}
    for x, y in loader:
        optimizer.zero_grad()
        if config.use_amp:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = loss_fn(context.model(x), y)
            {scale}
        else:
            loss = loss_fn(context.model(x), y)
            loss.backward()
        {step}
"""
EITHER = "if scaler is not None:\n            scaler.step(optimizer)\n            scaler.update()\n        else:\n            optimizer.step()"


@pytest.mark.parametrize(
    ("scaler", "step", "expected"),
    [
        ("context.scaler", EITHER, []),
        ('torch.amp.GradScaler("cuda")', "scaler.step(optimizer)\n        scaler.update()", [12]),
        ("context.scaler", "scaler.step(optimizer)\n        scaler.update()", [12]),
    ],
)
def test_another_file_passes_no_scaler_without_mixed_precision(scaler, step, expected):
    """A step for the case that there is a scaler does not run where the setting that creates it is off."""
    text = OPTIONAL.format(scaler=scaler, scale="scaler.scale(loss).backward()", step=step)
    document = read_document("train.py", text.encode(), "python")
    assert [f.line for f in check_document(document, Settings(), Selection()) if f.code == "HS102"] == expected


TWICE = """\
import torch
def train(model, loader, optimizer, scaler, *, log=False, clip=1.0):
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()
        ready = False
        if log:
            if not {flag}:
                scaler.unscale_(optimizer)
                ready = True
            print(norm(model))
        if clip is not None:
            if not {flag}:
                scaler.unscale_(optimizer)
                ready = True
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(("flag", "expected"), [("ready", []), ("frozen", [15])])
def test_both_calls_test_a_variable_that_the_first_sets(flag, expected):
    """`if not done: unscale_(); done = True` runs once, however often it stands there."""
    assert lines(TWICE.format(flag=flag), "HS105") == expected
