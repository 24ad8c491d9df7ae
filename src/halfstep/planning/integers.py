"""Integers keep their numbers: a step on fake tensors can still read masks, labels, positions and routes.

How it works. Fake tensors have no numbers, but a step's way depends on some: a library looks whether an attention mask masks
anything and leaves it out if not, a loss picks the tokens that have labels, a mixture of experts sends tokens to
experts. Nearly all such numbers are integers or booleans that come from the batch, and they are few: a token's id, not
its vector of activations. So integers are real tensors in a trace and floating-point numbers are fake, and an operation
among integers and constants alone is run for real, even if its result is not of integers (a mask of 0 and -inf).
`mask.all()`, `labels != -100`, nonzero and tolist then answer as they would on a GPU.

Where floating-point numbers decide (topk, argmax, sort), the integers are made up: each choice in turn, so that experts
get equal shares. If a size depends on them afterwards, the plan says so.
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

__all__ = ["MOST_NUMBERS", "Integers", "is_integer"]

MOST_NUMBERS = 1 << 25  # in one tensor; beyond it integers are fake too, as 256 MiB of them would be slow
_MOST_CONSTANTS = 1 << 20  # in a tensor made from nothing, such as arange; where those are larger, they are scratch
_aten = torch.ops.aten
_CHOOSING = (_aten.topk, _aten.sort, _aten.argsort, _aten.argmax, _aten.argmin, _aten.max, _aten.min, _aten.multinomial)
_CONSTANT = (_aten.ones, _aten.full, _aten.arange, _aten.linspace)  # not zeros, which is room to write results into
_INDEXING = (
    _aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default,
    _aten._index_put_impl_.default, _aten._unsafe_index.Tensor, _aten._unsafe_index_put.default,  # noqa: SLF001
)  # fmt: skip
_MASKING = {*_INDEXING, _aten.masked_select.default}
_CTC = (_aten._ctc_loss.default, _aten._ctc_loss.Tensor)  # noqa: SLF001
_CTC_BACKWARD = (_aten._ctc_loss_backward.default, _aten._ctc_loss_backward.Tensor)  # noqa: SLF001


def is_integer(tensor: Tensor) -> bool:
    """Whether a tensor's dtype is one whose numbers are kept."""
    return not tensor.dtype.is_floating_point and not tensor.dtype.is_complex


