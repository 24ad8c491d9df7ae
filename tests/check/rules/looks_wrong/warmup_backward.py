# The first backward is unscaled, but its gradients are discarded: it only pre-allocates memory.
import torch
import torch.nn as nn
from torch import optim

model = Net().cuda()
optimizer = optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda")
with torch.autocast("cuda", dtype=torch.float16):
    loss = model(torch.zeros(largest, 3, 224, 224, device="cuda")).sum()
loss.backward()
optimizer.zero_grad(set_to_none=True)
for x, y in loader:
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
