# The backward runs inside a context that is either nullcontext or no_sync, not autocast.
import torch
import torch.nn as nn
from torch import optim

model = Net().cuda()
optimizer = optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda")
from contextlib import nullcontext
for i, (x, y) in enumerate(loader):
    last = (i + 1) % 4 == 0
    ctx = nullcontext() if last else model.no_sync()
    with ctx:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = loss_fn(model(x), y) / 4
        scaler.scale(loss).backward()
    if last:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
