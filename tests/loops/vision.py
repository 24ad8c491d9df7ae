"""Vision loops, plain and converted: MAE, DINO, MoCo, SimSiam, BYOL, timm's classifier, U-Net, CLIP, ResNet with OneCycle."""

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

import halfstep
from loops.amp import Amp
from loops.layers import MLP, STEPS, Block, generator, images, points, tokens

# MAE: random masks, an asymmetric encoder and decoder, targets normalized per patch, the rate per iteration.


class Mae(nn.Module):
    """An encoder of the visible patches, and a decoder of all of them."""

    def __init__(self, width=16, patch=2, size=8, channels=1):
        super().__init__()
        self.patch, count = patch, (size // patch) ** 2
        self.embed = nn.Conv2d(channels, width, patch, stride=patch)
        self.positions = nn.Parameter(torch.randn(1, count, width) * 0.1, requires_grad=False)
        self.encoder, self.norm = Block(width), nn.LayerNorm(width)
        self.to_decoder, self.mask_token = nn.Linear(width, width), nn.Parameter(torch.zeros(1, 1, width))
        self.decoder, self.decoder_norm = Block(width), nn.LayerNorm(width)
        self.pixels = nn.Linear(width, patch * patch * channels)

    def forward(self, x, noise):
        patches = F.unfold(x, self.patch, stride=self.patch).transpose(1, 2)
        order = noise.argsort(1)
        visible = order[:, : order.shape[1] // 4, None]
        h = self.embed(x).flatten(2).transpose(1, 2) + self.positions
        h = h.gather(1, visible.expand(-1, -1, h.shape[2]))
        h = self.to_decoder(self.norm(self.encoder(h)))
        full = self.mask_token.to(h.dtype).repeat(len(x), order.shape[1], 1)
        full = full.scatter(1, visible.expand(-1, -1, h.shape[2]), h)
        prediction = self.pixels(self.decoder_norm(self.decoder(full + self.positions)))
        target = (patches - patches.mean(-1, keepdim=True)) / (patches.var(-1, keepdim=True) + 1e-2).sqrt()
        mask = torch.ones_like(noise).scatter(1, visible[..., 0], 0.0)
        return ((prediction.float() - target).square().mean(-1) * mask).sum() / mask.sum()


def start_mae():
    torch.manual_seed(0)
    model, g = Mae(), generator(0)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, betas=(0.9, 0.95), weight_decay=0.05)
    return model, optimizer, [(x, torch.rand(4, 16, generator=g)) for x in images(2 * STEPS)]


def mae_rate(step):
    """Half a cosine after a short warm-up."""
    return 5e-3 * min(1.0, (step + 1) / 4) * (0.5 + 0.5 * math.cos(math.pi * step / STEPS))


def plain_mae(preset):
    model, optimizer, data = start_mae()
    amp, losses = Amp(preset), []
    scaler = amp.scaler()
    for index, (x, noise) in enumerate(data):
        if index % 2 == 0:
            for group in optimizer.param_groups:
                group["lr"] = mae_rate(index // 2)
        with amp.autocast():
            loss = model(x, noise)
        losses.append(loss.item())
        scaler.scale(loss / 2).backward()
        if index % 2 == 1:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return losses


def converted_mae(precision):
    model, optimizer, data = start_mae()
    losses = []
    with halfstep.Engine(model, optimizer, precision, accumulate=2) as engine:
        for index, (x, noise) in enumerate(data):
            if index % 2 == 0:
                for group in optimizer.param_groups:
                    group["lr"] = mae_rate(index // 2)
            with engine.forward():
                loss = model(x, noise)
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
    return losses


# DINO: a frozen teacher that follows the student, clipping per parameter, a frozen last layer at first, schedules by hand.


class DinoNet(nn.Module):
    """A backbone and a head whose last layer has a weight norm."""

    def __init__(self, width=16):
        super().__init__()
        self.backbone = MLP(16, width, activation=nn.GELU)
        self.last_layer = nn.utils.parametrizations.weight_norm(nn.Linear(width, 8, bias=False))
        self.last_layer.parametrizations.weight.original0.requires_grad = False

    def forward(self, x):
        return self.last_layer(F.normalize(self.backbone(x).float(), dim=-1))


def start_dino():
    torch.manual_seed(1)
    student = DinoNet()
    teacher = copy.deepcopy(student).requires_grad_(False)
    trainable = [p for p in student.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() > 1]},
        {"params": [p for p in trainable if p.dim() <= 1], "weight_decay": 0.0},
    ]
    g = generator(1)
    views = [torch.randn(2, 8, 16, generator=g) * 0.3 + torch.randn(8, 16, generator=g) for _ in range(STEPS)]
    return student, teacher, torch.optim.AdamW(groups, lr=3e-3), views


def dino_loss(student, teacher, center):
    """Cross-entropy of each view of the student with the other view of the teacher."""
    target = ((teacher.float() - center) / 0.1).softmax(-1).chunk(2)
    log_probs = (student.float() / 0.2).log_softmax(-1).chunk(2)
    return -((target[0] * log_probs[1]).sum(-1).mean() + (target[1] * log_probs[0]).sum(-1).mean()) / 2


def set_dino_schedule(optimizer, step):
    """The rate of every group, and the weight decay of the first."""
    for index, group in enumerate(optimizer.param_groups):
        group["lr"] = 3e-3 * (1 - step / (2 * STEPS))
        if index == 0:
            group["weight_decay"] = 0.04 + 0.3 * step / STEPS


def edit_dino_gradients(student, step):
    """Clip each gradient by its own norm, and drop those of the last layer in the first steps."""
    for name, param in student.named_parameters():
        if param.grad is not None:
            param.grad.mul_((0.3 / (param.grad.norm() + 1e-6)).clamp(max=1))
            if step < 3 and "last_layer" in name:
                param.grad = None


@torch.no_grad()
def follow(teacher, student, momentum=0.9):
    """Move every parameter of the teacher towards the student's."""
    for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
        slow.data.mul_(momentum).add_((1 - momentum) * fast.detach().data)


def plain_dino(preset):
    student, teacher, optimizer, data = start_dino()
    amp, losses, center = Amp(preset), [], torch.zeros(8)
    scaler = amp.scaler()
    for step, views in enumerate(data):
        set_dino_schedule(optimizer, step)
        with amp.autocast():
            teacher_out, student_out = teacher(views.flatten(0, 1)), student(views.flatten(0, 1))
            loss = dino_loss(student_out, teacher_out, center)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        edit_dino_gradients(student, step)
        scaler.step(optimizer)
        scaler.update()
        follow(teacher, student)
        center = center * 0.9 + teacher_out.float().mean(0) * 0.1
        losses.append(loss.item())
    return losses


def converted_dino(precision):
    student, teacher, optimizer, data = start_dino()
    losses, center = [], torch.zeros(8)
    with halfstep.Engine(student, optimizer, precision) as engine:
        for step, views in enumerate(data):
            set_dino_schedule(optimizer, step)
            with engine.forward():
                teacher_out, student_out = teacher(views.flatten(0, 1)), student(views.flatten(0, 1))
                loss = dino_loss(student_out, teacher_out, center)
            engine.backward(loss)
            engine.unscale()
            edit_dino_gradients(student, step)
            engine.step()
            follow(teacher, student)
            center = center * 0.9 + teacher_out.float().mean(0) * 0.1
            losses.append(loss.item())
    return losses


# MoCo: the momentum encoder and the queue of keys are part of the model.


class Moco(nn.Module):
    """A query encoder, a key encoder that follows it, and a queue of keys."""

    def __init__(self, width=8, length=16, momentum=0.9):
        super().__init__()
        self.momentum = momentum
        self.encoder_q = MLP(16, width, activation=nn.ReLU)
        self.encoder_k = copy.deepcopy(self.encoder_q).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(width, length), dim=0))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, query_view, key_view):
        q = F.normalize(self.encoder_q(query_view).float(), dim=1)
        with torch.no_grad():
            for fast, slow in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
                slow.data = slow.data * self.momentum + fast.data * (1 - self.momentum)
            k = F.normalize(self.encoder_k(key_view).float(), dim=1)
        positive, negative = (q * k).sum(1, keepdim=True), (q[:, :, None] * self.queue.clone()[None]).sum(1)
        start = int(self.pointer)
        self.queue[:, start : start + len(k)] = k.T
        self.pointer[0] = (start + len(k)) % self.queue.shape[1]
        return torch.cat([positive, negative], 1) / 0.5


