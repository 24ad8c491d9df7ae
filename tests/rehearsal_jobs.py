"""Jobs for rehearsals: four that fp16 breaks in known layers, and healthy ones."""

import contextlib

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from halfstep.jobs.job import Job

WIDTH, CLASSES = 16, 4


class Block(nn.Module):
    """A pre-norm residual block; `gain` multiplies what its branch adds to the stream."""

    def __init__(self, gain):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.fc1 = nn.Linear(WIDTH, 2 * WIDTH)
        self.fc2 = nn.Linear(2 * WIDTH, WIDTH)
        with torch.no_grad():
            self.fc2.weight.mul_(gain)

    def forward(self, x):
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))


class Residual(nn.Module):
    """A residual stream that passes 65504 in its second block."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(Block(gain) for gain in (1.0, 2e5, 1.0, 1.0))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class SelfAttention(nn.Module):
    """Attention whose logits are not divided by the root of the width."""

    def __init__(self, gain):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            self.qkv.weight[: 2 * WIDTH].mul_(gain)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.proj((q @ k.transpose(-2, -1)).softmax(-1) @ v)


class AttentionBlock(nn.Module):
    """Attention and an MLP around a residual stream."""

    def __init__(self, gain):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = SelfAttention(gain)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class Attention(nn.Module):
    """A transformer; the logits of its second block pass 65504 if `gain` is large."""

    def __init__(self, gain=300.0):
        super().__init__()
        self.embed = nn.Linear(8, WIDTH)
        self.blocks = nn.Sequential(AttentionBlock(1.0), AttentionBlock(gain))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.head(self.blocks(self.embed(x)).mean(1))


class Sigmoids(nn.Module):
    """A deep stack in which each layer makes the gradient about eight times smaller."""

    def __init__(self, depth=14):
        super().__init__()
        self.embed = nn.Linear(8, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = torch.sigmoid(self.embed(x))
        for layer in self.layers:
            x = torch.sigmoid(layer(x))
        return self.head(x)


class DropSigmoids(Sigmoids):
    """A sigmoid stack with dropout before its head."""

    def forward(self, x):
        x = torch.sigmoid(self.embed(x))
        for layer in self.layers:
            x = torch.sigmoid(layer(x))
        return self.head(F.dropout(x, 0.5, self.training))


class CheckpointedSigmoids(Sigmoids):
    """A sigmoid stack that computes its activations again in the backward pass."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Routed(nn.Module):
    """Two experts, of which each row uses the better one with a weight that is normalised to 1.

    The gradient of the gate is 0 in exact arithmetic, so what fp32 computes for it is rounding noise; the experts count
    little, so that this noise is below fp16's range on every CPU.
    """

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(8, WIDTH)
        self.gate = nn.Linear(WIDTH, 2, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = torch.tanh(self.embed(x))
        weight, index = self.gate(x).softmax(-1).topk(1)
        weight = weight / weight.sum(-1, keepdim=True)
        chosen = torch.where(index == 0, self.experts[0](x), self.experts[1](x))
        return self.head(x + weight * chosen * 2**-11)


class Critic(nn.Module):
    """A critic whose gradient with respect to its input passes 65504 on the way to the first layers."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, WIDTH, bias=False)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        self.third = nn.Linear(WIDTH, WIDTH, bias=False)
        self.score = nn.Linear(WIDTH, 1, bias=False)
        with torch.no_grad():
            for layer in (self.second, self.third, self.score):
                layer.weight.mul_(300.0)

    def forward(self, x):
        for layer in (self.first, self.second, self.third):
            x = F.leaky_relu(layer(x), 0.2)
        return self.score(x)


def _seeded(build):
    def model(seed):
        torch.manual_seed(seed)
        return build()

    return model


def _data(*shape):
    def data(batch_size, split):
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(64, *shape, generator=generator)
        flat = x.flatten(1)
        y = (flat[:, 0] > 0).long() + 2 * (flat[:, 1] > 0).long()
        return [(x[i : i + batch_size], y[i : i + batch_size]) for i in range(0, 64, batch_size)]

    return data


def _cross_entropy(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def _penalty(model, batch, context):
    """A critic's loss with an R1 penalty; the gradient inside it is not scaled."""
    x = batch[0].mul(1e-5).requires_grad_()
    score = model(x)
    with context:
        (gradient,) = torch.autograd.grad(score.sum(), x, create_graph=True)
    return F.softplus(-score.float()).mean() + 1e-12 * gradient.pow(2).sum(-1).mean()


def _penalised(model, batch):
    return _penalty(model, batch, torch.autocast("cpu", enabled=False))  # as torch advises


def _penalised_with_autocast(model, batch):
    return _penalty(model, batch, contextlib.nullcontext())


def _adam(params):
    return torch.optim.Adam(params, lr=1e-3)


residual = Job(_seeded(Residual), _data(8), _cross_entropy, _adam, name="residual")
attention = Job(_seeded(Attention), _data(6, 8), _cross_entropy, _adam, name="attention")
transformer = Job(_seeded(lambda: Attention(1.0)), _data(6, 8), _cross_entropy, _adam, name="transformer")


# Without an epsilon that is smaller than the gradients, Adam would not move the first layers in fp32 either.
def _exact_adam(params):
    return torch.optim.Adam(params, lr=1e-2, eps=1e-30)


def stack(build, optimizer=_exact_adam):
    """A job with a stack of sigmoids."""
    return Job(_seeded(build), _data(8), _cross_entropy, optimizer, name="sigmoids")


sigmoids = stack(Sigmoids)
routed = Job(_seeded(Routed), _data(8), _cross_entropy, _adam, name="routed")
critic = Job(_seeded(Critic), _data(8), _penalised, _adam, name="critic")
cast_critic = Job(_seeded(Critic), _data(8), _penalised_with_autocast, _adam, name="cast critic")
mlp = Job(
    _seeded(lambda: nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))),
    _data(8), _cross_entropy, _adam, name="mlp",
)  # fmt: skip
unnormalised = Job(
    _seeded(lambda: nn.Sequential(nn.Linear(8, 4))),
    lambda batch_size, split: [(1e6 * x, y) for x, y in _data(8)(batch_size, split)],
    _cross_entropy, _adam, name="unnormalised",
)  # fmt: skip
job = mlp
