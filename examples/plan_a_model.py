"""Predict the peak memory of a training step, and the largest batch that fits on a 24 GiB GPU.

Run it with `python examples/plan_a_model.py`; no GPU is needed.
"""

import torch
import torch.nn.functional as F
from torch import nn

import halfstep

LENGTH, WIDTH, VOCABULARY = 256, 512, 8000


class Model(nn.Module):
    """A small language model."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        """Logits for every position."""
        return self.head(self.layers(self.embed(tokens)))


def batches(batch_size):
    """Random tokens; a real job would read a corpus."""
    yield torch.randint(VOCABULARY, (batch_size, LENGTH + 1))


job = halfstep.Job(
    model=Model,
    data=batches,
    loss=lambda model, batch: F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()),
    optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4),
    name="a small language model",
)

memory_plan = halfstep.plan(job, 64, precision=("fp32", "bf16", "bf16-lean"), memory="24GiB")
for entry in memory_plan.entries:
    largest = sorted(entry.estimate.peak.breakdown.items(), key=lambda item: -item[1])[:3]
    top = ", ".join(f"{category} {size / 2**30:.2f}" for category, size in largest)
    print(f"{entry.precision:10} {entry.peak_bytes / 2**30:5.2f} GiB at batch 64 ({top}); fits: {entry.fits}")

best = halfstep.find_batch_size(job, "bf16", memory="24GiB")
print(f"In 24 GiB, bf16 fits batches of up to {best.batch} sequences.")
