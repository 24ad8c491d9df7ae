# An unscaled backward probes for out-of-memory batches; its gradients are discarded.
import torch
import torch.nn as nn
from torch import optim

model = Net().cuda()
optimizer = optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda")
def scan_pessimistic_batches(loader):
    for batch in loader:
        try:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = compute_loss(model, batch)
            loss.backward()
            optimizer.zero_grad()
        except RuntimeError as error:
            report(error)
            raise

scan_pessimistic_batches(loader)
for batch in loader:
    with torch.autocast("cuda", dtype=torch.float16):
        loss = compute_loss(model, batch)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
