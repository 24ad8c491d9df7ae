"""Times the optimizer step, finite check, unscale and clip included, against stock torch in the same run.

    python benchmarks/bench_step.py [--model vit_l_16] [--loop] [--out FILE.md]

The gradients are synthetic and stay on the device, so only the step is timed. With --loop, whole training steps of the
model are timed too: Halfstep's Engine against a hand-written torch AMP loop. Needs a CUDA device.
"""

import argparse
import statistics
import time

import torch
import torch.nn.functional as F

import halfstep
from halfstep.engine import Engine
from halfstep.environment import environment
from halfstep.models import vit
from halfstep.scaler import LossScaler
from halfstep.steps import choose_path, decide, take_step


def timed(function, *, rounds, per_round=10):
    """Median and spread of a call's device time in milliseconds."""
    for _ in range(5):
        function()
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(per_round):
            function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / per_round)
    return statistics.median(times), min(times), max(times)


def copy_bandwidth():
    """Measured bytes per second of a device-to-device copy."""
    a = torch.empty(1 << 28, dtype=torch.float32, device="cuda")
    b = torch.empty_like(a)
    ms, _, _ = timed(lambda: b.copy_(a), rounds=10)
    return 2 * a.numel() * 4 / ms * 1e3


def fresh(shapes):
    """Parameters with gradients."""
    params = [torch.nn.Parameter(torch.randn(s, device="cuda") * 0.02) for s in shapes]
    for p in params:
        p.grad = torch.randn_like(p) * 1e-3
    return params


def stock(params, *, fused):
    """torch AMP as the documentation writes it: unscale_, clip_grad_norm_, step, update."""
    optimizer = torch.optim.AdamW(params, lr=1e-4, fused=fused, foreach=not fused)
    scaler = torch.amp.GradScaler("cuda", init_scale=1.0, growth_interval=10**9)
    scaler.scale(torch.ones((), device="cuda"))

    def step():
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(params, 1e9)
        scaler.step(optimizer)
        scaler.update()

    return step


def ours(params):
    """Path 2: torch's fused AdamW with unscale, clip and skip folded in."""
    holder = torch.nn.ParameterList(params)
    path = choose_path(torch.optim.AdamW(holder.parameters(), lr=1e-4), holder)
    assert path.kind == "fused", path
    scaler = LossScaler(init_scale=1.0, growth_interval=10**9)
    device = params[0].device
    grads = [p.grad for p in params]

    def step():
        decision = decide(grads, scaler.scale_on(device) * 1.0, 1e9, lambda flag: flag)
        take_step([path], decision, divides=True)
        scaler.advance(decision.found_inf)

    return step


def bench_steps(shapes, rounds):
    """One row per implementation: name, bytes moved per parameter, median, min, max."""
    rows = []
    for name, moved, make in (
        ("torch AMP: unscale_, clip, foreach AdamW (torch's default)", 100, lambda p: stock(p, fused=False)),
        ("torch AMP: unscale_, clip, fused AdamW", 48, lambda p: stock(p, fused=True)),
        ("Halfstep path 2: torch's fused AdamW", 36, ours),
    ):
        params = fresh(shapes)
        rows.append((name, moved, *timed(make(params), rounds=rounds)))
        del params
        torch.cuda.empty_cache()
    return rows


def loop_rate(make, batch, steps, image_size):
    """Images per second and peak GiB of a training loop."""
    torch.manual_seed(0)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step = make()
    x = torch.randn(batch, 3, image_size, image_size, device="cuda")
    y = torch.randint(0, 1000, (batch,), device="cuda")
    for _ in range(5):
        step(x, y)
    rates = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            step(x, y)
        torch.cuda.synchronize()
        rates.append(batch * steps / (time.perf_counter() - start))
    return statistics.median(rates), min(rates), max(rates), torch.cuda.max_memory_allocated() / 2**30


def hand_written(build, dtype):
    """The AMP loop people write."""

    def make():
        model = build().cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        scaler = torch.amp.GradScaler("cuda", enabled=dtype is torch.float16)

        def step(x, y):
            with torch.autocast("cuda", dtype=dtype):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)

        return step

    return make


def engine_loop(build, precision):
    """The same with the Engine."""

    def make():
        model = build().cuda()
        engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-4), precision, max_norm=1.0)

        def step(x, y):
            with engine.forward():
                loss = F.cross_entropy(model(x), y)
            engine.backward(loss)
            engine.step()

        return step

    return make


def main():
    """Run, print and optionally write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="vit_l_16")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--loop", action="store_true")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--out")
    args = parser.parse_args()
    build = getattr(vit, args.model)
    with torch.device("meta"):
        shapes = [tuple(p.shape) for p in build().parameters()]
    count = sum(torch.Size(s).numel() for s in shapes)
    bandwidth = copy_bandwidth()
    lines = [
        f"# Optimizer step, {args.model}: {count / 1e6:.1f} M parameters in {len(shapes)} tensors",
        "",
        f"halfstep {halfstep.__version__}; {environment()}",
        f"copy bandwidth {bandwidth / 1e9:.0f} GB/s; device time of one step, median (min to max) of {args.rounds} rounds of 10",
        "",
        "| implementation | bytes/param moved | floor ms | ms | share of copy bandwidth |",
        "|---|---|---|---|---|",
    ]
    for name, moved, median, low, high in bench_steps(shapes, args.rounds):
        floor = moved * count / bandwidth * 1e3
        lines.append(
            f"| {name} | {moved} | {floor:.2f} | {median:.3f} ({low:.3f} to {high:.3f}) | {floor / median:.0%} |"
        )
    if args.loop:
        lines += [
            "",
            f"Whole step at 224 pixels, batch {args.batch}, AdamW, clip 1.0, eager; median (min to max) of 5 rounds",
            "",
        ]
        lines += ["| loop | images/s | peak GiB |", "|---|---|---|"]
        cases = [
            ("torch AMP bf16, by hand, fused AdamW", hand_written(build, torch.bfloat16)),
            ("Halfstep bf16", engine_loop(build, "bf16")),
            ("torch AMP fp16, by hand, fused AdamW", hand_written(build, torch.float16)),
            ("Halfstep fp16", engine_loop(build, "fp16")),
        ]
        for name, make in cases:
            median, low, high, peak = loop_rate(make, args.batch, 10, 224)
            lines.append(f"| {name} | {median:.0f} ({low:.0f} to {high:.0f}) | {peak:.1f} |")
    text = "\n".join(lines)
    print(text)
    if args.out:
        with open(args.out, "w") as file:  # noqa: PTH123
            file.write(text + "\n")


if __name__ == "__main__":
    main()
