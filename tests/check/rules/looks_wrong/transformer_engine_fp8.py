# The backward runs inside Transformer Engine's fp8_autocast, which is not torch.autocast.
import torch
import transformer_engine.pytorch as te

for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
            loss = loss_fn(model(x), y)
    with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
        loss.backward()
    optimizer.step()
