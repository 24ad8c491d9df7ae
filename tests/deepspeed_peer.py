"""Runs DeepSpeed itself on one CPU rank and prints what a weight's gradient became; a program for the peer tests."""

import importlib
import json
import os
import sys

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator


def run(precision, window, accumulate, steps):
    """The true gradient is 1 at every step; what DeepSpeed's SGD with lr 1 applied, step by step."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[2])
    importlib.import_module("deepspeed.comm.torch")
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # needs a C++ compiler, and is not used here
    # DeepSpeed refuses fp16 on CPUs whose oneDNN has no fp16 products; there are none here, and torch computes the rest anywhere.
    get_accelerator().is_fp16_supported = lambda: True

    class One(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(8))

        def forward(self):
            return self.w.sum()

    model = One()
    block = {"enabled": True}
    if precision == "fp16":
        block |= {"initial_scale_power": 4, "loss_scale_window": window, "hysteresis": 1}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulate,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        precision: block,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), config=config)
    applied, last = [], 0.0
    for _ in range(steps):
        for _ in range(accumulate):
            engine.backward(engine())
            engine.step()
        now = float(engine.optimizer.single_partition_of_fp32_groups[0][0])
        applied.append(round(last - now, 6))
        last = now
    return applied


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1], 3, int(sys.argv[3]), int(sys.argv[4]))))
