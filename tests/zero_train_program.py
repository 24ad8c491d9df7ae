"""One rank of `train` with DeepSpeed configurations: runs that are killed, resumed, and moved to other backends.

RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python tests/zero_train_program.py FOLDER PORT PORT PORT

The runs that are killed are processes of their own, which need a port each.
"""

import json
import logging
import os
import shutil
import sys
import warnings
from pathlib import Path

import torch

from halfstep.backends.deepspeed.blocks import build_optimizer, build_scheduler
from halfstep.backends.group import open_group
from halfstep.backends.launch import read_launch
from halfstep.errors import SettingError
from halfstep.train import TrainConfig, train
from halfstep.train.zero_file import settings_of_file
from launch_job import make_job
from launch_program import digest

FOLDER, PORTS = Path(sys.argv[1]), sys.argv[2:]
CONFIG = {"epochs": 2, "save_every": 3, "device": "cpu", "timeout": 60}
COMMON = {
    "train_batch_size": 16,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "optimizer": {"type": "Adam", "params": {"lr": 0.02}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 12, "warmup_num_steps": 2}},
}
FILES = {
    1: {"bf16": {"enabled": True}},
    2: {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 3}},
    3: {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
}
ONE_BIT = "onebit-adam,freeze_step=3,allow_unverified=true"  # unverified outside fp16


def settings_of(stage):
    """The precision and the fields of a run with the file of a stage."""
    zero = {"stage": stage, "reduce_bucket_size": 60}
    path, own = FOLDER / f"ds-{stage}.json", FOLDER / f"ds-{stage}-{os.environ['RANK']}.json"
    own.write_text(json.dumps({**COMMON, **FILES.get(stage, FILES[3]), "zero_optimization": zero}))
    own.replace(path)  # both ranks write the same
    fields, precision = settings_of_file(path, CONFIG | {"ds_config": str(path)}, None, 2)
    return precision, fields


def run(context, stage, out, *, resume=False, **changed):
    """What one run reports."""
    precision, fields = settings_of(stage)
    config = TrainConfig(**(fields | changed | ({} if "backend" not in changed else {"ds_config": None})))
    job = make_job(
        optimizer=lambda params: build_optimizer(COMMON["optimizer"], params),
        scheduler=lambda optimizer: build_scheduler(COMMON["scheduler"], optimizer),
    )
    outcome = train(job, config, precision=precision, out=out, resume=resume, ranks=context)
    return {"steps": outcome.steps, "digest": digest(outcome), "loss": outcome.loss, "validation": outcome.validation}


def replaced(context, stage):
    """What a run with the file of a stage reports whose optimizer the command line replaces."""
    out = FOLDER / f"one-bit-{stage}"
    try:
        return run(context, stage, out, optimizer=ONE_BIT)
    except SettingError as error:
        return {"error": str(error)}


def killed(stage, port):
    """Train in a process that is killed in its ninth micro-batch; returns the signal."""
    pid = os.fork()
    if pid:
        return os.WTERMSIG(os.waitpid(pid, 0)[1])
    os.environ |= {"MASTER_PORT": port, "FAULT": "kill:0:9,kill:1:9"}
    try:
        with open_group(read_launch(), torch.device("cpu"), timeout_seconds=60) as context:
            run(context, stage, FOLDER / f"killed-{stage}")
    finally:
        os._exit(1)


def report(name, values):
    """One line of JSON."""
    print(json.dumps({"case": name, **values}), flush=True)


def main():
    """All runs of this rank."""
    warnings.simplefilter("ignore")
    logging.getLogger("halfstep").setLevel(logging.ERROR)
    for stage, port in zip(FILES, PORTS, strict=True):
        report(f"killed {stage}", {"signal": killed(stage, port)})
    with open_group(read_launch(), torch.device("cpu"), timeout_seconds=60) as context:
        for stage in FILES:
            if context.rank == 0:
                for name in ("ddp", "fsdp"):
                    shutil.copytree(FOLDER / f"killed-{stage}", FOLDER / f"{name}-{stage}")
            report(f"whole {stage}", run(context, stage, FOLDER / f"whole-{stage}"))
            report(f"resumed {stage}", run(context, stage, FOLDER / f"killed-{stage}", resume=True))
            for name in ("ddp", "fsdp"):
                moved = FOLDER / f"{name}-{stage}"
                report(f"{name} from stage {stage}", run(context, stage, moved, resume=True, backend=name))
        for name in ("ddp", "fsdp"):
            run(context, 2, FOLDER / f"from-{name}", backend=name, steps=4)
            report(f"stage 2 from {name}", run(context, 2, FOLDER / f"from-{name}", resume=True))
        for stage in (0, 2):
            report(f"one-bit {stage}", replaced(context, stage))


if __name__ == "__main__":
    main()
