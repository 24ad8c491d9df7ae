"""A complete job file: classify points on two interleaved spirals. Takes seconds on a CPU.

Run it with `halfstep train examples/job.py --epochs 20`, or with `python examples/job.py`.
"""

import math

import torch
import torch.nn.functional as F

import halfstep


def spirals(split):
    """Points on two interleaved spirals with a little noise, and the spiral each one is on."""
    generator = torch.Generator().manual_seed(0 if split == "train" else 1)
    labels = torch.randint(2, (2048,), generator=generator)
    turn = torch.rand(2048, generator=generator) * 3 * math.pi
    angle = turn + math.pi * labels
    points = torch.stack([angle.cos(), angle.sin()], dim=1) * (turn / (3 * math.pi))[:, None]
    return points + 0.01 * torch.randn(points.shape, generator=generator), labels


def data(batch_size, split, seed=0, epoch=0):
    """Batches; their order depends only on the seed and the epoch, so every precision trains on the same ones."""
    points, labels = spirals(split)
    order = torch.arange(len(points))
    if split == "train":
        order = torch.randperm(len(points), generator=torch.Generator().manual_seed(1000 * seed + epoch))
    return [(points[rows], labels[rows]) for rows in order.split(batch_size)]


def model():
    """Three linear layers."""
    return torch.nn.Sequential(
        torch.nn.Linear(2, 64),
        torch.nn.Tanh(),
        torch.nn.Linear(64, 64),
        torch.nn.Tanh(),
        torch.nn.Linear(64, 2),
    )


def loss(model, batch):
    points, labels = batch
    return F.cross_entropy(model(points), labels)


def metric(model, batch):
    points, labels = batch
    return (model(points).argmax(-1) == labels).float().mean()


job = halfstep.Job(
    model=model,
    data=data,
    loss=loss,
    optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
    metric=metric,
)


if __name__ == "__main__":  # the core of what `halfstep train` does
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = job.call("model")
    optimizer = job.call("optimizer", model=net)
    for epoch in range(20):
        for batch in job.call("data", split="train", batch_size=128, seed=0, epoch=epoch):
            job.call("loss", model=net, batch=batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    (batch,) = job.call("data", split="val", batch_size=2048)
    print(f"validation accuracy {float(job.call('metric', model=net, batch=batch)):.3f}")
