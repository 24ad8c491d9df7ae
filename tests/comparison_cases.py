"""Comparisons that nobody ran: run files and a survey made up from a few numbers, for tests of what reads them."""

import json
import math
import random

from halfstep.comparison.contender import parse_contenders
from halfstep.comparison.record import RUNS, SURVEY, run_name, write_run
from halfstep.comparison.settings import CompareSettings

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


def run_values(seconds, gap=0.0, seed=0, steps=40, scaled=False, skips=(), seed_noise=0.02):
    """Curves and times of one run: a loss that falls, a seed's own wobble, and a gap that grows to its full size."""
    chance = random.Random(seed)
    wobble = [seed_noise * chance.uniform(-1, 1) for _ in range(steps)]
    loss = [2.3 * math.exp(-i / steps) + wobble[i] + gap * i / steps for i in range(steps)]
    return {
        "loss": loss,
        "grad_norm": [math.inf if i + 1 in skips else 1.0 + wobble[i] for i in range(steps)],
        "scale": [65536.0 if scaled else None] * steps,
        "skipped": [i + 1 in skips for i in range(steps)],
    }, [seconds * (1 + 0.01 * chance.uniform(-1, 1)) for _ in range(steps - 10)]


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
    """Write a comparison's directory; `rows` are (precision, seconds per step, more for `run_values`)."""
    failures = failures or {}
    settings = CompareSettings(steps=40, repeats=repeats)
    contenders = parse_contenders([r[0] for r in rows if r[0].partition(":")[0] not in peers], peers)
    (folder / RUNS).mkdir(parents=True)
    by_label = {c.label: c for c in contenders}
    for label, seconds, more in rows:
        for repeat in range(repeats):
            options = {"peak": 400 * 2**20, **more}
            peak = options.pop("peak")
            curves, times = run_values(seconds * drift(repeat), seed=repeat, seed_noise=noise, **options)
            spec = {
                "contender": vars(by_label[label]), "settings": settings.as_dict(), "repeat": repeat, "seed": repeat,
                "batch": 64, "is_reference": label == "fp32", "command": ["halfstep", "compare"],
            }  # fmt: skip
            record = {
                "base_bytes": 300 * 2**20 if device == "cpu" else 0, "weights": f"w{repeat}", "batch": f"b{repeat}",
                "held": {"weights": 2**20, "gradients": 2**20, "optimizer": 2**21}, "warmup_seconds": 0.5, "warmup_steps": 10,
                "warmup_peak_bytes": peak, "peak_bytes": peak, "samples": 64,
                "validation": {"loss": curves["loss"][-1], "metric": 0.9},
                "truth": {"rows": {"precision": label, "parameters": "fp32; 26,538 trainable"}, "lossy": ["<b>lossy</b>"],
                          "gives_up": [], "bytes_per_parameter": 16.0},
            }  # fmt: skip
            if repeat == 0:
                record |= {"split": {"data": 1e-4, "forward": 2e-3, "backward": 5e-3, "step": 1e-3}, "census": CENSUS}
                if label != "fp32":
                    record["gradients"] = {"cosine": 0.9999, "relative_error": 0.01, "vanished": 0}
            failure = failures.get(label)
            write_run(
                folder / RUNS / f"{run_name(label, repeat)}.jsonl",
                spec=spec,
                environment=ENVIRONMENT,
                curves={} if failure else curves,
                seconds=[] if failure else times,
                slices=[] if failure else settings.slices(),
                record={} if failure else record,
                failure=failure,
            )
    found = {
        "target": "digits", "source": "digits", "data_dir": None, "batch": 64, "device": device, "machine": machine,
        "threads": 1, "support": {f: ["native", ""] for f in ("fp32", "tf32", "bf16", "fp16", "fp8")}, "environment": ENVIRONMENT,
        "matmul": [{"format": f, "gflops_median": 100.0} for f in ("fp32", "bf16", "fp16")], "resident_bytes": 4e8,
        "has_metric": True, "notes": [], "same_weights": True, "same_batches": True, "num_params": 26538, "samples": 64,
        "flops_per_step": 47_000_000, "settings": settings.as_dict(), "contenders": [vars(c) for c in contenders],
        "reference": "fp32" if "fp32" in by_label else contenders[0].label, "command": ["halfstep", "compare", "digits"],
        "side_by_side": True, "stopped": False, **survey,
    }  # fmt: skip
    (folder / SURVEY).write_text(json.dumps(found))
    return folder
