"""How many GPUs each strategy needs, and what an exact number of them stores and sends.

More GPUs never need more memory on each at the same global batch, so the smallest number is found by bisection over the
numbers that a strategy can use, on the line through two traces; the answer itself is traced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from halfstep.errors import SettingError, unknown
from halfstep.hardware.units import bytes_text
from halfstep.planning.estimator import Estimate, Estimator
from halfstep.planning.ranks.communication import Traffic, traffic
from halfstep.planning.sharding import GROUP, STRATEGIES, Layout, layout_of, per_gpu, rejection, valid_counts

__all__ = [
    "MAX_GPUS",
    "STATE_CATEGORIES",
    "Answer",
    "Fleet",
    "fewest",
    "largest_on_each",
    "on_exactly",
    "parse_strategies",
]

STATE_CATEGORIES = ("weights", "master", "states", "average")  # with the gradients: model state
MAX_GPUS = 4096
_START = 8  # examples in the first trace of a search
_MAX_BATCH = 1 << 22


@dataclass(frozen=True)
class Fleet:
    """The GPUs to plan for."""

    gpus: int | None = None  # at most this many; None: no limit
    strategies: tuple[str, ...] = tuple(STRATEGIES)
    group: int = GROUP  # GPUs that share one copy of the model in hsdp


@dataclass(frozen=True)
class Answer:
    """One strategy on the smallest number of GPUs, or on a requested number."""

    strategy: str
    num_gpus: int | None  # None: it fits on no number of GPUs
    micro_batch: int
    need_bytes: int  # of tensors, on each GPU
    decides: str  # the largest category on one GPU fewer, where it does not fit
    traffic: Traffic | None = None  # that each GPU sends per update
    rejected: str = ""  # the reason why this precision cannot be trained with this strategy
    fits: bool = True


def parse_strategies(names: Sequence[str]) -> tuple[tuple[str, ...], int]:
    """The named strategies, or all of them, and the size of hsdp's groups, written as hsdp:16."""
    strategies: list[str] = []
    group = GROUP
    for text in names:
        name, colon, size = text.partition(":")
        if name not in STRATEGIES:
            raise unknown("strategy", name, STRATEGIES)
        if colon and (name != "hsdp" or not size.isdecimal() or int(size) < 2):
            raise SettingError(
                f"strategy {text!r}: only hsdp has a group size, of at least 2 GPUs, such as hsdp:{GROUP}. Write that, or {name}."
            )
        group = int(size) if colon else group
        strategies.append(name)
    return tuple(dict.fromkeys(strategies)) or tuple(STRATEGIES), group


def fewest(estimator: Estimator, layout: Layout, strategy: str, batch: int, usable: int, fleet: Fleet) -> Answer:
    """The smallest number of GPUs on which a micro-batch over all of them fits."""
    reason = _rejection(estimator, batch, strategy)
    if reason:
        return Answer(strategy, None, batch, 0, "rejected", rejected=reason, fits=False)

    def need(num: int, *, checked: bool = False) -> dict[str, int]:
        return _need(estimator, layout, strategy, batch, num, fleet.group, checked=checked)

    def fits(num: int, *, checked: bool = False) -> bool:
        return sum(need(num, checked=checked).values()) <= usable

    counts = valid_counts(strategy, min(batch, MAX_GPUS) if fleet.gpus is None else fleet.gpus, fleet.group)
    low, high, last = -1, 0, len(counts) - 1  # positions in `counts`
    while not fits(counts[high]):
        if high >= last:
            sizes = need(counts[high])
            return Answer(strategy, None, -(-batch // counts[high]), sum(sizes.values()), _decides(sizes), fits=False)
        low, high = high, min(2 * high + 1, last)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(counts[middle]) else (middle, high)
    while not fits(counts[high], checked=True) and high < last:  # the line was slightly too low here
        high += 1
    num = counts[high]
    sizes = need(num)
    decides = _decides(need(counts[high - 1]) if high else sizes)
    sent = traffic(layout.communicated, strategy, num, accumulate=layout.accumulate, group=fleet.group)
    return Answer(strategy, num, -(-batch // num), sum(sizes.values()), decides, sent)


def on_exactly(estimator: Estimator, layout: Layout, strategy: str, batch: int, usable: int, fleet: Fleet) -> Answer:
    """A strategy on `fleet.gpus` GPUs: what each stores and sends."""
    num = fleet.gpus
    assert num is not None
    reason = _rejection(estimator, -(-batch // num), strategy)  # and so the micro-batch of each GPU is traced
    if not reason and num > batch:
        reason = f"a micro-batch of {batch} over all GPUs has no example for some of {num}"
    if not reason and num not in valid_counts(strategy, num, fleet.group):
        reason = f"{num} GPUs are not a multiple of its groups of {fleet.group}"
    if reason:
        return Answer(strategy, num, -(-batch // num), 0, "rejected", rejected=reason, fits=False)
    sizes = _need(estimator, layout, strategy, batch, num, fleet.group)
    sent = traffic(layout.communicated, strategy, num, accumulate=layout.accumulate, group=fleet.group)
    total = sum(sizes.values())
    return Answer(strategy, num, -(-batch // num), total, _decides(sizes), sent, fits=total <= usable)


def largest_on_each(estimator: Estimator, strategy: str, num_gpus: int, usable: int) -> Estimate:
    """The largest micro-batch that fits on each of `num_gpus`; raises if not even one example does."""
    (name,), group = parse_strategies([strategy])
    traced = estimator.trace(_START)
    layout = layout_of(
        estimator.policy, traced.parts, traced.units, traced.buckets, estimator.options.accumulate, traced.compressed
    )
    reason = rejection(name, estimator.policy, elementwise=traced.elementwise)
    if reason:
        raise SettingError(f"{name} with {estimator.policy} is rejected: {reason}.")
    estimator.trace(2 * _START)

    def need(size: int, *, trace: bool = False) -> int:
        return sum(per_gpu(estimator.at(size, trace=trace).least, layout, name, num_gpus, group).values())

    low, high = 0, 1
    while need(high) <= usable and high < _MAX_BATCH:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if need(middle) <= usable else (low, middle)
    while low > 1 and need(low, trace=True) > usable:  # the line was slightly too low here
        low -= max(1, low // 200)
    if low == 0 or need(low, trace=True) > usable:
        raise SettingError(
            f"Not even one example fits on each of {num_gpus} GPUs with {name} in {estimator.policy}: that needs "
            f"{bytes_text(need(1))}, and {bytes_text(usable)} are usable. Use more GPUs or a leaner precision."
        )
    return estimator.at(low)


def _rejection(estimator: Estimator, batch: int, strategy: str) -> str:
    return rejection(strategy, estimator.policy, elementwise=estimator.trace(batch).elementwise)


def _need(
    estimator: Estimator, layout: Layout, strategy: str, batch: int, num: int, group: int, *, checked: bool = False
) -> dict[str, int]:
    micro = -(-batch // num)
    estimate = estimator.checked(micro) if checked else estimator.at(micro, trace=False)
    return per_gpu(estimate.least, layout, strategy, num, group)


def _decides(sizes: dict[str, int]) -> str:
    """The largest part: model state, communication buffers, or one category of the step itself."""
    state = sum(sizes.get(category, 0) for category in (*STATE_CATEGORIES, "gradients"))
    others = {category: size for category, size in sizes.items() if category not in {*STATE_CATEGORIES, "gradients"}}
    top = max(others, key=lambda category: others[category], default="")
    return "model state" if not top or state >= others[top] else top
