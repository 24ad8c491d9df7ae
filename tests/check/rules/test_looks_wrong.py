"""Correct code that looks wrong: loops seen in real repositories, on which no rule may speak.

Each case is a small whole script in the manner of the code it stands for. The second half re-types the loops of
PyTorch's own "Automatic Mixed Precision examples".
"""

import pytest

from check_scripts import codes

HEAD = """\
import torch
import torch.nn as nn
from torch import optim

model = Net().cuda()
optimizer = optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda")
"""

RIGHT = {
    "one scaler, two optimizers, one update": HEAD
    + """\
opt_d = optim.Adam(net_d.parameters())
for real in loader:
    opt_d.zero_grad(set_to_none=True)
    with torch.autocast("cuda", dtype=torch.float16):
        fake = model(noise())
        loss_d = bce(net_d(real), 1) + bce(net_d(fake.detach()), 0)
    scaler.scale(loss_d).backward()
    scaler.step(opt_d)
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cuda", dtype=torch.float16):
        loss_g = bce(net_d(fake), 1)
    scaler.scale(loss_g).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "one scaler, two optimizers, an update after each": HEAD
    + """\
opt_d = optim.Adam(net_d.parameters())
for real in loader:
    opt_d.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss_d = d_loss(net_d, real)
    scaler.scale(loss_d).backward()
    scaler.step(opt_d)
    scaler.update()
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss_g = g_loss(net_d, model)
    scaler.scale(loss_g).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "update with a new scale": HEAD
    + """\
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    if scaler.get_scale() < 128.0:
        scaler.update(128.0)
    else:
        scaler.update()
""",
    "warm-up backward that is thrown away": HEAD
    + """\
with torch.autocast("cuda", dtype=torch.float16):
    loss = model(torch.zeros(largest, 3, 224, 224, device="cuda")).sum()
loss.backward()
optimizer.zero_grad(set_to_none=True)
for x, y in loader:
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
""",
    "scan for out-of-memory batches": HEAD
    + """\
def scan_pessimistic_batches(loader):
    for batch in loader:
        try:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = compute_loss(model, batch)
            loss.backward()
            optimizer.zero_grad()
        except RuntimeError as error:
            report(error)
            raise

scan_pessimistic_batches(loader)
for batch in loader:
    with torch.autocast("cuda", dtype=torch.float16):
        loss = compute_loss(model, batch)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
""",
    "clipping inside the optimizer's own step": """\
import torch

class ClippedAdam(torch.optim.Adam):
    def step(self, closure=None):
        torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1.0)
        return super().step(closure)

optimizer = ClippedAdam(model.parameters())
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "Accelerate owns the unscale": """\
import torch
from accelerate import Accelerator

accelerator = Accelerator(mixed_precision="fp16")
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for batch in loader:
    with accelerator.accumulate(model):
        with accelerator.autocast():
            loss = model(**batch).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
""",
    "Fabric owns the unscale": """\
import torch
from lightning.fabric import Fabric

fabric = Fabric(precision="16-mixed")
model, optimizer = fabric.setup(model, optimizer)
for x, y in fabric.setup_dataloaders(loader):
    optimizer.zero_grad()
    with fabric.autocast():
        loss = loss_fn(model(x), y)
    fabric.backward(loss)
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
""",
    "DeepSpeed owns the step": """\
import deepspeed
import torch

engine, optimizer, _, _ = deepspeed.initialize(model=model, model_parameters=params, config="ds.json")
for x, y in loader:
    with torch.autocast("cuda", dtype=torch.float16):
        loss = engine(x, y)
    engine.backward(loss)
    engine.step()
""",
    "a native scaler wrapper in the same file": """\
import torch

class NativeScaler:
    state_dict_key = "amp_scaler"

    def __init__(self):
        self._scaler = torch.amp.GradScaler("cuda")

    def __call__(self, loss, optimizer, clip_grad=None, parameters=None, create_graph=False, need_update=True):
        self._scaler.scale(loss).backward(create_graph=create_graph)
        if need_update:
            if clip_grad is not None:
                self._scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(parameters, clip_grad)
            self._scaler.step(optimizer)
            self._scaler.update()

    def state_dict(self):
        return self._scaler.state_dict()

    def load_state_dict(self, state):
        self._scaler.load_state_dict(state)

loss_scaler = NativeScaler()
for i, (x, y) in enumerate(loader):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = criterion(model(x), y) / accum_iter
    loss_scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters(), need_update=(i + 1) % accum_iter == 0)
    if (i + 1) % accum_iter == 0:
        optimizer.zero_grad()
