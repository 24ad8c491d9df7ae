# The GradScaler is not called `scaler`.
import torch

fp16_helper = torch.amp.GradScaler("cuda")
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y)
    fp16_helper.scale(loss).backward()
    fp16_helper.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    fp16_helper.step(optimizer)
    fp16_helper.update()
