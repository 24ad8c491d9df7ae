"""A model with tied weights, its wrapped form, and engines trained on them."""

import torch
import torch.nn.functional as F
from torch import nn

from halfstep.engine.engine import Engine


class Tied(nn.Module):
    """A language model whose head is tied to its embedding."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.inner = nn.Linear(8, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(torch.tanh(self.inner(self.embed(x))))


class Wrapped(nn.DataParallel):
    """A submodule behind the level that a wrapper of torch's inserts; on the CPU, whatever devices there are."""

    def __init__(self, inner):
        nn.Module.__init__(self)
        self.module = inner

    def forward(self, x):
        return self.module(x)


def trained(model, precision, steps=4, optimizer=None, **options):
    """An Engine after a few steps."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = Engine(model, optimizer, precision, **options)
    train(model, engine, steps)
    return engine


def train(model, engine, steps):
    """Train for a few steps on predicting the next of 16 numbers."""
    for i in range(steps):
        x = torch.randint(0, 16, (32,), generator=torch.Generator().manual_seed(i))
        with engine.forward():
            loss = F.cross_entropy(model(x), (x + 1) % 16)
        engine.backward(loss)
        engine.step()
