"""1-bit Adam, 0/1 Adam and 1-bit LAMB next to DeepSpeed 0.19.6, the last release that has them: fp32, 2 gloo ranks.

    pip download --no-deps --no-binary :all: deepspeed==0.19.6 && tar xzf deepspeed-0.19.6.tar.gz
    python benchmarks/compare_onebit.py --deepspeed deepspeed-0.19.6

Both optimizers get the same gradients, for 60 to 90 steps, and the weights of all steps and ranks are compared. Two defects of
DeepSpeed are set aside where sizes need no padding: its first call builds buffers and drops the gradient, but counts as a step, so
the schedule here starts at step 1 with the second gradient. With `deepspeed_compat=True`, and in the float64 simulation of the tests,
both are reproduced, and sizes are any.

`--record FILE` writes DeepSpeed's weights at every tenth step; tests/optim/onebit/deepspeed_0196.json is such a file.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import socket
import subprocess
import sys
import types
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import onebit_simulation as simulation
from halfstep import optim
from onebit_cases import ALIGNED, COMPARED, SHAPES, gradients, start

SIMULATED = {"OneBitAdam": simulation.Adam, "ZeroOneAdam": simulation.ZeroOne, "OneBitLamb": simulation.Lamb}
PEERS = {"OneBitAdam": "adam.OnebitAdam", "ZeroOneAdam": "zoadam.ZeroOneAdam", "OneBitLamb": "lamb.OnebitLamb"}


class Packer:
    """What DeepSpeed's `compressed` backend needs on a CPU, where its own packer does not exist."""

    def load(self):
        """DeepSpeed builds its operations by this."""
        return self

    def packbits(self, buffer, size, rank):
        """Signs to bytes."""
        weights = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1])
        return ((buffer.view(-1, 8) >= 0).long() * weights).sum(1).to(torch.uint8)

    def unpackbits(self, buffer, size, rank):
        """Bytes to signs."""
        weights = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1])
        return ((buffer.long().view(-1, 1) & weights) != 0).float().mul(2).sub(1).view(-1)


def load_deepspeed(folder):
    """Import DeepSpeed from a folder and make its compressed backend run on gloo."""
    sys.path.insert(0, str(folder))
    import deepspeed

    assert Path(deepspeed.__file__).is_relative_to(Path(folder).resolve()), deepspeed.__file__
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # it would compile C++
    deepspeed.init_distributed("gloo")
    backend = importlib.import_module("deepspeed.runtime.comm.compressed")
    backend.PackbitsBuilder = Packer
    comm = backend.dist

    def all_gather(received, own, group=None):
        return comm.all_gather(received, own.reshape(1) if own.dim() == 0 else own, group=group)

    names = ("new_group", "get_world_size", "get_rank", "all_to_all_single")
    backend.dist = types.SimpleNamespace(all_gather=all_gather, **{name: getattr(comm, name) for name in names})
    return deepspeed.__version__


def run_peer(name, settings, steps, shapes):
    """DeepSpeed's weights after each call, the first of which changes nothing."""
    module, kind = PEERS[name].split(".")
    kind = getattr(importlib.import_module(f"deepspeed.runtime.fp16.onebit.{module}"), kind)
    params = [torch.nn.Parameter(w) for w in start(shapes)]
    engine = types.SimpleNamespace(mpu=None, local_rank=dist.get_rank(), enable_backward_allreduce=True)
    optimizer = kind(params, engine, comm_backend_name="compressed", **settings)
    history = []
    for step in range(steps + 1):
        grads = gradients(step, dist.get_rank(), shapes)
        if engine.enable_backward_allreduce:
            for grad in grads:
                dist.all_reduce(grad)
                grad.div_(dist.get_world_size())
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        optimizer.step()
        history.append([p.detach().clone() for p in params])
    return history[1:]


def run_own(name, settings, steps, shapes, *, compat):
    """Halfstep's weights: with DeepSpeed's defects, or with the gradients from the second on, counting from step 1."""
    params = [torch.nn.Parameter(w) for w in start(shapes)]
    optimizer = getattr(optim, name)(params, allow_unverified=True, deepspeed_compat=compat, **settings)
    if not compat:
        optimizer.schedule = dataclasses.replace(optimizer.schedule, step=1)
    history = []
    for step in range(0 if compat else 1, steps + 1):
        for param, grad in zip(params, gradients(step, dist.get_rank(), shapes), strict=True):
            param.grad = grad
        optimizer.step()
        history.append([p.detach().clone() for p in params])
    return history[-steps:]


def run_simulation(name, settings, steps, shapes):
    """This rank's weights in the float64 simulation, with DeepSpeed's padding."""
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    weights = [w.numpy() for w in start(shapes)]
    model = SIMULATED[name](weights, num_ranks, simulation.Settings(**settings), padded=True, first_step=1)
    history = []
    for step in range(1, steps + 1):
        model.step([[g.double().numpy().reshape(-1) for g in gradients(step, r, shapes)] for r in range(num_ranks)])
        history.append([torch.from_numpy(p.copy()).reshape(s) for p, s in zip(model.p[rank], shapes, strict=True)])
    return history


def largest(a, b):
    """The largest difference between two histories, over all ranks."""
    difference = torch.stack(
        [(x.double() - y.double()).abs().max() for s, t in zip(a, b, strict=True) for x, y in zip(s, t, strict=True)]
    )
    worst = difference.max()
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.item()


def rank_main(arguments):
    """Run all comparisons on this rank; rank 0 prints and records."""
    version = load_deepspeed(arguments.deepspeed)
    results, recorded = {}, {}
    for name, (settings, steps) in COMPARED.items():
        peer = run_peer(name, settings, steps, ALIGNED)
        padded = run_peer(name, settings, steps, SHAPES)
        results[name] = {
            "steps": steps,
            "no padding": largest(peer, run_own(name, settings, steps, ALIGNED, compat=False)),
            "no padding, deepspeed_compat": largest(peer, run_own(name, settings, steps, ALIGNED, compat=True)),
            "padding, deepspeed_compat": largest(padded, run_own(name, settings, steps, SHAPES, compat=True)),
            "padding, float64 simulation": largest(padded, run_simulation(name, settings, steps, SHAPES)),
        }
        recorded[name] = {
            str(i + 1): [[float(f"{x:.9g}") for x in p.reshape(-1).tolist()] for p in padded[i]]
            for i in range(9, steps, 10)
        }
    if dist.get_rank() == 0:
        print(
            json.dumps(
                {"deepspeed": version, "torch": torch.__version__, "largest difference of a weight": results}, indent=1
            )
        )
        if arguments.record:
            Path(arguments.record).write_text(json.dumps({"deepspeed": version, "weights of rank 0 by step": recorded}))
    dist.destroy_process_group()


def main():
    """Start two ranks of this program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--deepspeed", required=True, type=Path, help="folder with the unpacked sources of DeepSpeed 0.19.6"
    )
    parser.add_argument("--record", help="file for DeepSpeed's weights at every tenth step")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        rank_main(arguments)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "DS_ACCELERATOR": "cpu",
    }
    ranks = [
        subprocess.Popen([sys.executable, *sys.argv], env=variables | {"RANK": str(r), "LOCAL_RANK": str(r)})
        for r in range(2)
    ]
    sys.exit(max(rank.wait() for rank in ranks))


if __name__ == "__main__":
    main()
