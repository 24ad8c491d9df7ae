"""Synthetic comparisons: run files and a survey made from a few numbers, for tests of the code that reads them."""

import json
import math
import random

import torch

from halfstep.comparison.measurements import (
    Curves,
    Failure,
    GradientDifference,
    Measurements,
    Numerics,
    PredictedPeak,
    TrialResult,
    Validation,
)
from halfstep.comparison.numerics.underflow import take_sample
from halfstep.comparison.record import RUNS, run_name, write_run
from halfstep.comparison.settings import CompareSettings
from halfstep.comparison.spec import TrialSpec
from halfstep.comparison.survey import SURVEY
from halfstep.comparison.variant import parse_variants

ENVIRONMENT = {"halfstep": "0.1.0", "python": "3.11", "torch": "2.13.0", "cpu": "a CPU", "gpus": []}
CENSUS = {
    "source": "dispatch",
    "rows": [
        {"op": "mm", "format": "bf16", "calls": 4, "seconds": 0.004, "why": ""},
        {"op": "sum", "format": "fp32", "calls": 2, "seconds": 0.001, "why": "long sums are kept in fp32"},
    ],
    "share": {"bf16": 0.7, "fp32": 0.2, "casts": 0.1},
    "products": {"bf16": 1.0},
    "misaligned": [{"op": "mm", "shape": [64, 32, 10], "calls": 2}],
}


def sample_values():
    """A sample of one layer, whose gradient has elements between 2^-30 and 2^-1 and zeros."""
    weight = torch.nn.Parameter(torch.zeros(3, 20))
    weight.grad = 65536.0 * torch.cat([2.0 ** -torch.arange(1.0, 31.0), torch.zeros(30)]).reshape(3, 20)
    return take_sample(41, [("blocks.1.fc.weight", weight)], 65536.0, None)


def run_values(seconds, gap=0.0, seed=0, steps=40, scaled=False, skips=(), seed_noise=0.02):
    """Curves and times of one run: a falling loss, noise that depends on the seed, and a gap that grows linearly."""
    rng = random.Random(seed)
    noise = [seed_noise * rng.uniform(-1, 1) for _ in range(steps)]
    curves = Curves(
        loss=tuple(2.3 * math.exp(-i / steps) + noise[i] + gap * i / steps for i in range(steps)),
        grad_norm=tuple(math.inf if i + 1 in skips else 1.0 + noise[i] for i in range(steps)),
        scale=(65536.0 if scaled else None,) * steps,
        skipped=tuple(i + 1 in skips for i in range(steps)),
    )
    return curves, tuple(seconds * (1 + 0.01 * rng.uniform(-1, 1)) for _ in range(steps - 10))


def measurements(label, repeat, loss, peak, base_bytes):
    """The measurements of one run."""
    split = {"data": 1e-4, "forward": 2e-3, "backward": 5e-3, "step": 1e-3}
    return Measurements(
        base_bytes=base_bytes,
        weights_digest=f"w{repeat}",
        batch_digest=f"b{repeat}",
        allocated={"weights": 2**20, "gradients": 2**20, "optimizer": 2**21},
        warmup_seconds=0.5,
        warmup_steps=10,
        warmup_peak_bytes=peak,
        peak_bytes=peak,
        samples=64,
        validation=Validation(loss, 0.9, seconds=0.5, samples=360),
        predicted=PredictedPeak(70 << 20, {"weights": 6 << 20, "workspaces": 64 << 20}, "A100 40GB") if repeat == 0 and base_bytes else None,
        truth={
            "rows": {"precision": label, "parameters": "fp32; 26,538 trainable"}, "lossy": ["<b>lossy</b>"],
            "waived_guarantees": [], "bytes_per_parameter": 16.0,
        },
        split=split if repeat == 0 else None,
        census=CENSUS if repeat == 0 else None,
        numerics=Numerics(41, 65536.0, 0.0 if label == "fp32" else 0.125, "blocks.1.fc", 0.5) if repeat == 0 else None,
        gradients=GradientDifference(0.9999, 0.01, 0) if repeat == 0 and label != "fp32" else None,
        eager_gradients=GradientDifference(0.9999, 0.003, 0) if repeat == 0 and "compile" in label else None,
    )  # fmt: skip


def write_case(
    folder,
    rows=(("fp32", 0.010, {}), ("bf16", 0.005, {}), ("fp16", 0.006, {"scaled": True, "skips": (3, 5)})),
    *,
    peers=(),
    failures=None,
    repeats=3,
    device="cpu",
    machine="a CPU",
    noise=0.02,
    drift=lambda repeat: 1.0,
    **survey,
):
    """Write a comparison's directory; `rows` are (precision, seconds per step, arguments of `run_values`)."""
    failures = failures or {}
    settings = CompareSettings(steps=40, repeats=repeats)
    variants = parse_variants([r[0] for r in rows if r[0].partition(":")[0] not in peers], peers)
    (folder / RUNS).mkdir(parents=True)
    by_label = {variant.label: variant for variant in variants}
    for label, seconds, more in rows:
        for repeat in range(repeats):
            options = {"peak": 400 * 2**20, **more}
            peak = options.pop("peak")
            curves, times = run_values(seconds * drift(repeat), seed=repeat, seed_noise=noise, **options)
            base_bytes = 300 * 2**20 if device == "cpu" else 0
            result = TrialResult(
                curves,
                times,
                settings.slices(),
                measurements(label, repeat, curves.loss[-1], peak, base_bytes),
                sample_values() if repeat == 0 else None,
            )
            failure = failures.get(label)
            write_run(
                folder / RUNS / f"{run_name(label, repeat)}.jsonl",
                spec=TrialSpec(
                    by_label[label], settings, repeat, 64, survey=False, is_reference=label == "fp32", repeat=repeat
                ),
                command=["halfstep", "compare"],
                environment=ENVIRONMENT,
                result=TrialResult() if failure else result,
                failure=Failure(**failure) if failure else None,
            )
    values = {
        "target": "digits", "source": "digits", "data_dir": None, "batch": 64, "device": device, "machine": machine,
        "threads": 1, "support": {f: ["native", ""] for f in ("fp32", "tf32", "bf16", "fp16", "fp8")}, "environment": ENVIRONMENT,
        "matmul": [{"format": f, "gflops_median": 100.0} for f in ("fp32", "bf16", "fp16")], "resident_bytes": 4e8,
        "has_metric": True, "notes": [], "same_weights": True, "same_batches": True, "num_params": 26538, "samples": 64,
        "flops_per_step": 47_000_000, "settings": settings.as_dict(), "contenders": [variant.as_dict() for variant in variants],
        "reference": "fp32" if "fp32" in by_label else variants[0].label, "command": ["halfstep", "compare", "digits"],
        "side_by_side": True, "stopped": False, **survey,
    }  # fmt: skip
    (folder / SURVEY).write_text(json.dumps(values))
    return folder
