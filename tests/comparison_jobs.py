"""Small job files for comparisons that really run, some of them faulty."""

LINEAR = """
import os, signal
import torch
import torch.nn.functional as F
import halfstep

x = torch.linspace(-1, 1, 256).reshape(-1, 8)

def data(batch_size, split):
    order = torch.randperm(len(x)) if split == "train" else torch.arange(len(x))
    return [(x[i], 3 * x[i, :1]) for i in order.split(batch_size)]

def loss(model, batch):
    value = F.mse_loss(model(batch[0]).float(), batch[1])
    {fault}
    return value

job = halfstep.Job(
    model=lambda: torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 1)),
    data=data,
    loss=loss,
    optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
    metric=lambda model, batch: -F.mse_loss(model(batch[0]).float(), batch[1]),
)
"""
# A NaN in bf16 from the first step on, and in fp16 a process that is killed.
FAULTY = """
    kind = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    if kind is torch.bfloat16:
        value = value * float("nan")
    if kind is torch.float16:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def write_job(folder, fault="pass"):
    """A job file with a faulty line in its loss."""
    path = folder / "job.py"
    path.write_text(LINEAR.replace("{fault}", fault.strip()))
    return path


def write_ranks_job(folder, fault="pass"):
    """A job file for several ranks: global batches are the same on any number of them, and `fault` sees the rank."""
    text = LINEAR.replace("import os, signal", "import os, signal, time")
    text = text.replace("def data(batch_size, split):", "def data(batch_size, split, rank, world_size, seed):")
    order = "torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))"
    text = text.replace("torch.randperm(len(x))", order)
    part = "order.view(-1, world_size)[:, rank].split(batch_size)"
    text = text.replace("order.split(batch_size)", part).replace(
        "def loss(model, batch):", "def loss(model, batch, rank):"
    )
    path = folder / "ranks_job.py"
    path.write_text(text.replace("{fault}", fault.strip()))
    return path
