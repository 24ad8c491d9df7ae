"""The memory of one GPU out of several: the formulas of DDP, FSDP2 and ZeRO, checked against published numbers.

How it works. Model state is weights, gradients, master and optimizer states. Data parallelism copies it to every GPU; the
sharded strategies give each of N GPUs a shard, at the price of buffers for what is gathered temporarily:

    ddp      nothing is sharded; gradients are sent in buckets of the reduce dtype, which replace them. (A model that you
             wrap in DistributedDataParallel has a second copy of all gradients, unless gradient_as_bucket_view=True.)
    zero1    states and fp32 masters / N, which DeepSpeed has of fp32 weights too; one bucket of gradients
    zero2    gradients / N as well, summed in fp32 (`ranks/zero.py`); one bucket
    zero3    weights / N as well; gathered for one unit of the model at a time, and for the next one ahead
    fsdp     FSDP2: as zero3, with the units that the job's `shard` names; weights are gathered as they are stored
    hsdp     fsdp within groups of GPUs, a copy in each group

The tests compare with published numbers: the ZeRO paper's 7.5 billion parameters on 64 GPUs (Rajbhandari et al. 2020,
figure 1), Megatron's distributed optimizer and DeepSpeed's own estimators. These differ because they count different
things: ZeRO's table has 16-bit gradients (2+2+12), Megatron fp32 ones (2+4+12), DeepSpeed both at once (2+2+4+12).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from halfstep.backends.buckets import BucketBytes
from halfstep.errors import SettingError, unknown
from halfstep.optim.onebit.allreduce import server_bytes
from halfstep.planning.ranks.communication import Model
from halfstep.planning.ranks.parts import Units
from halfstep.planning.ranks.shards import Counted, fsdp_bytes, whole_bytes
from halfstep.planning.ranks.zero import zero_bytes
from halfstep.planning.replay import Peak
from halfstep.precision.formats import FORMATS
from halfstep.precision.policy import Policy

__all__ = [
    "GROUP",
    "STRATEGIES",
    "Layout",
    "StateBytes",
    "Strategy",
    "deepspeed_bytes",
    "layout_of",
    "megatron_bytes",
    "per_gpu",
    "rejection",
    "retained_bytes",
    "state_bytes",
    "valid_counts",
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
    "hsdp": Strategy("FSDP2 within groups of GPUs, a copy in each group (HSDP)", _STATES | {"gradients", "weights"}),
    "zero3": Strategy("weights as well (DeepSpeed ZeRO 3)", _STATES | {"gradients", "weights"}),
}
_FSDP = frozenset({"fsdp", "hsdp"})
GROUP = 8  # GPUs in a group of hsdp: those of one node, usually
_FP32 = 4  # bytes
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

    parts: Counted
    units: Units
    param_bytes: int  # of a stored weight
    compute_bytes: int  # of a weight that ZeRO 3 gathers
    reduce_bytes: int
    accumulate: int = 1
    buckets: tuple[BucketBytes, ...] = ()  # of ddp
    native: bool = False  # whether 16-bit gradients are reduced in their own format
    compressed: tuple[int, ...] = ()  # elements of tensors that the optimizer sends compressed
    weights: str = "fp32"  # the format they are stored in

    @property
    def num_params(self) -> int:
        """Trainable parameters."""
        return sum(count * math.prod(part.shape) for part, count in self.parts if part.category == "gradients")

    @property
    def grad_bytes(self) -> int:
        """Bytes of all gradients."""
        return whole_bytes(self.parts).get("gradients", 0)

    @property
    def communicated(self) -> Model:
        """What the ranks exchange: the weights as they are stored, and the gradients in the reduce dtype."""
        weights = tuple(item for item in self.parts if item[0].category == "weights")
        messages = sum(bucket.message for bucket in self.buckets)
        return Model(weights, self._gradients_in(self.reduce_bytes), messages, self.summed, self.compressed)

    @property
    def summed(self) -> Counted:
        """Gradients in the dtype in which FSDP2 sums them: fp32, unless they are stored and reduced in one 16-bit format."""
        return self._gradients_in(None if self.native else _FP32)

    def _gradients_in(self, block_bytes: int | None) -> Counted:
        gradients = [item for item in self.parts if item[0].category == "gradients"]
        return tuple((replace(part, block_bytes=block_bytes or part.block_bytes), count) for part, count in gradients)


def layout_of(
    policy: Policy,
    parts: Counted,
    units: Units,
    buckets: tuple[BucketBytes, ...],
    accumulate: int,
    compressed: tuple[int, ...] = (),
) -> Layout:
    """The layout of a model under a policy."""
    params = _bytes(policy.params)
    compute = _bytes(policy.compute) if policy.params == "fp32" else params
    native = policy.params == policy.reduce
    sent = (buckets, native, compressed, policy.params)
    return Layout(parts, units, params, compute, _bytes(policy.reduce), accumulate, *sent)


def rejection(strategy: str, policy: Policy, *, elementwise: bool = True) -> str:
    """Why a precision cannot be trained with a strategy; empty where it can."""
    sharded = STRATEGIES[strategy].sharded
    if sharded and not elementwise:
        return "its optimizer needs whole matrices, so it cannot step shards; use ddp"
    if _is_zero(strategy) and policy.is_lean and (policy.master, policy.states) != ("fp32", "fp32"):
        name = str(replace(policy, master="fp32", states="fp32"))
        return f"DeepSpeed stores fp32 masters and moments of 16-bit weights; plan {name} for ZeRO, or use fsdp"
    return ""


def _is_zero(strategy: str) -> bool:
    return strategy.startswith("zero")


def valid_counts(strategy: str, most: int, group: int) -> list[int] | range:
    """The numbers of GPUs a strategy can use, up to `most`: hsdp fills one group, or has whole ones."""
    if strategy != "hsdp":
        return range(1, most + 1)
    return [*range(1, min(group, most) + 1), *range(2 * group, most + 1, group)]


def per_gpu(peak: Peak, layout: Layout, strategy: str, num_gpus: int, group: int = GROUP) -> dict[str, int]:
    """One GPU's memory by category: at the peak of the step or in the update, whichever is larger, sharded."""
    if strategy not in STRATEGIES:
        raise unknown("strategy", strategy, STRATEGIES)
    if num_gpus < 1:
        raise SettingError(f"num_gpus={num_gpus} must be 1 or more.")
    if strategy == "hsdp" and num_gpus > group and num_gpus % group:
        raise SettingError(f"hsdp on {num_gpus} GPUs: not a multiple of its groups of {group}. Use whole groups.")
    if num_gpus == 1:
        return dict(peak.breakdown)
    shards = min(group, num_gpus) if strategy == "hsdp" else num_gpus
    whole = whole_bytes(layout.parts)
    if strategy in _FSDP:
        local = fsdp_bytes(layout.parts, shards)
    elif _is_zero(strategy):
        local = zero_bytes(layout.parts, int(strategy.removeprefix("zero")), shards, weights=layout.weights)
    else:
        local = whole
    if strategy == "ddp" and layout.compressed:
        errors = {"states": server_bytes(layout.compressed, num_gpus)}
        peak = replace(
            peak, breakdown=_added(peak.breakdown, errors), others=tuple(_added(o, errors) for o in peak.others)
        )
    candidates = [_at(sizes, layout, strategy, shards, whole, local) for sizes in (peak.breakdown, *peak.others)]
    return max(candidates, key=lambda sizes: sum(sizes.values()))


