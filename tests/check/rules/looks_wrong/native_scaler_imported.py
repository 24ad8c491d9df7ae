# float16 autocast without a visible GradScaler: an imported wrapper scales, clips and steps.
import torch
from timm.utils import NativeScaler

loss_scaler = NativeScaler()

def train_one_epoch(model, loader, optimizer, loss_scaler, max_norm):
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(model(x), y)
        second_order = hasattr(optimizer, "is_second_order") and optimizer.is_second_order
        loss_scaler(loss, optimizer, clip_grad=max_norm, parameters=model.parameters(), create_graph=second_order)