def start_moco():
    torch.manual_seed(2)
    model, g = Moco(), generator(2)
    optimizer = torch.optim.SGD(model.encoder_q.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    base = [torch.randn(8, 16, generator=g) for _ in range(STEPS)]
    return model, optimizer, [(x + 0.3 * torch.randn(8, 16, generator=g), x) for x in base]


def plain_moco(preset):
    model, optimizer, data = start_moco()
    amp, losses = Amp(preset), []
    scaler = amp.scaler()
    for query, key in data:
        with amp.autocast():
            loss = F.cross_entropy(model(query, key), torch.zeros(len(query), dtype=torch.long))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


def converted_moco(precision):
    model, optimizer, data = start_moco()
    losses = []
    if "lean" in precision:
        precision += ",keep_fp32=encoder_k"  # 16 bits would lose the small steps of the momentum encoder
    with halfstep.Engine(model, optimizer, precision) as engine:
        for query, key in data:
            with engine.forward():
                loss = F.cross_entropy(model(query, key), torch.zeros(len(query), dtype=torch.long))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


# SimSiam: a stopped gradient, batch norm in the projector, a predictor whose rate stays fixed.


class SimSiam(nn.Module):
    """A projector with batch norm, and a predictor."""

    def __init__(self, width=16):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(16, width, bias=False), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, width)
        )
        self.encoder.append(nn.BatchNorm1d(width, affine=False))
        self.predictor = nn.Sequential(
            nn.Linear(width, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, width)
        )

    def forward(self, one, two):
        z1, z2 = self.encoder(one), self.encoder(two)
        return self.predictor(z1).float(), self.predictor(z2).float(), z1.detach().float(), z2.detach().float()


