# float16 weights with Adam, but FP16_Optimizer keeps float32 master weights and scales the loss.
import torch
from project.fp16 import FP16_Optimizer

model = Net().cuda().half()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
optimizer = FP16_Optimizer(optimizer, dynamic_loss_scale=True)
for x, y in loader:
    optimizer.zero_grad()
    loss = loss_fn(model(x.half()), y)
    optimizer.backward(loss)
    optimizer.clip_master_grads(1.0)
    optimizer.step()
