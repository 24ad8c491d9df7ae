"""The memory of one GPU out of several: the formulas of DDP, FSDP2 and ZeRO, checked against published numbers.

How it works. Model state is weights, gradients, master and optimizer states. Data parallelism copies it to every GPU; the
sharded strategies give each of N GPUs a shard, at the price of buffers for what is gathered temporarily:

    ddp      nothing is sharded; gradient buckets are as large as the gradients
    zero1    states and master / N; one bucket of gradients
    zero2    gradients / N as well; one bucket
    zero3    weights / N as well; gathered for one unit of the model at a time, and for the next one ahead
    fsdp     FSDP2: as zero3, with the units that the job's `shard` names

The tests compare with published numbers: the ZeRO paper's 7.5 billion parameters on 64 GPUs (Rajbhandari et al. 2020,
figure 1), Megatron's distributed optimizer and DeepSpeed's own estimators. These differ because they count different
things: ZeRO's table has 16-bit gradients (2+2+12), Megatron fp32 ones (2+4+12), DeepSpeed both at once (2+2+4+12).
"""

from __future__ import annotations

from dataclasses import dataclass

from halfstep.errors import SettingError, unknown
from halfstep.planning.replay import Peak
from halfstep.precision.formats import FORMATS
from halfstep.precision.policy import Policy

__all__ = [
    "STRATEGIES",
    "Layout",
    "StateBytes",
    "Strategy",
    "deepspeed_bytes",
    "layout_of",
    "megatron_bytes",
    "per_gpu",
    "state_bytes",
    "zero_paper_bytes",
]


@dataclass(frozen=True)
class Strategy:
    """One way to train on several GPUs."""

    description: str
    sharded: frozenset[str] = frozenset()  # categories of memory of which each GPU has 1 / N


_STATES = frozenset({"states", "master", "average"})
STRATEGIES = {
    "ddp": Strategy("a full copy on every GPU (DistributedDataParallel)"),
    "zero1": Strategy("optimizer states and masters sharded (DeepSpeed ZeRO 1)", _STATES),
    "zero2": Strategy("gradients as well (ZeRO 2)", _STATES | {"gradients"}),
    "fsdp": Strategy("weights as well (FSDP2)", _STATES | {"gradients", "weights"}),
    "zero3": Strategy("weights as well (DeepSpeed ZeRO 3)", _STATES | {"gradients", "weights"}),
}
_BUCKET = 500_000_000  # elements: DeepSpeed's reduce_bucket_size
# DeepSpeed's stage3_max_live_parameters and prefetch bucket: elements that may be gathered at once.
_LIVE, _PREFETCH = 1_000_000_000, 50_000_000


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter: the model state that persists between steps, and the gradient."""

    weights: float
    gradients: float
    master: float
    states: float

    @property
    def total(self) -> float:
        """Their sum."""
        return self.weights + self.gradients + self.master + self.states


def _bytes(name: str) -> int:
    return int(FORMATS[name].bytes)


def state_bytes(policy: Policy, accumulate: int = 1, moments: int = 2) -> StateBytes:
    """What a policy stores per parameter with an optimizer of this many moments (Adam: 2)."""
    master = {"weights": 0, "none": 0, "split": 2, "fp32": 4}[policy.master]
    moment = FORMATS[policy.states].bytes
    return StateBytes(_bytes(policy.params), _bytes(policy.grads_format(accumulate)), master, moments * moment)


@dataclass(frozen=True)
class Layout:
    """The facts about a model and its policy that the formulas need."""

    num_params: int
    unit_params: int  # of the largest unit gathered at once
    compute_bytes: int  # of a gathered weight
    grad_bytes: int
    reduce_bytes: int


def layout_of(policy: Policy, num_params: int, unit_params: int, accumulate: int) -> Layout:
    """The layout of a model under a policy."""
    compute = _bytes(policy.compute) if policy.params == "fp32" else _bytes(policy.params)
    return Layout(num_params, unit_params, compute, _bytes(policy.grads_format(accumulate)), _bytes(policy.reduce))


def per_gpu(peak: Peak, layout: Layout, strategy: str, num_gpus: int) -> dict[str, int]:
    """One GPU's memory by category: at the peak of the step or in the update, whichever is larger, sharded."""
    if strategy not in STRATEGIES:
        raise unknown("strategy", strategy, STRATEGIES)
    if num_gpus < 1:
        raise SettingError(f"num_gpus={num_gpus} must be 1 or more.")
    if num_gpus == 1:
        return dict(peak.breakdown)
    sharded = STRATEGIES[strategy].sharded
    buffers = _buffers(layout, strategy)
    at_peak = {name: size // num_gpus if name in sharded else size for name, size in peak.breakdown.items()}
    if "weights" in sharded:
        at_peak.pop("cast cache", None)  # weights are gathered in the compute dtype, so autocast makes no copies
    at_peak["communication"] = buffers
    persistent = ("weights", "buffers", "master", "states", "average", "batch", "workspaces")
    update = {name: at_peak[name] for name in persistent if name in at_peak}
    gradients = layout.num_params * layout.grad_bytes
    update["gradients"] = gradients // num_gpus if "gradients" in sharded else gradients
    update["communication"] = 0 if "weights" in sharded else buffers
    return max(at_peak, update, key=lambda sizes: sum(sizes.values()))


def _buffers(layout: Layout, strategy: str) -> int:
    if strategy == "ddp":
        return layout.num_params * layout.grad_bytes
    if strategy in {"zero1", "zero2"}:
        return min(_BUCKET, layout.num_params) * layout.reduce_bytes
    if strategy == "zero3":
        gathered = min(_LIVE, layout.num_params, 2 * layout.unit_params + _PREFETCH)
        return gathered * layout.compute_bytes + min(_BUCKET, layout.num_params) * layout.reduce_bytes
    # FSDP2: this unit and the next one gathered, and the full gradient of one before reduce-scatter.
    return 2 * layout.unit_params * layout.compute_bytes + 2 * layout.unit_params * layout.reduce_bytes


def zero_paper_bytes(num_params: float, num_gpus: int, stage: int) -> float:
    """Model state per GPU according to the ZeRO paper: fp16 weights and gradients, 12 bytes of fp32 master and Adam."""
    _check_stage(stage)
    shares = [num_gpus if stage >= needed else 1 for needed in (3, 2, 1)]
    return num_params * sum(size / share for size, share in zip((2, 2, 12), shares, strict=True))


def megatron_bytes(num_params: float, num_gpus: int, *, distributed_optimizer: bool) -> float:
    """Model state per GPU according to Megatron's theoretical_memory_usage: 18, or 6 + 12 / N, bytes per parameter."""
    return num_params * (6 + 12 / num_gpus if distributed_optimizer else 18)


def deepspeed_bytes(num_params: float, num_gpus: int, stage: int, largest_layer: float = 0) -> float:
    """Model state per GPU according to DeepSpeed: 2 + 18 / N for stage 2, 18 / N and 4 per weight of one layer for 3."""
    _check_stage(stage)
    if stage == 3:
        return num_params * 18 / num_gpus + 4 * largest_layer
    if stage == 2:
        return num_params * (2 + 18 / num_gpus)
    raise SettingError(f"DeepSpeed publishes estimators for ZeRO stages 2 and 3, not {stage}.")


def _check_stage(stage: int) -> None:
    if stage not in range(4):
        raise SettingError(f"stage={stage} is not a ZeRO stage; use 0, 1, 2 or 3.")
