"""Speed and choice of a format: by this machine's measurement, and by the table of devices."""

from __future__ import annotations

from halfstep.hardware.measure import FASTER, is_unsteady, measure_matmuls
from halfstep.hardware.probe import find_gpu, probe
from halfstep.learning.experiment import Outcome, Reading
from halfstep.precision.choice import choose

__all__ = ["hardware_choice", "matmul_speed"]

_ATTEMPTS = 3
_GPUS = {"V100": "fp16", "T4": "fp16", "A100": "bf16", "H100": "bf16"}


def matmul_speed() -> Outcome:
    """Matrix products in each format on this machine."""
    hardware = probe()
    # Other work on the machine may slow fp32 down and not the next format: what contradicts the table is measured again.
    for _ in range(_ATTEMPTS):
        measured = {m.format: m for m in measure_matmuls(256 if hardware.kind == "cpu" else None, seconds=1.5)}
        formats = [name for name in ("bf16", "fp16") if name in measured]
        faster = [name for name in formats if measured[name].ratio_to_fp32 > FASTER]
        unsteady = [name for name in formats if is_unsteady(measured[name], measured.values())]
        emulated = [name for name in faster if hardware.support[name] in {"emulated", "none"}]
        unexpected = [name for name in emulated if name not in unsteady]
        if not unexpected:
            break
    readings = [
        Reading(
            f"{name} matmul, {m.size} x {m.size}",
            m.ratio_to_fp32,
            f"{m.speed} GFLOP/s (spread {m.spread:.0%}), {m.ratio_to_fp32:.2g} x fp32",
        )
        for name, m in measured.items()
    ]
    readings.append(Reading("this machine", hardware.name))
    if unsteady:
        verdict = (
            "Here the timings vary too much to say which format is faster: repeat this when the machine is less busy."
        )
    elif faster:
        verdict = f"Here {' and '.join(faster)} products are faster than fp32: this machine multiplies in 16 bits."
    else:
        verdict = "Here no 16-bit format is faster than fp32, so mixed precision would cost time on this machine."
    return Outcome(
        tuple(readings),
        bool(formats) and not unexpected,
        f"{verdict} A product is the best case; `halfstep compare` measures a training step, and `halfstep probe` explains.",
    )


def hardware_choice() -> Outcome:
    """The precision that `halfstep probe` chooses for four GPUs and for this machine."""
    chosen = {name: choose(find_gpu(name)) for name in _GPUS}
    readings = [Reading(name, str(c.policy), f"{c.policy}: {c.reasons[0]}") for name, c in chosen.items()]
    here = probe()
    own = choose(here)
    readings.append(Reading("this machine", str(own.policy), f"{own.policy}: {own.reasons[0]}"))
    native = [name for name in ("bf16", "fp16") if here.support[name] == "native"]
    expected = native[0] if native else "fp32"
    return Outcome(
        tuple(readings),
        {name: str(c.policy) for name, c in chosen.items()} == _GPUS and str(own.policy) == expected,
        "torch.cuda.is_bf16_supported() is True on a T4, where bf16 is emulated: ask for the architecture (8.0 or later), or "
        "`halfstep probe`. These are facts of a table; `halfstep probe --measure` times them on the machine at hand.",
    )
