"""`halfstep train` under torchrun, and the result that it leaves."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from halfstep.checkpoint.directory import load_checkpoint
from halfstep.checkpoint.retention import CheckpointFolder

TESTS = Path(__file__).resolve().parent


DDP = ("-p", "fp32", "--backend", "ddp", "--batch", 8)


def torchrun(out, *options, fault="", ranks=2, restarts=0, timeout=300, backend=DDP):
    """The exit code and the output of `halfstep train` under torchrun, with the settings of the other runs."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", ranks, "--max-restarts", restarts]
    command += ["-m", "halfstep", "train", TESTS / "launch_job.py", "--out", out, *backend]
    command += ["--epochs", 2, "--set", "save_every=3", "--set", "watch=off", "--set", "device=cpu"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "FAULT": fault or "none:0:0"}
    process = subprocess.run(
        list(map(str, (*command, *options))),
        check=False,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    return process.returncode, process.stdout


def digest_of(out):
    """A hash of the weights of the latest checkpoint."""
    weights = load_checkpoint(CheckpointFolder(out / "checkpoints").latest()).weights
    return hashlib.sha256(b"".join(weights[name].float().numpy().tobytes() for name in sorted(weights))).hexdigest()
