# Arguments of autocast and GradScaler are passed by position, in the right order.
import torch
from project.compat import GradScaler as OldScaler

def step(flag, x, y):
    with torch.autocast("cuda", torch.float16, flag):
        loss = loss_fn(model(x), y)
    return loss

scaler = torch.amp.GradScaler("cuda", 2**10)
for x, y in loader:
    optimizer.zero_grad()
    loss = step(True, x, y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
