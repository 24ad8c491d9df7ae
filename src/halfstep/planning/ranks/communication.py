"""The bytes that each GPU sends per update, for every strategy: formulas, checked against the collectives of real ranks.

How it works. A ring of N GPUs that gathers or reduce-scatters S bytes makes each GPU send (N - 1) / N of them, and an
all-reduce is both in turn. With P bytes of parameters, G bytes of gradients in the reduce dtype, and k micro-batches:

    ddp      all-reduce of G, once per update, in the messages of the Engine's reducer (`backends/buckets.py`)
    zero1    reduce-scatter of G and all-gather of the new weights, once per update
    zero2    as zero1, with a reduce-scatter in each micro-batch, because the gradients are sharded while they accumulate
    zero3    all-gather in forward and backward and reduce-scatter, in each micro-batch
    fsdp     the same all-gathers, but one reduce-scatter per update: gradients accumulate unsharded
             (`set_requires_gradient_sync`); what the root of FSDP2 gathers stays gathered until its backward
    hsdp     as fsdp within a group, and an all-reduce of each shard's gradients between the groups

Bytes divided by the bus bandwidth that nccl-tests reports is the time of the collectives, because its definition has the
same factors. How much of that is hidden behind compute is not predicted.
"""

from __future__ import annotations

from dataclasses import dataclass

from halfstep.optim.onebit.allreduce import compressed_bytes
from halfstep.planning.ranks.shards import Counted, Part, fsdp_bytes, whole_bytes

__all__ = ["Model", "Traffic", "traffic"]


@dataclass(frozen=True)
class Model:
    """What the formulas need to know about a model in one precision."""

    weights: Counted  # as they are gathered
    gradients: Counted  # in the reduce dtype
    message_bytes: int = 0  # of all buckets of ddp
    summed: Counted = ()  # gradients as FSDP2 accumulates them, and as hsdp sums them between groups
    compressed: tuple[int, ...] = ()  # elements of tensors that the optimizer sends compressed in most of its steps


@dataclass(frozen=True)
class Traffic:
    """Bytes that each GPU sends per update, by collective."""

    all_gather: int = 0
    reduce_scatter: int = 0
    all_reduce: int = 0  # of ddp, and between the groups of hsdp
    compressed: int = 0  # in a compressed step of the optimizer, instead of all the others

    @property
    def total(self) -> int:
        """All of them; of an optimizer that compresses, in its dense steps."""
        return self.all_gather + self.reduce_scatter + self.all_reduce

    def seconds(self, bandwidth: float) -> float:
        """Time of the collectives one after another at a bus bandwidth in bytes per second: predicted, nothing overlaps."""
        return self.total / bandwidth


def traffic(model: Model, strategy: str, num_gpus: int, *, accumulate: int = 1, group: int = 8) -> Traffic:
    """What each of `num_gpus` sends per update of `accumulate` micro-batches; `group` is the size of hsdp's shard groups."""
    if num_gpus == 1:
        return Traffic()
    if strategy == "ddp":
        compressed = compressed_bytes(model.compressed, num_gpus) if model.compressed else 0
        return Traffic(all_reduce=_all_reduce(model.message_bytes, num_gpus), compressed=compressed)
    if strategy == "fsdp":
        return _fsdp(model, num_gpus, accumulate)
    if strategy == "hsdp":
        shards = min(group, num_gpus)
        gradients = sum(fsdp_bytes(model.summed, shards).values())
        within = _fsdp(model, shards, accumulate)
        return Traffic(within.all_gather, within.reduce_scatter, _all_reduce(gradients, num_gpus // shards))
    # DeepSpeed divides one flat buffer, so there is no padding worth counting.
    gather, scatter = (_share(_total(counted), num_gpus) for counted in (model.weights, model.gradients))
    if strategy == "zero3":
        return Traffic(2 * accumulate * gather, accumulate * scatter)
    return Traffic(gather, scatter * (accumulate if strategy == "zero2" else 1))


def _fsdp(model: Model, num_gpus: int, accumulate: int) -> Traffic:
    if num_gpus == 1:
        return Traffic()
    gathers = sum(
        (1 if part.at_root else 2) * count * _sent(part, num_gpus) for part, count in model.weights
    )  # forward and backward
    return Traffic(accumulate * gathers, sum(count * _sent(part, num_gpus) for part, count in model.gradients))


def _sent(part: Part, num_gpus: int) -> int:
    """Each GPU passes on the padded shards of all others."""
    return (num_gpus - 1) * part.num_bytes(-(-part.num_rows // num_gpus))


def _total(counted: Counted) -> int:
    return sum(whole_bytes(counted).values())


def _share(num_bytes: int, num_gpus: int) -> int:
    return -(-num_bytes * (num_gpus - 1) // num_gpus)


def _all_reduce(num_bytes: int, num_gpus: int) -> int:
    return 2 * _share(num_bytes, num_gpus)
