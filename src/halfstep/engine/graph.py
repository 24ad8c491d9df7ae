"""What the autograd graph of a loss shows: the formats its matrix products ran in, and factors left over in the loss.

A policy is an intent: a forward outside `with engine.forward():`, an autocast switched off inside a model or a module that
casts its inputs computes in another format, without an error. Every node of the graph records the dtype of its result, so
one walk before the first backward shows what really ran. Compiled code, custom autograd functions and re-entrant
checkpoints are single nodes whose content is not visible; they are counted and reported as such.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from halfstep.events import log_warning
from halfstep.precision.formats import DTYPES_16_BIT, format_name
from halfstep.precision.policy import Policy

__all__ = [
    "LossObserver",
    "Products",
    "is_custom",
    "is_opaque",
    "leftover_factor",
    "loss_results",
    "nodes_of",
    "operation_of",
    "products_of",
    "wide_results",
]

_PRODUCT = re.compile(
    r"^(Addmm|AddmmActivation|Addmv|Addbmm|Addr|Baddbmm|Bmm|Mm|Matmul|Mv|Dot"
    r"|(Mkldnn|Aligned)?Linear|Trilinear|(Scaled)?GroupedMm|ScaledMm)Backward"
    r"|Convolution|Conv\d|ConvDepthwise|ConvTranspose|Attention|Rnn|LstmMps"
)
# Nodes through which a factor of a loss is still a factor of it.
_TRANSPARENT = re.compile(r"^(ToCopy|View|ReshapeAlias|UnsafeView|Alias|Clone|Squeeze|Unsqueeze|Neg)Backward")
_LOSS = re.compile(r"Loss|LogSoftmax|LogSigmoid|CrossEntropy|KlDiv|CosineEmbedding|Ctc")
_ELEMENTWISE = re.compile(r"^(Mul|Div|Add|Sub|Rsub|Where|MaskedFill|MaskedSelect|Index|Select|Slice|Gather)Backward")
_MAX_DEPTH = 4  # elementwise operations between a loss function and its mean

_SMALLEST_SCALE = 2.0**10  # powers of two from here on look like a loss scale; losses are rarely multiplied by so much


@dataclass(frozen=True)
class Products:
    """Matrix products by the format of their result, and the opaque nodes by what they are."""

    formats: Mapping[str, int] = field(default_factory=dict)
    opaque: Mapping[str, int] = field(default_factory=dict)

    def __add__(self, other: Products) -> Products:
        return Products(Counter(self.formats) + Counter(other.formats), Counter(self.opaque) + Counter(other.opaque))

    @property
    def total(self) -> int:
        """How many products are visible."""
        return sum(self.formats.values())


def products_of(loss: Tensor) -> Products:
    """Walk the graph of a loss once; no device work."""
    formats: Counter[str] = Counter()
    opaque: Counter[str] = Counter()
    for node in nodes_of(loss.grad_fn):
        if isinstance(node, torch.autograd.function.BackwardCFunction) and is_custom(node):
            opaque[_kind(type(node).__name__)] += 1
        elif _PRODUCT.search(node.name()):
            formats.update([_result_format(node)])
    return Products(dict(formats), dict(opaque))


def wide_results(loss: Tensor) -> dict[str, int]:
    """Bytes of large fp32 results by operation, largest first: at least an eighth of the largest matrix product's result."""
    nodes = [node for node in nodes_of(loss.grad_fn) if not is_custom(node)]
    largest = max((_num_elements(node) for node in nodes if _PRODUCT.search(node.name())), default=0)
    sizes: Counter[str] = Counter()
    for node in nodes:
        if _result_format(node) == "fp32" and largest and _num_elements(node) >= largest / 8:
            sizes[operation_of(node.name())] += 4 * _num_elements(node)
    return {name: size for name, size in sizes.most_common() if name}


