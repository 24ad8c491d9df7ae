"""Bytes and seconds per step over a limited network: the compressed optimizers next to DDP in fp32 and torch's communication hooks.

    python benchmarks/bench_wire.py [--ranks 2 4] [--rate 100mbit 1gbit none] [--row NAME ...] [--steps 4] [--json FILE]
    python benchmarks/bench_wire.py --tiny       a small model over loopback, without namespaces; its times mean nothing

Each rank is a process in a network namespace of its own (root is needed), connected by veth pairs to a bridge in another one. `tc` limits both
directions of every link with a token bucket, so that gloo's sockets see the bandwidth of an Ethernet. `none` leaves the links as fast as
the kernel copies. Bytes are those that the kernel counted on the rank's own interface, headers included. CPU seconds are those of rank 0's
process; they show what a step computes where other programs use the machine at the same time.

The model is ViT-S/16 (22 M parameters) on 32 x 32 images, four to a batch: little compute for its parameters, so that the network is
what is measured. Every row trains the same batches in fp32 from the same weights; compressed rows are timed after their freeze step, and PowerSGD
once it has started. The loss is that of the fixed batches after the same number of steps for all rows but 0/1 Adam, whose cycle of 16
local steps is timed as a whole.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from halfstep import Engine
from halfstep.jobs.models.vit import ViT
from halfstep.optim import OneBitAdam, OneBitLamb, ZeroOneAdam

LR, BETAS, WARM, CYCLE = 1e-4, (0.9, 0.99), 2, 16
IMAGE, BATCH, CLASSES, NUM_BATCHES = 32, 4, 1000, 2
HUB, LINK = "hswire-hub", "hswire"
Step = Callable[[int], float]


def _model(*, tiny: bool) -> nn.Module:
    torch.manual_seed(0)
    size = {"dim": 32, "depth": 1, "heads": 2} if tiny else {"dim": 384, "depth": 12, "heads": 6}
    return ViT(image_size=IMAGE, patch=16, num_classes=CLASSES, **size)


def _batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(1000 * (step % NUM_BATCHES) + rank)
    return torch.randn(BATCH, 3, IMAGE, IMAGE, generator=source), torch.randint(CLASSES, (BATCH,), generator=source)


def _ddp(
    hook: Callable[[nn.parallel.DistributedDataParallel], None], bucket_mb: int | None = None
) -> Callable[[nn.Module], Step]:
    def build(model: nn.Module) -> Step:
        wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=bucket_mb)
        hook(wrapped)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=0, fused=True)

        def step(number: int) -> float:
            x, y = _batch(number, dist.get_rank())
            loss = F.cross_entropy(wrapped(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.item()

        return step

    return build


def _powersgd(wrapped: nn.parallel.DistributedDataParallel) -> None:
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=WARM)
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def _bf16_hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations, which are text in this file
    """torch's own under another name: by its name DDP rejects it without NCCL, although gloo sums bf16."""
    return default_hooks.bf16_compress_hook(state, bucket)


def _engine(kind: Any, **settings: Any) -> Callable[[nn.Module], Step]:
    def build(model: nn.Module) -> Step:
        optimizer = kind(model.parameters(), lr=LR, betas=BETAS, allow_unverified=True, **settings)
        engine = Engine(model, optimizer, "fp32", backend="ddp")

        def step(number: int) -> float:
            x, y = _batch(number, dist.get_rank())
            with engine.forward():
                loss = F.cross_entropy(model(x), y)
            engine.backward(loss)
            engine.step()
            return loss.item()

        return step

    return build


ROWS: dict[str, Callable[[nn.Module], Step]] = {
    "ddp fp32": _ddp(lambda _: None),
    "ddp fp16 hook": _ddp(lambda wrapped: wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)),
    "ddp bf16 hook": _ddp(lambda wrapped: wrapped.register_comm_hook(None, _bf16_hook)),
    # One bucket: the hook sends from callbacks, whose order over several buckets differs between ranks, and gloo then fails.
    "ddp PowerSGD": _ddp(_powersgd, bucket_mb=1000),
    "1-bit Adam": _engine(OneBitAdam, freeze_step=WARM, bias_correction=True),
    "1-bit LAMB": _engine(OneBitLamb, freeze_step=WARM),
    "0/1 Adam": _engine(
        ZeroOneAdam, var_freeze_step=WARM - 1, local_step_scaler=1, local_step_clipper=CYCLE, bias_correction=True
    ),
}


# --- one rank -----------------------------------------------------------------------------------------------------------


def _sent(interface: str) -> int:
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


def _measure(build: Callable[[nn.Module], Step], *, num_steps: int, skipped: int, interface: str, tiny: bool) -> Any:
    model = _model(tiny=tiny)
    step = build(model)
    for number in range(WARM + skipped):
        step(number)
    dist.barrier()
    before, started, used = _sent(interface), time.perf_counter(), time.process_time()
    losses = [step(WARM + skipped + number) for number in range(num_steps)]
    dist.barrier()
    seconds, sent = time.perf_counter() - started, _sent(interface) - before
    cpu_seconds = time.process_time() - used
    x, y = _batch(0, dist.get_rank())
    with torch.no_grad():
        loss = F.cross_entropy(model(x), y)
    dist.all_reduce(loss)
    return {
        "seconds": seconds / num_steps,
        "cpu_seconds": cpu_seconds / num_steps,
        "bytes": sent / num_steps,
        "loss": loss.item() / dist.get_world_size(),
        "train_loss": losses[-1],
    }


