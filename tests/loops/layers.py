"""Layers that the small models of the loops share. Dropout is 0 everywhere, so that two runs see the same numbers."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 20


def generator(seed=0):
    """A seeded generator for data and noise, so that no loop depends on the state of the global one."""
    return torch.Generator().manual_seed(seed)


def tokens(count, batch=4, length=8, vocabulary=16, seed=0):
    """Batches of token sequences in which the next token follows from the one before, with some noise."""
    g = generator(seed)
    batches = []
    for _ in range(count):
        start = torch.randint(vocabulary, (batch, 1), generator=g)
        noise = (torch.rand(batch, length, generator=g) < 0.1).long()
        batches.append((start + 3 * torch.arange(length) + noise) % vocabulary)
    return batches


def points(count, batch=8, features=6, classes=4, seed=0):
    """Batches of points with the class that a fixed linear map assigns to them."""
    g = generator(seed)
    truth = torch.randn(features, classes, generator=g)
    inputs = [torch.randn(batch, features, generator=g) for _ in range(count)]
    return [(x, (x @ truth).argmax(-1)) for x in inputs]


def images(count, batch=4, size=8, channels=1, seed=0):
    """Batches of smooth images with values between -1 and 1."""
    g = generator(seed)
    small = [torch.rand(batch, channels, 2, 2, generator=g) * 2 - 1 for _ in range(count)]
    return [F.interpolate(x, size=(size, size), mode="bilinear", align_corners=True) for x in small]


class Attention(nn.Module):
    """Multi-head attention over torch's fused kernel; `memory` makes it cross-attention."""

    def __init__(self, width, heads=2, *, causal=False):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.query, self.key_value = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x, memory=None, rotate=None):
        batch, length, width = x.shape
        k, v = self.key_value(x if memory is None else memory).chunk(2, -1)
        q, k, v = (t.reshape(batch, -1, self.heads, width // self.heads).transpose(1, 2) for t in (self.query(x), k, v))
        if rotate is not None:
            q, k = rotate(q).to(v.dtype), rotate(k).to(v.dtype)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(out.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """A pre-norm transformer block; with `cross=True` it also attends to a memory."""

    def __init__(self, width, *, causal=False, cross=False):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, causal=causal)
        self.norm_cross = nn.LayerNorm(width) if cross else None
        self.cross = Attention(width) if cross else None
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x, memory=None):
        x = x + self.attention(self.norm1(x))
        if self.cross is not None:
            x = x + self.cross(self.norm_cross(x), memory)
        return x + self.mlp(self.norm2(x))


class RMSNorm(nn.Module):
    """Written by hand, as language models do: in fp32, and back to the dtype of the input."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class MLP(nn.Module):
    """Two layers with a nonlinearity between them."""

    def __init__(self, inputs, outputs, width=16, activation=nn.Tanh):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(inputs, width), activation(), nn.Linear(width, outputs))

    def forward(self, x):
        return self.layers(x)
