"""HS124, HS138, HS146, HS175, HS179: conditions in place of a device, masks of a loss, and what helpers and base classes do."""

import pytest

from check_scripts import findings
from halfstep.check.files.document import read_document
from halfstep.check.files.source import Settings
from halfstep.check.runner import check_document
from halfstep.check.select import Selection

TRAIN = """
def train(model, loader, opt):
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.mse_loss(model(x), y)
        scaler.scale(guard(loss)).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
"""
HEAD = "import torch\nimport torch.nn.functional as F\nscaler = torch.amp.GradScaler('cuda')\n"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("ok = torch.isfinite(loss.detach())\n    return loss * ok.to(loss.dtype)", [6]),
        ("loss *= 1.0 - torch.isnan(loss).float()\n    return loss", [5]),
        ("good = ~(torch.isnan(loss) | torch.isinf(loss))\n    return (loss * good).sum() / good.sum()", [6]),
        ("w = 0.0 if torch.isnan(loss).any() else 1.0\n    return w * loss", [6]),
        ("return loss.mul(loss.isfinite()).mean()", [5]),
        ("if not torch.isfinite(loss):\n        return loss * 0.0\n    return loss", [6]),
        ("ok = torch.isfinite(target)\n    return (loss * ok).sum()", []),
        ("ok = torch.isfinite(loss)\n    loss = torch.nan_to_num(loss)\n    return loss * ok", []),
        ("return loss * torch.isnan(loss).sum()", []),
        ("return loss[torch.isfinite(loss)].mean() * 0.5", []),
    ],
)
def test_a_mask_does_not_remove_a_loss_that_is_not_finite(lines: str, expected: list[int]) -> None:
    """A product with a mask of what is finite is still NaN; a selection, or a mask of something else, is not reported."""
    text = f"{HEAD}def guard(loss, target=None):\n    {lines}\n{TRAIN}"
    assert [f.line for f in findings(text, "HS179")] == expected


@pytest.mark.parametrize(
    ("argument", "is_wrong"),
    [
        ("args.dtype == 'float16'", True),
        ("not args.fp32", True),
        ("args.gpu and torch.cuda.is_available()", True),
        ("wanted", True),
        ("device", False),
        ("device or 'cuda'", False),
        ("'cuda' if torch.cuda.is_available() else 'cpu'", False),
    ],
)
def test_a_condition_is_no_device(argument: str, *, is_wrong: bool) -> None:
    """A condition in the place of the device of a scaler leaves it always enabled."""
    text = f"import torch\nwanted = args.dtype == 'float16'\ndevice = args.device\nscaler = torch.amp.GradScaler({argument})\n"
    assert [f.line for f in findings(text, "HS124")] == [4] * is_wrong


@pytest.mark.parametrize(
    ("value", "is_wrong"),
    [
        ("cuda and fmt is not torch.float32,", True),
        ("args.precision != 'full',", True),
        ("(fmt is not torch.float32,)", False),
        ("x > 3,", False),
        ("fmt is not torch.float32", False),
    ],
)
def test_a_comma_after_a_test_of_the_format(value: str, *, is_wrong: bool) -> None:
    """A test of the format that ends in a comma is always true, whatever its variable is called."""
    text = (
        f"import torch\nreduced = {value}\nwith torch.autocast('cuda', enabled=bool(reduced)):\n    loss = model(x)\n"
    )
    assert [f.line for f in findings(text, "HS138")] == [2] * is_wrong


LOSS = """\
import torch
import torch.nn as nn
import torch.nn.functional as F

def focal(p, t):
    {region}ce = F.binary_cross_entropy(p, t)
    return ce.mean()

class Loss(nn.Module):
    def one(self, logit, t):
        return focal(torch.sigmoid(logit), t)

    def forward(self, logits, t):
        return sum(self.one(logit, t) for logit in logits)

criterion = Loss()
with torch.autocast("cuda", dtype=torch.float16):
    loss = criterion(model(x), y)
"""


@pytest.mark.parametrize(
    ("region", "is_wrong"),
    [
        ("", True),
        ("with torch.autocast('cuda', enabled=False):\n        ", False),
        ("if not torch.is_autocast_enabled():\n        ", False),
    ],
)
def test_a_helper_of_a_loss_runs_in_its_region(region: str, *, is_wrong: bool) -> None:
    """What the forward of a module calls runs in the region around it, unless it leaves the region."""
    assert bool(findings(LOSS.format(region=region), "HS146")) is is_wrong


HOOK = """\
import torch
import lightning as L
from argparse import ArgumentParser

class Watch:
    def {hook}(self, optimizer):
        total = torch.stack([p.grad.norm() for p in self.parameters()]).norm()
        if not torch.isfinite(total):
            raise FloatingPointError("gradient")

class Net({bases}):
    def training_step(self, batch, _):
        return self(batch)

ap = ArgumentParser()
ap.add_argument("--precision", default="32", choices={choices})
a = ap.parse_args()
L.Trainer(precision=a.precision).fit(Net())
"""


@pytest.mark.parametrize(
    ("hook", "bases", "choices", "is_wrong"),
    [
        ("on_before_optimizer_step", "Watch, L.LightningModule", ["32", "16-mixed"], True),
        ("on_before_optimizer_step", "Watch, L.LightningModule", ["32", "bf16-mixed"], False),
        ("on_before_optimizer_step", "L.LightningModule", ["32", "16-mixed"], False),
        ("report", "Watch, L.LightningModule", ["32", "16-mixed"], False),
    ],
)
def test_an_inherited_hook_raises(hook: str, bases: str, choices: list[str], *, is_wrong: bool) -> None:
    """A hook that a module of Lightning inherits from a class of the file sees the overflows of a precision that is offered."""
    text = HOOK.format(hook=hook, bases=bases, choices=choices)
    reports = check_document(read_document("train.py", text.encode(), "python"), Settings(), Selection())
    assert [f.line for f in reports if f.code == "HS175"] == [9] * is_wrong
