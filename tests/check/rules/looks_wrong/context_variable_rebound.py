# The name of the context is autocast at the forward, but no_sync at the backward.
import torch
import torch.nn as nn
from torch import optim

model = Net().cuda()
optimizer = optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda")
for i, (x, y) in enumerate(loader):
    ctx = torch.autocast("cuda", dtype=torch.float16)
    with ctx:
        loss = loss_fn(model(x), y)
    ctx = model.no_sync()
    with ctx:
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
