"""Weights and gradients that the tests of the compressed optimizers share; every rank has its own gradients."""

import torch

SHAPES = [(5, 7), (16,), (3,), (9, 4), (1,)]
ALIGNED = [(4, 8), (16,), (2, 16)]  # multiples of 16: no padding on two ranks

# What is compared with DeepSpeed 0.19.6: settings and number of steps.
_COMMON = {"lr": 1e-2, "weight_decay": 0.01}
COMPARED = {
    "OneBitAdam": (_COMMON | {"freeze_step": 20}, 60),
    "ZeroOneAdam": (
        _COMMON | {"var_freeze_step": 40, "var_update_scaler": 8, "local_step_scaler": 10, "local_step_clipper": 4},
        90,
    ),
    "OneBitLamb": (_COMMON | {"freeze_step": 20}, 60),
}


def start(shapes=SHAPES):
    """The first weights, the same on every rank."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def gradients(step, rank, shapes=SHAPES):
    """The gradients of a rank at a step: a part that all ranks share, and noise of its own."""
    shared = torch.Generator().manual_seed(31 * step + 5)
    own = torch.Generator().manual_seed(1009 * step + rank + 3)
    return [
        torch.randn(shape, generator=shared) * 0.5 + torch.randn(shape, generator=own) * (0.3 + 0.2 * i)
        for i, shape in enumerate(shapes)
    ]


def run(wire, kind, settings, steps, shapes=SHAPES):
    """The weights after every step of an optimizer on this rank."""
    params = [torch.nn.Parameter(w) for w in start(shapes)]
    optimizer = kind(params, allow_unverified=True, **settings)
    optimizer._wire = wire
    history = []
    for step in range(steps):
        for param, grad in zip(params, gradients(step, wire.rank, shapes), strict=True):
            param.grad = grad
        optimizer.step()
        history.append([p.detach().clone() for p in params])
    return history
