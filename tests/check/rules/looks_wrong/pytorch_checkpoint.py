# Saving and resuming, from PyTorch's AMP documentation.
import torch
import torch.nn as nn
from torch import optim

model = Net().cuda()
optimizer = optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda")
checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
torch.save(checkpoint, "x.pt")
dev = torch.cuda.current_device()
checkpoint = torch.load("x.pt", map_location=lambda storage, loc: storage.cuda(dev))
model.load_state_dict(checkpoint["model"])
optimizer.load_state_dict(checkpoint["optimizer"])
scaler.load_state_dict(checkpoint["scaler"])
for input, target in data:
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast(device_type="cuda", dtype=torch.float16):
        loss = loss_fn(model(input), target)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
