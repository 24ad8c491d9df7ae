# The float16 base model is frozen; the trained adapters are float32.
import torch
from project.lora import add_lora

base = load_base().half().cuda()
base.requires_grad_(False)
lora = add_lora(base).float()
optimizer = torch.optim.AdamW(lora.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    with torch.autocast("cuda", dtype=torch.float16):
        loss = base(x, y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
