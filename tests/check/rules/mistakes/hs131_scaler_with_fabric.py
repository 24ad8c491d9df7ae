# HS131:5 A GradScaler is used alongside Fabric in float16.
import torch
from lightning.fabric import Fabric
fabric = Fabric(devices=1, precision="16-mixed")
scaler = torch.amp.GradScaler("cuda")
model, optimizer = fabric.setup(model, optimizer)
for batch in loader:
    scaler.scale(model(batch)).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