def start_simsiam():
    torch.manual_seed(3)
    model, g = SimSiam(), generator(3)
    groups = [
        {"params": list(model.encoder.parameters()), "fix_lr": False},
        {"params": list(model.predictor.parameters()), "fix_lr": True},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=1e-4)
    base = [torch.randn(16, 16, generator=g) for _ in range(STEPS)]
    return model, optimizer, [(x + 0.2 * torch.randn(16, 16, generator=g), x) for x in base]


def set_simsiam_rate(optimizer, step):
    """A cosine for the encoder; the predictor's rate is fixed."""
    for group in optimizer.param_groups:
        group["lr"] = 0.05 if group["fix_lr"] else 0.05 * 0.5 * (1 + math.cos(math.pi * step / STEPS))


def simsiam_loss(p1, p2, z1, z2):
    """Negative cosine similarity, in both directions."""
    return -(F.cosine_similarity(p1, z2).mean() + F.cosine_similarity(p2, z1).mean()) / 2


def plain_simsiam(preset):
    model, optimizer, data = start_simsiam()
    amp, losses = Amp(preset), []
    scaler = amp.scaler()
    for step, (one, two) in enumerate(data):
        set_simsiam_rate(optimizer, step)
        with amp.autocast():
            loss = simsiam_loss(*model(one, two))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


def converted_simsiam(precision):
    model, optimizer, data = start_simsiam()
    losses = []
    with halfstep.Engine(model, optimizer, precision) as engine:
        for step, (one, two) in enumerate(data):
            set_simsiam_rate(optimizer, step)
            with engine.forward():
                loss = simsiam_loss(*model(one, two))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


# BYOL: an online network with a predictor, and a separate target network that follows it.


def start_byol():
    torch.manual_seed(4)
    online, predictor, g = MLP(16, 8, activation=nn.GELU), nn.Linear(8, 8), generator(4)
    target = copy.deepcopy(online).requires_grad_(False)
    model = nn.ModuleDict({"online": online, "predictor": predictor})
    base = [torch.randn(8, 16, generator=g) for _ in range(STEPS)]
    data = [(x + 0.3 * torch.randn(8, 16, generator=g), x) for x in base]
    return model, target, torch.optim.AdamW(model.parameters(), lr=3e-3), data