def _added(sizes: dict[str, int], more: dict[str, int]) -> dict[str, int]:
    return sizes | {name: sizes.get(name, 0) + size for name, size in more.items()}


def _at(
    breakdown: dict[str, int], layout: Layout, strategy: str, shards: int, whole: dict[str, int], local: dict[str, int]
) -> dict[str, int]:
    """One moment of the step, or the update after it, whichever needs more."""
    sharded = STRATEGIES[strategy].sharded
    at_peak = dict(breakdown)
    for name in sharded - {"gradients"}:
        if name in at_peak or (name == "master" and _is_zero(strategy)):
            # What no part describes, such as step counts, every rank has.
            at_peak[name] = at_peak.get(name, 0) + local.get(name, 0) - whole.get(name, 0)
    if "gradients" in at_peak and ("gradients" in sharded or _is_zero(strategy)):
        at_peak["gradients"] = _gradients(at_peak["gradients"], layout, strategy, whole, local)
    if strategy == "zero3":
        at_peak.pop("cast cache", None)  # weights are gathered in the compute dtype, so autocast makes no copies
    at_peak["communication"] = _buffers(layout, strategy, shards, at_peak.get("gradients", 0))
    persistent = ("weights", "buffers", "master", "states", "average", "batch", "workspaces")
    update = {name: at_peak[name] for name in persistent if name in at_peak}
    update["gradients"] = local.get("gradients", 0)
    update["communication"] = 0 if "weights" in sharded else _buffers(layout, strategy, shards, update["gradients"])
    return max(at_peak, update, key=lambda sizes: sum(sizes.values()))


def _gradients(at_peak: int, layout: Layout, strategy: str, whole: dict[str, int], local: dict[str, int]) -> int:
    """Gradients at the peak: the shards of those that are allocated, or all of them unsharded while FSDP2 accumulates."""
    if strategy in _FSDP and layout.accumulate > 1:
        return retained_bytes(layout)
    return -(-at_peak * local["gradients"] // max(1, whole["gradients"]))


def retained_bytes(layout: Layout) -> int:
    """Whole gradients that FSDP2 accumulates on every rank."""
    return sum(whole_bytes(layout.summed).values())


def _buffers(layout: Layout, strategy: str, shards: int, gradients: int) -> int:
    """Memory for communication while this many bytes of gradients are allocated."""
    num_params, units = layout.num_params, layout.units
    if strategy == "ddp":
        # Messages replace the gradients while they are sent, and are replaced by the means; one bucket is copied at a time.
        wider = sum(max(bucket.message, bucket.gradients) for bucket in layout.buckets) - layout.grad_bytes
        largest_bucket = max((bucket.message for bucket in layout.buckets), default=0)
        return wider * gradients // max(1, layout.grad_bytes) + largest_bucket
    if strategy in {"zero1", "zero2"}:
        return min(_BUCKET, num_params) * layout.reduce_bytes
    largest = max(units.largest, units.root)
    if strategy == "zero3":
        gathered = min(_LIVE, num_params, 2 * largest + _PREFETCH)
        return gathered * layout.compute_bytes + min(_BUCKET, num_params) * layout.reduce_bytes
    # FSDP2: the root, which stays gathered from its forward to its backward, this unit and the next one, and the whole
    # gradient of one unit before and in the reduce-scatter. What is gathered or scattered is padded to equal shards: a
    # position table of shape (1, 257, 6144) becomes N of them.
    root = tuple((part, count) for part, count in layout.parts if part.category == "weights" and part.at_root)
    gathered = shards * sum(fsdp_bytes(root, shards).values())
    scattered = max(2 * units.largest, units.root + gathered // layout.param_bytes)
    # Groups that sum in fp32 round a copy of one unit's gradients before a 16-bit message.
    exact = layout.native or layout.reduce_bytes == _FP32
    summed = scattered * layout.reduce_bytes if exact else scattered * _FP32 + largest * layout.reduce_bytes
    return gathered + 2 * units.largest * layout.param_bytes + summed


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
