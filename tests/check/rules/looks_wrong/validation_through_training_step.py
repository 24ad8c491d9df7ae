# scaler.scale is reachable under no_grad, but only when an optimizer is passed.
import torch

def step(model, batch, use_fp16, optimizer=None, scaler=None):
    with torch.autocast("cuda", dtype=torch.float16, enabled=use_fp16):
        loss = model(**batch).loss
    if optimizer:
        optimizer.zero_grad()
        if use_fp16:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
    return loss.item()

def validate(model, loader, use_fp16):
    with torch.no_grad():
        return [step(model, batch, use_fp16) for batch in loader]

scaler = torch.amp.GradScaler("cuda")
for epoch in range(3):
    for batch in train_loader:
        step(model, batch, True, optimizer, scaler)
    validate(model, valid_loader, True)
