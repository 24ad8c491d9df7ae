"""Practice 1 of the course, solved: time and peak memory of the same training in fp32 and under bf16 autocast.

On a GPU it prints what `torch.cuda.max_memory_allocated` reports; without one it prints times only, because torch counts no memory of a
CPU. Run it with `python examples/memory_practice.py`, on a GPU with `--width 2048 --depth 12 --batch 8192 --steps 20`, and grade it with
`halfstep learn practice 1 examples/memory_practice.py`. The grader hides a GPU and runs on the CPU, so it is the script that measures one.
"""

import argparse
import time
import warnings

import torch
from torch import nn

# A CPU without bf16 arithmetic prints pages of C++ frames.
warnings.filterwarnings("ignore", message="mkldnn", category=UserWarning)
device = "cuda" if torch.cuda.is_available() else "cpu"
parser = argparse.ArgumentParser()
for option, default in {"width": 64, "depth": 3, "batch": 64, "steps": 5}.items():
    parser.add_argument(f"--{option}", type=int, default=default)
args = parser.parse_args()


def make_model() -> nn.Module:
    """The same weights in both modes."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(args.width, args.width), nn.GELU()) for _ in range(args.depth)]
    return nn.Sequential(*blocks, nn.Linear(args.width, 10)).to(device)


def wait() -> None:
    """A GPU works in the background: the clock is read when it has finished."""
    if device == "cuda":
        torch.cuda.synchronize()


def train(mixed: bool) -> tuple[float, float]:
    """Milliseconds of a step and the peak memory in MiB."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x, y = torch.randn(args.batch, args.width, device=device), torch.randint(10, (args.batch,), device=device)
    start = 0.0
    for step in range(args.steps + 2):
        if step == 2:  # the first steps allocate optimizer states and choose kernels
            wait()
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=mixed):
            loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    wait()
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return (time.perf_counter() - start) / args.steps * 1000, peak / 2**20


if __name__ == "__main__":
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}: {args.depth} layers of width {args.width}, batch {args.batch}, AdamW")
    results = {"fp32": train(mixed=False), "bf16 autocast": train(mixed=True)}
    for mode, (milliseconds, peak) in results.items():
        memory = f"max_memory_allocated {peak:9.1f} MiB" if device == "cuda" else "memory not counted"
        print(f"{mode:14} {milliseconds:9.2f} ms per step, {memory}")
    (slow, large), (fast, small) = results.values()
    ratio = f", memory {small / large:.2f}x" if large else ""
    print(f"bf16 autocast against fp32: speed {slow / fast:.2f}x{ratio}")
