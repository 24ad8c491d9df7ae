"""From the numbers of an fp32 step to a policy: what overflows or underflows, what must stay in fp32, which loss scale.

How it works. A product in 16 bits needs nine tensors in the range of its format: its inputs, its weights and its result, the gradients of
all three multiplied by the loss scale, and the gradients that the loss itself computes. Other 16-bit results need themselves and their
gradient. `dtypes.sixteen_bit` decides which results those are, for a set of modules that are kept in fp32. What is out of range is then cured in
the order of the step, until nothing is:

    a product, or an operation of a leaf module     keep its module
    a sum of 16-bit tensors in a module around      keep the module that computed the larger summand: torch promotes the sum
    attention logits and other inner products       keep the module whose forward computes them, with all its children

The loss scale is chosen with the 16-bit gradients that remain. Gradients of which 0.5 % is lost at that scale have their modules
kept in fp32, and the scale is chosen again for the others. What is kept for that reason is still reached through the layers behind it, so
from then on 0.1 % is the limit for activation gradients that lead there: a weight gradient is a sum over the batch in which large
parts cancel, and an error of 2 % of its terms was 20 % of the sum. Gradients that are noise in fp32 itself
(`noise.py`) do not count. If more than half of the products would have to be kept, or something lies outside of any
module, bf16 is proposed instead.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from halfstep.precision.formats import FP16, Format, get_format
from halfstep.precision.loss_scale import LossScale
from halfstep.precision.policy import Policy
from halfstep.rehearsal.dtypes import is_inside, origin, patterns_for, sixteen_bit
from halfstep.rehearsal.ledger import Ledger
from halfstep.rehearsal.observer import (
    ACTIVATION,
    GRADIENT,
    INNER,
    INPUT,
    LOSS,
    ROOT,
    WEIGHT,
    WEIGHT_GRADIENT,
    Operation,
)
from halfstep.rehearsal.rounding import BestScale, best_scale, largest_magnitude, relative_error
from halfstep.rehearsal.rules import FIRST, LOWER, VIEW
from halfstep.watching.stats import TensorStats

__all__ = ["Proposal", "Risk", "Trouble", "propose", "risks_of", "sixteen_bit_rows", "troubles_of"]

LOST = (
    0.005  # relative error of a gradient from which it counts as lost; rounding alone is 0.0002 in fp16, 0.0016 in bf16
)
LOST_BEFORE = 0.001  # the same for an activation gradient that leads to modules that are kept because of LOST
MOST_KEPT = 0.5  # share of the products; with more of them in fp32, fp16 is no gain
NEAR = 3.0  # powers of two from the limit: 8 times as large would overflow
_NOT_CURED = "keeping modules in fp32 does not change that"
_AUTOCAST_OFF = (
    "keeping modules in fp32 would not help: the loss calls torch.autograd.grad with autocast on, which casts the backward pass of "
    "every module. Call it under torch.autocast(device_type, enabled=False), as torch advises, and rehearse again"
)
OVERFLOW, UNDERFLOW = "overflow", "underflow"


@dataclass(frozen=True)
class Trouble:
    """A tensor that a format cannot represent."""

    module: str
    kind: str
    effect: str  # overflow or underflow
    function: str  # the torch function that computes or uses it
    largest: float  # magnitude, before the loss scale
    lost: float  # relative error after rounding; inf for an overflow
    cure: str | None  # the module to keep in fp32; None if it is outside of every module

    def __str__(self) -> str:
        what = f"up to {self.largest:.3g}" if self.effect == OVERFLOW else f"{100 * self.lost:.2g}% lost"
        return f"{self.module}: {self.kind} {self.effect}s, {what} ({self.function})"


@dataclass(frozen=True)
class Risk:
    """A 16-bit tensor that is close to overflow; nothing went wrong in the steps that were observed."""

    module: str
    kind: str
    margin: float  # powers of two to the limit


@dataclass(frozen=True)
class Proposal:
    """A policy that avoids the predicted troubles, with its reasons."""

    policy: str
    keep_fp32: tuple[str, ...]  # modules
    scale: BestScale | None  # None where the format needs no loss scale
    reasons: tuple[str, ...]


def troubles_of(ledger: Ledger, policy: Policy) -> tuple[tuple[Trouble, ...], BestScale | None]:
    """What goes wrong under a policy, the worst of each module and kind, and the loss scale that this assumes.

    That is the policy's own scale if it is static, else the best one.
    """
    fmt = _format(policy)
    in_fp32 = {name for name in ledger.modules if policy.keeps_fp32(name)}
    narrow = sixteen_bit(ledger.operations, in_fp32)
    scale = _scale_for(ledger, narrow, in_fp32, fmt, policy)
    worst: dict[tuple[str, str, str], Trouble] = {}
    for trouble in _all_troubles(ledger, narrow, in_fp32, fmt, 0 if scale is None else scale.exponent):
        key = (trouble.module, trouble.kind, trouble.effect)
        if key not in worst or (trouble.lost, trouble.largest) > (worst[key].lost, worst[key].largest):
            worst[key] = trouble
    return tuple(worst.values()), scale


def sixteen_bit_rows(ledger: Ledger, policy: Policy) -> frozenset[tuple[str, str]]:
    """The (module, kind) of which something is 16-bit under a policy; others are fp32, whatever range they have."""
    in_fp32 = {name for name in ledger.modules if policy.keeps_fp32(name)}
    rows = set()
    for name in sixteen_bit(ledger.operations, in_fp32):
        op = ledger.operations[name]
        rows |= {(op.module, kind) for kind in (ACTIVATION, GRADIENT, INNER)}
        if op.rule == LOWER and op.params:
            rows |= {
                (param.rpartition(".")[0] or ROOT, kind) for param in op.params for kind in (WEIGHT, WEIGHT_GRADIENT)
            }
    return frozenset(rows)


def risks_of(ledger: Ledger, policy: Policy) -> tuple[Risk, ...]:
    """The 16-bit activations, and gradients that no loss scale protects, of which the largest element is less than 2^3 from the limit.

    Scaled gradients are not among them: the loss scale is lowered if they grow.
    """
    fmt = _format(policy)
    in_fp32 = {name for name in ledger.modules if policy.keeps_fp32(name)}
    margins: dict[tuple[str, str], float] = {}
    for name in sixteen_bit(ledger.operations, in_fp32):
        for kind in (ACTIVATION, INNER):
            stats = ledger.of(kind, name)
            largest = 0.0 if stats is None else largest_magnitude(stats)
            if largest and 0 <= (margin := math.log2(fmt.max / largest)) < NEAR:
                key = (ledger.operations[name].module, kind)
                margins[key] = min(margin, margins.get(key, math.inf))
    return tuple(Risk(module, kind, margin) for (module, kind), margin in sorted(margins.items(), key=lambda m: m[1]))


def propose(ledger: Ledger, policy: Policy) -> Proposal:
    """The policy with what it takes to avoid its troubles, or bf16."""
    fmt = _format(policy)
    in_fp32 = {name for name in ledger.modules if policy.keeps_fp32(name)}
    reasons: list[str] = []
    scale: BestScale | None = None
    fresh = False  # whether the scale was chosen for the modules that are in fp32 now
    starved: set[str] = set()  # modules that are kept because gradients underflow
    while True:
        narrow = sixteen_bit(ledger.operations, in_fp32)
        exponent = None if scale is None else scale.exponent
        leading = _leading_to(ledger, starved)
        trouble = next(_all_troubles(ledger, narrow, in_fp32, fmt, exponent, leading), None)
        if trouble is None:
            if fresh or (scale is None and fmt is not FP16):
                break
            scale, fresh = _scale_for(ledger, narrow, in_fp32, fmt, policy), True
            continue
        if trouble.cure is None or is_inside(trouble.cure, in_fp32):
            advice = _AUTOCAST_OFF if trouble.kind == INNER and ledger.casts_inner else _NOT_CURED
            return _wider(ledger, policy, [*reasons, str(trouble)], advice)
        fresh = False
        if trouble.effect == UNDERFLOW and trouble.kind != INNER:
            starved.add(trouble.cure)
        reasons.append(f"keep {trouble.cure} in fp32. {trouble}")
        in_fp32 = {name for name in in_fp32 if not is_inside(name, {trouble.cure})} | {trouble.cure}
    if _share_kept(ledger, in_fp32) > MOST_KEPT:
        return _wider(ledger, policy, reasons, f"more than {MOST_KEPT:.0%} of the products would stay in fp32")
    return _with(policy, ledger, in_fp32, scale, tuple(reasons))


def _with(
    policy: Policy, ledger: Ledger, in_fp32: set[str], scale: BestScale | None, reasons: tuple[str, ...]
) -> Proposal:
    patterns = patterns_for(in_fp32, ledger.modules) if in_fp32 else ()
    proposed = replace(policy, keep_fp32=patterns)
    if scale is not None and policy.scaling.mode == "dynamic":
        proposed = replace(proposed, loss_scale=str(_start_at(policy.scaling, scale)))
    return Proposal(str(proposed), tuple(sorted(in_fp32)), scale, reasons)


def _start_at(settings: LossScale, scale: BestScale) -> LossScale:
    """Dynamic settings with a start that the gradients need; unchanged where their own start is as good."""
    usual = math.log2(settings.init_scale)
    if usual <= scale.highest and usual >= scale.exponent:
        return settings
    start = max(scale.scale, settings.min_scale if scale.exponent >= 0 else 0.0)
    least = min(settings.min_scale, start)
    most = max(settings.max_scale, start * 4)
    return replace(settings, init_scale=start, min_scale=least, max_scale=most)


def _wider(ledger: Ledger, policy: Policy, reasons: list[str], because: str) -> Proposal:
    in_fp32 = {name for name in ledger.modules if policy.keeps_fp32(name)}
    wide = Policy(compute="bf16", keep_fp32=patterns_for(in_fp32, ledger.modules) if in_fp32 else ())
    return Proposal(
        str(wide),
        tuple(sorted(in_fp32)),
        None,
        (*reasons, f"bf16 has the range of fp32; {policy.compute} does not, and {because}"),
    )


def _share_kept(ledger: Ledger, in_fp32: Collection[str]) -> float:
    products = [op for op in ledger.operations.values() if op.rule == LOWER]
    return sum(is_inside(op.module, in_fp32) for op in products) / len(products) if products else 0.0


def _all_troubles(
    ledger: Ledger,
    narrow: set[str],
    in_fp32: Collection[str],
    fmt: Format,
    exponent: int | None,
    leading: Collection[str] = (),
) -> Iterator[Trouble]:
    """What is out of range, forward first; gradients only once there is a loss scale 2^exponent."""
    yield from _forward_troubles(ledger, narrow, in_fp32, fmt)
    if exponent is not None:
        yield from _gradient_troubles(ledger, narrow, in_fp32, fmt, exponent, leading)


def _leading_to(ledger: Ledger, modules: Collection[str]) -> set[str]:
    """The operations through which the gradients of some modules come."""
    leading: set[str] = set()
    for name, op in ledger.operations.items() if modules else ():
        if is_inside(op.module, modules) or any(source in leading for source in op.inputs):
            leading.add(name)
    return leading


def _forward_troubles(ledger: Ledger, narrow: set[str], in_fp32: Collection[str], fmt: Format) -> Iterator[Trouble]:
    """What is out of range before any loss scale, in the order of the step."""
    for name, op in ledger.operations.items():
        if op.rule == LOWER and not is_inside(op.module, in_fp32):
            yield from _overflows(ledger, narrow, op, WEIGHT, ledger.merged(WEIGHT, op.params), fmt)
            for source in _wide_sources(ledger, narrow, op):
                stats = ledger.activation(source) if source else ledger.of(INPUT, name)
                yield from _overflows(ledger, narrow, op, ACTIVATION, stats, fmt)
                if not ledger.casts_inner:
                    yield from _inner_troubles(ledger, narrow, op, source, fmt)
        is_narrow = name in narrow and op.rule != VIEW
        if is_narrow:
            yield from _overflows(ledger, narrow, op, ACTIVATION, ledger.activation(name), fmt)
        if is_narrow or (ledger.casts_inner and op.rule == LOWER):
            yield from _inner_troubles(ledger, narrow, op, name, fmt)


def _inner_troubles(ledger: Ledger, narrow: set[str], op: Operation, name: str, fmt: Format) -> Iterator[Trouble]:
    """Whether a gradient that the loss computes is out of range: no loss scale applies to it."""
    inner = ledger.of(INNER, name)
    yield from _overflows(ledger, narrow, op, INNER, inner, fmt)
    if inner is not None and (lost := relative_error(inner.bins, fmt)) > LOST:
        yield _trouble(ledger, narrow, op, INNER, inner, UNDERFLOW, lost)


def _wide_sources(ledger: Ledger, narrow: set[str], op: Operation) -> list[str]:
    """The operations that computed the fp32 inputs of a product, "" for a tensor from outside.

    The product casts them to 16 bits, and computes their gradients in 16 bits whatever their dtype.
    """
    sources = dict.fromkeys(origin(ledger.operations, source) for source in op.inputs)
    return [source for source in sources if source not in narrow]


def _overflows(
    ledger: Ledger, narrow: set[str], op: Operation, kind: str, stats: TensorStats | None, fmt: Format
) -> Iterator[Trouble]:
    if stats is not None and largest_magnitude(stats) > fmt.max:
        yield _trouble(ledger, narrow, op, kind, stats, OVERFLOW, math.inf)


def _gradient_troubles(
    ledger: Ledger, narrow: set[str], in_fp32: Collection[str], fmt: Format, exponent: int, leading: Collection[str]
) -> Iterator[Trouble]:
    for op, kind, stats in _gradients(ledger, narrow, in_fp32):
        limit = LOST_BEFORE if kind == GRADIENT and op.name in leading else LOST
        if math.ldexp(largest_magnitude(stats), exponent) > fmt.max:
            yield _trouble(ledger, narrow, op, kind, stats, OVERFLOW, math.inf)
        elif (lost := relative_error(stats.bins, fmt, exponent)) > limit:
            yield _trouble(ledger, narrow, op, kind, stats, UNDERFLOW, lost)


def _gradients(
    ledger: Ledger, narrow: set[str], in_fp32: Collection[str]
) -> Iterator[tuple[Operation, str, TensorStats]]:
    """The gradients that are computed in 16 bits, with the operation that needs them; none that is zero or noise."""
    for name, op in ledger.operations.items():
        own = _known(ledger, name) if name in narrow and op.rule != VIEW else None
        if own is not None:
            yield op, GRADIENT, own
        if op.rule != LOWER or is_inside(op.module, in_fp32):
            continue
        # The weights of a product together: the gradient of a bias alone may be rounding noise (of keys in attention, or
        # before a batch norm it is 0 in exact arithmetic).
        known = tuple(param for param in op.params if (WEIGHT_GRADIENT, param) not in ledger.noise)
        weights = ledger.merged(WEIGHT_GRADIENT, known)
        if weights is not None and weights.nonzero:
            yield op, WEIGHT_GRADIENT, weights
        for source in _wide_sources(ledger, narrow, op):
            stats = _known(ledger, source)
            if stats is not None:
                yield op, GRADIENT, stats


def _known(ledger: Ledger, name: str) -> TensorStats | None:
    """The gradient of an operation's result; None if there is none, or it is 0 or rounding noise."""
    stats = ledger.gradient(name)
    return None if stats is None or not stats.nonzero or (GRADIENT, name) in ledger.noise else stats


