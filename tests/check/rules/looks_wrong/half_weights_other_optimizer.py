# The float16 model belongs to another optimizer, which keeps float32 master weights.
import torch

def main():
    model = Net().cuda()
    judge = Judge().cuda().half()
    judge_optimizer = MasterWeights(torch.optim.SGD(judge.parameters(), lr=1e-3))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
