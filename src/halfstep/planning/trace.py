"""One training step of a job on fake tensors, as the Engine would run it on a GPU, recorded as a ledger.

The set-up is the Engine's own (`engine.setup.prepare_run`), and so is the order: copy the buffers, forward in the policy's
region, backward from the scaled loss, update, drop the gradients. With accumulation two micro-batches are traced, because
from the second on the gradients of the earlier ones are allocated as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from halfstep.backends.buckets import BucketBytes, bucket_bytes
from halfstep.backends.context import RunContext
from halfstep.checkpoint.rng import restore_rng, rng_state
from halfstep.engine.buffers import RESTORE_COPIES, BufferGuard
from halfstep.engine.ema import UPDATE_COPIES, Ema
from halfstep.engine.region import compute_region, recomputing
from halfstep.engine.setup import PreparedRun, as_list, prepare_run
from halfstep.engine.steps import StepPath
from halfstep.jobs.job import Job
from halfstep.optim.exchange import exchanging_of
from halfstep.planning.cuda_rules import as_on_cuda
from halfstep.planning.fakes import build_model, fake_batch, new_mode
from halfstep.planning.ledger import Event, Ledger
from halfstep.planning.optimizers import (
    StoredState,
    plain_states,
    run_plain,
    states_after_step,
    states_of,
    step_scratch,
)
from halfstep.planning.quiet import quietly
from halfstep.planning.ranks.parts import Units, find_units, model_parts
from halfstep.planning.ranks.shards import Counted, Part, count_parts
from halfstep.planning.tracer import Tracer
from halfstep.planning.workspaces import scratch_by_category
from halfstep.precision.formats import COMPUTE_DTYPES
from halfstep.precision.policy import Policy

__all__ = ["StepOptions", "Traced", "trace_step"]

_ANY_DECAY = 0.999  # of the EMA, whose memory does not depend on it


@dataclass(frozen=True)
class StepOptions:
    """Settings besides precision and batch size that change a step's memory."""

    accumulate: int = 1
    ema: bool = False
    recompute: str | float | None = None  # as Engine(recompute=...)


@dataclass(frozen=True)
class Traced:
    """A step's ledger, and facts about the model that the trace collected."""

    ledger: Ledger
    num_params: int
    num_trainable: int
    largest_param: int  # elements
    units: Units  # that FSDP would gather
    parts: Counted  # what sharding would divide
    buckets: tuple[BucketBytes, ...]  # that the ranks of ddp would send
    elementwise: bool  # whether the optimizers update each element by itself, so that they can step shards
    build_bytes: int  # peak of setting up the Engine, before any step
    compressed: tuple[int, ...] = ()  # elements of each tensor that the optimizer sends compressed between ranks
    notes: tuple[str, ...] = field(default=())


def trace_step(
    job: Job, policy: Policy, batch: Any, context: RunContext, options: StepOptions, *, real: bool = False
) -> Traced:
    """Run one step of `job` on fake tensors shaped like `batch` and record its memory."""
    before = rng_state()
    try:
        # TorchScript runs functions differently from their second call on, and two traces would not be the same step.
        with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
            return _trace(job, policy, batch, context, options, real=real)
    finally:
        restore_rng(before)  # the batch's integers are real, and drawing them advances the generators


def _trace(job: Job, policy: Policy, batch: Any, context: RunContext, options: StepOptions, *, real: bool) -> Traced:
    mode = new_mode()
    model = build_model(job, mode, context, real=real)
    notes: list[str] = []
    with mode, as_on_cuda(), contextlib.ExitStack() as undo:
        optimizers = as_list(job.call("optimizer", context, model=model))
        with quietly():
            run = prepare_run(model, optimizers, policy, accumulate=options.accumulate, recompute=options.recompute)
        undo.push(run.undo)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        buckets = bucket_bytes(trained, COMPUTE_DTYPES.get(policy.reduce, torch.float32))
        ema = Ema(run.params, _ANY_DECAY, run.master_of) if options.ema else None
        inputs = fake_batch(batch, mode)
        tracer = Tracer(partial(scratch_by_category, tf32=policy.compute == "tf32"))
        tracer.ignore_model(model)
        tracer.ignore(_tensors(inputs))
        with tracer, tracer.modules():
            buffers = _copy_buffers(tracer, model)
            for _ in range(min(2, options.accumulate)):
                _micro_batch(tracer, job, run, inputs, context)
            tracer.phase = "step"
            states = [state for path in run.paths for state in _update(tracer, path, notes)]
            tracer.scratch({"workspaces": RESTORE_COPIES * _num_bytes(buffers.copies)})
            if ema is not None:
                largest = max((average.nbytes for average in ema.averages.values()), default=0)
                tracer.scratch({"workspaces": UPDATE_COPIES * largest})
            for param in model.parameters():
                param.grad = None
            buffers.forget()
            events = tracer.categorized()
        tracer.stop()
    notes += tracer.integers.notes()
    if ema is not None:
        for average in ema.averages.values():
            part = Part("average", tuple(average.shape), average.element_size())
            states.append(StoredState("average", average.nbytes, by_step=False, parts=(part,)))
    parts = model_parts(model, job.shard, policy, options.accumulate)
    units = find_units(model, job.shard, policy)
    elementwise = all(getattr(path.optimizer, "elementwise", True) for path in run.paths)
    traced = _traced(model, inputs, states, events, tuple(notes), parts, buckets, units, elementwise=elementwise)
    exchanging = exchanging_of(run.optimizers)
    return traced if exchanging is None else replace(traced, compressed=exchanging.compressed_sizes())


