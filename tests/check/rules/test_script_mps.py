"""HS123: a region that a script enters in float16 on MPS, where its scaler is for CUDA and does nothing."""

import pytest

from check_scripts import findings

PASSED = """\
import torch
def train(model, loader, optimizer, device, scaler=None, amp=False):
    use_amp = {use_amp}
    use_scaler = {use_scaler}
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast(device_type={device}, enabled=use_amp{dtype}):
            loss = loss_fn(model(x), y)
        if use_scaler:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        {otherwise}
"""
OTHERWISE = "else:\n            loss.backward()\n            optimizer.step()"


def passed(
    use_amp="amp and device.type in {'cuda', 'mps'}",
    use_scaler="scaler is not None and device.type == 'cuda'",
    device="device.type",
    dtype="",
    otherwise=OTHERWISE,
):
    return PASSED.format(use_amp=use_amp, use_scaler=use_scaler, device=device, dtype=dtype, otherwise=otherwise)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_amp": "amp and (device.type == 'cuda' or device.type == 'mps')"},
        {"dtype": ", dtype=torch.float16"},
        {"use_scaler": "torch.cuda.is_available()"},
    ],
)
def test_a_region_enabled_on_mps_beside_a_scaler_used_on_cuda(options):
    """The flag of the region names MPS, that of the scaler asks for CUDA: the other branch trains without a scale."""
    assert [f.line for f in findings(passed(**options), "HS123")] == [7]


@pytest.mark.parametrize(
    "options",
    [
        {"use_amp": "amp and device.type == 'cuda'"},
        {"use_amp": "amp"},
        {"use_amp": "amp and device.type != 'mps'"},
        {"use_scaler": "scaler is not None and device.type in ('cuda', 'mps')"},
        {"use_scaler": "scaler is not None"},
        {"device": "'cuda'"},
        {"dtype": ", dtype=torch.bfloat16"},
        {"dtype": ", dtype=torch.bfloat16 if device.type == 'mps' else torch.float16"},
        {"dtype": ", dtype=torch.float16 if device.type == 'cuda' else torch.bfloat16"},
        {"otherwise": ""},
    ],
)
def test_a_region_that_mps_does_not_enter_in_float16(options):
    """Off on MPS, unknown, for CUDA, in bfloat16 there, or without a backward there."""
    assert findings(passed(**options), "HS123") == []


CONFIGURED = """\
import torch
from contextlib import nullcontext
class Trainer:
    def __init__(self, config):
        self.config = config
        self.device = torch.device("cuda" if torch.cuda.is_available() else "mps")
        self.enabled, self.dtype, self.scaler = False, None, None
        self.configure()

    def configure(self):
        if self.device.type {devices} or self.config.precision == "fp32":
            return
        self.enabled = True
        if self.config.precision == "fp16":
            self.dtype = torch.float16
            self.scaler = torch.amp.GradScaler({scaler})
        else:
            self.dtype = torch.bfloat16

    def context(self):
        if not self.enabled:
            return nullcontext()
        return torch.autocast(device_type={device}, dtype=self.dtype)

    def step(self, x, y):
        with self.context():
            loss = loss_fn(self.model(x), y)
        scaler = self.scaler
        if scaler is not None and scaler.is_enabled():
            scaler.scale(loss).backward()
            scaler.step(self.optimizer)
            scaler.update()
        else:
            loss.backward()
            self.optimizer.step()
        self.optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("scaler", "devices", "device", "num"),
    [
        ('"cuda"', "not in ('cuda', 'mps')", "self.device.type", 1),
        ("", "not in ('cuda', 'mps')", "self.device.type", 1),
        ("self.device.type", "not in ('cuda', 'mps')", "self.device.type", 0),
        ('"cuda"', "not in ('cuda', 'mps')", "'cuda'", 0),
    ],
)
def test_a_scaler_for_cuda_created_on_mps_as_well(scaler, devices, device, num):
    """The scaler, which another variable copies, is created where the device is CUDA or MPS, and disables itself on MPS."""
    text = CONFIGURED.format(scaler=scaler, devices=devices, device=device)
    assert [f.line for f in findings(text, "HS123")] == [16] * num


CHOSEN = """\
import argparse
import torch
parser = argparse.ArgumentParser()
parser.add_argument("--amp", action="store_true")
args = parser.parse_args()
if torch.cuda.is_available():
    device = torch.device("cuda")
elif {test}:
    device = torch.device("{other}")
else:
    device = torch.device("cpu")
{more}
scaler = torch.amp.GradScaler({scaler})
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast(device_type=device.type, dtype=torch.{dtype}, enabled={enabled}):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""


def chosen(enabled="True", dtype="float16", scaler="", other="mps", more=""):
    return CHOSEN.format(
        test="torch.backends.mps.is_available()", enabled=enabled, dtype=dtype, scaler=scaler, other=other, more=more
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enabled": "args.amp"},
        {"enabled": "use_amp", "more": "use_amp = args.amp"},
        {"enabled": "args.amp and device.type != 'cpu'"},
        {"scaler": "'cuda', enabled=args.amp", "enabled": "args.amp"},
        {"scaler": "device.type, enabled=device.type == 'cuda'"},
    ],
)
def test_a_device_that_the_file_may_set_to_mps(options):
    """The region is for whatever device the file chooses, and always on, or by a setting alone."""
    assert [f.line for f in findings(chosen(**options), "HS123")] == [13]


@pytest.mark.parametrize(
    "options",
    [
        {"other": "cpu"},
        {"dtype": "bfloat16"},
        {"scaler": "device.type"},
        {"enabled": "device.type == 'cuda'"},
        {"enabled": "args.amp and torch.cuda.is_available()"},
        {"enabled": "args.amp", "more": "if device.type != 'cuda':\n    args.amp = False"},
        {"enabled": "use_amp", "more": "use_amp = args.amp\nif device.type != 'cuda':\n    use_amp = False"},
        {"enabled": "supported(device)"},
    ],
)
def test_a_region_that_the_file_may_turn_off_on_mps(options):
    """Nothing is certain for MPS where it is not offered, or where the device may disable the region."""
    assert findings(chosen(**options), "HS123") == []
