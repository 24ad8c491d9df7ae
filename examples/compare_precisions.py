"""Compare three precisions and torch AMP on one small job, and evaluate a gate for CI.

Every run is a separate process that imports this file, so the call must be under `if __name__ == "__main__":`.
"""

import tempfile

import torch
import torch.nn.functional as F

import halfstep


def data(batch_size, split, seed):
    generator = torch.Generator().manual_seed(seed if split == "train" else 10_000)
    for _ in range(20):
        x = torch.randn(batch_size, 32, generator=generator)
        yield x, x[:, :4].argmax(-1)


job = halfstep.Job(
    model=lambda: torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.GELU(), torch.nn.Linear(128, 4)),
    data=data,
    loss=lambda model, batch: F.cross_entropy(model(batch[0]).float(), batch[1]),
    optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
    metric=lambda model, batch: (model(batch[0]).argmax(-1) == batch[1]).float().mean(),
)

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        comparison = halfstep.compare(
            job, ["fp32", "bf16", "bf16-lean"], peers=["torch-amp"], steps=60, repeats=2, batch=64, out=directory
        )
    print(comparison)
    print(comparison.gate("bf16.loss_gap > 0.05 or bf16-lean.loss_gap > 0.05"))