class Integers:
    """Runs the operations of a trace: for real where all numbers are known, on fake tensors otherwise."""

    def __init__(self) -> None:
        self._made_up: Any = WeakIdKeyDictionary()  # tensors whose numbers do not follow from the batch's
        self._checked: Any = WeakIdKeyDictionary()  # fake tensors whose elements all have one known value
        self.read: dict[str, bool] = {}  # operations whose results' sizes depend on numbers; whether on made-up ones

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operation."""
        if func in _MASKING:
            func, args = self._by_positions(func, args)
        tensors = _tensors((args, kwargs))
        made_up = False
        if all(_has_numbers(t) for t in tensors):
            made_up = any(t in self._made_up for t in tensors)
            out = self._really(func, args, kwargs, follows=bool(tensors), made_up=made_up)
        else:
            out = _ctc_loss(func, args)
            out = func(*args, **kwargs) if out is None else out
            changed = args[0] if func._schema.is_mutable and args else None  # noqa: SLF001 - the only way to ask
            if isinstance(changed, Tensor) and _has_numbers(changed):
                out, made_up = changed, True  # the numbers written into it are not known
            elif func.overloadpacket in _CHOOSING:
                out, made_up = _choose_in_turn(func, args, kwargs, out), True
            elif func.overloadpacket in CHECKS:
                out = self._check(func, args, out)
        if made_up:
            for tensor in _tensors(out):
                if _has_numbers(tensor):
                    self._made_up[tensor] = True
        return out

    def _really(self, func: Any, args: Any, kwargs: Any, *, follows: bool, made_up: bool) -> Any:
        if torch.Tag.dynamic_output_shape in func.tags and func not in _INDEXING:
            self._note(func, made_up=made_up)
        elif torch.Tag.data_dependent_output not in func.tags and not _aliases(func):
            # What the result will be, before it is computed: it may be too large.
            fake = func(*args, **kwargs)
            leaves = _tensors(fake)
            most = MOST_NUMBERS if follows else _MOST_CONSTANTS
            kept = follows or func.overloadpacket in _CONSTANT
            if not all(t.numel() <= most and (kept or is_integer(t) or t.numel() == 1) for t in leaves):
                return fake
        with unset_fake_temporarily():
            return func(*args, **kwargs)

    def _check(self, func: Any, args: Any, out: Tensor) -> Tensor:
        """A check for inf and nan, as it comes out in a healthy step."""
        value = answer(func, args, lambda x: self._checked.get(x) if isinstance(x, Tensor) else None)
        if value is None or out.dtype is not torch.bool:
            return out
        if out.dim() == 0:
            with unset_fake_temporarily():
                return torch.tensor(value)
        self._checked[out] = value
        return out

    def _by_positions(self, func: Any, args: Any) -> tuple[Any, Any]:
        """Indexing by a boolean mask as indexing by the positions it is true at, which is how it is done on a GPU."""
        if func is _aten.masked_select.default and _has_numbers(args[1]) and not _has_numbers(args[0]):
            x = args[0].expand(torch.broadcast_shapes(args[0].shape, args[1].shape))  # type: ignore[no-untyped-call]
            with unset_fake_temporarily():
                mask = args[1].expand(x.shape)
            func, args = _aten.index.Tensor, (x, [mask])
        if func not in _INDEXING:
            return func, args
        indices: list[Tensor | None] = []
        for index in args[1]:
            if index is None or index.dtype not in (torch.bool, torch.uint8) or not _has_numbers(index):
                indices.append(index)
                continue
            if len(args) == 2 or args[2].numel() > 1:
                self._note(func, made_up=index in self._made_up)
            with unset_fake_temporarily():
                indices += index.nonzero().unbind(1)
        return func, (args[0], indices, *args[2:])

    def _note(self, func: Any, *, made_up: bool) -> None:
        name = func.overloadpacket._qualified_op_name.removeprefix("aten::").strip("_")  # noqa: SLF001 - the public name is newer
        self.read[name] = self.read.get(name, False) or made_up

    def notes(self) -> tuple[str, ...]:
        """What the trace assumed about numbers, in sentences."""
        found = []
        for made_up, said in (
            (False, "of the batch; those of a small batch were taken for typical"),
            (
                True,
                "that the step computes, as when it routes tokens; equal shares were assumed, and others can take more",
            ),
        ):
            names = sorted(name for name, depends in self.read.items() if depends is made_up)
            if names:
                found.append(f"Sizes depend on numbers ({', '.join(names)}) {said}.")
        return tuple(found)


def _tensors(tree: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(tree) if isinstance(t, Tensor)]


def _has_numbers(tensor: Any) -> bool:
    real = isinstance(tensor, Tensor) and not isinstance(tensor, FakeTensor) and tensor.device.type == "cpu"
    return real and not tensor.requires_grad and tensor.numel() <= MOST_NUMBERS


def _aliases(func: Any) -> bool:
    """Whether an operation gives back memory it was given: a view, or a change in place."""
    schema = func._schema  # noqa: SLF001 - the only way to ask
    return bool(schema.is_mutable or any(r.alias_info is not None for r in schema.returns))


def _choose_in_turn(func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    """The result with its integers made up: 0, 1, 2 ... and again from 0, along the dimension that is chosen from."""
    named = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}  # noqa: SLF001
    named |= dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs  # noqa: SLF001
    x, dim = args[0], named.get("dim", -1)
    choices = x.numel() if dim is None or not x.dim() else x.shape[dim]

    def choose(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor) or not is_integer(tensor) or not 0 < tensor.numel() <= MOST_NUMBERS:
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
    """CTC's loss, whose table of alignments is as wide as the longest target; None for other operations."""
    if func in _CTC_BACKWARD:
        torch.empty_like(args[6])  # the table of the way back
        return torch.empty_like(args[1])
    if func not in _CTC or (isinstance(args[3], Tensor) and not _has_numbers(args[3])):
        return None
    log_probs, lengths = args[0], args[3]
    if isinstance(lengths, Tensor):
        with unset_fake_temporarily():
            lengths = lengths.tolist()
    longest = max(lengths, default=0)
    steps, num = log_probs.shape[:2]
    return log_probs.new_empty(num), log_probs.new_empty(num, steps, 2 * longest + 1)
