# HS180:8 The end of the accumulation window is passed to the step as a flag.
import torch
scaler = torch.amp.GradScaler("cuda")

def step(model, optimizer, batch, accumulate=False):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(batch)
    scaler.scale(loss).backward()
    if not accumulate:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

def train(model, optimizer, loader, every):
    for i, batch in enumerate(loader):
        accumulate = i % every != 0
        step(model, optimizer, batch, accumulate=accumulate)
