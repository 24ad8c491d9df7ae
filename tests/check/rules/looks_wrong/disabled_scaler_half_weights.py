# float16 weights are stepped through a scaler that is disabled; the enabled one steps float32 weights.
import torch

def steps(model, opt, scaler, n):
    for _ in range(n):
        loss = model(torch.randn(4, 4, device="cuda")).float().mean()
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()

def first():
    model = torch.nn.Linear(4, 4).cuda()
    steps(model, torch.optim.SGD(model.parameters(), lr=1e-3), torch.amp.GradScaler("cuda"), 3)

def second():
    model = torch.nn.Linear(4, 4).cuda().half()
    steps(model, torch.optim.SGD(model.parameters(), lr=1e-3), torch.amp.GradScaler("cuda", enabled=False), 3)
