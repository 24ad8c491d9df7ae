"""Rehearse a job in fp32, and train with the fp16 policy that the rehearsal proposes.

The residual stream of this model passes 65504 in its first block, so that plain fp16 skips every step.
"""

import torch
import torch.nn.functional as F
from torch import nn

import halfstep

WIDTH = 16


class Block(nn.Module):
    """A residual block."""

    def __init__(self, gain):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        with torch.no_grad():
            self.down.weight.mul_(gain)

    def forward(self, x):
        """The stream plus what this block adds to it."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


def batches(batch_size):
    """Random points; the class is the largest of four coordinates."""
    x = torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(0))
    return list(zip(x.split(batch_size), x[:, :4].argmax(-1).split(batch_size), strict=True))


job = halfstep.Job(
    model=lambda: nn.Sequential(Block(2e5), Block(1.0), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)),
    data=batches,
    loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
    name="a large residual stream",
)

rehearsal = halfstep.rehearse(job, "fp16", steps=4, batch=32)
for trouble in rehearsal.troubles:
    print(trouble)
print(f"proposed: {rehearsal.proposal.policy}")

for precision in ("fp16", rehearsal.proposal.policy):
    torch.manual_seed(0)
    model = job.model()
    engine = halfstep.Engine(model, job.optimizer(model.parameters()), precision)
    skipped = 0
    for batch in batches(32):
        with engine.forward():
            loss = job.loss(model, batch)
        engine.backward(loss)
        skipped += engine.step().skipped
    print(f"{precision}: {skipped} of 8 steps skipped, last loss {loss.item():.3f}")
    engine.close()
