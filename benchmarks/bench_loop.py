"""Times whole training steps with only a loop and a clock, to check the results of `halfstep compare`.

    python benchmarks/bench_loop.py [--model vit_l_16] [--batch 128] [--steps 16] [--compile [MODE]] [--only TEXT ...] [--out FILE.md]

Each loop runs in a separate process, one after the other, as in `compare`; a GPU that has been busy for minutes runs at
lower clocks. The torch AMP loop is that of its documentation, with a fused AdamW. Needs a CUDA device.
"""

import argparse
import json
import subprocess
import sys
import time

import torch
import torch.nn.functional as F

from halfstep.engine.compiling import compile_model, parse_compile
from halfstep.engine.engine import Engine
from halfstep.hardware.environment import environment
from halfstep.jobs.models import vit

WARM_UP = 4
CASES = {
    "fp32, by hand": ("hand", torch.float32),
    "tf32, by hand": ("hand", "tf32"),
    "torch AMP bf16, by hand": ("hand", torch.bfloat16),
    "torch AMP fp16, by hand": ("hand", torch.float16),
    "Halfstep bf16": ("engine", "bf16"),
    "Halfstep fp16": ("engine", "fp16"),
    "Halfstep bf16-lean": ("engine", "bf16-lean"),
    "Halfstep bf16-lean, 8-bit moments": ("engine", "bf16-lean,states=8bit"),
}


def hand_written(model, dtype):
    """The loop people write; without autocast and scaler for fp32 and tf32."""
    if dtype == "tf32":
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32, dtype = True, torch.float32
    else:
        torch.backends.cudnn.allow_tf32 = False
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype is torch.float16)

    def step(x, y):
        with torch.autocast("cuda", dtype=dtype, enabled=dtype is not torch.float32):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return step


def engine_loop(model, precision, *, compiled):
    """The same with the Engine."""
    engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-4), precision, max_norm=1.0, compile=compiled)

    def step(x, y):
        with engine.forward():
            loss = F.cross_entropy(model(x), y)
        engine.backward(loss)
        engine.step()

    return step


def time_one(name, args):
    """Images per second over all steps after the warm-up, and peak GiB."""
    torch.manual_seed(0)
    kind, how = CASES[name]
    model = getattr(vit, args.model)().cuda()
    if kind == "hand":
        compile_model(model, args.compile)
        step = hand_written(model, how)
    else:
        step = engine_loop(model, how, compiled=args.compile)
    x = torch.randn(args.batch, 3, 224, 224, device="cuda")
    y = torch.randint(0, 1000, (args.batch,), device="cuda")
    for _ in range(WARM_UP):
        step(x, y)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(args.steps):
        step(x, y)
    torch.cuda.synchronize()
    rate = args.batch * args.steps / (time.perf_counter() - start)
    return {"images_per_s": rate, "peak_gib": torch.cuda.max_memory_allocated() / 2**30}


def main():
    """Run every loop in a separate process and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="vit_l_16", help="a ViT of this package")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument(
        "--compile",
        nargs="?",
        type=parse_compile,
        const=True,
        default=False,
        metavar="MODE",
        help="compile the model, optionally with a mode of torch.compile",
    )
    parser.add_argument("--only", action="append", help="run only the loops whose name contains one of these texts")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)  # for the child process
    parser.add_argument("--out")
    args = parser.parse_args()
    if args.case:
        print(json.dumps(time_one(args.case, args)))
        return
    how = f"compiled ({args.compile})" if isinstance(args.compile, str) else "compiled" if args.compile else "eager"
    lines = [
        f"{args.model} at 224 pixels, batch {args.batch}, {how}, AdamW, clip 1.0; {args.steps} steps after {WARM_UP}, timed as a whole",
        "", f"{environment()}", "", "| loop | images/s | peak GiB |", "|---|---|---|",
    ]  # fmt: skip
    for name in CASES:
        if args.only and not any(text in name for text in args.only):
            continue
        done = subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], "--case", name], check=False, capture_output=True, text=True
        )
        if done.returncode:
            lines.append(f"| {name} | did not run: {(done.stderr.strip().splitlines() or ['no message'])[-1]} | |")
        else:
            result = json.loads(done.stdout.splitlines()[-1])
            lines.append(f"| {name} | {result['images_per_s']:.0f} | {result['peak_gib']:.2f} |")
        print(lines[-1], flush=True)
    text = "\n".join(lines)
    print(text)
    if args.out:
        with open(args.out, "w") as file:  # noqa: PTH123
            file.write(text + "\n")


if __name__ == "__main__":
    main()
