"""One training step of a job on fake tensors, as the Engine would take it on a GPU, written down as a ledger.

The order is the Engine's: the buffers are copied, forward in the policy's region, the scaled loss backwards, the update,
the gradients dropped. With accumulation two micro-batches are traced, because from the second on the gradients of those
before are there as well.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from halfstep.backends.context import RunContext
from halfstep.checkpoint.rng import restore_rng, rng_state
from halfstep.engine.setup import prepare_run
from halfstep.engine.steps import StepPath
from halfstep.jobs.job import Job
from halfstep.planning.cuda_rules import as_on_cuda
from halfstep.planning.fakes import build_model, fake_batch, new_mode
from halfstep.planning.ledger import Entry, Ledger
from halfstep.planning.optimizers import Held, held_by, run_plain, states_of, step_scratch
from halfstep.planning.quiet import quietly
from halfstep.planning.tracer import Tracer
from halfstep.planning.workspaces import scratch_by_cause
from halfstep.precision.formats import COMPUTE_DTYPES
from halfstep.precision.policy import Policy

__all__ = ["StepOptions", "Traced", "trace_step"]


@dataclass(frozen=True)
class StepOptions:
    """What besides precision and batch changes a step's memory."""

    accumulate: int = 1
    ema: bool = False


@dataclass(frozen=True)
class Traced:
    """A step's ledger with what was learnt about the model on the way."""

    ledger: Ledger
    num_params: int
    num_trainable: int
    largest_param: int  # elements
    unit_params: int  # elements of the largest group of parameters that FSDP would gather at once
    build_bytes: int  # the most that making the Engine takes, before any step
    notes: tuple[str, ...] = field(default=())


def trace_step(
    job: Job, policy: Policy, batch: Any, context: RunContext, options: StepOptions, *, real: bool = False
) -> Traced:
    """Run one step of `job` on fake tensors shaped like `batch` and write down its memory."""
    before = rng_state()
    try:
        # TorchScript runs functions otherwise from their second call on, and two traces would not be the same step.
        with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
            return _trace(job, policy, batch, context, options, real=real)
    finally:
        restore_rng(before)  # the batch's integers are real, and so is a draw among them


def _trace(job: Job, policy: Policy, batch: Any, context: RunContext, options: StepOptions, *, real: bool) -> Traced:
    mode = new_mode()
    model = build_model(job, mode, context, real=real)
    notes: list[str] = []
    with mode, as_on_cuda(), contextlib.ExitStack() as undo:
        optimizer = job.call("optimizer", context, model=model)
        with quietly():
            run = prepare_run(model, [optimizer], policy, accumulate=options.accumulate)
        undo.push(run.undo)
        (path,) = run.paths
        inputs = fake_batch(batch, mode)
        tracer = Tracer(partial(scratch_by_cause, tf32=policy.compute == "tf32"))
        tracer.know_weights(model)
        tracer.know([t for t in pytree.tree_leaves(inputs) if isinstance(t, Tensor)])
        with tracer, tracer.modules():
            copies = _copy_buffers(tracer, model)
            for _ in range(min(2, options.accumulate)):
                _micro_batch(tracer, job, policy, model, inputs, context)
            tracer.phase = "step"
            held = _update(tracer, path, notes)
            tracer.scratch({"workspaces": 3 * sum(c.numel() * c.element_size() for c in copies)})
            if options.ema:
                tracer.scratch({"workspaces": 12 * max((p.numel() for p in model.parameters()), default=0)})
            for param in model.parameters():
                param.grad = None
            copies.clear()
            lines = tracer.settled()
        tracer.stop()
    notes += tracer.integers.notes()
    if options.ema:
        held += [Held("average", 4 * p.numel(), by_step=False) for p in model.parameters() if p.requires_grad]
    return _traced(model, job, inputs, held, lines, tuple(notes))


def _copy_buffers(tracer: Tracer, model: nn.Module) -> list[Tensor]:
    tracer.phase = "forward"
    copies = [b.detach().clone() for b in model.buffers()]
    tracer.mark(copies, "buffers")
    return copies


def _micro_batch(tracer: Tracer, job: Job, policy: Policy, model: nn.Module, inputs: Any, context: RunContext) -> None:
    tracer.phase = "forward"
    dtype = COMPUTE_DTYPES.get(policy.compute)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        loss = job.call("loss", context, model=model, batch=inputs, split="train", epoch=0)
    tracer.end_forward()
    tracer.phase = "backward"
    scaled = loss.float() * 1.0
    del loss
    with torch.autocast("cpu", enabled=False):
        scaled.backward()
    del scaled
    tracer.mark([p.grad for p in model.parameters() if p.grad is not None], "gradients")


def _update(tracer: Tracer, path: StepPath, notes: list[str]) -> list[Held]:
    """Trace the update; what the optimizer holds afterwards."""
    optimizer, kind = path.optimizer, "lean" if path.kind == "halfstep" else path.kind
    if kind != "plain":
        scratch = step_scratch(optimizer, kind)
        if scratch:
            tracer.scratch({"workspaces": scratch})
        return held_by(optimizer, kind)
    start = len(tracer.lines)
    problem = run_plain(optimizer, optimizer.step)
    states = states_of(optimizer)
    held = [Held("states", t.numel() * t.element_size()) for t in states]
    if problem:
        notes.append(f"{problem}; its states are those it had made by then, its temporaries are not counted.")
        return held
    # The second step is the one to keep: the first also makes the states.
    del tracer.lines[start:]
    tracer.know(states)
    run_plain(optimizer, optimizer.step)
    return held


def _traced(
    model: nn.Module,
    job: Job,
    inputs: Any,
    held: list[Held],
    lines: tuple[Entry, ...],
    notes: tuple[str, ...],
) -> Traced:
    params = list(model.parameters())
    kept = [("weights", p) for p in params] + [("buffers", b) for b in model.buffers()]
    kept += [("batch", t) for t in pytree.tree_leaves(inputs) if isinstance(t, Tensor)]
    first = [Entry(-1, t.numel() * t.element_size(), cause) for cause, t in kept]
    first += [Entry(-1, h.num_bytes, h.cause) for h in held if not h.by_step]
    made = tuple(Entry(-1, h.num_bytes, h.cause) for h in held if h.by_step)
    trainable = [p for p in params if p.requires_grad]
    rounded = sum(p.numel() for p in params if p.dtype is not torch.float32)
    weights = sum(p.numel() * p.element_size() for p in params)
    # While weights are rounded, their fp32 originals, fp32 masters and new values are there together.
    return Traced(
        ledger=Ledger(tuple(first), made, lines),
        num_params=sum(p.numel() for p in params),
        num_trainable=sum(p.numel() for p in trainable),
        largest_param=max((p.numel() for p in params), default=0),
        unit_params=_largest_unit(model, job),
        build_bytes=weights + 8 * rounded,
        notes=notes,
    )


def _largest_unit(model: nn.Module, job: Job) -> int:
    """Elements of the largest piece that FSDP gathers at once: a module the job names, or what is left at the root."""
    units = [
        module
        for name, module in model.named_modules()
        if any(fnmatchcase(name, item) if isinstance(item, str) else isinstance(module, item) for item in job.shard)
    ]
    inside = {p for unit in units for p in unit.parameters()}
    rest = sum(p.numel() for p in model.parameters() if p not in inside)
    sizes: list[int] = [rest, *(sum(p.numel() for p in unit.parameters()) for unit in units)]
    return max(sizes)