def _tensors(tree: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(tree) if isinstance(t, Tensor)]


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.nbytes for t in tensors)


def _copy_buffers(tracer: Tracer, model: nn.Module) -> BufferGuard:
    tracer.phase = "forward"
    guard = BufferGuard(model)
    guard.save()
    tracer.mark(guard.copies, "buffers")
    return guard


def _micro_batch(tracer: Tracer, job: Job, run: PreparedRun, inputs: Any, context: RunContext) -> None:
    tracer.phase = "forward"
    # With the kernels of `as_on_cuda` where CUDA differs.
    with compute_region("cpu", run.policy.compute, lean=run.policy.is_lean):
        loss = job.call("loss", context, model=run.module, batch=inputs, split="train", epoch=0)
    tracer.end_forward()
    tracer.phase = "backward"
    scaled = loss.float() * 1.0
    del loss
    with torch.autocast("cpu", enabled=False), recomputing(lean=run.policy.is_lean):
        scaled.backward()
    del scaled
    tracer.mark([p.grad for p in run.module.parameters() if p.grad is not None], "gradients")


def _update(tracer: Tracer, path: StepPath, notes: list[str]) -> list[StoredState]:
    """Trace the update of one optimizer; what it has allocated afterwards."""
    optimizer, kind = path.optimizer, "lean" if path.kind == "halfstep" else path.kind
    if kind not in {"plain", "masters"}:
        scratch = step_scratch(optimizer, kind)
        if scratch:
            tracer.scratch({"workspaces": scratch})
        return states_after_step(optimizer, kind)
    start = len(tracer.events)
    problem = run_plain(optimizer, optimizer.step)
    states, tensors = plain_states(optimizer), states_of(optimizer)
    if problem:
        notes.append(f"{problem}; only the states it had created by then are counted, and not its temporaries.")
        return states
    # The second step is the one to record: the first also creates the states.
    del tracer.events[start:]
    tracer.ignore(tensors)
    run_plain(optimizer, optimizer.step)
    return states


def _traced(
    model: nn.Module,
    inputs: Any,
    states: list[StoredState],
    events: tuple[Event, ...],
    notes: tuple[str, ...],
    parts: list[Part],
    buckets: tuple[BucketBytes, ...],
    units: Units,
    *,
    elementwise: bool,
) -> Traced:
    params = list(model.parameters())
    tensors = [("weights", p) for p in params] + [("buffers", b) for b in model.buffers()]
    tensors += [("batch", t) for t in _tensors(inputs)]
    persistent = [Event(-1, t.nbytes, category) for category, t in tensors]
    persistent += [Event(-1, s.num_bytes, s.category) for s in states if not s.by_step]
    first_update = tuple(Event(-1, s.num_bytes, s.category) for s in states if s.by_step)
    rounded = sum(p.numel() for p in params if p.dtype is not torch.float32)
    # While engine.casting rounds the weights, their fp32 originals, fp32 masters and new values are allocated together.
    return Traced(
        ledger=Ledger(tuple(persistent), first_update, events),
        num_params=sum(p.numel() for p in params),
        num_trainable=sum(p.numel() for p in params if p.requires_grad),
        largest_param=max((p.numel() for p in params), default=0),
        units=units,
        parts=count_parts([*parts, *(part for state in states for part in state.parts)]),
        buckets=buckets,
        elementwise=elementwise,
        build_bytes=_num_bytes(params) + 8 * rounded,
        notes=notes,
    )
