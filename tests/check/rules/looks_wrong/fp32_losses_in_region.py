# Losses are computed in a disabled autocast region nested inside an enabled one.
import torch
from torch.nn import functional as F
from torch.amp import autocast, GradScaler
import commons

def train_and_evaluate(epoch, nets, optims, scaler, loader):
    net_g, net_d = nets
    optim_g, optim_d = optims
    for x, spec, y in loader:
        with autocast("cuda", enabled=hps.train.fp16_run):
            y_hat, l_length, kl = net_g(x, spec)
            y_d_r, y_d_g = net_d(y, y_hat.detach())
            with autocast("cuda", enabled=False):
                loss_disc = discriminator_loss(y_d_r, y_d_g)
        optim_d.zero_grad()
        scaler.scale(loss_disc).backward()
        scaler.unscale_(optim_d)
        grad_norm_d = commons.clip_grad_value_(net_d.parameters(), None)
        scaler.step(optim_d)
        with autocast("cuda", enabled=hps.train.fp16_run):
            y_d_r, y_d_g = net_d(y, y_hat)
            with autocast("cuda", enabled=False):
                loss_gen = F.l1_loss(y, y_hat) + kl
        optim_g.zero_grad()
        scaler.scale(loss_gen).backward()
        scaler.unscale_(optim_g)
        grad_norm_g = commons.clip_grad_value_(net_g.parameters(), None)
        scaler.step(optim_g)
        scaler.update()