def _compute_seconds(*, tiny: bool) -> float:
    """Forward and backward alone, all ranks at once as in a step."""
    model = _model(tiny=tiny)
    times = []
    for number in range(4):
        dist.barrier()
        started = time.perf_counter()
        x, y = _batch(number, dist.get_rank())
        F.cross_entropy(model(x), y).backward()
        times.append(time.perf_counter() - started)
    return min(times[1:])


def run_rank(args: argparse.Namespace) -> None:
    """Measure all rows on this rank; rank 0 prints a line of JSON for each."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=dt.timedelta(seconds=600))
    compute = _compute_seconds(tiny=args.tiny)
    for name in args.row:
        local = name == "0/1 Adam"
        result = _measure(
            ROWS[name],
            num_steps=CYCLE if local else args.steps,
            skipped=CYCLE - WARM if local else 0,  # up to a synchronization at the full interval
            interface=args.interface,
            tiny=args.tiny,
        )
        if dist.get_rank() == 0:
            params = sum(p.numel() for p in _model(tiny=args.tiny).parameters())
            print(json.dumps({"row": name, "compute": compute, "params": params} | result), flush=True)
    dist.destroy_process_group()


# --- the network --------------------------------------------------------------------------------------------------------


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextlib.contextmanager
def _network(num_ranks: int, rate: str) -> Iterator[None]:
    """Namespaces hswire0, hswire1, ... with the addresses 10.77.0.1, ..., each link limited to `rate` in both directions."""
    spaces = [HUB, *(f"{LINK}{rank}" for rank in range(num_ranks))]
    try:
        for space in spaces:
            _ip("netns", "add", space)
            _ip("-n", space, "link", "set", "lo", "up")
        _ip("-n", HUB, "link", "add", "bridge", "type", "bridge")
        _ip("-n", HUB, "link", "set", "bridge", "up")
        for rank in range(num_ranks):
            space, port = f"{LINK}{rank}", f"port{rank}"
            _ip("-n", HUB, "link", "add", port, "type", "veth", "peer", "name", "wire", "netns", space)
            _ip("-n", HUB, "link", "set", port, "master", "bridge", "up")
            _ip("-n", space, "addr", "add", f"10.77.0.{rank + 1}/24", "dev", "wire")
            _ip("-n", space, "link", "set", "wire", "up")
            for owner, device in ((HUB, port), (space, "wire")):
                if rate != "none":
                    limit = ["tbf", "rate", rate, "burst", "256kb", "latency", "100ms"]
                    subprocess.run(["tc", "-n", owner, "qdisc", "add", "dev", device, "root", *limit], check=True)
        yield
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], check=False, stderr=subprocess.DEVNULL)


def _launch(args: argparse.Namespace, num_ranks: int) -> list[dict[str, Any]]:
    """The results of one setting, in the order of the rows."""
    processes = []
    own = [sys.executable, str(Path(__file__).resolve()), "--steps", str(args.steps), "--row", *args.row]
    for rank in range(num_ranks):
        place = ["lo", "127.0.0.1"] if args.tiny else ["wire", "10.77.0.1"]
        enter = [] if args.tiny else ["ip", "netns", "exec", f"{LINK}{rank}"]
        ranks = {
            "RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": place[1],
            "MASTER_PORT": str(args.port),
        }
        environment = os.environ | ranks | {"GLOO_SOCKET_IFNAME": place[0], "OMP_NUM_THREADS": "1"}
        command = [*enter, *own, "--interface", place[0], *(["--tiny"] if args.tiny else [])]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    try:
        texts = [process.communicate(timeout=1800)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        print(texts[0], file=sys.stderr)  # the rows before the failure
        raise RuntimeError(f"A rank failed: exit codes {[process.returncode for process in processes]}.")
    return [json.loads(line) for line in texts[0].splitlines() if line.startswith("{")]


def _table(results: list[dict[str, Any]]) -> str:
    base = next((r["seconds"] for r in results if r["row"] == "ddp fp32"), None)
    lines = [
        "| row | MB sent per step | s per step | times ddp fp32 | CPU s per step | loss |",
        "|---|---|---|---|---|---|",
    ]
    for r in results:
        ratio = f"{base / r['seconds']:.2f}" if base else "-"
        lines.append(
            f"| {r['row']} | {r['bytes'] / 1e6:.3g} | {r['seconds']:.2f} | {ratio} | {r['cpu_seconds']:.2f} | {r['loss']:.3f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Start the ranks of every setting and print a table for each; with --interface, be one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rate", nargs="+", default=["100mbit", "1gbit", "none"])
    parser.add_argument("--row", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--port", type=int, default=29_400)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--interface", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.interface:
        run_rank(args)
        return
    collected = []
    for num_ranks in args.ranks:
        for rate in ["none"] if args.tiny else args.rate:
            with contextlib.nullcontext() if args.tiny else _network(num_ranks, rate):
                results = _launch(args, num_ranks)
            collected.append({"ranks": num_ranks, "rate": rate, "rows": results})
            first = results[0]
            print(
                f"\n{num_ranks} ranks, {rate}: {first['params']:,} parameters, {BATCH} images per rank, forward and backward "
                f"{first['compute']:.2f} s\n\n{_table(results)}",
                flush=True,
            )
            if args.json:
                args.json.write_text(json.dumps(collected, indent=1) + "\n")


if __name__ == "__main__":
    main()
