"""A small job whose model has a `head`, as the page's commands assume."""

from collections import OrderedDict

import torch
from torch import nn

import halfstep


def data(batch_size, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(8):
        x = torch.randn(batch_size, 4, generator=generator)
        yield x, x.sum(1, keepdim=True)


job = halfstep.Job(
    model=lambda: nn.Sequential(OrderedDict(body=nn.Linear(4, 8), norm=nn.LayerNorm(8), head=nn.Linear(8, 1))),
    data=data,
    loss=lambda model, batch: (model(batch[0]) - batch[1]).pow(2).mean(),
    optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
)
