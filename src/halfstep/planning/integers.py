"""Integers keep their values: a step on fake tensors can still read masks, labels, positions and routes.

How it works. Fake tensors have no data, but the control flow of a step depends on some: a library drops an attention mask
that masks nothing, a loss selects the tokens that have labels, a mixture of experts routes tokens to experts. Nearly all
such data are integers or booleans from the batch, and there are few of them: a token's id, not its vector of activations.
So integers are real tensors in a trace and floating-point tensors are fake, and an operation on integers and constants
alone runs for real, even if its result is floating point (a mask of 0 and -inf). `mask.all()`, `labels != -100`, nonzero
and tolist then return what they would return on a GPU.

Where floating-point values decide (topk, argmax, sort), the integers are invented: each choice in turn, so that experts
get equal shares. If a size depends on them later, a note of the plan reports it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from halfstep.planning.finite import CHECKS, answer

__all__ = ["MAX_NUMEL", "Integers", "is_integer"]

MAX_NUMEL = 1 << 25  # of a tensor; larger integer tensors are fake too, as 256 MiB of them would be slow
_MAX_CONSTANTS = 1 << 20  # elements of a tensor without inputs, such as arange; larger ones are scratch memory
_aten = torch.ops.aten
_CHOOSING = (_aten.topk, _aten.sort, _aten.argsort, _aten.argmax, _aten.argmin, _aten.max, _aten.min, _aten.multinomial)
_CONSTANT = (
    _aten.ones,
    _aten.full,
    _aten.arange,
    _aten.linspace,
)  # not zeros, which are allocated to write results into
_INDEXING = (
    _aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default,
    _aten._index_put_impl_.default, _aten._unsafe_index.Tensor, _aten._unsafe_index_put.default,  # noqa: SLF001
)  # fmt: skip
_MASKING = {*_INDEXING, _aten.masked_select.default}
_CTC = (_aten._ctc_loss.default, _aten._ctc_loss.Tensor)  # noqa: SLF001
_CTC_BACKWARD = (_aten._ctc_loss_backward.default, _aten._ctc_loss_backward.Tensor)  # noqa: SLF001


def is_integer(tensor: Tensor) -> bool:
    """Whether a tensor of this dtype keeps its data."""
    return not tensor.dtype.is_floating_point and not tensor.dtype.is_complex


class Integers:
    """Runs the operations of a trace: for real where all data is known, on fake tensors otherwise."""

    def __init__(self) -> None:
        self._invented: Any = WeakIdKeyDictionary()  # tensors whose data does not follow from the batch
        self._checked: Any = WeakIdKeyDictionary()  # fake tensors whose elements all have one known value
        self.read: dict[str, bool] = {}  # operations whose output sizes depend on data; whether on invented data

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operation."""
        if func in _MASKING:
            func, args = self._by_positions(func, args)
        tensors = _tensors((args, kwargs))
        invented = False
        if all(_has_data(t) for t in tensors):
            invented = any(t in self._invented for t in tensors)
            out = self._really(func, args, kwargs, follows=bool(tensors), invented=invented)
        else:
            out = _ctc_loss(func, args)
            out = func(*args, **kwargs) if out is None else out
            changed = args[0] if func._schema.is_mutable and args else None  # noqa: SLF001 - the only way to query it
            if isinstance(changed, Tensor) and _has_data(changed):
                out, invented = changed, True  # the values written into it are unknown
            elif func.overloadpacket in _CHOOSING:
                out, invented = _choose_in_turn(func, args, kwargs, out), True
            elif func.overloadpacket in CHECKS:
                out = self._check(func, args, out)
        if invented:
            for tensor in _tensors(out):
                if _has_data(tensor):
                    self._invented[tensor] = True
        return out

    def _really(self, func: Any, args: Any, kwargs: Any, *, follows: bool, invented: bool) -> Any:
        if torch.Tag.dynamic_output_shape in func.tags and func not in _INDEXING:
            self._note(func, invented=invented)
        elif torch.Tag.data_dependent_output not in func.tags and not _aliases(func):
            # The shape of the result before it is computed: it may be too large.
            fake = func(*args, **kwargs)
            leaves = _tensors(fake)
            most = MAX_NUMEL if follows else _MAX_CONSTANTS
            allowed = follows or func.overloadpacket in _CONSTANT
            if not all(t.numel() <= most and (allowed or is_integer(t) or t.numel() == 1) for t in leaves):
                return fake
        with unset_fake_temporarily():
            return func(*args, **kwargs)

    def _check(self, func: Any, args: Any, out: Tensor) -> Tensor:
        """A check for inf and NaN, with its result in a step without overflow."""
        value = answer(func, args, lambda x: self._checked.get(x) if isinstance(x, Tensor) else None)
        if value is None or out.dtype is not torch.bool:
            return out
        if out.dim() == 0:
            with unset_fake_temporarily():
                return torch.tensor(value)
        self._checked[out] = value
        return out

    def _by_positions(self, func: Any, args: Any) -> tuple[Any, Any]:
        """Indexing by a boolean mask as indexing by the positions of its true elements, as on a GPU."""
        if func is _aten.masked_select.default and _has_data(args[1]) and not _has_data(args[0]):
            x = args[0].expand(torch.broadcast_shapes(args[0].shape, args[1].shape))  # type: ignore[no-untyped-call]
            with unset_fake_temporarily():
                mask = args[1].expand(x.shape)
            func, args = _aten.index.Tensor, (x, [mask])
        if func not in _INDEXING:
            return func, args
        indices: list[Tensor | None] = []
        for index in args[1]:
            if index is None or index.dtype not in (torch.bool, torch.uint8) or not _has_data(index):
                indices.append(index)
                continue
            if len(args) == 2 or args[2].numel() > 1:
                self._note(func, invented=index in self._invented)
            with unset_fake_temporarily():
                indices += index.nonzero().unbind(1)
        return func, (args[0], indices, *args[2:])

    def _note(self, func: Any, *, invented: bool) -> None:
        name = func.overloadpacket._qualified_op_name.removeprefix("aten::").strip("_")  # noqa: SLF001 - the public name is newer
        self.read[name] = self.read.get(name, False) or invented

    def notes(self) -> tuple[str, ...]:
        """What the trace assumed about tensor values, in sentences."""
        assumptions = {
            False: "values of the batch; those of a small batch were assumed to be typical",
            True: "values that the step computes, for example to route tokens; equal shares were assumed, and others can need more",
        }
        notes = []
        for invented, assumption in assumptions.items():
            names = sorted(name for name, depends in self.read.items() if depends is invented)
            if names:
                notes.append(f"Sizes depend on {assumption} ({', '.join(names)}).")
        return tuple(notes)


