# The optimizer state is saved without the scaler, but only after training, and nothing restores it: the run is not resumed.
import torch
import torch.nn as nn
from torch import optim

model = Net().cuda()
optimizer = optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda")
for epoch in range(9):
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "final.pt")
model.load_state_dict(torch.load("final.pt")["model"])
