# HS180:9 The number of steps is divided by the window, but the loss is not.
import torch

def train(model, loader, optimizer, args):
    total = len(loader) // args.accumulation_steps * args.epochs
    for i, (x, y) in enumerate(loader):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(x, y)
        loss.backward()
        if (i + 1) % args.accumulation_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
    return total
