# optimizer.step() follows a scaled backward, but the optimizer was constructed with the scaler.
import torch
from project.distributed import DistributedOptimizer

scaler = torch.amp.GradScaler("cuda", enabled=(dtype == "float16"))
optimizer = DistributedOptimizer(optimizer, models=[model], grad_clip=1.0, scaler=scaler)
for x, y in loader:
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x, y)
    scaler.scale(loss).backward()
    optimizer.step()
    optimizer.zero_grad()
