# Two optimizers share one scaler; a single update() after both steps is correct.
import torch
import torch.nn as nn
from torch import optim

model = Net().cuda()
optimizer = optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda")
opt_d = optim.Adam(net_d.parameters())
for real in loader:
    opt_d.zero_grad(set_to_none=True)
    with torch.autocast("cuda", dtype=torch.float16):
        fake = model(noise())
        loss_d = bce(net_d(real), 1) + bce(net_d(fake.detach()), 0)
    scaler.scale(loss_d).backward()
    scaler.step(opt_d)
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cuda", dtype=torch.float16):
        loss_g = bce(net_d(fake), 1)
    scaler.scale(loss_g).backward()
    scaler.step(optimizer)
    scaler.update()
