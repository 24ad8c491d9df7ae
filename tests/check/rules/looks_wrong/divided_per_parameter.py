# The loss is not divided by the accumulation steps; each gradient is divided before the step.
import torch
for i, batch in enumerate(loader):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(batch)
    loss.backward()
    seen += len(batch)
    if (i + 1) % gradient_accumulation_steps == 0:
        for p in model.parameters():
            p.grad /= seen
        optimizer.step()
        optimizer.zero_grad()
