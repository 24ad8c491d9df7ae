# HS120:9 The bfloat16 dtype comes from keyword arguments that a helper returns.
import torch
from torch.amp import GradScaler, autocast

def options(args):
    return {"device_type": "cuda", "enabled": args.amp, "dtype": torch.bfloat16}

def train(model, loader, optimizer, args):
    scaler = GradScaler("cuda", enabled=args.amp)
    for x, y in loader:
        optimizer.zero_grad()
        with autocast(**options(args)):
            loss = model(x, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
