"""`recompute=`: drop activations after the forward pass and compute them again in backward.

    "cheap"         in every repeated block, results of matrix products, convolutions, attention, embeddings and custom
                    operations stay saved; what is computed from them by element (activations, norms, sums) is recomputed
    0.6 (a share)   about this share of the blocks' activations is saved

How it works. Each repeated block (`engine/repeats.py`) runs under torch's checkpoint without reentrance, which saves the block's
inputs and runs its forward again when backward first needs one of its activations. In eager mode "cheap" adds two dispatch
modes: the first records the results to save, the second returns them, so that the second run launches only the rest. The
second run stops at the last tensor that backward needs; results recorded after it are dropped with the forward (the last
product of a block, whose sum with the residual is the next block's input).

The second run must give the same bits. Autocast and random-number states are restored by torch's checkpoint; a random
operation that is saved and not run again leaves the generator where it was after the first run. The cast weights that
autocast caches are not shared with the blocks, so both runs cast. Buffers that the first run changed (batch-norm statistics)
have their old values during the second run, and are not changed by it.

In compiled code the partitioner divides the graph instead: "cheap" marks the same operations as saved, and a share is
torch's `activation_memory_budget`, set while this model is compiled. In eager mode a share is met by blocks: the first
(1 - share) of them save only their inputs. Those are recomputed last, when most other activations are gone.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from halfstep.engine.region.forwards import bind_forward, unbind_forward
from halfstep.engine.repeats import repeated_blocks
from halfstep.engine.rerun.buffers import Changes, buffers_of, old_values
from halfstep.engine.rerun.caches import find_cache_classes, without_caches
from halfstep.engine.rerun.expensive import is_saved
from halfstep.engine.rerun.modes import Record, Reusing, Saving
from halfstep.errors import SettingError

__all__ = ["CHEAP", "check_recomputable", "check_recompute", "parse_recompute", "recompute_blocks", "recompute_row"]

CHEAP = "cheap"
_OFF = {"off", "false", "0", "none"}


def check_recompute(recompute: Any) -> None:
    """Raise for a `recompute=` that is neither off, nor "cheap", nor a share between 0 and 1."""
    if recompute is None or recompute is False or recompute == CHEAP:
        return
    if isinstance(recompute, bool) or not isinstance(recompute, float) or not 0 < recompute < 1:
        raise SettingError(
            f"recompute={recompute!r} must be None, {CHEAP!r} or a share of the activations to keep, a float between 0 and 1 such as 0.6."
        )


def parse_recompute(text: str) -> str | float | None:
    """The setting that a string names."""
    if text.casefold() in _OFF:
        return None
    try:
        value: str | float = float(text)
    except ValueError:
        value = text.casefold() if text.casefold() == CHEAP else text
    check_recompute(value)
    return value


def check_recomputable(model: nn.Module, recompute: str | float | None) -> None:
    """Raise for a model without repeated blocks, or one that checkpoints by itself."""
    if not recompute:
        return
    if not repeated_blocks(model):
        raise SettingError(
            f"recompute={recompute!r} works on repeated blocks, and {type(model).__name__} has none: no two children of a module have the same class "
            "and the same parameters. Put its layers into blocks (nn.ModuleList of one class), use torch.utils.checkpoint in "
            "the model, or leave out recompute."
        )
    for name, module in model.named_modules():
        for flag in ("gradient_checkpointing", "grad_checkpointing"):  # of transformers and diffusers; of timm
            if getattr(module, flag, False) is True:
                raise SettingError(
                    f"recompute={recompute!r}, but the model checkpoints its activations by itself ({f'{name}.' if name else ''}{flag} is True). Turn that "
                    "off (gradient_checkpointing_disable(), set_grad_checkpointing(False)) or leave out recompute."
                )


def recompute_blocks(
    model: nn.Module, recompute: str | float | None, undo: contextlib.ExitStack, *, compiled: bool = False
) -> None:
    """Wrap the forward of each repeated block; `undo` takes that back. A compiled model wraps nothing for a share."""
    if not recompute or (compiled and recompute != CHEAP):
        return
    find_cache_classes()
    blocks = [block for stack in repeated_blocks(model) for block in stack.modules]
    if recompute != CHEAP:
        blocks = blocks[: _num_recomputed(len(blocks), float(recompute))]
    for block in blocks:
        bind_forward(block, _forward_cheap if recompute == CHEAP else _forward_whole, _INNER)
    undo.callback(_unwrap, blocks)


def recompute_row(model: nn.Module, recompute: str | float | None, *, compiled: bool) -> dict[str, str]:
    """The row of the truth table."""
    if not recompute:
        return {}
    num_blocks = sum(len(stack.blocks) for stack in repeated_blocks(model))
    if recompute == CHEAP:
        return {"recompute": f"activations and norms of {num_blocks} blocks"}
    if compiled:
        return {"recompute": f"activation memory budget {recompute:g}"}
    return {"recompute": f"everything in {_num_recomputed(num_blocks, float(recompute))} of {num_blocks} blocks"}


def _num_recomputed(num_blocks: int, share: float) -> int:
    return max(1, round((1 - share) * num_blocks))


def _unwrap(blocks: list[nn.Module]) -> None:
    for block in blocks:
        unbind_forward(block, _INNER)


# --- the wrapped forwards -------------------------------------------------------------------------------------------

_INNER = "_halfstep_recomputed"


def _forward_cheap(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return _inner(self)(*args, **kwargs)
    if torch.compiler.is_compiling():
        args, kwargs = without_caches(args, kwargs)
        return checkpoint(_inner(self), *args, use_reentrant=False, context_fn=_tagging_contexts, **kwargs)
    return _checkpointed(self, args, kwargs, selective=True)


def _forward_whole(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return _inner(self)(*args, **kwargs)
    return _checkpointed(self, args, kwargs, selective=False)


def _inner(block: nn.Module) -> Callable[..., Any]:
    """The forward that the block had before."""
    own: Callable[..., Any] | None = getattr(block, _INNER)
    return own if own is not None else functools.partial(type(block).forward, block)


def _checkpointed(block: nn.Module, args: Any, kwargs: Any, *, selective: bool) -> Any:
    args, kwargs = without_caches(args, kwargs)
    names = [name for name, value in kwargs.items() if isinstance(value, Tensor)]
    rest = {name: value for name, value in kwargs.items() if not isinstance(value, Tensor)}
    forward, num_args = _inner(block), len(args)

    def run(*values: Any) -> Any:  # tensors by position: torch checks that nothing has changed those in place
        return forward(*values[:num_args], **dict(zip(names, values[num_args:], strict=True)), **rest)

    tensors = [t for t in (*args, *(kwargs[name] for name in names)) if isinstance(t, Tensor) and not t.is_inference()]
    versions = [t._version for t in tensors]  # noqa: SLF001 - torch's counter of changes in place
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        result = checkpoint(
            run,
            *args,
            *(kwargs[name] for name in names),
            use_reentrant=False,
            context_fn=functools.partial(_contexts, block, selective),
        )
    finally:
        torch.set_autocast_cache_enabled(cached)
    if [t._version for t in tensors] != versions:  # noqa: SLF001
        raise SettingError(
            f"A block of class {type(block).__name__} changes its input in place, so recompute cannot run its forward a second time. "
            "Make a copy of the input there (x = x + y instead of x += y), or leave out recompute."
        )
    return result


# --- compiled -------------------------------------------------------------------------------------------------------


def _tagging_contexts() -> Any:
    return create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:  # noqa: ARG001 - torch's signature
    return CheckpointPolicy.MUST_SAVE if is_saved(operation) else CheckpointPolicy.PREFER_RECOMPUTE


# --- eager ----------------------------------------------------------------------------------------------------------


def _contexts(block: nn.Module, selective: bool) -> Any:
    changes: Changes = []
    record = Record()
    modes = (Saving(record), Reusing(record)) if selective else (contextlib.nullcontext(), contextlib.nullcontext())
    return _first_run(block, changes, modes[0]), _SecondRun(changes, modes[1])


@contextlib.contextmanager
def _first_run(block: nn.Module, changes: Changes, mode: Any) -> Iterator[None]:
    buffers = buffers_of(block)
    before = buffers.read()
    with mode:
        yield
    changes += buffers.changes(before)


class _SecondRun(contextlib.AbstractContextManager[None]):
    """Entered once for each backward, with retain_graph several times."""

    def __init__(self, changes: Changes, mode: Any) -> None:
        self._changes, self._mode = changes, mode

    def __enter__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(old_values(self._changes))
        self._stack.enter_context(self._mode)

    def __exit__(self, *exc: object) -> None:
        self._stack.close()
