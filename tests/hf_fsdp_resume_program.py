"""One rank of Accelerate's FSDP2 checkpoints with a loss scaler (accelerate#4289), and of the Engine's: prints the scalers' states.

RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python tests/hf_fsdp_resume_program.py FOLDER
"""

import json
import logging
import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn

import halfstep
from halfstep.optim.shards import local

os.environ |= {"LOCAL_RANK": os.environ["RANK"], "ACCELERATE_USE_CPU": "true"}
FOLDER = Path(sys.argv[1])


def build():
    """A model of two layers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 1))


def sharded(make, scaler):
    """An Accelerator with a sharded model, its optimizer and a scaler."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="no_wrap", reshard_after_forward=True, state_dict_type="SHARDED_STATE_DICT"
    )
    accelerator = Accelerator(fsdp_plugin=plugin, cpu=True)
    # Accelerate chooses FSDP and a scaler on GPUs only; its checkpoints are the same on gloo ranks.
    accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    accelerator.scaler = scaler
    model = build()
    prepared = accelerator.prepare(model, make(model.parameters()))
    accelerator.state.distributed_type = DistributedType.FSDP  # the wrapper of the optimizer has detected it again
    return accelerator, *prepared


def trained(model, optimizer):
    """Copies of this rank's weights and moments."""
    own = optimizer.optimizer.state
    moments = [value for param in model.parameters() for _, value in sorted(own[param].items())]
    return [local(t).detach().clone() for t in (*model.parameters(), *moments)]


def resumed(make, name):
    """The scaler's state as it was saved, and as a new process has it after load_state()."""
    accelerator, model, optimizer = sharded(make, torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3))
    for _ in range(2):
        accelerator.backward(model(torch.ones(2, 4)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(str(FOLDER / name))
    saved, before = accelerator.scaler.state_dict(), trained(model, optimizer)
    accelerator.free_memory()
    again, model, optimizer = sharded(make, torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3))
    again.load_state(str(FOLDER / name))
    same = [torch.equal(a, b) for a, b in zip(before, trained(model, optimizer), strict=True)]
    return {"saved": saved, "loaded": again.scaler.state_dict(), "equal": all(same), "tensors": len(same)}


def engine():
    """A model under the Engine."""
    model = build()
    scaler = halfstep.LossScaler(init_scale=1024.0, growth_interval=3)
    return model, halfstep.Engine(model, torch.optim.AdamW(model.parameters()), "fp16", scaler=scaler, backend="fsdp")


def engine_resumed():
    """The same of the Engine."""
    model, first = engine()
    for _ in range(2):
        with first.forward():
            loss = model(torch.ones(2, 4)).square().mean()
        first.backward(loss)
        first.step()
    path = first.save(FOLDER / "engine")
    saved = first.scaler.state_dict()
    _, second = engine()
    second.load(path)
    return {"saved": saved, "loaded": second.scaler.state_dict()}


def main():
    """Print the states of the stock library, of it with an optimizer of halfstep.optim, and of the Engine."""
    logging.getLogger("halfstep").setLevel(logging.ERROR)
    report = {
        "stock": resumed(lambda p: torch.optim.AdamW(p, lr=1e-2), "stock"),
        "optim": resumed(lambda p: halfstep.optim.AdamW(p, lr=1e-2), "optim"),
        "engine": engine_resumed(),
    }
    print(json.dumps(report), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
