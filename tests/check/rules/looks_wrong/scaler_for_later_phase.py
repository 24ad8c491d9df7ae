# A scaler is created inside the epoch loop, but only in the epoch that ends the warm-up.
import torch

scaler = torch.amp.GradScaler("cuda", enabled=False)
for epoch in range(100):
    if epoch == warmup_epochs:
        scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16, enabled=epoch >= warmup_epochs):
            loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