def _tensors(tree: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(tree) if isinstance(t, Tensor)]


def _has_data(tensor: Any) -> bool:
    real = isinstance(tensor, Tensor) and not isinstance(tensor, FakeTensor) and tensor.device.type == "cpu"
    return real and not tensor.requires_grad and tensor.numel() <= MAX_NUMEL


def _aliases(func: Any) -> bool:
    """Whether an operation returns the memory of an input: a view, or an in-place operation."""
    schema = func._schema  # noqa: SLF001 - the only way to query it
    return bool(schema.is_mutable or any(r.alias_info is not None for r in schema.returns))


def _choose_in_turn(func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    """The result with invented integers: 0, 1, 2 ... and again from 0, along the dimension that is chosen from."""
    named = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}  # noqa: SLF001
    named |= dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs  # noqa: SLF001
    x, dim = args[0], named.get("dim", -1)
    choices = x.numel() if dim is None or not x.dim() else x.shape[dim]

    def choose(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor) or not is_integer(tensor) or not 0 < tensor.numel() <= MAX_NUMEL:
            return tensor
        shape = list(tensor.shape)
        along = dim if dim is not None and len(shape) == x.dim() and shape else None
        with unset_fake_temporarily():
            turns = torch.arange(math.prod(shape)) % max(1, choices)
            if along is None:
                return turns.view(shape)
            last = shape.pop(along)
            return turns.view(*shape, last).movedim(-1, along).contiguous()

    return pytree.tree_map(choose, tuple(out) if isinstance(out, tuple) else out)


def _ctc_loss(func: Any, args: Any) -> Any:
    """The CTC loss, whose table of alignments is as wide as the longest target; None for other operations."""
    if func in _CTC_BACKWARD:
        torch.empty_like(args[6])  # the table of the backward pass
        return torch.empty_like(args[1])
    if func not in _CTC or (isinstance(args[3], Tensor) and not _has_data(args[3])):
        return None
    log_probs, lengths = args[0], args[3]
    if isinstance(lengths, Tensor):
        with unset_fake_temporarily():
            lengths = lengths.tolist()
    longest = max(lengths, default=0)
    steps, num = log_probs.shape[:2]
    return log_probs.new_empty(num), log_probs.new_empty(num, steps, 2 * longest + 1)
