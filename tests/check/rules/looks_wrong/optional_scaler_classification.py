# The scaler may be None, and its state is added to the checkpoint in a separate statement.
import torch

def train(model, criterion, optimizer, loader, device, epoch, args, model_ema=None, scaler=None):
    last_opt_step = -1
    for i, (image, target) in enumerate(loader):
        with torch.amp.autocast("cuda", dtype=torch.float16, enabled=scaler is not None):
            output = model(image)
            loss = criterion(output, target)
        optimizer.zero_grad()
        if scaler is not None:
            scaler.scale(loss).backward()
            if args.clip_grad_norm is not None:
                # we should unscale the gradients of optimizer's assigned params if do gradient clipping
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad_norm)
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            if args.clip_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad_norm)
            optimizer.step()

def main(args):
    scaler = torch.amp.GradScaler("cuda") if args.amp else None
    if args.resume:
        checkpoint = torch.load(args.resume, map_location="cpu")
        if not args.test_only:
            optimizer.load_state_dict(checkpoint["optimizer"])
        if scaler:
            scaler.load_state_dict(checkpoint["scaler"])
    for epoch in range(args.epochs):
        train(model, criterion, optimizer, loader, device, epoch, args, model_ema, scaler)
        checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        if scaler:
            checkpoint["scaler"] = scaler.state_dict()
        utils.save_on_master(checkpoint, "checkpoint.pth")
