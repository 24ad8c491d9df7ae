"""Precision names of other tools, and the preset each one is mapped to.

A name of another tool is accepted if Halfstep has a preset for the same purpose, and the mapping is logged. It
covers formats only: the loss scale is Halfstep's `dynamic`, not the other tool's scaler. There are three kinds of names:

    same name, same meaning     fp32, bf16, fp16, fp8: these are presets, nothing is logged
    another name                `FOREIGN`: the preset and the differences
    no such precision here      `REJECTED`: the reason and what to write instead
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FOREIGN", "REJECTED", "Foreign", "fold"]


@dataclass(frozen=True)
class Foreign:
    """A precision name of another tool: the tool, the preset it is mapped to, and the differences."""

    source: str
    preset: str
    note: str


_SAME = "the same thing under another name"
_OWN_SCALE = "fp16 autocast over fp32 weights; the loss scale is Halfstep's dynamic one"
_NO_MASTER = (
    "weights in 16 bits, to which Halfstep adds a master, because an update below half an ulp of a 16-bit weight "
    "vanishes; write master=none to train without one"
)
_DTYPE = "read as autocast over fp32 weights; for weights in that dtype write {preset}-lean"
_FP8 = "fp8 linears over bf16 weights with a split master"

_TABLE: tuple[tuple[str, str, str, str], ...] = (
    # name, source, preset, note
    ("16", "Lightning", "fp16", _OWN_SCALE),
    ("16-mixed", "Lightning", "fp16", _OWN_SCALE),
    ("16-true", "Lightning", "fp16-lean", _NO_MASTER + "; the loss scale is dynamic, Lightning has none there"),
    ("bf16-mixed", "Lightning", "bf16", _SAME),
    ("bf16-true", "Lightning", "bf16-lean", _NO_MASTER),
    ("32", "Lightning", "fp32", _SAME),
    ("32-true", "Lightning", "fp32", _SAME),
    ("transformer-engine", "Lightning", "fp8", _FP8),
    ("O0", "Apex", "fp32", _SAME),
    ("O1", "Apex", "fp16", _OWN_SCALE),
    ("O2", "Apex", "fp16-lean", "fp16 weights with a master; the loss scale is Halfstep's dynamic one"),
    ("O3", "Apex", "fp16-lean", _NO_MASTER + "; the loss scale is dynamic, Apex uses 1 there"),
    ("no", "Accelerate", "fp32", _SAME),
    ("amp_fp16", "Composer", "fp16", _OWN_SCALE),
    ("amp_bf16", "Composer", "bf16", _SAME),
    ("amp_fp8", "Composer", "fp8", _FP8),
    ("float32", "torch", "fp32", _SAME),
    ("float", "torch", "fp32", _SAME),
    ("bfloat16", "torch", "bf16", _DTYPE.format(preset="bf16")),
    ("float16", "torch", "fp16", _DTYPE.format(preset="fp16")),
    ("half", "torch", "fp16", _DTYPE.format(preset="fp16")),
)

FOREIGN: dict[str, Foreign] = {name: Foreign(source, preset, note) for name, source, preset, note in _TABLE}

_NO_FP64 = "Halfstep has no fp64 preset: it covers fp32 and below. Use fp32, or train in fp64 without Halfstep."
REJECTED: dict[str, str] = {
    "auto": (
        "A policy is one fixed value and 'auto' depends on the hardware. "
        'Call halfstep.choose() for a policy with its reasons, or pass precision="auto" to the Engine.'
    ),
    "64": _NO_FP64,
    "64-true": _NO_FP64,
    "float64": _NO_FP64,
    "double": _NO_FP64,
    "transformer-engine-float16": "Halfstep builds fp8 linears on bf16 weights only. Use fp8, or fp16-lean.",
}

_FOLDED = {name.casefold(): name for name in (*FOREIGN, *REJECTED)}


def fold(name: str) -> str:
    """The spelling in the tables for a name as typed; case, surrounding blanks and a leading `torch.` do not matter."""
    key = name.strip().casefold().removeprefix("torch.")
    return _FOLDED.get(key, key)
