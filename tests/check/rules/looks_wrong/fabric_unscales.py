# There is no unscale_ before clipping: Fabric's clip_gradients unscales first.
import torch
from lightning.fabric import Fabric

fabric = Fabric(precision="16-mixed")
model, optimizer = fabric.setup(model, optimizer)
for x, y in fabric.setup_dataloaders(loader):
    optimizer.zero_grad()
    with fabric.autocast():
        loss = loss_fn(model(x), y)
    fabric.backward(loss)
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