""",
    "an imported scaler wrapper": """\
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
""",
    "a project's autocast helper": """\
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
""",
    "step helpers in the same file": """\
import torch

class Trainer:
    def __init__(self, model, args):
        self.model = model
        self.args = args
        self.optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
        self.scaler = torch.amp.GradScaler("cuda", enabled=args.amp)

    def backward(self, loss):
        self.scaler.scale(loss).backward()

    def clip(self):
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip)

    def step(self):
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def fit(self, loader):
        for i, batch in enumerate(loader):
            with torch.autocast("cuda", dtype=torch.float16, enabled=self.args.amp):
                loss = self.model(batch) / self.args.accum
            self.backward(loss)
            if (i + 1) % self.args.accum == 0:
                self.clip()
                self.step()
""",
    "a context that may be no_sync": HEAD
    + """\
from contextlib import nullcontext
for i, (x, y) in enumerate(loader):
    last = (i + 1) % 4 == 0
    ctx = nullcontext() if last else model.no_sync()
    with ctx:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = loss_fn(model(x), y) / 4
        scaler.scale(loss).backward()
    if last:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
""",
    "a context variable that is autocast here and no_sync there": HEAD
    + """\
for i, (x, y) in enumerate(loader):
    ctx = torch.autocast("cuda", dtype=torch.float16)
    with ctx:
        loss = loss_fn(model(x), y)
    ctx = model.no_sync()
    with ctx:
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
""",
    "Transformer Engine's fp8 region": """\
import torch
import transformer_engine.pytorch as te

for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
            loss = loss_fn(model(x), y)
    with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
        loss.backward()
    optimizer.step()
""",
    "scikit-learn's scaler": """\
import torch
from sklearn.preprocessing import StandardScaler

scaler = StandardScaler()
features = scaler.fit_transform(features)
model = Net()
optimizer = torch.optim.Adam(model.parameters())
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = loss_fn(model(x), y)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "mean": scaler.mean_}, "x.pt")
optimizer.load_state_dict(torch.load("x.pt")["optimizer"])
""",
    "a GradScaler of another name": """\
import torch

fp16_helper = torch.amp.GradScaler("cuda")
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y)
    fp16_helper.scale(loss).backward()
    fp16_helper.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    fp16_helper.step(optimizer)
    fp16_helper.update()
""",
    "half for saving, for a frozen encoder and for a teacher": HEAD
    + """\
import copy
teacher = build_teacher().cuda().half().eval()
encoder = Encoder().cuda()
encoder.half()
encoder.requires_grad_(False)
for x, y in loader:
    optimizer.zero_grad()
    with torch.no_grad():
        target = teacher(x.half())
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(encoder(x.half())), target)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
torch.save({"model": copy.deepcopy(model).half().state_dict()}, "best.pt")
model.half()
torch.onnx.export(model, x, "model.onnx")
""",
    "an optimizer that holds its own masters": """\
import torch
from project.fp16 import FP16_Optimizer

model = Net().cuda().half()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
optimizer = FP16_Optimizer(optimizer, dynamic_loss_scale=True)
for x, y in loader:
    optimizer.zero_grad()
    loss = loss_fn(model(x.half()), y)
    optimizer.backward(loss)
    optimizer.clip_master_grads(1.0)
    optimizer.step()
""",
    "loss scaling by hand": """\
import torch

loss_scale = 1024.0
model = Net().cuda().half()
master = [p.detach().clone().float() for p in model.parameters()]
optimizer = torch.optim.SGD(master, lr=0.1)
for x, y in loader:
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y)
    (loss * loss_scale).backward()
    for p, m in zip(model.parameters(), master):
        m.grad = p.grad.float() / loss_scale
    torch.nn.utils.clip_grad_norm_(master, 1.0)
    optimizer.step()
    model.zero_grad()
