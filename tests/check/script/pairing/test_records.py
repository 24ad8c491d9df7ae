"""Records that hold a number format together with the flag of its scaler."""

from __future__ import annotations

import pytest

from check_scripts import codes

RECORD = """\
import torch
from dataclasses import dataclass

@dataclass(frozen=True)
class Precision:
    name: str
    dtype: torch.dtype
    use_scaler: bool

def choose(name, device):
    if name == "bf16":
        return Precision("bf16", torch.bfloat16, False)
    return Precision("fp16", torch.float16, {flag})

def device_of():
    return torch.device("cuda" if torch.cuda.is_available() else "mps")

def train(model, optimizer, loader, name):
    device = device_of()
    precision = choose(name, device)
    scaler = torch.amp.GradScaler("cuda", enabled=precision.use_scaler)
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast(device_type={device}, dtype=precision.dtype):
            loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
"""


@pytest.mark.parametrize(
    ("flag", "device", "expected"),
    [
        ("device.type == 'cuda'", "device.type", ["HS123:13"]),
        ("device.type == 'cuda'", "'cuda'", []),
        ("True", "'cuda'", []),
    ],
)
def test_record_whose_scaler_is_for_cuda_alone(flag, device, expected):
    """A record of float16 with a scaler for CUDA alone leaves the loss unscaled where its region is for every device."""
    assert [c for c in codes(RECORD.format(flag=flag, device=device)) if c.startswith("HS123")] == expected
