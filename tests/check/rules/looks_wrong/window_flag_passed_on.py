# The end of the accumulation window is a flag that is passed to a function.
import torch
import torch.nn as nn
from torch import optim

model = Net().cuda()
optimizer = optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda")
def finish(last, loss):
    scaler.scale(loss).backward()
    if not last:
        return
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()

for i, (x, y) in enumerate(loader):
    last = (i + 1) % accum == 0
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x, y) / accum
    finish(last, loss)
