# The autocast region comes from an imported helper, and the scaler may be None.
import contextlib
import torch
from project.amp import maybe_autocast

def train(model, loader, optimizer, scaler, amp):
    for x, y in loader:
        optimizer.zero_grad()
        with maybe_autocast(amp):
            loss = model(x, y)
        if scaler is not None:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