def loss_results(loss: Tensor) -> list[tuple[str, str]]:
    """(operation, format of its result) of the operations that make up a loss: those with one number, and loss functions.

    Casts of the result, the loss scale and other constant factors are passed over, because they do not change what the loss
    was computed in.
    """
    if loss.grad_fn is None or loss.numel() != 1:
        return [("result", format_name(loss.dtype))]
    results: dict[Any, tuple[str, str]] = {}
    pending: list[tuple[Any, int]] = [(loss.grad_fn, 0)]
    visited = set()
    while pending:
        node, depth = pending.pop(0)
        if node is None or node in visited or depth > _MAX_DEPTH:
            continue
        visited.add(node)
        parents = [parent for parent, _ in node.next_functions]
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            if _num_elements(node) == 1 or not results:
                results[node] = (_kind(type(node).__name__), _result_format(node))
        elif _TRANSPARENT.match(node.name()) or _is_constant_factor(node):
            pending += [(parent, depth) for parent in parents[:1]]
        elif _num_elements(node) == 1 or _LOSS.search(node.name()):
            name = operation_of(node.name())
            if name:  # not a parameter that is a loss by itself
                results[node] = (name, _result_format(node))
            pending += [(parent, 0) for parent in parents]
        elif _ELEMENTWISE.match(node.name()):  # masks and weights between a loss function and its mean
            pending += [(parent, depth + 1) for parent in parents]
    return list(results.values()) or [("result", format_name(loss.dtype))]


def _is_constant_factor(node: Any) -> bool:
    rest = [parent for parent, _ in node.next_functions[1:]]
    return node.name().startswith(("DivBackward", "MulBackward")) and all(parent is None for parent in rest)


def _num_elements(node: Any) -> int:
    metadata = getattr(node, "_input_metadata", None) or ()
    return max((math.prod(int(n) for n in entry.shape) for entry in metadata), default=0)


def operation_of(name: str) -> str:
    """The name of a node's operation as the dispatcher spells it; "" for the accumulation of a parameter's gradient."""
    base = re.sub(r"Backward\d*$", "", name.rpartition("::")[2])
    return "" if base == "AccumulateGrad" else re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", base).lower()


def nodes_of(root: Any) -> Iterator[Any]:
    """Every node of an autograd graph, once."""
    pending, visited = [root], set()
    while pending:
        node = pending.pop()
        if node is not None and node not in visited:
            visited.add(node)
            yield node
            pending += [parent for parent, _ in node.next_functions]


def is_custom(node: Any) -> bool:
    """Whether a node runs a custom autograd function in Python or C++, other than Halfstep's."""
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        return _package(getattr(type(node), "_forward_cls", None)) != "halfstep"
    return type(node).__name__ == "CppFunction"


def is_opaque(function: Any) -> bool:
    """Whether an autograd function, or the node of one, may write to tensors without torch's knowledge, by kernels of its own.

    Halfstep's write only to what they allocate, and torch's own by operations that count versions.
    """
    if isinstance(function, torch.autograd.function.BackwardCFunction):
        function = getattr(type(function), "_forward_cls", None)
    elif not isinstance(function, type):
        return is_custom(function)
    return _package(function) not in {"halfstep", "torch"}


def _package(function: Any) -> str:
    return str(getattr(function, "__module__", "")).partition(".")[0]


def _kind(name: str) -> str:
    if name.startswith("Compiled"):
        return "compiled code"
    return "re-entrant checkpoints" if name.startswith("Checkpoint") else "custom autograd functions"


def _result_format(node: Any) -> str:
    metadata = getattr(node, "_input_metadata", None) or ()  # the gradients that come in: of this node's results
    dtypes = [entry.dtype for entry in metadata if entry.dtype.is_floating_point or entry.dtype.is_complex]
    return format_name(dtypes[0]) if dtypes else "unknown"


# --- factors of a loss ----------------------------------------------------------------------------------------------


def leftover_factor(loss: Tensor) -> float | None:
    """The constant that the whole loss was multiplied with last, such as 0.25 for `loss / 4`; None if there is none."""
    return _factor(loss.grad_fn, 8)


def _factor(node: Any, depth: int) -> float | None:
    for _ in range(depth):
        if node is None or not _TRANSPARENT.match(node.name()):
            break
        node = node.next_functions[0][0]
    if node is None:
        return None
    name = node.name()
    if name.startswith("AddBackward") and depth:  # a sum whose terms all have the factor has it as well
        factors = {_factor(term, depth - 1) for term, _ in node.next_functions if term is not None}
        return factors.pop() if len(factors) == 1 else None
    if not name.startswith(("DivBackward", "MulBackward")):
        return None
    if any(parent is not None for parent, _ in node.next_functions[1:]):
        return None  # the other operand is computed, not a constant
    value = _constant(getattr(node, "_raw_saved_other", None))
    if not value:
        return None
    return 1 / value if name.startswith("Div") else value


