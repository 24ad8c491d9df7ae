"""Facts of an observed step, and of what is known without one."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from halfstep.backends.deepspeed.rows import accumulation_of
from halfstep.backends.fsdp.groups import Groups, is_sharded_model
from halfstep.hardware.units import count_text
from halfstep.inspection.facts import Fact, fact_of, unknown_fact
from halfstep.inspection.observer import Observer
from halfstep.inspection.wrappers import Parts
from halfstep.precision.formats import format_name

__all__ = ["observed_facts"]

_HOW = "put one step inside `with halfstep.inspect(model, optimizer, scaler) as step:`."
_NO_BACKWARD = "no backward() ran inside the block."


def observed_facts(parts: Parts, observer: Observer | None) -> list[Fact]:
    """The facts of a step; without one, how to observe it."""
    if observer is None:
        rest = [unknown_fact(key, _HOW) for key in ("compute", "backward", "loss", "grads")]
        own = _by_deepspeed(parts)
        intended = _intended_reduction(parts)
        reduce = own.get("reduce") or unknown_fact("reduce", _HOW + (f" Set up: {intended}." if intended else ""))
        return [*rest, own.get("accumulate") or unknown_fact("accumulate", _HOW), reduce, unknown_fact("step", _HOW)]
    return [
        _compute(parts, observer),
        _backward(observer),
        _loss(observer),
        _grads(parts, observer),
        _accumulate(parts, observer),
        _reduce(parts, observer),
        _step(observer),
    ]


def _compute(parts: Parts, observer: Observer) -> Fact:
    entries = [(name, form, 1) for name, form in observer.products]
    if not entries and parts.is_compiled:
        return unknown_fact(
            "compute",
            "compiled code called no operator for its matrix products; inspect the model before torch.compile.",
        )
    if not entries and not observer.num_backwards:
        return unknown_fact("compute", "no forward that records gradients ran inside the block.")
    return fact_of("compute", entries, note=f"{count_text(len(entries), 'matrix product')} of the forward")


def _backward(observer: Observer) -> Fact:
    if not observer.num_backwards:
        return unknown_fact("backward", _NO_BACKWARD)
    entries = [(name, form, 1) for name, form in observer.backward_products]
    return fact_of("backward", entries, note=count_text(len(entries), "matrix product"))


def _loss(observer: Observer) -> Fact:
    if not observer.losses:
        return unknown_fact("loss", _NO_BACKWARD)
    operations = ", ".join(dict.fromkeys(name for name, _ in observer.losses))
    return fact_of("loss", [(name, form, 1) for name, form in observer.losses], note=operations)


def _grads(parts: Parts, observer: Observer) -> Fact:
    if observer.grads:
        entries = [(name, form, parts.params[name].numel()) for name, form in observer.grads.items()]
        return fact_of("grads", entries, num_bytes=observer.grad_bytes)
    own = _by_deepspeed(parts).get("grads")
    if own is not None and observer.num_backwards:
        return own
    why = "backward() left no gradients: they are used inside it." if observer.num_backwards else _NO_BACKWARD
    return unknown_fact("grads", why)


def _accumulate(parts: Parts, observer: Observer) -> Fact:
    own = _by_deepspeed(parts).get("accumulate")
    if own is not None:
        return own
    if observer.accumulated:
        entries = [(name, form, 1) for name, form in observer.accumulated.items()]
        return fact_of(
            "accumulate", entries, note=count_text(observer.num_backwards, "backward pass", "backward passes")
        )
    if not observer.num_backwards:
        return unknown_fact("accumulate", _NO_BACKWARD)
    return fact_of("accumulate", (), note="nothing was added up")


def _reduce(parts: Parts, observer: Observer) -> Fact:
    if observer.reductions:
        names = ", ".join(dict.fromkeys(name for name, _, _ in observer.reductions))
        return fact_of("reduce", observer.reductions, note=names)
    own = _by_deepspeed(parts).get("reduce")
    if own is not None:
        return own
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return fact_of("reduce", (), note="one rank")
    intended = _intended_reduction(parts)
    return unknown_fact(
        "reduce", "no gradients were reduced inside the block" + (f" (set up: {intended})." if intended else ".")
    )


def _step(observer: Observer) -> Fact:
    applied, skipped = observer.num_applied, observer.num_skips
    if not applied and not skipped:
        return unknown_fact("step", "optimizer.step() was not called inside the block.")
    counts = (("applied", applied), ("skipped", skipped))
    return fact_of("step", [("optimizer.step()", kind, count) for kind, count in counts if count])


def _by_deepspeed(parts: Parts) -> dict[str, Fact]:
    """What a DeepSpeed engine does in its own buffers, read from its objects."""
    engine = parts.deepspeed
    if engine is None:
        return {}
    form, micro_batches = accumulation_of(engine), parts.micro_batches or 1
    note = f"over {micro_batches} micro-batches, by DeepSpeed"
    accumulate = [("DeepSpeed's buffers", form, 1)] if micro_batches > 1 else []
    facts = {"accumulate": fact_of("accumulate", accumulate, note=note)}
    facts["grads"] = fact_of("grads", [("DeepSpeed's buffers", form, 1)], note="in DeepSpeed's buffers")
    dtype = getattr(engine.optimizer, "communication_data_type", None) or engine.communication_data_type
    reduced = [("gradients", format_name(dtype), 1)] if dist.get_world_size() > 1 else []
    facts["reduce"] = fact_of("reduce", reduced, note="by DeepSpeed" if reduced else "one rank")
    return facts


def _intended_reduction(parts: Parts) -> str:
    """What FSDP2's policy or a hook of DistributedDataParallel is set to."""
    if is_sharded_model(parts.module):
        policies = {_policy(unit.group) for unit in Groups(parts.module).units}
        return "; ".join(sorted(policies - {""}))
    hooks = getattr(parts.ddp, "_comm_hooks", None) or ()
    return ", ".join(getattr(hook, "__name__", str(hook)) for hook, _ in hooks)


def _policy(group: Any) -> str:
    policy = getattr(group, "mp_policy", None)
    if policy is None:
        return ""
    names = {name: getattr(policy, name, None) for name in ("param_dtype", "reduce_dtype")}
    return "FSDP2 " + ", ".join(
        f"{name} {format_name(value) if value else 'as stored'}" for name, value in names.items()
    )
