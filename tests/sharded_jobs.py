"""Jobs for training on shards, with models that are hard to initialise and data whose windows can be shuffled."""

import torch
import torch.nn.functional as F
from torch import nn

import halfstep
from launch_job import Data, make_job

BUILT_ON = []  # the device of each model that was built in this process


class Block(nn.Module):
    """A block with weights that do not divide evenly by the number of ranks."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(9, 9), nn.BatchNorm1d(9)

    def forward(self, x):
        return x + self.norm(self.linear(x)).relu()


class Model(nn.Module):
    """Tied weights, a frozen parameter, a flagged one, a scalar, batch norms, buffers of which one is shared and one not saved."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(8, 9, bias=False), nn.Linear(9, 8, bias=False)
        self.head.weight = nn.Parameter(torch.randn(8, 9))
        self.blocks = nn.Sequential(Block(), Block())
        self.gain, self.out = nn.Parameter(torch.ones(())), nn.Linear(8, 2)
        self.out.bias.no_decay = True
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.tied = nn.Linear(9, 8, bias=False)
        self.tied.weight = self.head.weight
        table = torch.randn(8)
        self.register_buffer("table", table, persistent=False)
        self.out.register_buffer("shared", table)
        self.register_buffer("count", torch.tensor(7))
        BUILT_ON.append(str(self.gain.device))

    def forward(self, x):
        x = self.blocks(self.embed(x))
        return self.out((self.head(x) + self.tied(x)) * self.gain + 0.1 * self.table + 0.1 * self.out.shared)


class ReadsValues(Model):
    """A constructor that does not work on the meta device, as timm's drop rates."""

    def __init__(self):
        super().__init__()
        self.rate = torch.linspace(0, 0.1, 3)[1].item()


class PlainAttribute(Model):
    """A tensor that is neither a parameter nor a buffer."""

    def __init__(self):
        super().__init__()
        self.scales = [torch.full((2,), 0.5)]

    def forward(self, x):
        return super().forward(x) * self.scales[0]


def optimizer(model):
    """AdamW with a group that the constructor has flagged."""
    flagged = [p for p in model.parameters() if getattr(p, "no_decay", False)]
    others = [p for p in model.parameters() if p.requires_grad and not getattr(p, "no_decay", False)]
    return torch.optim.AdamW([{"params": others}, {"params": flagged, "weight_decay": 0.0}], lr=1e-2)


def full_job(model=Model, **changed):
    """The job of a model above."""
    fields = {"model": model, "data": Data, "optimizer": optimizer, "shard": "blocks.*"}
    return make_job(**(fields | changed))


class Uneven(Data):
    """Validation data of which rank 1 has one batch, and the others the rest."""

    def __init__(self, batch_size, split, seed, epoch, rank, world_size):
        super().__init__(batch_size, split, seed, epoch, rank, world_size)
        self._split, self._batch = split, batch_size

    def __len__(self):
        return super().__len__() if self._split == "train" else len(self._own())

    def _own(self):
        batches = list(zip(*(part.split(4) for part in self._all), strict=True))
        return batches if self._world_size == 1 else batches[:1] if self.rank == 1 else batches[1:]

    def __iter__(self):
        yield from super().__iter__() if self._split == "train" else self._own()


class Shuffled(Data):
    """Training data with the examples of each update in another order, and so in other micro-batches; `order` None keeps it.

    The order "half" is a fault: the examples of the second of two ranks are lost.
    """

    order, window = None, 16

    def __init__(self, batch_size, split, seed, epoch, rank, world_size):
        super().__init__(batch_size, split, seed, epoch, rank, world_size)
        if self.order not in {None, "half"} and split == "train":
            generator = torch.Generator().manual_seed(1000 * self.order + epoch)
            starts = range(0, len(self._all[0]), self.window)
            places = torch.cat([start + torch.randperm(self.window, generator=generator) for start in starts])
            self._all = tuple(part[places] for part in self._all)

    def __iter__(self):
        for batch in super().__iter__():
            yield tuple(part[: len(part) // 2] for part in batch) if self.order == "half" else batch


def curve_job(order=None, factor=1.0):
    """A small network whose loss curve is compared between backends; no dropout, which differs between ranks.

    A large `factor` makes the first loss scales of fp16 overflow.
    """

    def model():
        return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 2))

    return halfstep.Job(
        model=model,
        data=type("Data", (Shuffled,), {"order": order}),
        loss=lambda model, batch: factor * F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda params: torch.optim.AdamW(
            params, lr=2e-2
        ),  # large: rounding errors grow above one ulp of the loss
    )
