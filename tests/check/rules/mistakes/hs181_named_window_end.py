# HS181:8 The end of the window has a name, and gradients are cleared on every micro-batch.
import torch
scaler = torch.amp.GradScaler("cuda")
for i, (x, y) in enumerate(loader):
    is_last = (i + 1) % accum == 0 or (i + 1) == len(loader)
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x, y) / accum
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    if is_last:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
