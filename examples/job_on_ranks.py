"""A job file whose data is divided over ranks, with a last batch that is not complete.

`halfstep train examples/job_on_ranks.py --epochs 5` trains it. `python examples/job_on_ranks.py` shows which
examples two ranks would get.
"""

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import halfstep
from halfstep.backends.context import RunContext

INPUTS = torch.linspace(-1, 1, 100).reshape(-1, 1)


def data(batch_size, split, rank=0, world_size=1, seed=0):
    """Batches of this rank's part of the examples; Halfstep sets the sampler's epoch."""
    dataset = TensorDataset(INPUTS, (3 * INPUTS).sin())
    if split == "val":  # every rank takes every W-th example, and means are over all of them
        return DataLoader(Subset(dataset, range(rank, len(dataset), world_size)), batch_size)
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank, seed=seed)
    return DataLoader(dataset, batch_size, sampler=sampler)


job = halfstep.Job(
    model=lambda: torch.nn.Sequential(torch.nn.Linear(1, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)),
    data=data,
    loss=lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
    optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
)


if __name__ == "__main__":
    ranks = [RunContext(rank=rank, world_size=2, batch_size=16) for rank in range(2)]
    batches = [[batch[0] for batch in job.call("data", run, split="train")] for run in ranks]
    for rank, own in enumerate(batches):
        print(f"rank {rank}: batches of {', '.join(str(len(batch)) for batch in own)} examples")
    together = torch.cat([batch for own in batches for batch in own]).flatten()
    print(f"together {len(together)} examples, {len(together.unique())} different ones")
