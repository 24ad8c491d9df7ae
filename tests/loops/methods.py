"""Training methods, plain and converted: SAM, weight averaging, ReduceLROnPlateau, graphs, frozen bases with adapters."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

import halfstep
from loops.amp import Amp
from loops.layers import MLP, STEPS, generator, points

# SAM: a first backward finds the direction in which the loss grows, a second one at the perturbed weights is used.


def start_sam():
    torch.manual_seed(0)
    model = MLP(6, 4, activation=nn.GELU)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), points(STEPS)


@torch.no_grad()
def climb(model, radius=0.05):
    """Move every weight along its gradient; returns the weights as they were."""
    saved = [p.detach().clone() for p in model.parameters()]
    norm = torch.stack([p.grad.float().norm() for p in model.parameters()]).norm()
    for param in model.parameters():
        param.add_(radius * param.grad / (norm + 1e-12))
    return saved


@torch.no_grad()
def descend(model, saved):
    """Put the weights back."""
    for param, value in zip(model.parameters(), saved, strict=True):
        param.copy_(value)


def plain_sam(preset):
    model, optimizer, data = start_sam()
    amp, losses = Amp(preset), []
    scaler = amp.scaler()
    for x, y in data:
        with amp.autocast():
            loss = F.cross_entropy(model(x).float(), y)
        (scaler.scale(loss)).backward()
        for param in model.parameters():
            param.grad /= scaler.get_scale()
        saved = climb(model)
        optimizer.zero_grad()
        with amp.autocast():
            second = F.cross_entropy(model(x).float(), y)
        scaler.scale(second).backward()
        descend(model, saved)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses += [loss.item(), second.item()]
    return losses


def converted_sam(precision):
    model, optimizer, data = start_sam()
    losses = []
    with halfstep.Engine(model, optimizer, precision) as engine:
        for x, y in data:
            with engine.forward():
                loss = F.cross_entropy(model(x), y)
            engine.backward(loss)
            engine.unscale()
            saved = climb(model)
            engine.reset_window()  # the first gradients have done their work
            with engine.forward():
                second = F.cross_entropy(model(x), y)
            engine.backward(second)
            descend(model, saved)
            engine.step()
            losses += [loss.item(), second.item()]
    return losses


# Stochastic weight averaging with torch's AveragedModel, validated at the end.


def start_swa():
    torch.manual_seed(1)
    model = MLP(6, 4, activation=nn.GELU)
    return model, torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9), points(STEPS, seed=1)


def plain_swa(preset):
    model, optimizer, data = start_swa()
    averaged = torch.optim.swa_utils.AveragedModel(model)
    amp, losses = Amp(preset), []
    scaler = amp.scaler()
    for step, (x, y) in enumerate(data):
        with amp.autocast():
            loss = F.cross_entropy(model(x).float(), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step >= STEPS // 2:
            averaged.update_parameters(model)
        losses.append(loss.item())
    with torch.no_grad(), amp.autocast():
        losses.append(sum(F.cross_entropy(averaged(x).float(), y).item() for x, y in data[:4]))
    return losses


def converted_swa(precision):
    model, optimizer, data = start_swa()
    averaged = torch.optim.swa_utils.AveragedModel(model)  # before the Engine, so that the averages are fp32
    losses = []
    with halfstep.Engine(model, optimizer, precision) as engine:
        for step, (x, y) in enumerate(data):
            with engine.forward():
                loss = F.cross_entropy(model(x), y)
            engine.backward(loss)
            engine.step()
            if step >= STEPS // 2:
                averaged.update_parameters(model)
            losses.append(loss.item())
        with torch.no_grad(), engine.forward():
            losses.append(sum(F.cross_entropy(averaged(x), y).item() for x, y in data[:4]))
    return losses


# Fine-tuning with ReduceLROnPlateau: the metric comes from validation.


def start_plateau():
    torch.manual_seed(2)
    model = MLP(6, 4, activation=nn.GELU)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.05)
    return model, optimizer, scheduler, points(STEPS, seed=2)


def plain_plateau(preset):
    model, optimizer, scheduler, data = start_plateau()
    amp, losses = Amp(preset), []
    scaler = amp.scaler()
    for step, (x, y) in enumerate(data):
        with amp.autocast():
            loss = F.cross_entropy(model(x).float(), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        if step % 4 == 3:
            with torch.no_grad(), amp.autocast():
                metric = F.cross_entropy(model(data[0][0]).float(), data[0][1]).item()
            scheduler.step(metric)
    return [*losses, optimizer.param_groups[0]["lr"]]


def converted_plateau(precision):
    model, optimizer, scheduler, data = start_plateau()
    losses = []
    with halfstep.Engine(model, optimizer, precision, scheduler=scheduler) as engine:
        for step, (x, y) in enumerate(data):
            with engine.forward():
                loss = F.cross_entropy(model(x), y)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            if step % 4 == 3:
                with engine.evaluate():
                    metric = F.cross_entropy(model(data[0][0]), data[0][1]).item()
                engine.step_scheduler(metric)
    return [*losses, optimizer.param_groups[0]["lr"]]


# The same, with the scheduler left outside the Engine.


def plain_plateau_outside(preset):
    return plain_plateau(preset)


def converted_plateau_outside(precision):
    model, optimizer, scheduler, data = start_plateau()
    losses = []
    with halfstep.Engine(model, optimizer, precision) as engine:
        for step, (x, y) in enumerate(data):
            with engine.forward():
                loss = F.cross_entropy(model(x), y)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            if step % 4 == 3:
                with engine.evaluate():
                    metric = F.cross_entropy(model(data[0][0]), data[0][1]).item()
                scheduler.step(metric)
    return [*losses, optimizer.param_groups[0]["lr"]]


# A graph network: the whole graph in one batch, sparse products in fp32, a mask for the training nodes.


class GraphNet(nn.Module):
    """Two graph convolutions."""

    def __init__(self, features=6, classes=3, width=16):
        super().__init__()
        self.first, self.second = nn.Linear(features, width), nn.Linear(width, classes)

    def forward(self, x, adjacency):
        x = F.relu(propagate(adjacency, self.first(x)))
        return propagate(adjacency, self.second(x))


def propagate(adjacency, x):
    """A sparse product; torch has none in 16 bits, so autocast is off around it."""
    with torch.autocast(x.device.type, enabled=False):
        return torch.sparse.mm(adjacency, x.float())


def start_gcn():
    torch.manual_seed(3)
    model, g = GraphNet(), generator(3)
    links = (torch.rand(12, 12, generator=g) < 0.2).float() + torch.eye(12)
    adjacency = (links / links.sum(1, keepdim=True)).to_sparse()
    x = torch.randn(12, 6, generator=g)
    labels, train = (torch.sparse.mm(adjacency, x))[:, :3].argmax(-1), torch.arange(12) % 3 != 0
    return model, torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4), x, adjacency, labels, train


def plain_gcn(preset):
    model, optimizer, x, adjacency, labels, train = start_gcn()
    amp, losses = Amp(preset), []
    scaler = amp.scaler()
    for _ in range(STEPS):
        optimizer.zero_grad()
        with amp.autocast():
            loss = F.cross_entropy(model(x, adjacency)[train], labels[train])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


def converted_gcn(precision):
    model, optimizer, x, adjacency, labels, train = start_gcn()
    losses = []
    with halfstep.Engine(model, optimizer, precision) as engine:
        for _ in range(STEPS):
            with engine.forward():
                loss = F.cross_entropy(model(x, adjacency)[train], labels[train])
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


# LoRA: adapters on a frozen base. The first pair has a base in fp32, the second one in 16 bits.


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank update in fp32."""

    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = (
            nn.Linear(base.in_features, rank, bias=False),
            nn.Linear(rank, base.out_features, bias=False),
        )
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x.to(self.base.weight.dtype)) + self.up(self.down(x))