""",
    "positional forms": """\
import torch
from project.compat import GradScaler as OldScaler

def step(flag, x, y):
    with torch.autocast("cuda", torch.float16, flag):
        loss = loss_fn(model(x), y)
    return loss

scaler = torch.amp.GradScaler("cuda", 2**10)
for x, y in loader:
    optimizer.zero_grad()
    loss = step(True, x, y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "division in a DDP hook": HEAD
    + """\
def average(state, bucket):
    return allreduce(bucket.buffer() / accumulation_steps)

model.register_comm_hook(None, average)
for i, (x, y) in enumerate(loader):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    if (i + 1) % accumulation_steps == 0:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
""",
    "division by multiplying": HEAD
    + """\
for i, (x, y) in enumerate(loader):
    with torch.autocast("cuda", dtype=torch.float16):
        losses = loss_fn(model(x), y)
    losses *= 1. / accum_steps
    scaler.scale(losses).backward()
    if (i + 1) % accum_steps == 0:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
""",
    "no optimizer in the checkpoint": HEAD
    + """\
def save(epoch, best):
    torch.save({"model": model.state_dict(), "optimizer": None, "epoch": epoch}, "last.pt")

for epoch in range(9):
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    save(epoch, False)
model.load_state_dict(torch.load("last.pt")["model"])
""",
    "an optimizer saved and never restored": HEAD
    + """\
for epoch in range(9):
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{epoch}.pt")
model.load_state_dict(torch.load("8.pt")["model"])
""",
    "bfloat16 with no scaler": """\
import torch

for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = loss_fn(model(x), y)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
""",
    "a scaler enabled for float16 only": """\
import contextlib
import torch

dtype = "bfloat16" if torch.cuda.get_device_capability()[0] >= 8 else "float16"
ptdtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]
ctx = contextlib.nullcontext() if device_type == "cpu" else torch.amp.autocast(device_type=device_type, dtype=ptdtype)
scaler = torch.amp.GradScaler("cuda", enabled=(dtype == "float16"))
optimizer = model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), device_type)
while True:
    for micro_step in range(gradient_accumulation_steps):
        with ctx:
            logits, loss = model(x, y)
            loss = loss / gradient_accumulation_steps
        x, y = get_batch("train")
        scaler.scale(loss).backward()
    if grad_clip != 0.0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
""",
    "both branches of use_amp, twice": HEAD
    + """\
for x, y in loader:
    optimizer.zero_grad()
    if args.use_amp:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()
    else:
        loss = loss_fn(model(x), y)
        loss.backward()
    if args.clip:
        if args.use_amp:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
    if args.use_amp:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
""",
    "branches on two names of one flag": """\
import torch

class Engine:
    def __init__(self, model, optimizer, cfg):
        self.model, self.optimizer = model, optimizer
        self.use_amp = cfg.amp
        self.scaler = torch.amp.GradScaler("cuda") if cfg.amp else None

    def run(self, loader):
        for x, y in loader:
            self.optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16, enabled=self.use_amp):
                loss = self.model(x, y)
            if self.scaler is not None:
                self.scaler.scale(loss).backward()
            else:
                loss.backward()
            if self.use_amp:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            else:
                self.optimizer.step()
""",
    "detection trainer with hooks and a precision attribute": """\
import torch
from torch.amp import GradScaler, autocast

class AMPTrainer(SimpleTrainer):
    def __init__(self, model, data_loader, optimizer, grad_scaler=None, precision=torch.float16):
        super().__init__(model, data_loader, optimizer)
        if grad_scaler is None:
            grad_scaler = GradScaler("cuda")
        self.grad_scaler = grad_scaler
        self.precision = precision

    def run_step(self):
        data = next(self._data_loader_iter)
        self.optimizer.zero_grad()
        with autocast("cuda", dtype=self.precision):
            loss_dict = self.model(data)
            losses = sum(loss_dict.values())
        self.grad_scaler.scale(losses).backward()
        self.after_backward()
        self.grad_scaler.step(self.optimizer)
        self.grad_scaler.update()

    def state_dict(self):
        ret = super().state_dict()
        ret["grad_scaler"] = self.grad_scaler.state_dict()
        return ret

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.grad_scaler.load_state_dict(state_dict["grad_scaler"])
""",
    "self-supervised loop with a scaler that may be None": """\
import torch
import utils

def train_one_epoch(student, teacher, loss_fn, loader, optimizer, schedule, epoch, fp16_scaler, args):
    for it, (images, _) in enumerate(loader):
        for i, group in enumerate(optimizer.param_groups):
            group["lr"] = schedule[it]
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
""",
    "classification reference with optional scaler and accumulation by warm-up": """\
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
""",
    "object detector that sums losses over a nominal batch": """\
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
""",
    "speech synthesis with losses in float32 inside the region": """\
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
""",
    "manual optimization in a Lightning module": """\
import lightning as L
import torch

class GAN(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        opt_g, opt_d = self.optimizers()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = self.loss(batch)
        opt_g.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(opt_g, gradient_clip_val=0.5)
        opt_g.step()
""",
    "a helper elsewhere that unscales": """\
import torch
from engine.amp import prepare_gradients

scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    prepare_gradients(scaler, optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
""",
    "an optimizer that was given the scaler": """\
import torch
from project.distributed import DistributedOptimizer

scaler = torch.amp.GradScaler("cuda", enabled=(dtype == "float16"))
optimizer = DistributedOptimizer(optimizer, models=[model], grad_clip=1.0, scaler=scaler)
for x, y in loader:
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x, y)
    scaler.scale(loss).backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "a loss scaled by the function that computes it": """\
import torch

class Trainer:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.scaler = torch.amp.GradScaler("cuda")

    def compute_loss(self, x, y):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = loss_fn(self.model(x), y)
        return self.scaler.scale(loss)

    def fit(self, loader):
        for x, y in loader:
            self.optimizer.zero_grad()
            self.compute_loss(x, y).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
""",
    "a scaler made when a later phase begins": """\
import torch

scaler = torch.amp.GradScaler("cuda", enabled=False)
for epoch in range(100):
    if epoch == warmup_epochs:
        scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16, enabled=epoch >= warmup_epochs):
            loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
    "a validation pass through the training step": """\
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
""",
    "adapters on a frozen half model": """\
import torch
from project.lora import add_lora

base = load_base().half().cuda()
base.requires_grad_(False)
lora = add_lora(base).float()
optimizer = torch.optim.AdamW(lora.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    with torch.autocast("cuda", dtype=torch.float16):
        loss = base(x, y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
""",
    "cross-validation with a class per fold": """\
import torch

class Fold:
    def __init__(self, index):
        self.model = Net().cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def fit(self, loader):
        scaler = torch.amp.GradScaler("cuda")
        for epoch in range(10):
            for x, y in loader:
                self.optimizer.zero_grad()
                with torch.autocast("cuda", dtype=torch.float16):
                    loss = self.model(x, y)
                scaler.scale(loss).backward()
                scaler.step(self.optimizer)
                scaler.update()

if __name__ == "__main__":
    for index in range(5):
        fold = Fold(index)
        fold.fit(loaders[index])
""",
    "Apex": """\
from apex import amp
import torch

model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
for x, y in loader:
    optimizer.zero_grad()
    loss = loss_fn(model(x), y)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
    optimizer.step()
""",
    "an update that is the caller's, with unscale under a condition": """\
import torch
from torch.cuda.amp.grad_scaler import GradScaler

class Optimizers:
    def step_all(self, grad_scaler: GradScaler):
        for group, optimizer in self.optimizers.items():
            if self.max_norm[group] is not None:
                grad_scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(self.parameters[group], self.max_norm[group])
            if any(p.grad is not None for p in self.parameters[group]):
                grad_scaler.step(optimizer)
""",
    "an update in a hook of the same class": """\
import torch

class Trainer:
    def setup(self):
        self.scaler = torch.amp.GradScaler("cuda")

    def run(self):
        for x, y in self.loader:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = self.model(x, y)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.call("after_step")

    def after_step(self):
        self.scaler.update()
        self.optimizer.zero_grad()
""",
    "DeepSpeed's engine scales, and steps by itself": """\
import deepspeed
engine, _, _, _ = deepspeed.initialize(model=model, config=path)
for x, y in loader:
    engine.scale(loss_fn(engine(x), y)).backward()
    engine.step()
""",
    "a disabled scaler with float16 weights, an enabled one elsewhere": """\
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
""",
    "float16 weights under another optimizer than the scaler's": """\
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
""",
    "a scaler and a checkpoint of functions that nothing joins": """\
import torch

def train(model, optimizer, loader):
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

def other_experiment(model, optimizer, path):
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    optimizer.load_state_dict(torch.load(path)["optimizer"])
""",
    "restored through another name": """\
import torch

class Trainer:
    def fit(self, loader):
        self.scaler = torch.amp.GradScaler("cuda")
        for x, y in loader:
            self.optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = self.net(x, y)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def save(self, path):
        torch.save({"optimizer": self.optimizer.state_dict(), "scaler": self.scaler.state_dict()}, path)

    def load(self, path):
        kept = torch.load(path)
        self.optimizer.load_state_dict(kept["optimizer"])
        scaling = self.scaler if self.scaler is not None else self.other
        if scaling is not None and kept.get("scaler") is not None:
            scaling.load_state_dict(kept["scaler"])
""",
    "restored by a loop over what is kept": """\
import torch

class Trainer:
    def fit(self, loader):
        self.scaler = torch.amp.GradScaler("cuda")
        for x, y in loader:
            self.optimizer.zero_grad()
            self.scaler.scale(self.net(x, y)).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def save(self, path):
        torch.save({"optimizer": self.optimizer.state_dict(), "scaler": self.scaler.state_dict()}, path)

    def load(self, path):
        kept = torch.load(path)
        self.optimizer.load_state_dict(kept["optimizer"])
        for name, part in self.parts.items():
            part.load_state_dict(kept[name])
""",
    "a warm-up inside the region whose gradients are thrown away": """\
import torch
with torch.autocast("cuda", dtype=torch.bfloat16):
    model(**longest).loss.backward()
optimizer.zero_grad()
for batch in loader:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = model(**batch)
    out.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "a project's own scaler, which takes a closure": """\
