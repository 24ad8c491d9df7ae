"""Parameters, gradients and snapshots that the optimizers' tests share."""

import torch
from torch import nn

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def weights(*shapes, dtype=FP32, seed=0):
    """Random parameters of these shapes."""
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def give_grads(params, seed, size=1.0):
    """Random gradients of the parameters' dtype."""
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = (torch.randn(p.shape, generator=generator) * size).to(p.dtype)


def bits(tensor):
    """The bit patterns of a tensor, as a copy."""
    return tensor.detach().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]).clone()


def snapshot(optimizer):
    """Everything a step may change, as bits."""
    tensors = {}
    for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        tensors[i, "weight"] = bits(p)
        for name, value in optimizer.state[p].items():
            tensors[i, name] = bits(value)
    return tensors


def same(before, after):
    """Whether everything in the first snapshot has the same bits in the second."""
    assert before.keys() <= after.keys()
    return all(torch.equal(value, after[key]) for key, value in before.items())
