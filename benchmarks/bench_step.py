"""Times the optimizer step, finite check, unscale and clip included, against the peers that are installed.

    python benchmarks/bench_step.py [--model vit_l_16 | gpt_1b] [--out FILE.md]

The gradients are synthetic and stay on the device, so only the step is timed; `bench_loop.py` times whole training steps.
Needs a CUDA device.
"""

import argparse
import gc
import statistics

import torch

import halfstep
from halfstep.backends import SingleDevice
from halfstep.engine.steps import choose_path, decide, take_step
from halfstep.hardware.environment import environment
from halfstep.jobs.models import vit
from halfstep.scaling.scaler import LossScaler


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


def fresh(shapes, dtype):
    """Parameters with gradients."""
    params = [torch.nn.Parameter((torch.randn(s, device="cuda") * 0.02).to(dtype)) for s in shapes]
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


def ours(params, optimizer):
    """Halfstep's step as the Engine takes it: finite check, unscale, clip, update, loss scale."""
    holder = torch.nn.ParameterList(params)
    path = choose_path(optimizer, holder)
    scaler = LossScaler(init_scale=1.0, growth_interval=10**9)
    device = params[0].device
    grads, tables, backend = [p.grad for p in params], {}, SingleDevice()

    def step():
        decision = decide(grads, scaler.scale_on(device), 1e9, backend, tables)
        take_step([path], decision, backend, divides=True)
        scaler.advance(decision.found_inf)

    return step


def o2_by_hand(params):
    """fp32 masters next to bf16 weights, managed by hand as Apex O2 users wrote it."""
    masters = [p.detach().float() for p in params]
    optimizer = torch.optim.AdamW(masters, lr=1e-4, fused=True)

    def step():
        for master, param in zip(masters, params, strict=True):
            master.grad = param.grad.float()
        torch.nn.utils.clip_grad_norm_(masters, 1e9)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(params, masters)

    return step


def flashoptim(params, bits):
    """FlashOptim with a master of 24 or 32 bits, clipped by torch."""
    from flashoptim import FlashAdamW

    optimizer = FlashAdamW(params, lr=1e-4, master_weight_bits=bits)

    def step():
        torch.nn.utils.clip_grad_norm_(params, 1e9)
        optimizer.step()

    return step


def torchao_8bit(params):
    """torchao's 8-bit AdamW on bf16 weights with stochastic rounding, no master, clipped by torch."""
    from torchao.optim import AdamW8bit

    optimizer = AdamW8bit(params, lr=1e-4, bf16_stochastic_round=True)

    def step():
        torch.nn.utils.clip_grad_norm_(params, 1e9)
        optimizer.step()

    return step


FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
# name, dtype of weights and gradients, bytes moved per parameter (None: not known), how to build
CASES = (
    ("torch AMP: unscale_, clip, foreach AdamW (torch's default)", FP32, 100, lambda p: stock(p, fused=False)),
    ("torch AMP: unscale_, clip, fused AdamW", FP32, 48, lambda p: stock(p, fused=True)),
    ("Halfstep path 2: torch's fused AdamW", FP32, 36, lambda p: ours(p, torch.optim.AdamW(p, lr=1e-4))),
    ("Halfstep fp32 weights", FP32, 32, lambda p: ours(p, lean(p, "none", "fp32"))),
    ("O2 by hand: bf16 weights, fp32 masters, fused AdamW", BF16, None, o2_by_hand),
    ("Halfstep bf16-lean", BF16, 28, lambda p: ours(p, lean(p, "split", "fp32"))),
    ("Halfstep fp16-lean", FP16, 28, lambda p: ours(p, lean(p, "split", "fp32"))),
    ("FlashOptim, 24-bit master, 8-bit moments", BF16, None, lambda p: flashoptim(p, 24)),
    ("FlashOptim, 32-bit master, 8-bit moments", BF16, None, lambda p: flashoptim(p, 32)),
    ("torchao 8-bit AdamW, no master", BF16, None, torchao_8bit),
    ("Halfstep bf16-lean, 8-bit moments", BF16, 16.1, lambda p: ours(p, lean(p, "split", "8bit"))),
    ("Halfstep fp16-lean, 8-bit moments", FP16, 16.1, lambda p: ours(p, lean(p, "split", "8bit"))),
)


def lean(params, master, states):
    """halfstep.optim.AdamW in one layout."""
    return halfstep.optim.AdamW(params, lr=1e-4, master=master, states=states)


def bench_steps(shapes, rounds, count, only):
    """One row per implementation: name, bytes moved, median, min, max, allocated bytes, and the peak of one step over them."""
    rows = []
    for name, dtype, moved, make in CASES:
        if only and not any(text in name for text in only):
            continue
        params = step = None
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        params = fresh(shapes, dtype)
        try:
            step = make(params)
            times = timed(step, rounds=rounds)
        except Exception as error:  # a peer that is not installed or cannot run here becomes a row with the reason
            rows.append((name, moved, None, f"{type(error).__name__}: {str(error)[:60]}", "", ""))
            continue
        torch.cuda.synchronize()
        allocated = torch.cuda.memory_allocated() - before
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        rows.append((name, moved, *times, f"{allocated / count:.2f}", f"{peak / allocated:.3f}"))
    return rows


def shapes_of(model):
    """The parameter shapes of a model: a ViT of this package, or gpt_1b, a decoder of 1.0 billion parameters."""
    if model == "gpt_1b":
        dim, depth, vocabulary, context = 2048, 18, 50304, 2048
        block = [(dim,), (dim,), (3 * dim, dim), (3 * dim,), (dim, dim), (dim,), (dim,), (dim,)]
        block += [(4 * dim, dim), (4 * dim,), (dim, 4 * dim), (dim,)]
        return [(vocabulary, dim), (context, dim), *(block * depth), (dim,), (dim,)]
    with torch.device("meta"):
        return [tuple(p.shape) for p in getattr(vit, model)().parameters()]


def main():
    """Run, print and optionally write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="vit_l_16", help="a ViT of this package, or gpt_1b")
    parser.add_argument(
        "--only", action="append", help="run only the implementations whose name contains one of these texts"
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out")
    args = parser.parse_args()
    shapes = shapes_of(args.model)
    count = sum(torch.Size(s).numel() for s in shapes)
    bandwidth = copy_bandwidth()
    lines = [
        f"# Optimizer step, {args.model}: {count / 1e6:.1f} M parameters in {len(shapes)} tensors",
        "",
        f"halfstep {halfstep.__version__}; {environment()}",
        f"copy bandwidth {bandwidth / 1e9:.0f} GB/s; device time of one step, median (min to max) of {args.rounds} rounds of 10",
        "",
        "| implementation | bytes/param moved | floor ms | ms | share of copy bandwidth | allocated bytes/param | peak / allocated |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, moved, *rest in bench_steps(shapes, args.rounds, count, args.only):
        if rest[0] is None:
            lines.append(f"| {name} | | | did not run: {rest[1]} | | | |")
            continue
        median, low, high, allocated, peak = rest
        floor = moved * count / bandwidth * 1e3 if moved else None
        share = f"{floor / median:.0%}" if floor else ""
        shown = f"{floor:.2f}" if floor else ""
        lines.append(
            f"| {name} | {moved or ''} | {shown} | {median:.3f} ({low:.3f} to {high:.3f}) | {share} | {allocated} | {peak} |"
        )
    text = "\n".join(lines)
    print(text)
    if args.out:
        with open(args.out, "w") as file:  # noqa: PTH123
            file.write(text + "\n")


if __name__ == "__main__":
    main()
