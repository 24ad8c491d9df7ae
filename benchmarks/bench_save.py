"""Measures what saving costs a training run: the first save, the stall of later ones, and the steps while one is written.

    python benchmarks/bench_save.py [--model vit_l_16] [--batch 128] [--precision bf16-lean] [--saves 5] [--dir DIR] [--out FILE.md]
    python benchmarks/bench_save.py --tiny        # a small model on the CPU: shows that it runs, not how fast a GPU is

A stall is the time from a save in the background to the end of the next step, less the median time of a step. The first save
allocates (and on a GPU pins) the host memory, and is listed apart. Steps while a checkpoint is written are timed one by one
until it is on disk, with the device synchronized after each, as the reference steps are.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from halfstep.engine.engine import Engine
from halfstep.hardware.environment import environment
from halfstep.jobs.models import vit

WARM_UP = 5
MAX_STALL_SECONDS, MAX_SLOWDOWN = 0.15, 0.02  # for ViT-L/16 on an H200


def build(args):
    """An engine and a function that takes one step and waits for it."""
    torch.manual_seed(0)
    device = torch.device("cpu" if args.tiny else "cuda")
    size, classes = (16, 10) if args.tiny else (224, 1000)
    model = vit.ViT(16, 4, 32, 2, 2, num_classes=10) if args.tiny else getattr(vit, args.model)()
    model = model.to(device)
    engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-4), args.precision, max_norm=1.0)
    x = torch.randn(args.batch, 3, size, size, device=device)
    y = torch.randint(0, classes, (args.batch,), device=device)

    def step():
        with engine.forward():
            loss = F.cross_entropy(model(x), y)
        engine.backward(loss)
        engine.step()
        if device.type == "cuda":
            torch.cuda.synchronize()

    return engine, step


def seconds(function):
    """How long a call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure(args, folder):
    """Times in seconds, by name; lists where there are several."""
    engine, step = build(args)
    for _ in range(WARM_UP):
        step()
    plain = [seconds(step) for _ in range(args.steps)]
    usual = statistics.median(plain)
    calls, stalls, during, written = [], [], [], []
    for number in range(args.saves + 1):
        path = folder / f"save-{number}"
        start = time.perf_counter()
        calls.append(seconds(lambda p=path: engine.save(p, wait=False)))
        step()
        stalls.append(time.perf_counter() - start - usual)
        while engine.saver.busy:
            took = seconds(step)
            if engine.saver.busy and number:
                during.append(took)
        engine.finish_save()
        written.append(time.perf_counter() - start)
        size = sum(file.stat().st_size for file in path.iterdir())
        shutil.rmtree(path)
    blocking = seconds(lambda: engine.save(folder / "blocking"))
    engine.close()
    return {
        "plain": plain, "calls": calls, "stalls": stalls, "during": during, "written": written, "blocking": blocking, "bytes": size,
    }  # fmt: skip


def report(args, times):
    """The lines of the result."""
    usual, during = statistics.median(times["plain"]), times["during"]
    later = times["stalls"][1:]
    slowdown = statistics.median(during) / usual - 1 if during else float("nan")
    name = "small ViT on the CPU" if args.tiny else f"{args.model} at 224 pixels"
    rows = [
        ("step", f"{usual * 1e3:.2f} ms (median of {len(times['plain'])})"),
        ("checkpoint", f"{times['bytes'] / 2**30:.3f} GiB"),
        ("save that waits", f"{times['blocking']:.3f} s"),
        (
            "first save in the background",
            f"stalls {times['stalls'][0]:.3f} s, on disk after {times['written'][0]:.2f} s",
        ),
        ("later saves", f"stall {max(later):.3f} s at most, {statistics.median(later):.3f} s median of {len(later)}"),
        ("of which in the call", f"{max(times['calls'][1:]):.3f} s at most"),
        ("on disk after", f"{statistics.median(times['written'][1:]):.2f} s (median)"),
        (
            "steps while writing",
            f"{slowdown:+.1%} (median of {len(during)})" if during else "none: written within one step",
        ),
    ]
    lines = [
        f"{name}, batch {args.batch}, {args.precision}, AdamW, eager",
        "",
        f"{environment()}",
        "",
        "| | |",
        "|---|---|",
    ]
    lines += [f"| {label} | {text} |" for label, text in rows]
    if args.tiny:
        return lines
    reached = max(later) <= MAX_STALL_SECONDS and (not during or slowdown <= MAX_SLOWDOWN)
    aim = f"ViT-L/16 on an H200: stall at most {MAX_STALL_SECONDS} s, steps at most {MAX_SLOWDOWN:.0%} slower"
    return [*lines, "", f"Aim ({aim}): {'reached' if reached else 'not reached'}."]


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="vit_l_16", help="a ViT of this package")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--precision", default="bf16-lean")
    parser.add_argument("--steps", type=int, default=20, help="reference steps without a save")
    parser.add_argument("--saves", type=int, default=5, help="saves after the first")
    parser.add_argument("--dir", help="where to save; a temporary directory by default")
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU")
    parser.add_argument("--out")
    args = parser.parse_args()
    if args.tiny:
        args.batch, args.precision = 4, "fp32"
    elif not torch.cuda.is_available():
        parser.error("this needs a CUDA device; --tiny runs on the CPU")
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        text = "\n".join(report(args, measure(args, Path(folder))))
    print(text)
    if args.out:
        Path(args.out).write_text(text + "\n", encoding="ascii")


if __name__ == "__main__":
    main()