def byol_loss(prediction, target):
    """Squared distance of unit vectors."""
    return (F.normalize(prediction.float(), dim=-1) - F.normalize(target.float(), dim=-1)).square().sum(-1).mean()


def plain_byol(preset):
    model, target, optimizer, data = start_byol()
    amp, losses = Amp(preset), []
    scaler = amp.scaler()
    for one, two in data:
        with amp.autocast():
            loss = byol_loss(model["predictor"](model["online"](one)), target(two))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        follow(target, model["online"])
        losses.append(loss.item())
    return losses


def converted_byol(precision):
    model, target, optimizer, data = start_byol()
    losses = []
    with halfstep.Engine(model, optimizer, precision) as engine:
        for one, two in data:
            with engine.forward():
                loss = byol_loss(model["predictor"](model["online"](one)), target(two))
            engine.backward(loss)
            engine.step()
            follow(target, model["online"])
            losses.append(loss.item())
    return losses


# timm: mixup, label smoothing, a cosine schedule per epoch, an EMA that is validated at the end.


class ConvNet(nn.Module):
    """Convolutions with batch norm, pooling and a linear head."""

    def __init__(self, classes=4, width=8):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(width, width, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(width))
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        return self.head(F.relu(self.body(self.stem(x))).mean((2, 3)))


def start_timm():
    torch.manual_seed(5)
    model, g = ConvNet(), generator(5)
    data = [(x, torch.randint(4, (len(x),), generator=g)) for x in images(STEPS, seed=5)]
    return model, torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.05), data


def mixup(x, y, classes=4, share=0.7, smoothing=0.1):
    """Each image mixed with that at the other end of the batch, and soft targets."""
    soft = torch.full((len(y), classes), smoothing / classes).scatter(
        1, y[:, None], 1 - smoothing + smoothing / classes
    )
    return share * x + (1 - share) * x.flip(0), share * soft + (1 - share) * soft.flip(0)


def plain_timm(preset):
    model, optimizer, data = start_timm()
    ema = copy.deepcopy(model).eval()
    amp, losses = Amp(preset), []
    scaler = amp.scaler()
    for x, y in data:
        mixed, soft = mixup(x, y)
        with amp.autocast():
            loss = F.cross_entropy(model(mixed).float(), soft)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            for slow, fast in zip(ema.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        losses.append(loss.item())
    for slow, fast in zip(ema.buffers(), model.buffers(), strict=True):
        slow.copy_(fast)
    with torch.no_grad(), amp.autocast():
        losses.append(sum(F.cross_entropy(ema(x).float(), y).item() for x, y in data[:4]))
    return losses


def converted_timm(precision):
    model, optimizer, data = start_timm()
    losses = []
    with halfstep.Engine(model, optimizer, precision, max_norm=1.0, ema=0.9) as engine:
        for x, y in data:
            mixed, soft = mixup(x, y)
            with engine.forward():
                loss = F.cross_entropy(model(mixed), soft)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        with engine.evaluate(ema=True):
            losses.append(sum(F.cross_entropy(model(x), y).item() for x, y in data[:4]))
    return losses


# U-Net: skip connections, batch norm, cross-entropy plus a Dice loss, validation in eval mode every five steps.


class UNet(nn.Module):
    """One level down and up."""

    def __init__(self, width=8, classes=2):
        super().__init__()
        self.enter = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.down = nn.Sequential(
            nn.MaxPool2d(2), nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()
        )
        self.up = nn.ConvTranspose2d(width, width, 2, stride=2)
        self.merge = nn.Sequential(nn.Conv2d(2 * width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.out = nn.Conv2d(width, classes, 1)

    def forward(self, x):
        skip = self.enter(x)
        up = self.up(self.down(skip))
        return self.out(self.merge(torch.cat([skip, up], 1)))


def segmentation_loss(logits, mask):
    """Cross-entropy plus one minus the Dice overlap."""
    probability = logits.float().softmax(1)[:, 1]
    overlap = 2 * (probability * mask).sum() / (probability.sum() + mask.sum() + 1e-6)
    return F.cross_entropy(logits.float(), mask) + 1 - overlap


def start_unet():
    torch.manual_seed(6)
    model = UNet()
    data = [(x, (x[:, 0] > 0).long()) for x in images(STEPS, seed=6)]
    return model, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4, nesterov=True), data


def plain_unet(preset):
    model, optimizer, data = start_unet()
    amp, losses = Amp(preset), []
    scaler = amp.scaler()
    for step, (x, mask) in enumerate(data):
        with amp.autocast():
            loss = segmentation_loss(model(x), mask)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        if step % 5 == 4:
            model.eval()
            with torch.no_grad(), amp.autocast():
                losses.append(segmentation_loss(model(data[0][0]), data[0][1]).item())
            model.train()
    return losses


def converted_unet(precision):
    model, optimizer, data = start_unet()
    losses = []
    with halfstep.Engine(model, optimizer, precision, max_norm=1.0) as engine:
        for step, (x, mask) in enumerate(data):
            with engine.forward():
                loss = segmentation_loss(model(x), mask)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            if step % 5 == 4:
                with engine.evaluate():
                    losses.append(segmentation_loss(model(data[0][0]), data[0][1]).item())
    return losses


# CLIP: two towers, a symmetric loss, and a temperature that is clamped in place after each step.


class Clip(nn.Module):
    """An image tower, a text tower and a learned temperature."""

    def __init__(self, width=16):
        super().__init__()
        self.image, self.token = MLP(64, width, activation=nn.GELU), nn.Embedding(16, width)
        self.block, self.norm = Block(width), nn.LayerNorm(width)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.3)))

    def forward(self, picture, ids):
        image = F.normalize(self.image(picture.flatten(1)).float(), dim=-1)
        text = F.normalize(self.norm(self.block(self.token(ids))).mean(1).float(), dim=-1)
        return self.logit_scale.exp() * image @ text.t()


