"""The backward pass, node by node: which node first gave a gradient that is not finite.

A hook on every node of the graph measures what came in and what went out. As in the forward pass the chain counts, from
a parameter whose gradient is not finite back to its origin:

    inputs finite, a result not             this node is the origin
    an input not finite, its producer's result not either     the origin of the producer
    an input not finite, all producers' results finite        a sum of branches overflowed, or a hook changed the gradient

A node may run a backward pass of its own: re-entrant checkpoints do, over a graph that they have just computed again. Its
nodes run before the outer one is through, so the first origin is the inner one. Parameters in it are reached there, and the
gradient of a checkpoint's input at the leaf that stands for it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from halfstep.engine.graph import is_custom, is_opaque, nodes_of
from halfstep.watching.probes import Probes, Range, version_of

__all__ = ["BackwardOrigin", "BackwardTrace", "Node"]

_ACCUMULATE = "AccumulateGrad"
# What arrives at these leaves them with other strides, and then arrives at the next node.
_RESHAPES = frozenset(
    f"{name}Backward0" for name in ("View", "UnsafeView", "ReshapeAlias", "Transpose", "Permute", "T", "Unsqueeze")
)


@dataclass(frozen=True)
class BackwardOrigin:
    """The node at which a gradient stopped being finite."""

    node: int
    probe: int
    arrived: bool  # it was not finite when it arrived: a sum of branches, or a hook
    parameter: int | None  # the identity of the parameter whose gradient it is, if it is one's


@dataclass
class Node:
    """One node of a graph, and what it received and returned."""

    name: str
    sequence_nr: int
    edges: tuple[tuple[int, int], ...]  # (node, input) of each result; (-1, 0) where there is none
    variable: int | None  # identity of the parameter
    thread: int  # that created it
    outer: int | None  # the node during which its graph ran, if it did during one
    order: int = -1  # in which it ran
    inputs: tuple[int | None, ...] = ()
    outputs: tuple[int | None, ...] = ()


class BackwardTrace:
    """Measures the gradients at every node of a graph.

    With `only_arriving`, a dtype, it measures what arrives at the nodes in that dtype and nothing else, which takes about half the
    time: enough for `largest`, not for `origin`.
    """

    def __init__(self, probes: Probes, *, only_arriving: torch.dtype | None = None) -> None:
        self.nodes: list[Node] = []
        self._probes = probes
        self._only = only_arriving
        self._arrived: list[int | None] = []
        self._num_run = 0
        self._running: list[int] = []
        # By storage and version. The weak reference keeps the address of a storage from being used again.
        self._measured: dict[tuple[int, int], tuple[StorageWeakRef, dict[Any, int | None]]] = {}

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Measure every backward pass in this block, those inside another one included."""
        backward: Any = torch.autograd.backward

        def followed_backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            with self.of_graph([tensors] if isinstance(tensors, Tensor) else list(tensors)):
                return backward(tensors, *args, **kwargs)

        torch.autograd.backward = followed_backward
        try:
            yield
        finally:
            torch.autograd.backward = backward

    @contextlib.contextmanager
    def of_graph(self, roots: Sequence[Tensor]) -> Iterator[None]:
        """Measure a backward pass from these tensors in this block."""
        if self._only is not None:
            with self._arriving(roots):
                yield
            return
        thread, outer = threading.get_ident(), self._running[-1] if self._running else None
        graph = list(dict.fromkeys(node for root in roots for node in nodes_of(root.grad_fn)))
        start = len(self.nodes)
        index = {node: start + i for i, node in enumerate(graph)}
        handles: list[Any] = []
        try:
            for node in graph:
                edges = tuple((-1, 0) if n is None else (index[n], nr) for n, nr in node.next_functions)
                name = node.name()
                variable = id(node.variable) if name.endswith(_ACCUMULATE) else None
                number = index[node]
                self.nodes.append(
                    Node(name.rpartition("::")[2], node._sequence_nr(), edges, variable, thread, outer)  # noqa: SLF001
                )
                # Only custom functions run a backward pass of their own, and only they write where torch does not see it.
                custom = is_custom(node)
                opaque = custom and is_opaque(node)
                if custom:
                    handles.append(node.register_prehook(self._enter(number, opaque)))
                handles.append(node.register_hook(self._measure(number, custom, opaque)))
            del graph, index
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextlib.contextmanager
    def _arriving(self, roots: Sequence[Tensor]) -> Iterator[None]:
        def measure(gradients: Sequence[Tensor | None]) -> None:
            for gradient in gradients:
                if gradient is not None and gradient.dtype == self._only:
                    self._arrived.append(self._add(gradient))

        def measure_at_once(gradients: Sequence[Tensor | None]) -> None:
            measure(gradients)
            self._probes.flush()  # before a kernel that may write to a gradient without counting a version
            self._measured.clear()

        nodes = dict.fromkeys(node for root in roots for node in nodes_of(root.grad_fn))
        handles = [
            node.register_prehook(measure_at_once if is_custom(node) and is_opaque(node) else measure)
            for node in nodes
            if node.name() not in _RESHAPES
        ]
        del nodes
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, number: int, opaque: bool) -> Any:
        def enter(_: Any) -> None:
            if opaque:
                self._probes.flush()
            self._running.append(number)

        return enter

    def _measure(self, number: int, custom: bool, opaque: bool) -> Any:
        def hook(results: Sequence[Tensor | None], gradients: Sequence[Tensor | None]) -> None:
            while custom and self._running and self._running.pop() != number:
                pass
            node = self.nodes[number]
            node.order, self._num_run = self._num_run, self._num_run + 1
            node.inputs = tuple(map(self._add, gradients))
            if opaque:  # a kernel of its own may have written to a gradient without counting a version
                self._measured.clear()
            node.outputs = tuple(map(self._add, results))

        return hook

    def _add(self, gradient: Tensor | None) -> int | None:
        """The probe of a gradient; one that arrives as it left another node is not measured again."""
        if gradient is None:
            return None
        version = version_of(gradient)
        if version is None or gradient.layout is not torch.strided:
            return self._probes.add(gradient, at_once=True)
        storage = gradient.untyped_storage()
        key = storage._cdata, version  # noqa: SLF001 - as in StorageWeakRef
        known = self._measured.get(key)
        if known is None:
            known = self._measured[key] = StorageWeakRef(storage), {}  # type: ignore[no-untyped-call]
        return self._probes.add(gradient, measured=known[1], version=version)

    def origin(self, ranges: Sequence[Range]) -> BackwardOrigin | None:
        """The origin of the first parameter gradient that is not finite."""
        producers: dict[tuple[int, int], list[tuple[int, int | None]]] = {}
        origins: dict[int, BackwardOrigin] = {}
        last: BackwardOrigin | None = None
        for number in sorted(range(len(self.nodes)), key=lambda i: self.nodes[i].order):
            node = self.nodes[number]
            if node.order < 0:
                continue
            arrived = [(nr, p) for nr, p in enumerate(node.inputs) if p is not None and not ranges[p].finite]
            left = [p for p in node.outputs if p is not None and not ranges[p].finite]
            if arrived:
                nr, probe = arrived[0]
                senders = [
                    origins[n] for n, p in producers.get((number, nr), ()) if p is not None and not ranges[p].finite
                ]
                first = min(senders, key=lambda o: self.nodes[o.node].order, default=None)
                origins[number] = first or BackwardOrigin(number, probe, True, node.variable)
            elif left:
                position = node.outputs.index(left[0])
                target = node.edges[position][0]
                owner = self.nodes[target].variable if target >= 0 else None
                origins[number] = BackwardOrigin(number, left[0], False, owner)
            for edge, output in zip(node.edges, node.outputs, strict=False):
                producers.setdefault(edge, []).append((number, output))
            if node.variable is not None and arrived:
                candidate = origins[number]
                if last is None or self.nodes[candidate.node].order < self.nodes[last.node].order:
                    last = candidate
        return last

    def largest(self, ranges: Sequence[Range], dtype: str) -> float:
        """The largest gradient of a dtype anywhere in the pass."""
        of_nodes = (p for node in self.nodes for p in (*node.inputs, *node.outputs))
        measured = (ranges[p] for p in (*self._arrived, *of_nodes) if p is not None)
        return max((each.largest for each in measured if each.dtype == dtype and each.finite), default=0.0)