def start_lora(dtype=torch.float32):
    torch.manual_seed(4)
    model = nn.Sequential(Adapted(nn.Linear(6, 16).to(dtype)), nn.GELU(), Adapted(nn.Linear(16, 4).to(dtype)))
    trainable = [p for p in model.parameters() if p.requires_grad]
    return model, torch.optim.AdamW(trainable, lr=1e-2), points(STEPS, seed=4)


def train_plain(model, optimizer, data, preset):
    """A plain loop for a classifier."""
    amp, losses = Amp(preset), []
    scaler = amp.scaler()
    for x, y in data:
        with amp.autocast():
            loss = F.cross_entropy(model(x).float(), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


def train_converted(model, optimizer, data, precision):
    """The same loop, converted; the frozen base is not changed."""
    frozen = {name: copy.deepcopy(p) for name, p in model.named_parameters() if not p.requires_grad}
    losses = []
    with halfstep.Engine(model, optimizer, precision) as engine:
        for x, y in data:
            with engine.forward():
                loss = F.cross_entropy(model(x), y)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    params = dict(model.named_parameters())
    assert all(torch.equal(params[name].float(), p.to(params[name].dtype).float()) for name, p in frozen.items())
    return losses


def plain_lora(preset):
    return train_plain(*start_lora(), preset)


def converted_lora(precision):
    return train_converted(*start_lora(), precision)


def dtype_of(precision):
    """The dtype of a 16-bit base under a preset; bf16 where the preset computes in fp32."""
    return torch.float16 if precision.startswith("fp16") else torch.bfloat16


def plain_lora_16_bit_base(preset):
    return train_plain(*start_lora(dtype_of(preset)), preset)


def converted_lora_16_bit_base(precision):
    return train_converted(*start_lora(dtype_of(precision)), precision)


# Optimizers without a lean counterpart run over fp32 masters.


def start_rmsprop():
    torch.manual_seed(5)
    model = MLP(6, 4, activation=nn.GELU)
    return model, torch.optim.RMSprop(model.parameters(), lr=3e-3, momentum=0.9), points(STEPS, seed=5)


def plain_rmsprop(preset):
    return train_plain(*start_rmsprop(), preset)


def converted_rmsprop(precision):
    return train_converted(*start_rmsprop(), precision)


def start_adafactor():
    torch.manual_seed(6)
    model = MLP(6, 4, activation=nn.GELU)
    return model, torch.optim.Adafactor(model.parameters(), lr=1e-2), points(STEPS, seed=6)


def plain_adafactor(preset):
    return train_plain(*start_adafactor(), preset)


def converted_adafactor(precision):
    return train_converted(*start_adafactor(), precision)