def start_clip():
    torch.manual_seed(7)
    model = Clip()
    data = list(zip(images(STEPS, batch=8, seed=7), tokens(STEPS, batch=8, seed=7), strict=True))
    return model, torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.98), eps=1e-6), data


def clip_loss(logits):
    """Cross-entropy over rows and columns."""
    labels = torch.arange(len(logits))
    return (F.cross_entropy(logits.float(), labels) + F.cross_entropy(logits.t().float(), labels)) / 2


def plain_clip(preset):
    model, optimizer, data = start_clip()
    amp, losses = Amp(preset), []
    scaler = amp.scaler()
    for picture, ids in data:
        optimizer.zero_grad()
        with amp.autocast():
            loss = clip_loss(model(picture, ids))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            model.logit_scale.clamp_(0, math.log(3.4))
        losses.append(loss.item())
    assert model.logit_scale.item() <= math.log(3.4) + 1e-6
    return losses


def converted_clip(precision):
    model, optimizer, data = start_clip()
    losses = []
    with halfstep.Engine(model, optimizer, precision) as engine:
        for picture, ids in data:
            with engine.forward():
                loss = clip_loss(model(picture, ids))
            engine.backward(loss)
            engine.step()
            with torch.no_grad():
                model.logit_scale.clamp_(0, math.log(3.4))
            losses.append(loss.item())
        assert engine.masters()["logit_scale"].item() <= math.log(3.4) * (1 + 2.0**-8)
    return losses


# A classifier with OneCycleLR, which cycles the momentum as well as the rate.


def start_onecycle():
    torch.manual_seed(8)
    model = MLP(6, 4, activation=nn.ReLU)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=STEPS)
    return model, optimizer, scheduler, points(STEPS)


def plain_onecycle(preset):
    model, optimizer, scheduler, data = start_onecycle()
    amp, losses = Amp(preset), []
    scaler = amp.scaler()
    for x, y in data:
        optimizer.zero_grad()
        with amp.autocast():
            loss = F.cross_entropy(model(x).float(), y, label_smoothing=0.1)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        losses.append(loss.item())
    return losses


def converted_onecycle(precision):
    model, optimizer, scheduler, data = start_onecycle()
    losses = []
    with halfstep.Engine(model, optimizer, precision, scheduler=scheduler) as engine:
        for x, y in data:
            with engine.forward():
                loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses
