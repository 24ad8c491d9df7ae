"""A torch.amp loop with halfstep.GradScaler as a drop-in replacement: same weights, and skipped steps are counted."""

import torch

import halfstep

torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = halfstep.GradScaler("cpu", init_scale=2.0**20, named_parameters=model.named_parameters())

for _ in range(20):
    x = torch.randn(32, 8)
    with torch.autocast("cpu", dtype=torch.float16):
        prediction = model(x)
    loss = (prediction.float() - x.sum(1, keepdim=True)).pow(2).mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)

print(f"loss {loss.item():.3f}, scale {scaler.get_scale():.0f}, {scaler.counts()}")
