"""What torch rejects in runs with chosen settings: devices, flags and losses that reach a region through functions and tables."""

import pytest

from simulated_scripts import codes

SCRIPT = """\
import argparse
import functools
import torch
from torch import nn
import torch.nn.functional as F
p = argparse.ArgumentParser()
p.add_argument("--amp", action=argparse.BooleanOptionalAction, default=True)
p.add_argument("--gpu", type=int, default=0)
p.add_argument("--loss", choices=["plain", "logits"], default="plain")
args = p.parse_args()
LOSSES = {{"plain": lambda w: {plain}, "logits": lambda w: nn.BCEWithLogitsLoss(weight=w)}}
def bce(p, y, weight):
    return F.binary_cross_entropy(p.float(), y, weight=weight)
def run(model, loader, device, criterion):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cuda", enabled=args.amp)
    for x, y in loader:
        optimizer.zero_grad()
        with {region}:
            out = model(x)
            loss = criterion(out, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
def main():
    device = torch.device("cuda", args.gpu)
    run(create_model().to(device), create_loader(), device, LOSSES[args.loss](weights()))
main()
"""


def script(region="torch.autocast('cuda', enabled=args.amp)", plain="nn.BCEWithLogitsLoss(weight=w)"):
    """A loop whose device and loss are passed through functions and a table."""
    return SCRIPT.format(region=region, plain=plain)


@pytest.mark.parametrize(
    ("region", "expected"),
    [
        ("torch.autocast(device, enabled=args.amp)", ["HS142"]),
        ("torch.amp.autocast(device_type=device, dtype=torch.float16, enabled=args.amp)", ["HS142"]),
        ("torch.autocast(args.gpu, enabled=args.amp)", ["HS142"]),
        ("torch.autocast(device.type, enabled=args.amp)", []),
        ("torch.autocast(str(device).partition(':')[0], enabled=args.amp)", []),
        ("torch.autocast('cuda', args.amp)", ["HS143"]),
        ("functools.partial(torch.autocast, 'cuda')(args.amp)", ["HS143"]),
        ("torch.autocast('cuda', torch.float16, args.amp)", []),
    ],
)
def test_arguments_of_autocast_have_their_types(region, expected):
    """A torch.device, a number or a flag in the place of something else."""
    assert codes(script(region)) == expected


@pytest.mark.parametrize("plain", ["functools.partial(bce, weight=w)", "nn.BCELoss(weight=w)"])
def test_cross_entropy_on_probabilities_is_followed_through_tables(plain):
    """It raises inside the region, and not outside."""
    assert codes(script(plain=plain)) == ["HS146"]
    on_cpu = script("torch.autocast('cpu', dtype=torch.bfloat16)", plain)
    assert codes(on_cpu.replace("enabled=args.amp)", "enabled=False)")) == []
