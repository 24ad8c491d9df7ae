"""The truth table: what a run really stores and computes in, read from its tensors.

A precision setting is a wish. What counts is the dtype of the weights, gradients, masters and optimizer states that
exist after the first step, whether the hardware runs the compute format or emulates it, and what is lost on the way.
The table is built from the objects themselves, logged once at the first step, and saved in every checkpoint and run
file, so that nobody has to guess months later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from halfstep.backends.base import Backend
from halfstep.engine.casting import fp32_buffers
from halfstep.engine.graph import LossObserver
from halfstep.engine.region.aligned import aligned_row
from halfstep.engine.release import WAIVED_GUARANTEES
from halfstep.engine.setup import PreparedRun
from halfstep.events import log_once
from halfstep.hardware.probe import Hardware
from halfstep.hardware.tables import html_table
from halfstep.hardware.units import bytes_text, few
from halfstep.optim.exchange import exchanging_of
from halfstep.precision.formats import BF16, FP16, format_name
from halfstep.precision.policy import Policy
from halfstep.scaling.scaler import Scaler

__all__ = ["Truth", "TruthObserver", "build_truth", "census", "truth_of"]

_FEW = 5  # operations that a row lists
_COUNTED_STATES = {"step"}  # one number per tensor, not per parameter


@dataclass(frozen=True)
class Truth:
    """The rows of the table, what is lossy, and which guarantees an option waives."""

    rows: tuple[tuple[str, str], ...]
    lossy: tuple[str, ...]
    waived_guarantees: tuple[str, ...]
    bytes_per_parameter: float

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for run files and checkpoints."""
        return {
            "rows": dict(self.rows),
            "lossy": list(self.lossy),
            "waived_guarantees": list(self.waived_guarantees),
            "bytes_per_parameter": self.bytes_per_parameter,
        }

    @property
    def lines(self) -> list[tuple[str, str]]:
        """All rows: what is lossy and waived after the rest."""
        lossy = [("lossy", text) for text in self.lossy or ("nothing beyond the compute format",)]
        return [*self.rows, *lossy, *(("waived", text) for text in self.waived_guarantees)]

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self.rows)
        return "\n".join(f"  {name:{width}}  {value}" for name, value in self.lines)

    def _repr_html_(self) -> str:
        return html_table(("", ""), self.lines)


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
    device: str,
    ema: bool,
    losses: LossObserver | None = None,  # of the first micro-batch; None before it
    tables: Iterable[str] = (),  # names of fp32 buffers of a lean model
    waived_guarantees: tuple[str, ...] = (),
    replaced_rows: Mapping[str, str] | None = None,  # what the backend or an option knows better, by row
    num_total: int | None = None,  # trainable numbers of all ranks; None if `params` are all
) -> Truth:
    """The table for a model and its optimizers as they are now."""
    num_params = sum(p.numel() for p in params) or 1
    stored = [
        (n, t)
        for state in states.values()
        if isinstance(state, Mapping)  # some optimizers store a tensor or a number of their own among the states
        for n, t in state.items()
        if n not in _COUNTED_STATES and hasattr(t, "numel")
    ]
    masters = [t for n, t in stored if n in {"low", "master"}]
    moments = [t for n, t in stored if n not in {"low", "master"}]
    total_bytes = sum(t.numel() * t.element_size() for t in [*params, *masters, *moments]) + grad_bytes
    part = "" if num_total in {None, num_params} else f", {num_params:,} of them on this rank"
    rows = [
        ("precision", str(policy)),
        ("parameters", f"{_show(census(params))}; {num_total or num_params:,} trainable{part}"),
        ("gradients", _show(grads)),
        ("master", _master(policy, masters)),
        ("optimizer states", _show(census(moments)) if moments else "none yet" if not states else "none"),
        ("compute", _compute(policy, support, device, losses)),
        *_sensitive(policy, losses, tables),
        ("reduction", "none, one rank"),
        (
            "accumulation",
            f"{policy.grads_format(accumulate)} over {accumulate} micro-batches" if accumulate > 1 else "none",
        ),
        ("loss scale", loss_scale),
        ("step", "; ".join(paths)),
        (
            "bytes per parameter",
            f"{total_bytes / num_params:.2f}" + (" + 4 for the EMA" if ema else ""),
        ),
    ]
    rows = [(name, (replaced_rows or {}).get(name, value)) for name, value in rows]
    rows += [(name, value) for name, value in (replaced_rows or {}).items() if name not in dict(rows)]
    lossy = _lossy(policy, accumulate, support)
    return Truth(tuple(rows), lossy, waived_guarantees, round(total_bytes / num_params, 4))


