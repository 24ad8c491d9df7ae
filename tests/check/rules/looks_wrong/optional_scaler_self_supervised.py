# A scaler argument that may be None selects between the plain and the scaled branch.
import torch
import utils

def train_one_epoch(student, teacher, loss_fn, loader, optimizer, schedule, epoch, fp16_scaler, args):
    for it, (images, _) in enumerate(loader):
        for i, group in enumerate(optimizer.param_groups):
            group["lr"] = schedule[epoch]
        with torch.autocast("cuda", dtype=torch.float16, enabled=fp16_scaler is not None):
            loss = loss_fn(student(images), teacher(images[:2]), epoch)
        optimizer.zero_grad()
        if fp16_scaler is None:
            loss.backward()
            if args.clip_grad:
                norms = utils.clip_gradients(student, args.clip_grad)
            utils.cancel_gradients_last_layer(epoch, student, args.freeze_last_layer)
            optimizer.step()
        else:
            fp16_scaler.scale(loss).backward()
            if args.clip_grad:
                fp16_scaler.unscale_(optimizer)
                norms = utils.clip_gradients(student, args.clip_grad)
            utils.cancel_gradients_last_layer(epoch, student, args.freeze_last_layer)
            fp16_scaler.step(optimizer)
            fp16_scaler.update()
        with torch.no_grad():
            for q, k in zip(student.parameters(), teacher.parameters()):
                k.data.mul_(0.996).add_(0.004 * q.detach().data)
