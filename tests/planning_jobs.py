"""Small jobs for the tests of planning."""

import torch
import torch.nn.functional as F
from torch import nn

from halfstep.jobs.job import Job


def batches(batch_size):
    """One batch of vectors and labels."""
    yield torch.randn(batch_size, 16), torch.randint(4, (batch_size,))


def mlp():
    """Two linear layers."""
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))


def loss(model, batch):
    """Cross-entropy."""
    return F.cross_entropy(model(batch[0]), batch[1])


class Block(nn.Module):
    """A residual block as in a transformer, without attention."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def residual(num_blocks=3, width=32):
    """A layer, residual blocks, and a layer with four outputs."""
    return nn.Sequential(nn.Linear(16, width), *(Block(width) for _ in range(num_blocks)), nn.Linear(width, 4))


def small_job(**changes):
    """A job over `mlp`, with some fields changed."""
    fields = {
        "model": mlp,
        "data": batches,
        "loss": loss,
        "optimizer": lambda params: torch.optim.AdamW(params, lr=1e-3),
    }
    return Job(**{**fields, **changes})
