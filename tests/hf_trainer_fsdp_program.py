"""One rank of Hugging Face's Trainer with FSDP2 and an optimizer of halfstep.optim: prints what it measured as JSON.

RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python tests/hf_trainer_fsdp_program.py FOLDER
"""

import json
import logging
import os
import sys

import torch
from torch import nn
from transformers import PrinterCallback, Trainer, TrainingArguments

import halfstep

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
os.environ |= {"LOCAL_RANK": os.environ["RANK"]}
NUM_STEPS, PER_RANK, LR, MAX_NORM = 4, 3, 1e-2, 0.5


class Net(nn.Module):
    """Two layers with the Trainer's signature."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 1))

    def forward(self, x, labels):
        out = self.layers(x)
        return {"loss": (out - labels).square().mean(), "logits": out}


class Sharded(Trainer):
    """Accelerate chooses FSDP on GPUs only; what it then does with model and optimizer also runs on gloo ranks."""

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        from accelerate import DistributedType
        from accelerate.utils import FullyShardedDataParallelPlugin

        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap", reshard_after_forward=True)
        self.accelerator.state.distributed_type, self.accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
        self.is_fsdp_enabled = True


def example(number):
    """One example."""
    generator = torch.Generator().manual_seed(number)
    return {"x": torch.randn(4, generator=generator), "labels": torch.randn(1, generator=generator)}


def main():
    """Train sharded by the Trainer, and the same in one process."""
    logging.getLogger("halfstep").setLevel(logging.ERROR)
    arguments = TrainingArguments(
        sys.argv[1], use_cpu=True, max_steps=NUM_STEPS, per_device_train_batch_size=PER_RANK, max_grad_norm=MAX_NORM, report_to=[],
        save_strategy="no", disable_tqdm=True, logging_strategy="no", lr_scheduler_type="constant", train_sampling_strategy="sequential",
    )  # fmt: skip
    data = [example(n) for n in range(NUM_STEPS * PER_RANK * WORLD)]
    kind = (halfstep.optim.AdamW, {"lr": LR})
    trainer = Sharded(Net(), arguments, train_dataset=data, optimizer_cls_and_kwargs=kind)
    trainer.remove_callback(PrinterCallback)  # which prints a line that starts as JSON does
    trainer.train()
    whole = Net()
    optimizer = halfstep.optim.AdamW(whole.parameters(), lr=LR, weight_decay=0.0)
    for step in range(NUM_STEPS):
        batch = data[step * PER_RANK * WORLD : (step + 1) * PER_RANK * WORLD]
        whole(**{key: torch.stack([item[key] for item in batch]) for key in batch[0]})["loss"].backward()
        nn.utils.clip_grad_norm_(whole.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    pairs = list(zip(trainer.model_wrapped.parameters(), whole.parameters(), strict=True))
    sharded = all(hasattr(a, "full_tensor") for a, _ in pairs)
    far = max(float((a.full_tensor() - b).detach().abs().max()) for a, b in pairs) if sharded else None
    print(json.dumps({"sharded": sharded, "steps": trainer.state.global_step, "far": far}), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