def _constant(saved: Any) -> float | None:
    """The value of a saved number.

    Reading a saved tensor runs the unpack hooks of checkpoints, which allow that once. Attaching hooks passes the value
    to `pack` instead, and is rejected where other hooks exist.
    """
    values: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        values.append(tensor)
        return tensor

    if saved is None:
        return None
    try:
        saved.register_hooks(pack, lambda tensor: tensor)
    except RuntimeError:  # freed, or packed by somebody else
        return None
    return float(values[0]) if values and values[0].dim() == 0 and not values[0].is_complex() else None


# --- a run's losses -------------------------------------------------------------------------------------------------


class LossObserver:
    """Looks at the losses of a run's first micro-batch, and at the first one computed outside a forward block."""

    def __init__(self, policy: Policy, accumulate: int) -> None:
        self._policy, self._accumulate = policy, accumulate
        self._first, self._looked_outside = True, False
        self.products = Products()
        self.wide: dict[str, int] = {}  # bytes of large fp32 results of a lean model, by operation
        self.narrow: Counter[str] = Counter()  # operations with 16-bit results that torch.amp computes in fp32
        self.entered = False  # whether the first micro-batch was computed inside a forward block

    def observe(self, loss: Tensor, *, entered: bool) -> None:
        """Look at a loss before its backward; `entered` is whether a forward block was entered for its micro-batch."""
        suspect = self._policy.compute in {"bf16", "fp16"} and not entered and not self._looked_outside
        if not self._first and not suspect:
            return
        products = products_of(loss)
        if self._first:
            self.products, self.entered = self.products + products, self.entered or entered
            if self._policy.is_lean:
                self.wide = dict(Counter(self.wide) + Counter(wide_results(loss)))
            self._warn_of_factors(loss)
        if suspect:  # once: a walk over the graph in every step would cost more than it shows
            self._looked_outside = True
            self._warn_of_forward(loss, products)

    @property
    def observed(self) -> Counter[str] | None:
        """Where a region counts operations with 16-bit results: during the first micro-batch of a lean model."""
        return self.narrow if self._first and self._policy.is_lean else None

    def end_micro_batch(self) -> None:
        """The first micro-batch is complete: later ones are not looked at."""
        self._first = False

    def _warn_of_forward(self, loss: Tensor, products: Products) -> None:
        compute, visible = self._policy.compute, products.total
        missing = not products.formats.get(compute) and bool(visible or products.opaque)
        if not missing and loss.dtype not in DTYPES_16_BIT:
            return  # nothing that a block would change, or computed inside the block of another Engine
        if visible and missing:
            ran = ", ".join(f"{count} in {name}" for name, count in products.formats.items())
            effect = f"its matrix products did not run in {compute} ({ran})"
        else:
            effect = f"it does not follow the policy ({self._policy}; the loss is {format_name(loss.dtype)})"
        log_warning(
            f"backward(): the loss was computed outside `with engine.forward():`, so {effect}. Put the forward and the loss "
            "inside the block."
        )

    def _warn_of_factors(self, loss: Tensor) -> None:
        factor, accumulate = leftover_factor(loss), self._accumulate
        if factor is None:
            return
        if accumulate > 1 and math.isclose(factor, 1 / accumulate, rel_tol=1e-6):
            log_warning(
                f"backward(): the loss was divided by {accumulate}, and accumulate={accumulate}: the Engine divides by the number of "
                f"micro-batches itself, so gradients are {accumulate} times too small. Remove `/ accumulate` from the loop, unless this "
                "division is part of the loss."
            )
        elif factor >= _SMALLEST_SCALE and math.frexp(factor)[0] == 0.5:
            log_warning(
                f"backward(): the loss was multiplied by {factor:g}, as GradScaler.scale() does. The Engine applies the policy's loss scale "
                "itself and divides only by that one. Remove scaler.scale() from the loop."
            )