def _scale_for(
    ledger: Ledger, narrow: set[str], in_fp32: Collection[str], fmt: Format, policy: Policy
) -> BestScale | None:
    if fmt is not FP16:
        return None
    tensors = list({id(stats): stats for _, _, stats in _gradients(ledger, narrow, in_fp32)}.values())
    if policy.scaling.mode == "static":
        exponent = round(math.log2(policy.scaling.init_scale))
        best = best_scale(tensors, fmt)
        return replace(best, exponent=exponent)
    everywhere = [s for (kind, _), s in ledger.stats.items() if kind in (GRADIENT, WEIGHT_GRADIENT)]
    return best_scale(tensors, fmt, max((largest_magnitude(s) for s in everywhere), default=0.0))


def _trouble(
    ledger: Ledger, narrow: set[str], op: Operation, kind: str, stats: TensorStats, effect: str, lost: float
) -> Trouble:
    cure = None if kind == INNER and ledger.casts_inner else _cure(ledger, narrow, op, set())
    return Trouble(op.module, kind, effect, op.function, largest_magnitude(stats), lost, cure)


def _cure(ledger: Ledger, narrow: set[str], op: Operation, visited: set[str]) -> str | None:
    """The module to keep in fp32 so that the result of an operation is fp32."""
    own = None if op.module in (ROOT, LOSS) else op.module
    if op.rule == LOWER or op.is_leaf:
        return own
    visited.add(op.name)
    sources = [s for s in (origin(ledger.operations, i) for i in op.inputs) if s in narrow and s not in visited]
    if op.rule == FIRST:
        sources = sources[:1]
    sources.sort(key=lambda s: -_size(ledger.activation(s)))
    for source in sources:
        if (cure := _cure(ledger, narrow, ledger.operations[source], visited)) is not None:
            return cure
    return own


def _size(stats: TensorStats | None) -> float:
    return 0.0 if stats is None else largest_magnitude(stats)


def _format(policy: Policy) -> Format:
    fmt = get_format(policy.compute)
    assert isinstance(fmt, Format)
    return fmt
