# HS120:4 The scaler is useless in bfloat16; that it is recreated and not saved is not reported as well.
import torch
for epoch in range(epochs):
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")
optimizer.load_state_dict(torch.load("last.pt")["optimizer"])
