"""The truth table: what a run really holds and computes in, read from its tensors.

A precision setting is a wish. What counts is the dtype of the weights, gradients, masters and optimizer states that
exist after the first step, whether the hardware runs the compute format or emulates it, and what is lost on the way.
The table is built from the objects themselves, printed once at the first step, and saved in every checkpoint and run
file, so that months later nobody has to guess.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from halfstep.precision.formats import BF16, FP16, format_name
from halfstep.precision.policy import Policy

__all__ = ["Truth", "build_truth", "census"]

_COUNTED_STATES = {"step"}  # one number per tensor, not per parameter


@dataclass(frozen=True)
class Truth:
    """The rows of the table, what is lossy, and which promises an option gives up."""

    rows: tuple[tuple[str, str], ...]
    lossy: tuple[str, ...]
    gives_up: tuple[str, ...]
    bytes_per_parameter: float

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for run files and checkpoints."""
        return {
            "rows": dict(self.rows),
            "lossy": list(self.lossy),
            "gives_up": list(self.gives_up),
            "bytes_per_parameter": self.bytes_per_parameter,
        }

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self.rows)
        lines = [f"  {name:{width}}  {value}" for name, value in self.rows]
        lines += [f"  {'lossy':{width}}  {text}" for text in self.lossy or ("nothing beyond the compute format",)]
        lines += [f"  {'gives up':{width}}  {text}" for text in self.gives_up]
        return "\n".join(lines)


def census(tensors: Iterable[Any]) -> dict[str, int]:
    """Elements by dtype."""
    counts: dict[str, int] = {}
    for tensor in tensors:
        name = format_name(tensor.dtype)
        counts[name] = counts.get(name, 0) + tensor.numel()
    return counts


def _show(counts: Mapping[str, int]) -> str:
    if not counts:
        return "none yet"
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{name} ({count:,})" for name, count in sorted(counts.items(), key=lambda item: -item[1]))


def build_truth(
    *,
    policy: Policy,
    params: list[Any],
    grads: Mapping[str, int],  # census of the gradients of the last step
    grad_bytes: int,
    states: Mapping[Any, Mapping[str, Any]],
    accumulate: int,
    loss_scale: str,
    paths: Iterable[str],
    support: str | None,  # of the compute format here: "native", "slow", "emulated", or None if unknown
    reduce_dtype: str | None,
    device: str,
    ema: bool,
    gives_up: tuple[str, ...] = (),
) -> Truth:
    """The table for a model and its optimizers as they are now."""
    num_params = sum(p.numel() for p in params) or 1
    held = [
        (n, t)
        for state in states.values()
        for n, t in state.items()
        if n not in _COUNTED_STATES and hasattr(t, "numel")
    ]
    masters = [t for n, t in held if n in {"low", "master"}]
    moments = [t for n, t in held if n not in {"low", "master"}]
    total_bytes = sum(t.numel() * t.element_size() for t in [*params, *masters, *moments]) + grad_bytes
    compute = policy.compute
    how = {"fp32": "IEEE fp32", "tf32": "TF32 matmuls"}.get(compute, f"{compute} autocast")
    where = {"native": "native", "slow": "no faster than fp32", "emulated": "emulated"}.get(
        support or "", "support unknown"
    )
    rows = [
        ("precision", str(policy)),
        ("parameters", f"{_show(census(params))}; {num_params:,} trainable"),
        ("gradients", _show(grads)),
        ("master", _master(policy, masters)),
        ("optimizer states", _show(census(moments)) if moments else "none yet" if not states else "none"),
        ("compute", f"{how} on {device}: {where}"),
        ("losses, softmax, sums", "fp32"),
        ("reduction", f"{reduce_dtype} over ranks" if reduce_dtype else "one rank, none"),
        (
            "accumulation",
            f"{policy.grads_format(accumulate)} over {accumulate} micro-batches" if accumulate > 1 else "none",
        ),
        ("loss scale", loss_scale),
        ("step", "; ".join(paths)),
        (
            "bytes per parameter",
            f"{total_bytes / num_params:.2f} held" + (" + 4 for the moving average" if ema else ""),
        ),
    ]
    return Truth(tuple(rows), _lossy(policy, accumulate, support), gives_up, round(total_bytes / num_params, 4))


def _master(policy: Policy, masters: list[Any]) -> str:
    if policy.params == "fp32":
        return "the fp32 weights themselves"
    if policy.master == "none":
        return "none"
    kind = "split: weight and 16 more bits" if policy.master == "split" else "a whole fp32 copy"
    exact = (
        "exact fp32"
        if policy.params == "bf16" or policy.master == "fp32"
        else "exact fp32 for normal weights, else to 2^-40"
    )
    return f"{kind}, {exact}" + ("" if masters else " (from the first step on)")


def _lossy(policy: Policy, accumulate: int, support: str | None) -> tuple[str, ...]:
    fmt = BF16 if policy.params == "bf16" else FP16
    found = []
    if policy.params != "fp32" and policy.master == "none":
        found.append(f"weights: updates below {fmt.epsilon / 2:.1e} of a weight are lost, there is no master")
    if accumulate > 1 and policy.grads_format(accumulate) != "fp32":
        found.append(
            f"accumulation: sums over micro-batches are rounded to {policy.grads_format(accumulate)} and can stagnate"
        )
    if policy.states != "fp32":
        found.append(f"optimizer states: kept in {policy.states}")
    if policy.compute == "fp16":
        found.append(f"fp16 gradients: below {FP16.smallest_subnormal:.0e} / loss scale they vanish")
    if policy.reduce != "fp32":
        found.append(f"reduction: sums over ranks are rounded to {policy.reduce}")
    if support in {"emulated", "slow"}:
        found.append(
            f"speed: {policy.compute} is {'emulated' if support == 'emulated' else 'no faster than fp32'} on this device"
        )
    return tuple(found)
