"""One rank of Lightning's Trainer under DDP with our plugin and callback: one JSON line per preset.

RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python tests/lightning_program.py
"""

import json
import logging
import os
import warnings

import lightning
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from halfstep.errors import SettingError
from halfstep.integrations.lightning import HalfstepCallback, HalfstepPrecision

RANK = os.environ["RANK"]
os.environ |= {"LOCAL_RANK": RANK, "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "test"}


class Module(lightning.LightningModule):
    """Starts from other weights on each rank; overflows on rank 1 in the third step."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(int(RANK))
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
        self.losses = []

    def training_step(self, batch, batch_idx):
        out = self.net(batch[0]).float()
        if self.global_step == 2 and RANK == "1":
            out = out * 1e30 * 1e30
        loss = F.cross_entropy(out, batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


def trainer_of(policy, callback=None, **settings):
    """A Trainer on two gloo ranks."""
    return lightning.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", plugins=[HalfstepPrecision(policy)], callbacks=[callback] if callback else [],
        max_epochs=2, gradient_clip_val=0.5, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **settings,
    )  # fmt: skip


def same_on_ranks(tensors):
    """Whether all ranks have the same values."""
    flat = torch.cat([t.detach().double().flatten() for t in tensors])
    others = [torch.empty_like(flat) for _ in range(2)]
    dist.all_gather(others, flat)
    return bool(torch.equal(*others))


def main():
    """Fit in each preset, and one that is rejected."""
    warnings.simplefilter("ignore")
    for name in ("lightning", "lightning.pytorch", "halfstep"):
        logging.getLogger(name).setLevel(logging.ERROR)
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), 8)
    for policy in ("fp32", "bf16", "bf16-lean", "fp16-lean"):
        module, callback = Module(), HalfstepCallback()
        trainer = trainer_of(policy, callback)
        trainer.fit(module, loader)
        (optimizer,) = trainer.optimizers
        params = list(module.parameters())
        masters = [optimizer.master_of(p) if "lean" in policy else p for p in params]
        values = {
            "weights": same_on_ranks(params),
            "masters": same_on_ranks(masters),
            "finite": all(bool(m.isfinite().all()) for m in masters),
            "skips": [e.step for e in callback.watch.events if e.kind == "skip"],
            "causes": [(a.step, a.cause) for a in callback.watch.autopsies],
            "dtype": str(params[0].dtype),
        }
        print(json.dumps({"policy": policy} | values), flush=True)
    try:
        trainer_of("bf16-lean", accumulate_grad_batches=2).fit(Module(), loader)
    except SettingError as error:
        print(json.dumps({"policy": "accumulate", "error": str(error)}), flush=True)


if __name__ == "__main__":
    main()
