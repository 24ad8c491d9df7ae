# The models cast to float16 are not trained: a teacher, a frozen encoder and copies for saving and export.
import torch
import torch.nn as nn
from torch import optim

model = Net().cuda()
optimizer = optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda")
import copy
teacher = build_teacher().cuda().half().eval()
encoder = Encoder().cuda()
encoder.half()
encoder.requires_grad_(False)
for x, y in loader:
    optimizer.zero_grad()
    with torch.no_grad():
        target = teacher(x.half())
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(encoder(x.half())), target)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
torch.save({"model": copy.deepcopy(model).half().state_dict()}, "best.pt")
model.half()
torch.onnx.export(model, x, "model.onnx")
