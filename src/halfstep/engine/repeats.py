"""The repeated blocks of a model: what `compile="blocks"` compiles once and `recompute=` checkpoints.

A block is a module with matrices of its own or below it that is more than one layer: a transformer layer, a residual block,
an attention. Blocks repeat where children of one module have the same class and the same parameter names and shapes:

    ViT.blocks.0 ... 23        Swin.layers.2.blocks.0 ... 17        GPT2.transformer.h.0 ... 11

In a list (nn.ModuleList, nn.Sequential, nn.ModuleDict) the outermost repeats count: the parts of a block are not listed. In
any other module the innermost do, so that two equal towers, an actor and its critic, are lists of layers and not two blocks.
A list may contain a few blocks of the same class with other parameters (T5's first layer has the table of positions, a
ResNet stage's first block a projection); while at least half of the class repeat, the others belong to the stack too.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn

__all__ = ["Stack", "repeated_blocks"]

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_LAYERS = (nn.RNNBase, nn.RNNCellBase, nn.Embedding, nn.EmbeddingBag)  # single layers, whatever they consist of

_Shapes = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Stack:
    """Repeated blocks of one class: the name of the module that contains them ("" is the model), and their own names."""

    name: str
    blocks: tuple[tuple[str, nn.Module], ...] = field(repr=False)

    @property
    def modules(self) -> list[nn.Module]:
        """The blocks without their names."""
        return [module for _, module in self.blocks]

    @property
    def num_structures(self) -> int:
        """How many kinds of blocks there are by the names and shapes of their parameters; mostly 1."""
        return len({_shapes(module) for module in self.modules})


def repeated_blocks(model: nn.Module) -> tuple[Stack, ...]:
    """The stacks of repeated blocks of a model, in the order of its modules; empty if nothing repeats."""
    return tuple(_stacks("", model, set()))


def _stacks(name: str, module: nn.Module, visited: set[nn.Module]) -> Iterator[Stack]:
    if module in visited:  # a part that has two owners
        return
    visited.add(module)
    prefix = f"{name}." if name else ""
    by_class: dict[type, list[tuple[str, nn.Module]]] = defaultdict(list)
    for child_name, child in module.named_children():
        if child not in visited and _is_block(child):
            by_class[type(child)].append((prefix + child_name, child))
    repeats = [_members(candidates) for candidates in by_class.values()]
    stacks = {blocks[0][1]: Stack(name, tuple(blocks)) for blocks in repeats if blocks}
    if not isinstance(module, _LISTS):
        stacks = {first: stack for first, stack in stacks.items() if not any(map(repeated_blocks, stack.modules))}
    in_a_stack = {block for stack in stacks.values() for block in stack.modules}
    for child_name, child in module.named_children():
        if child in stacks:
            yield stacks[child]
        if child in in_a_stack:
            visited.update(child.modules())
        else:
            yield from _stacks(prefix + child_name, child, visited)


def _members(candidates: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Those of a module's children of one class that repeat, with their relatives; empty if none do."""
    shapes = [_shapes(module) for _, module in candidates]
    counts = Counter(shapes)
    repeats = [pair for pair, own in zip(candidates, shapes, strict=True) if counts[own] > 1]
    return candidates if 2 * len(repeats) >= len(candidates) and repeats else repeats


def _shapes(module: nn.Module) -> _Shapes:
    return tuple((name, tuple(param.shape)) for name, param in module.named_parameters())


def _is_block(module: nn.Module) -> bool:
    """Whether a module is more than one layer: it has a matrix, and another matrix or module next to it."""
    if isinstance(module, (*_LAYERS, nn.ModuleList, nn.ModuleDict)):  # lists that are not called
        return False
    num_matrices = sum(param.dim() > 1 for param in module.parameters())
    return num_matrices > 1 or (num_matrices == 1 and sum(1 for _ in module.modules()) > 2)
