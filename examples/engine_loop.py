"""Your own training loop with the Engine: accumulation, clipping, a schedule, an EMA, validation, a checkpoint."""

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F

import halfstep

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)
engine = halfstep.Engine(model, optimizer, precision="bf16", max_norm=1.0, accumulate=2, scheduler=scheduler, ema=0.95)

teacher = torch.randn(16, 4)
for _ in range(100):
    x = torch.randn(64, 16)
    y = (x @ teacher).argmax(-1)
    with engine.forward():
        loss = F.cross_entropy(model(x), y)
    engine.backward(loss, weight=len(x))
    result = engine.step()

with engine.evaluate(ema=True):
    x = torch.randn(1000, 16)
    accuracy = (model(x).argmax(-1) == (x @ teacher).argmax(-1)).float().mean()

with tempfile.TemporaryDirectory() as directory:
    engine.save(Path(directory) / "checkpoint")
    engine.load(Path(directory) / "checkpoint")

print(f"{result}\naccuracy {accuracy:.2f}\n{engine.truth()}")
engine.close()
