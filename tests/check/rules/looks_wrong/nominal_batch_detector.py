# The loss is not divided by the accumulation steps because it is summed over a nominal batch size.
import torch
from torch.amp import GradScaler, autocast

accumulate = max(round(nbs / batch_size), 1)
scaler = GradScaler("cuda", enabled=amp)
last_opt_step = -1
for epoch in range(start_epoch, epochs):
    optimizer.zero_grad()
    for i, (imgs, targets, paths, _) in enumerate(train_loader):
        ni = i + nb * epoch
        if ni <= nw:
            accumulate = max(1, np.interp(ni, xi, [1, nbs / batch_size]).round())
        with autocast("cuda", enabled=amp):
            pred = model(imgs)
            loss, loss_items = compute_loss(pred, targets)
            if RANK != -1:
                loss *= WORLD_SIZE
        scaler.scale(loss).backward()
        if ni - last_opt_step >= accumulate:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=10.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if ema:
                ema.update(model)
            last_opt_step = ni
