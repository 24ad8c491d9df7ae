# Two optimizers share one scaler; update() after each step is correct, because each step follows its own backward.
import torch
import torch.nn as nn
from torch import optim

model = Net().cuda()
optimizer = optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda")
opt_d = optim.Adam(net_d.parameters())
for real in loader:
    opt_d.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss_d = d_loss(net_d, real)
    scaler.scale(loss_d).backward()
    scaler.step(opt_d)
    scaler.update()
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss_g = g_loss(net_d, model)
    scaler.scale(loss_g).backward()
    scaler.step(optimizer)
    scaler.update()