import torch
from project.scaler import ClosureGradScaler

class Trainer:
    def setup(self):
        self.scaler = ClosureGradScaler() if self.closures else torch.amp.GradScaler("cuda")

    def step(self, loss):
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer, closure=self.closure)
        self.scaler.update()
""",
    "a loss object that scales by the scaler it is given": """\
import torch

class Processor:
    def __init__(self):
        self.grad_scaler = torch.amp.GradScaler("cuda")

    def train_step(self, model, batch, optimizer, losses):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            losses.calc(model(batch))
        loss_of = losses.backward(self.grad_scaler)
        self.grad_scaler.step(optimizer)
        self.grad_scaler.update()
""",
    "a loss on probabilities in a region that is off unless asked for": """\
import torch

class Loss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.bce = torch.nn.BCELoss()

    def forward(self, probabilities, labels, autocast=False):
        with torch.amp.autocast("cuda", enabled=autocast):
            return self.bce(probabilities, labels)
""",
    "a step that a test of the gradients holds back, with the update beside it": HEAD
    + """\
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x, y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if torch.isfinite(norm):
        scaler.step(optimizer)
    scaler.update()
""",
    "a method whose step waits for finite gradients": """\
import torch

class Trainer:
    def setup(self):
        self.scaler = torch.amp.GradScaler("cuda")

    def train_step(self, loss):
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        do_step = torch.isfinite(norm)
        if do_step:
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
""",
    "Accelerate in bfloat16, and a scaler for those without it": """\
