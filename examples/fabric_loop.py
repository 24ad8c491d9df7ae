"""A Fabric loop in fp16 with a fused optimizer and clipping, which Fabric's own plugin rejects: the lines marked `# halfstep` are the change."""

import lightning
import torch
import torch.nn.functional as F
from torch import nn

from halfstep.integrations.fabric import HalfstepPrecision  # halfstep

torch.manual_seed(0)
fabric = lightning.Fabric(plugins=[HalfstepPrecision("fp16")])  # halfstep
net = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 4))
model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True))
losses = []
for _ in range(60):
    points = torch.randn(64, 2, device=fabric.device)
    quarters = (points[:, 0] > 0).long() * 2 + (points[:, 1] > 0).long()
    loss = F.cross_entropy(model(points), quarters)
    fabric.backward(loss)
    # An overflow is skipped by the step; it is no error.
    fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
assert losses[-1] < losses[0] / 3
