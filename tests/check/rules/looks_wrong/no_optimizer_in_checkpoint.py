# The checkpoint has no scaler state, but no optimizer state either: it is not meant for resuming.
import torch
import torch.nn as nn
from torch import optim

model = Net().cuda()
optimizer = optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda")
def save(epoch, best):
    torch.save({"model": model.state_dict(), "optimizer": None, "epoch": epoch}, "last.pt")

for epoch in range(9):
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    save(epoch, False)
model.load_state_dict(torch.load("last.pt")["model"])