import torch
from accelerate import Accelerator

def with_accelerate(model, optimizer, loader):
    accelerator = Accelerator(mixed_precision="bf16")
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
""",
    "gradients divided by the tokens of the window": """\
import torch
from torchtune import training
for i, batch in enumerate(loader):
    tokens = (batch["labels"] != -100).sum()
    num_tokens += tokens
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(batch) * tokens
    loss.backward()
    if (i + 1) % gradient_accumulation_steps == 0:
        training.scale_grads(model, 1 / num_tokens)
        optimizer.step()
        optimizer.zero_grad()
""",
    "gradients divided one by one at the end of the window": """import torch
for i, batch in enumerate(loader):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(batch)
    loss.backward()
    seen += len(batch)
    if (i + 1) % gradient_accumulation_steps == 0:
        for p in model.parameters():
            p.grad /= seen
        optimizer.step()
        optimizer.zero_grad()
""",
    "a window's end under a name, handed on": HEAD
    + """def finish(last, loss):
    scaler.scale(loss).backward()
    if not last:
        return
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()

for i, (x, y) in enumerate(loader):
    last = (i + 1) % accum == 0
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x, y) / accum
    finish(last, loss)
""",
    "out of memory is caught and the batch given up": HEAD
    + """for x, y in loader:
    optimizer.zero_grad(set_to_none=True)
    try:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x, y)
        scaler.scale(loss).backward()
    except torch.cuda.OutOfMemoryError:
        optimizer.zero_grad(set_to_none=True)
        continue
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    try:
        scaler.step(optimizer)
    finally:
        scaler.update()
