"""`halfstep.rehearse()`: a few fp32 steps of a job, and what other formats would do to their numbers."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from halfstep.backends.context import RunContext
from halfstep.checkpoint.rng import restore_rng, rng_state, seed_everything
from halfstep.engine.casting import check_patterns
from halfstep.engine.engine import Engine
from halfstep.engine.schedules import needs_metric
from halfstep.errors import HalfstepError, SettingError
from halfstep.jobs.job import Job, trainable
from halfstep.jobs.targets import load_target
from halfstep.planning.quiet import quietly
from halfstep.precision.formats import COMPUTE_DTYPES
from halfstep.precision.policy import Policy
from halfstep.rehearsal.blocks import BlockSums, block_errors
from halfstep.rehearsal.ledger import Ledger, Row
from halfstep.rehearsal.noise import STRENGTH, Probe, changed
from halfstep.rehearsal.observer import INPUT, KINDS, LOSS, ROOT, UPDATE, WEIGHT, WEIGHT_GRADIENT, Observer
from halfstep.rehearsal.proposal import propose, risks_of, sixteen_bit_rows, troubles_of
from halfstep.rehearsal.result import Rehearsal
from halfstep.train.config import DEFAULT_BATCH
from halfstep.train.stream import DataStream, to_device
from halfstep.watching.stats import StatsTable, TensorStats

__all__ = ["DEFAULT_STEPS", "check_precision", "rehearse"]

DEFAULT_STEPS = 20


def rehearse(
    target: Job | str | None = None,
    precision: str = "fp16",
    *,
    steps: int = DEFAULT_STEPS,
    batch: int | None = None,
    seed: int = 0,
    max_norm: float | None = 1.0,
    device: str = "auto",
    data_dir: str | None = None,
) -> Rehearsal:
    """Train a job for a few steps in fp32 and predict what `precision` would do to its numbers.

    `target` is a target as on the command line (None is `digits`) or a `Job`. `precision` is a policy that computes in fp16 or bf16 with
    fp32 weights; modules in its `keep_fp32` count as fp32. The result has the range of every module's activations, gradients, weights and
    updates, the predicted troubles, and a proposed policy. Random number generators are left as they were.
    """
    policy = check_precision(precision)
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise SettingError(f"steps={steps!r} must be an integer of at least 1.")
    if isinstance(target, Job):
        if data_dir is not None:
            raise SettingError(f"data_dir={data_dir!r} has no effect on a Job, which has its own data; omit it.")
        name, job, default = target.name or "job", target, target.default_batch_size()
    else:
        loaded = load_target(target, data_dir=data_dir)
        name, job, default = loaded.name, loaded.job, dict(loaded.defaults).get("batch")
    size = batch if batch is not None else default or DEFAULT_BATCH
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise SettingError(f"batch={batch!r} must be an integer of at least 1.")
    run = RunContext.single(device, seed=seed, batch_size=size)
    before = rng_state()
    try:
        # Compiled code would hide its operations.
        with quietly(), torch.compiler.set_stance("force_eager"):
            ledger, losses = _observe(job, run, steps, max_norm, policy)
    finally:
        restore_rng(before)
    troubles, scale = troubles_of(ledger, policy)
    return Rehearsal(
        job=name,
        steps=steps,
        batch=size,
        device=str(run.device),
        policy=str(policy),
        losses=tuple(losses),
        ledger=ledger,
        scale=scale,
        troubles=troubles,
        risks=risks_of(ledger, policy),
        proposal=propose(ledger, policy),
        sixteen_bit=sixteen_bit_rows(ledger, policy),
    )


def check_precision(precision: str) -> Policy:
    """The policy to predict; raises for one whose dtypes a rehearsal does not know."""
    policy = Policy.parse(precision)
    if policy.compute not in COMPUTE_DTYPES or policy.is_lean:
        raise SettingError(
            f"A rehearsal predicts fp16 and bf16 compute with fp32 weights, not {precision!r}. Use fp16 or bf16, optionally with "
            "keep_fp32 and loss_scale."
        )
    return policy


def _observe(
    job: Job, run: RunContext, steps: int, max_norm: float | None, policy: Policy
) -> tuple[Ledger, list[float]]:
    seed_everything(run.seed)
    model = copy.deepcopy(job.call("model", run)).to(run.device).train()  # a job may return the same module every time
    check_patterns(model, policy)
    optimizer = job.call("optimizer", run, model=model)
    engine = Engine(model, optimizer, "fp32", max_norm=max_norm, scheduler=_scheduler(job, run, optimizer, model))
    observer = Observer(model)
    sums = BlockSums()
    losses: list[float] = []
    try:
        for step, (epoch, batch) in enumerate(_batches(job, run, steps), start=1):
            observer.blocks = sums if step == steps else None
            loss = _loss(job, run, engine, observer, model, batch, epoch)
            losses.append(float(loss.detach()))
            if not math.isfinite(losses[-1]):
                raise HalfstepError(
                    f"The loss is {losses[-1]} in fp32 at step {step}. No other format can be better; fix the model or lower the learning rate."
                )
            with observer.backward():
                engine.backward(loss)
            del loss
            _step(engine, model, observer)
        ledger = _ledger(observer, model, sums)
        if propose(ledger, policy).reasons:

            def differentiate() -> None:
                loss = _loss(job, run, engine, observer, model, batch, epoch)
                with observer.backward():
                    loss.backward()  # type: ignore[no-untyped-call]

            ledger = replace(ledger, noise=_noise(differentiate, model, observer))
    finally:
        observer.close()
        engine.close()
    return ledger, losses


def _loss(
    job: Job, run: RunContext, engine: Engine, observer: Observer, model: nn.Module, batch: Any, epoch: int
) -> Tensor:
    with engine.forward(), observer.observe(run.device):
        loss: Tensor = job.call("loss", run, model=model, batch=batch, split="train", epoch=epoch)
    return loss


def _noise(differentiate: Callable[[], None], model: nn.Module, observer: Observer) -> frozenset[tuple[str, str]]:
    """The gradients that are rounding noise in fp32: those of the same step, twice, differ."""
    state, samples = rng_state(), []
    for strength in (0.0, STRENGTH):
        restore_rng(state)
        model.zero_grad(set_to_none=True)
        observer.probe = Probe(strength)
        differentiate()
        for name, param in trainable(model):
            if param.grad is not None:
                observer.count(WEIGHT_GRADIENT, name, param.grad)
        samples.append(observer.probe.samples)
    observer.probe = None
    return changed(*samples)


def _scheduler(job: Job, run: RunContext, optimizer: Any, model: nn.Module) -> Any:
    scheduler = job.call("scheduler", run, optimizer=optimizer, model=model)
    return None if scheduler is not None and needs_metric(scheduler) else scheduler


def _batches(job: Job, run: RunContext, steps: int) -> Iterator[tuple[int, Any]]:
    stream, count = DataStream(job, run, split="train"), 0
    for epoch in itertools.count():
        for batch in stream.batches(epoch):
            yield epoch, to_device(batch, run.device)
            count += 1
            if count == steps:
                return


@torch.no_grad()
def _step(engine: Engine, model: nn.Module, observer: Observer) -> None:
    """Update the weights; counts gradients before and updates after it."""
    old = {}
    for name, param in trainable(model):
        observer.count(WEIGHT, name, param)
        if param.grad is not None:
            observer.count(WEIGHT_GRADIENT, name, param.grad)
        old[name] = param.detach().clone()
    engine.step()
    for name, param in trainable(model):
        observer.count(UPDATE, name, param - old[name])


def _ledger(observer: Observer, model: nn.Module, sums: BlockSums) -> Ledger:
    stats = {
        key: StatsTable([key[1]], np.array([numel]), table[None]).row(0)
        for key, (table, numel) in observer.tables().items()
    }
    modules = tuple(name for name, _ in model.named_modules(remove_duplicate=False) if name)
    groups: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for kind, name in stats:
        if kind != INPUT:
            operation = observer.operations.get(name)
            owner = operation.module if operation is not None else name.rpartition(".")[0] or ROOT
            groups.setdefault((owner, kind), []).append((kind, name))
    order = {name: i for i, name in enumerate((*modules, ROOT, LOSS))}
    host = sums.on_host()
    rows = [
        Row(module, kind, TensorStats.merge(module, (stats[key] for key in keys)), block_errors(host, keys))
        for (module, kind), keys in groups.items()
    ]
    rows.sort(key=lambda row: (order[row.module], KINDS.index(row.kind)))
    return Ledger(observer.operations, stats, tuple(rows), modules, observer.casts_inner)