def _compute(policy: Policy, support: str | None, device: str, losses: LossObserver | None) -> str:
    """What the matrix products of the first micro-batch ran in, or before it, what they are meant to."""
    compute = policy.compute
    speed = {"native": "native", "slow": "no faster than fp32", "emulated": "emulated"}.get(
        support or "", "support unknown"
    )
    intent = {"fp32": "IEEE fp32", "tf32": "TF32 matmuls"}.get(compute, f"{compute} autocast")
    if losses is None:
        return f"{intent} on {device}: {speed} (intended; observed at the first step)"
    products = losses.products
    hidden = ", ".join(f"{count} x {kind}" for kind, count in products.opaque.items())
    if not products.total:
        state = f"not observed inside {hidden}" if hidden else "the loss has no matrix products"
        block = "" if losses.entered or compute in {"fp32", "tf32"} else "; engine.forward() was not entered"
        return f"{intent} on {device}: {speed} (intended; {state}{block})"
    wanted = "fp32" if compute == "tf32" else compute
    counts = sorted(products.formats.items(), key=lambda item: (item[0] != wanted, -item[1]))
    shown = ", ".join(f"{name} in {count}" for name, count in counts)
    arithmetic = ", TF32 arithmetic" if compute == "tf32" else ""
    text = f"{shown} of {products.total} matrix products on {device}{arithmetic}: "
    if wanted in products.formats:
        text += speed
    else:
        text += f"none ran in {wanted}" if losses.entered else "engine.forward() was not entered"
    return text + (f"; not observed inside {hidden}" if hidden else "")


def _sensitive(policy: Policy, losses: LossObserver | None, tables: Iterable[str]) -> list[tuple[str, str]]:
    """What runs in fp32 whatever the compute format, and for a lean model where it gave 16 bits and where fp32."""
    if not policy.is_lean:
        return [("losses, softmax, sums", "fp32")]
    rows = [("losses, softmax, sums", "fp32; softmax and norms fp32 inside, 16 bits in and out")]
    if losses is None:
        return rows
    if losses.narrow:
        counts = ", ".join(f"{name} x{count}" for name, count in losses.narrow.most_common())
        rows.append(("16-bit results", f"{counts} (fp32 in torch.amp)"))
    if losses.wide:
        sizes = ", ".join(f"{name} {bytes_text(size)}" for name, size in list(losses.wide.items())[:_FEW])
        names = few(list(tables))
        rows.append(("fp32 results", sizes + (f"; fp32 buffers: {names}" if names else "")))
    return rows


def _master(policy: Policy, masters: list[Any]) -> str:
    if policy.params == "fp32":
        return "the fp32 weights themselves"
    if policy.master == "none":
        return "none"
    split_exact = "exact fp32" if policy.params == "bf16" else "exact fp32 for normal weights, else to 2^-40"
    kinds = {"split": f"split: weight and 16 more bits, {split_exact}", "fp32": "an fp32 copy, exact fp32"}
    if not masters:
        return f"{kinds[policy.master]} (from the first step on)"
    # An optimizer that halfstep.optim does not adopt has fp32 copies whatever the policy prefers.
    stored = {"fp32" if master.is_floating_point() else "split" for master in masters}
    return "; ".join(text for kind, text in kinds.items() if kind in stored)


