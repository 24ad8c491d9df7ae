# HS120:5 A GradScaler is used alongside Accelerate in bfloat16.
import torch
from accelerate import Accelerator
accelerator = Accelerator(mixed_precision="bf16")
scaler = torch.amp.GradScaler("cuda")
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    with accelerator.autocast():
        loss = model(**batch).loss
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
