# HS170:17 The optimizer is restored by an imported helper.
import torch
from project.checkpoints import smart_resume

def train(model, optimizer, loader, weights, epochs):
    kept = torch.load(weights)
    start = smart_resume(kept, optimizer, epochs)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(start, epochs):
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(x, y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")
