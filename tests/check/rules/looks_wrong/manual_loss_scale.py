# float16 without a GradScaler, but the script scales the loss and keeps float32 master weights itself.
import torch

loss_scale = 1024.0
model = Net().cuda().half()
master = [p.detach().clone().float() for p in model.parameters()]
optimizer = torch.optim.SGD(master, lr=0.1)
for x, y in loader:
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y)
    (loss * loss_scale).backward()
    for p, m in zip(model.parameters(), master):
        m.grad = p.grad.float() / loss_scale
    torch.nn.utils.clip_grad_norm_(master, 1.0)
    optimizer.step()
    model.zero_grad()
