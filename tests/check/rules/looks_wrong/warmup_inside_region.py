# A backward runs inside the autocast region, but its gradients are discarded.
import torch
with torch.autocast("cuda", dtype=torch.bfloat16):
    model(**longest).loss.backward()
optimizer.zero_grad()
for batch in loader:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = model(**batch)
    out.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