""",
    "a loss divided by what is left of the window": """\
import torch

class Trainer:
    def setup(self):
        self.scaler = torch.amp.GradScaler("cuda")

    def run(self):
        for i, batch in enumerate(self.loader):
            window = min(self.accum_steps, self.num_batches - i // self.accum_steps * self.accum_steps)
            self.back(self.model(batch), window)
            if (i + 1) % self.accum_steps == 0:
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.optimizer.zero_grad()

    def back(self, total, window):
        scaled = total / window
        self.scaler.scale(scaled).backward()
""",
    "a loss object made with the scaler": """\
import torch

class ScaledLoss:
    def __init__(self, scaler, plain):
        self.scaler = scaler
        self.plain = plain

    def __call__(self, output, target):
        return self.scaler.scale(self.plain(output, target))

class Loop:
    def __init__(self, loss):
        self.scaler = torch.amp.GradScaler("cuda")
        self.loss = ScaledLoss(self.scaler, loss)

    def epoch(self, loader):
        for x, y in loader:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = self.loss(self.model(x), y)
            loss.backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
""",
    "one function for training and inference": """\
import torch

class Learner:
    def batch(self, stage, x):
        with torch.autocast("cuda", dtype=torch.float16):
            out = self.model(x)
        if stage == Stage.TRAIN:
            self.optimizer.zero_grad()
            self.scaler.scale(self.loss(out)).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return out

    def fit(self, loader):
        self.scaler = torch.amp.GradScaler("cuda")
        for x in loader:
            self.batch(Stage.TRAIN, x)

    def predict(self, loader):
        with torch.no_grad():
            return [self.batch(Stage.INFERENCE, x) for x in loader]
""",
    "a stand-in for the scaler whose step is the optimizer's": """\
import torch

class NoScaler:
    def scale(self, loss):
        return loss

    def step(self, optimizer):
        optimizer.step()

    def update(self):
        pass

class Trainer:
    def setup(self):
        if self.mixed_precision:
            self.scaler = torch.amp.GradScaler("cuda")
        else:
            self.scaler = NoScaler()

    def train(self, loader):
        for x, y in loader:
            with torch.autocast("cuda", dtype=torch.float16, enabled=self.mixed_precision):
                loss = self.model(x, y)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
""",
}

EXAMPLES = {
    "typical training": HEAD
    + """\
for epoch in epochs:
    for input, target in data:
        optimizer.zero_grad()
        with torch.autocast(device_type="cuda", dtype=torch.float16):
            output = model(input)
            loss = loss_fn(output, target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
    "gradient clipping": HEAD
    + """\
for epoch in epochs:
    for input, target in data:
        optimizer.zero_grad()
        with torch.autocast(device_type="cuda", dtype=torch.float16):
            output = model(input)
            loss = loss_fn(output, target)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
""",
    "gradient accumulation": HEAD
    + """\
for epoch in epochs:
    for i, (input, target) in enumerate(data):
        with torch.autocast(device_type="cuda", dtype=torch.float16):
            output = model(input)
            loss = loss_fn(output, target)
            loss = loss / iters_to_accumulate
        scaler.scale(loss).backward()
        if (i + 1) % iters_to_accumulate == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
""",
    "gradient penalty": HEAD
    + """\
for epoch in epochs:
    for input, target in data:
        optimizer.zero_grad()
        with torch.autocast(device_type="cuda", dtype=torch.float16):
            output = model(input)
            loss = loss_fn(output, target)
        scaled_grad_params = torch.autograd.grad(
            outputs=scaler.scale(loss), inputs=model.parameters(), create_graph=True
        )
        inv_scale = 1.0 / scaler.get_scale()
        grad_params = [p * inv_scale for p in scaled_grad_params]
        with torch.autocast(device_type="cuda", dtype=torch.float16):
            grad_norm = 0
            for grad in grad_params:
                grad_norm += grad.pow(2).sum()
            grad_norm = grad_norm.sqrt()
            loss = loss + grad_norm
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
    "several models, losses and optimizers": """\
import torch

scaler = torch.amp.GradScaler()
for epoch in epochs:
    for input, target in data:
        optimizer0.zero_grad()
        optimizer1.zero_grad()
        with torch.autocast(device_type="cuda", dtype=torch.float16):
            output0 = model0(input)
            output1 = model1(input)
            loss0 = loss_fn(2 * output0 + 3 * output1, target)
            loss1 = loss_fn(3 * output0 - 5 * output1, target)
        scaler.scale(loss0).backward(retain_graph=True)
        scaler.scale(loss1).backward()
        scaler.unscale_(optimizer0)
        scaler.step(optimizer0)
        scaler.step(optimizer1)
        scaler.update()
""",
    "DataParallel in one process": """\
import torch
from torch import nn

model = MyModel()
dp_model = nn.DataParallel(model)
with torch.autocast(device_type="cuda", dtype=torch.float16):
    output = dp_model(input)
    loss = loss_fn(output)
""",
    "autocast as a decorator of forward": """\
import torch

class MyModel(torch.nn.Module):
    @torch.autocast("cuda")
    def forward(self, input):
        return self.layers(input)

class MyOther(torch.nn.Module):
    def forward(self, input):
        with torch.autocast(device_type="cuda"):
            return self.layers(input)
""",
    "custom function that is safe under autocast": """\
import torch

class MyMM(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a.mm(b)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        return grad.mm(b.t()), a.t().mm(grad)

mymm = MyMM.apply
with torch.autocast(device_type="cuda", dtype=torch.float16):
    output = mymm(input1, input2)
""",
    "custom function that needs float32": """\
import torch

class MyFloat32Func(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx, input):
        ctx.save_for_backward(input)
        return fwd_op(input)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx, grad):
        return bwd_op(grad)

func = MyFloat32Func.apply
with torch.autocast(device_type="cuda", dtype=torch.float16):
    output = func(input)
""",
    "saving and resuming": HEAD
    + """\
checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
torch.save(checkpoint, "x.pt")
dev = torch.cuda.current_device()
checkpoint = torch.load("x.pt", map_location=lambda storage, loc: storage.cuda(dev))
model.load_state_dict(checkpoint["model"])
optimizer.load_state_dict(checkpoint["optimizer"])
scaler.load_state_dict(checkpoint["scaler"])
for input, target in data:
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast(device_type="cuda", dtype=torch.float16):
        loss = loss_fn(model(input), target)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
}


@pytest.mark.parametrize("name", RIGHT)
def test_correct_code_that_looks_wrong_is_left_alone(name):
    """No rule speaks on correct code, except to say that Apex is old."""
    said = [code for code in codes(RIGHT[name]) if not code.startswith("HS191")]
    assert said == []


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_documentations_own_loops_are_left_alone(name):
    """The loops of PyTorch's AMP examples give no finding at all."""
    assert codes(EXAMPLES[name]) == []
