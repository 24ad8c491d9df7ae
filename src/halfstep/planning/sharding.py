"""What one GPU of several holds: the formulas of DDP, FSDP2 and ZeRO, and the published numbers they must give.

How it works. Model state is weights, gradients, master and optimizer states. Data parallelism copies it to every GPU; the
sharded strategies give each of N GPUs a part, and pay with buffers for what must be whole for a moment:

    ddp      nothing is shared out; buckets as large as the gradients hold what is being summed
    zero1    states and master / N; one bucket of gradients
    zero2    gradients as well / N; one bucket
    zero3    weights as well / N; gathered whole for one piece of the model at a time, and for the next one ahead
    fsdp     FSDP2: as zero3, with the pieces that the job's `shard` names

Published anchors, which are tests: the ZeRO paper's 7.5 billion parameters on 64 GPUs (Rajbhandari et al. 2020, figure 1), Megatron's
distributed optimizer and DeepSpeed's own estimators. They differ because they hold different things: ZeRO's table has
16-bit gradients (2+2+12), Megatron fp32 ones (2+4+12), DeepSpeed both at once (2+2+4+12).
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
    "deepspeed_bytes",
    "megatron_bytes",
    "per_gpu",
    "state_bytes",
    "zero_paper_bytes",
]

STRATEGIES = {
    "ddp": "every GPU holds everything (DistributedDataParallel)",
    "zero1": "optimizer states and masters shared out (DeepSpeed ZeRO 1)",
    "zero2": "gradients as well (ZeRO 2)",
    "fsdp": "weights as well (FSDP2)",
    "zero3": "weights as well (DeepSpeed ZeRO 3)",
}
_BUCKET = 500_000_000  # elements: DeepSpeed's reduce_bucket_size
# DeepSpeed's stage3_max_live_parameters and prefetch bucket: what may be whole at once.
_LIVE, _PREFETCH = 1_000_000_000, 50_000_000
_SHARED = {
    "ddp": frozenset[str](),
    "zero1": frozenset({"states", "master", "average"}),
    "zero2": frozenset({"states", "master", "average", "gradients"}),
    "fsdp": frozenset({"states", "master", "average", "gradients", "weights"}),
    "zero3": frozenset({"states", "master", "average", "gradients", "weights"}),
}


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter that stay from step to step, and those of its gradient."""

    weights: float
    gradients: float
    master: float
    states: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.weights + self.gradients + self.master + self.states


def _bytes(name: str) -> int:
    return int(FORMATS[name].bytes)


def state_bytes(policy: Policy, accumulate: int = 1, moments: int = 2) -> StateBytes:
    """What a policy holds per parameter with an optimizer of this many moments (Adam: 2)."""
    master = {"weights": 0, "none": 0, "split": 2, "fp32": 4}[policy.master]
    moment = FORMATS[policy.states].bytes
    return StateBytes(_bytes(policy.params), _bytes(policy.grads_format(accumulate)), master, moments * moment)


@dataclass(frozen=True)
class Layout:
    """What the formulas need to know about a model and its policy."""

    num_params: int
    unit_params: int  # of the largest piece gathered at once
    compute_bytes: int  # of a gathered weight
    grad_bytes: int
    reduce_bytes: int


def layout_of(policy: Policy, num_params: int, unit_params: int, accumulate: int) -> Layout:
    """The layout of a model under a policy."""
    compute = _bytes(policy.compute) if policy.params == "fp32" else _bytes(policy.params)
    return Layout(num_params, unit_params, compute, _bytes(policy.grads_format(accumulate)), _bytes(policy.reduce))


def per_gpu(peak: Peak, layout: Layout, strategy: str, num_gpus: int) -> dict[str, int]:
    """One GPU's memory by cause: the fuller of the step's own fullest moment and the update, shared out."""
    if strategy not in STRATEGIES:
        raise unknown("strategy", strategy, STRATEGIES)
    if num_gpus < 1:
        raise SettingError(f"num_gpus={num_gpus} must be 1 or more.")
    if num_gpus == 1:
        return dict(peak.breakdown)
    shared = _SHARED[strategy]
    buffers = _buffers(layout, strategy)
    at_peak = {cause: size // num_gpus if cause in shared else size for cause, size in peak.breakdown.items()}
    if "weights" in shared:
        at_peak.pop("cast cache", None)  # weights are gathered in the compute format, and no copy is made of them
    at_peak["communication"] = buffers
    kept = ("weights", "buffers", "master", "states", "average", "batch", "workspaces")
    update = {cause: at_peak[cause] for cause in kept if cause in at_peak}
    gradients = layout.num_params * layout.grad_bytes
    update["gradients"] = gradients // num_gpus if "gradients" in shared else gradients
    update["communication"] = 0 if "weights" in shared else buffers
    return max(at_peak, update, key=lambda found: sum(found.values()))


def _buffers(layout: Layout, strategy: str) -> int:
    if strategy == "ddp":
        return layout.num_params * layout.grad_bytes
    if strategy in {"zero1", "zero2"}:
        return min(_BUCKET, layout.num_params) * layout.reduce_bytes
    if strategy == "zero3":
        gathered = min(_LIVE, layout.num_params, 2 * layout.unit_params + _PREFETCH)
        return gathered * layout.compute_bytes + min(_BUCKET, layout.num_params) * layout.reduce_bytes
    # FSDP2: this piece and the next one gathered, and the gradient of one whole on its way to reduce-scatter.
    return 2 * layout.unit_params * layout.compute_bytes + 2 * layout.unit_params * layout.reduce_bytes


def zero_paper_bytes(num_params: float, num_gpus: int, stage: int) -> float:
    """Model state per GPU by the ZeRO paper: fp16 weights and gradients, 12 bytes of fp32 master and Adam."""
    _check_stage(stage, 3)
    shares = [num_gpus if stage >= needed else 1 for needed in (3, 2, 1)]
    return num_params * sum(size / share for size, share in zip((2, 2, 12), shares, strict=True))


def megatron_bytes(num_params: float, num_gpus: int, *, distributed_optimizer: bool) -> float:
    """Model state per GPU by Megatron's theoretical_memory_usage: 18, or 6 + 12 / N, bytes per parameter."""
    return num_params * (6 + 12 / num_gpus if distributed_optimizer else 18)


def deepspeed_bytes(num_params: float, num_gpus: int, stage: int, largest_layer: float = 0) -> float:
    """Model state per GPU by DeepSpeed's estimators: 2 + 18 / N for stage 2, 18 / N and 4 per weight of one layer for 3."""
    _check_stage(stage, 3)
    if stage == 3:
        return num_params * 18 / num_gpus + 4 * largest_layer
    if stage == 2:
        return num_params * (2 + 18 / num_gpus)
    raise SettingError(f"DeepSpeed publishes estimators for ZeRO stages 2 and 3, not {stage}.")


def _check_stage(stage: int, most: int) -> None:
    if stage not in range(most + 1):
        raise SettingError(f"stage={stage} is no ZeRO stage; they are 0 to {most}.")
