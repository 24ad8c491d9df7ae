"""Starter files of the practice tasks: they run, and are graded as not done."""

from __future__ import annotations

__all__ = ["STARTERS", "starter"]

_HEAD = """\
# {title}
#
# Grade it: halfstep learn practice {number} {file}
"""

_SPEED = """
import time

import torch
from torch import nn
from torch.amp import GradScaler, autocast

device = "cuda" if torch.cuda.is_available() else "cpu"


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 10)).to(device)


def train(mixed, num_steps=10):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(num_steps):
        x, y = torch.randn(64, 64, device=device), torch.randint(10, (64,), device=device)
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    # TODO: use autocast (and a GradScaler for fp16) if `mixed`; measure time and peak memory.


train(mixed=False)
train(mixed=True)
# TODO: print both times and both peaks.
"""

_CLIPPING = """
import torch
from torch import nn
from torch.amp import GradScaler, autocast

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
scaler = GradScaler(device)

for _ in range(8):
    x, y = torch.randn(64, 16, device=device), 20 * torch.randn(64, 4, device=device)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.zero_grad(set_to_none=True)
    with autocast(device_type=device, dtype=torch.float16):
        loss = nn.functional.mse_loss(model(x), y)
    scaler.scale(loss).backward()
    # TODO: clip the gradients at max_norm = 1.0.
    scaler.step(optimizer)
    scaler.update()
    update = torch.cat([(p - b).flatten() for p, b in zip(model.parameters(), before)])
    print(f"norm of the update: {update.norm().item():.4f}")
"""

_SKIPPED = """
import torch
from torch import nn
from torch.amp import GradScaler, autocast

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler(device)

skipped = 0
for _ in range(10):
    x, y = torch.randn(64, 16, device=device), torch.randn(64, 4, device=device)
    optimizer.zero_grad(set_to_none=True)
    with autocast(device_type=device, dtype=torch.float16):
        loss = nn.functional.mse_loss(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    # TODO: count the step if it was skipped.
print(f"skipped steps: {skipped}")
"""

_UNSTABLE = """
import torch
from torch import nn
from torch.amp import GradScaler, autocast

device = "cuda" if torch.cuda.is_available() else "cpu"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(16, 32)
        self.expand = nn.Linear(32, 32)
        self.mix = nn.Linear(32, 32)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 4)
        with torch.no_grad():
            self.stem.weight.mul_(100)
            self.expand.weight.mul_(300)
            self.mix.weight.mul_(300)

    def forward(self, x):
        return self.head(self.norm(self.mix(self.expand(self.stem(x)))))


def train(dtype):
    torch.manual_seed(0)
    model = Net().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = GradScaler(device, enabled=dtype == torch.float16)
    for _ in range(5):
        x, y = torch.randn(32, 16, device=device), torch.randint(4, (32,), device=device)
        optimizer.zero_grad(set_to_none=True)
        with autocast(device_type=device, dtype=dtype):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    print(dtype, "loss", loss.item())


train(torch.float16)
train(torch.bfloat16)
# TODO: find the layer that overflows (module.register_forward_hook) and print its name.
"""

_EXPLANATION = '''
# The experiment trains on targets so small that the gradients are about 1e-8, in four ways. Predict for each: does the loss fall?
# Write "yes" or "no".
FP32_LOSS_FALLS = ""
FP16_LOSS_FALLS = ""  # without a scaler
FP16_WITH_SCALER_LOSS_FALLS = ""
BF16_LOSS_FALLS = ""  # without a scaler

# Why is the GradScaler necessary for float16, but often unnecessary for bfloat16? What happens to small gradients in fp16, what does
# the scaler do about it, and why does bf16 not need it? Three or four sentences.
EXPLANATION = """
"""
'''

_BODIES = (_SPEED, _CLIPPING, _SKIPPED, _UNSTABLE, _EXPLANATION)


def starter(number: int, title: str, file: str) -> str:
    """The text of the starter file of a task."""
    return _HEAD.format(number=number, title=title, file=file) + STARTERS[number]


STARTERS = dict(enumerate(_BODIES, start=1))
