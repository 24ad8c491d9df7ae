"""Training loops that the examples of several rules vary."""

from __future__ import annotations

__all__ = ["ACCUMULATING_LOOP", "MANUAL_LOOP", "PLAIN_LOOP", "SCALED_LOOP", "TWO_OPTIMIZERS"]

SCALED_LOOP = """\
import torch
{scaler}
for epoch in range(epochs):
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.{dtype}):
            loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
"""
PLAIN_LOOP = """\
import torch
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.{dtype}):
        loss = loss_fn(model(x), y)
    loss.backward()
    optimizer.step()
"""
ACCUMULATING_LOOP = """\
import torch
scaler = torch.amp.GradScaler("cuda")
for i, (x, y) in enumerate(loader):
{start}    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y){divide}
    scaler.scale(loss).backward()
    if (i + 1) % accumulation_steps == 0:
        scaler.step(optimizer)
        scaler.update()
{end}"""
MANUAL_LOOP = """\
import lightning as L
{imports}
class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.compute_loss(batch))
{change}        optimizer.step()
{hook}
trainer = L.Trainer(precision="16-mixed")
"""
TWO_OPTIMIZERS = """\
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    scaler.scale(loss_g).backward()
    scaler.scale(loss_d).backward()
    scaler.unscale_(opt_g)
    scaler.step(opt_g)
    scaler.step(opt_d)
    scaler.update()
"""