def _lossy(policy: Policy, accumulate: int, support: str | None) -> tuple[str, ...]:
    fmt = BF16 if policy.params == "bf16" else FP16
    losses = []
    if policy.params != "fp32" and policy.master == "none":
        losses.append(f"weights: updates below {fmt.epsilon / 2:.1e} of a weight are lost without a master")
    if accumulate > 1 and policy.grads_format(accumulate) != "fp32":
        losses.append(
            f"accumulation: sums over micro-batches are rounded to {policy.grads_format(accumulate)} and can stagnate"
        )
    if policy.states != "fp32":
        losses.append(f"optimizer states: rounded to {policy.states}")
    if policy.compute == "fp16":
        losses.append(f"fp16 gradients: below {FP16.smallest_subnormal:.0e} / loss scale they vanish")
    if policy.reduce != "fp32":
        losses.append(f"reduction: sums over ranks are rounded to {policy.reduce}")
    if support in {"emulated", "slow"}:
        losses.append(
            f"speed: {policy.compute} is {'emulated' if support == 'emulated' else 'no faster than fp32'} on this device"
        )
    return tuple(losses)


def truth_of(
    run: PreparedRun,
    hardware: Hardware,
    backend: Backend,
    scaler: Scaler,
    grads: list[Any],  # of the last step, if there was one
    *,
    ema: bool = False,
    released: bool = False,  # whether gradients are used and dropped inside backward
    losses: LossObserver | None = None,  # of the first micro-batch
) -> Truth:
    """The table of a prepared run as it is now."""
    exchanging = exchanging_of(run.optimizers)
    rows = (
        run.rows
        | aligned_row(run.module)
        | dict(backend.truth_rows())
        | ({} if exchanging is None else exchanging.truth_rows())
    )
    rows |= {"gradients": "released during backward"} if released else {}
    known = hardware.kind == run.device.type
    return build_truth(
        policy=run.policy,
        params=[backend.local(p) for p in run.params.values()],
        num_total=sum(p.numel() for p in run.params.values()),
        grads=census(grads),
        grad_bytes=sum(g.numel() * g.element_size() for g in grads),
        states={p: s for o in run.optimizers for p, s in o.state.items()},
        accumulate=run.accumulate,
        loss_scale=str(scaler.settings),
        paths=[path.reason for path in run.paths],
        support=dict(hardware.support).get(run.policy.compute) if known else None,
        device=hardware.name if known else run.device.type,
        ema=ema,
        losses=losses,
        tables=fp32_buffers(run.module, run.policy) if run.policy.is_lean else (),
        waived_guarantees=(WAIVED_GUARANTEES if released else ())
        + (() if exchanging is None else exchanging.waived_guarantees()),
        replaced_rows=rows,
    )


class TruthObserver:
    """Builds the table of one run: at its first update from what was observed, before that from what exists."""

    def __init__(
        self, run: PreparedRun, hardware: Hardware, backend: Backend, scaler: Scaler, *, ema: bool, released: bool
    ) -> None:
        self._run, self._hardware, self._backend, self._scaler = run, hardware, backend, scaler
        self._ema, self._released = ema, released
        self.losses = LossObserver(run.policy, run.accumulate)
        self._first: Truth | None = None
        self._grads: list[Any] = []

    def observe(self, grads: list[Any]) -> None:
        """Build and log the table at the first update, from its gradients; later calls do nothing."""
        if self._first is None:
            # On the meta device: an optimizer that changes what it stores is asked again, and only dtypes and sizes are read.
            self._grads = [torch.empty_like(grad, device="meta") for grad in grads]
            self._first = self._build(grads, self.losses)
            log_once(f"truth table\n{self._first}")

    def table(self) -> Truth:
        """The table of the first update, before it of what exists so far; rows of a compressed optimizer are those of now."""
        if self._first is not None and exchanging_of(self._run.optimizers) is not None:
            return self._build(self._grads, self.losses)
        return self._first or self._build([], None)

    def _build(self, grads: list[Any], losses: LossObserver | None) -> Truth:
        parts = (self._run, self._hardware, self._backend, self._scaler)
        return truth_of(*parts, grads, ema=self._ema, released=self._released, losses=losses)
