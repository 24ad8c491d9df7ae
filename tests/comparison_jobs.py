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
