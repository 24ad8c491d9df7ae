"""An Accelerate loop with our scaler, where it has one, and a Watch: the lines marked `# halfstep` are the change."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import halfstep.integrations.accelerate  # halfstep

torch.manual_seed(0)
points = torch.randn(512, 2)
quarters = (points[:, 0] > 0).long() * 2 + (points[:, 1] > 0).long()
accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
model = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(TensorDataset(points, quarters), 32, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
session = halfstep.integrations.accelerate.attach(accelerator)  # halfstep
losses = []
for _ in range(8):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
print(session.watch.report())
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
assert losses[-1] < losses[0] / 3
