"""The replay of a skipped step: computed again with every operation observed, until the culprit is known.

    forward     traced; if a loss is not finite, its chain is followed to the origin, and that is all
    backward    otherwise traced at the same scale; if a gradient is not finite, its chain is followed. What the forward absorbed
                (an inf that tanh maps to 1) may still ruin a gradient: then the origin in the forward is the cause
    scale 1     backward once more, if a loss scale was in use: is it to blame? The graph of the forward is used again where
                torch alone computes the gradients; otherwise the forward is computed again too

With a loss scale most overflows happen in the backward pass. So the forward is first computed without a trace, which takes a third
of the time, and traced only if its loss is not finite, or if it may have absorbed something.

If something goes wrong, such as a tensor that was overwritten before it was measured, the replay is repeated carefully: every
tensor is measured at once, and no graph is used twice. The host waits once after each pass. Training continues bit for bit as without the replay (`engine/replay/undisturbed.py`).
"""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from halfstep.engine.graph import is_custom, nodes_of, operation_of
from halfstep.engine.replay.record import Generators, MicroBatch, Replays
from halfstep.engine.replay.undisturbed import (
    BufferCopies,
    MessageError,
    compute_losses,
    run_backward,
    scale_losses,
    undisturbed,
)
from halfstep.hardware.probe import Hardware
from halfstep.kernels.gradstats import dense_values, total_norm
from halfstep.watching.autopsy import Autopsy, Cause
from halfstep.watching.backward_trace import BackwardOrigin, BackwardTrace, Node
from halfstep.watching.causes import explained, largest_finite
from halfstep.watching.forward_trace import ForwardTrace, Origin
from halfstep.watching.places import Places, next_sequence_nr
from halfstep.watching.probes import Probes, Range, version_of

__all__ = ["examine"]


def examine(replays: Replays, step: int, scale: float, hardware: Hardware | None = None) -> Autopsy:
    """Compute a skipped step again and name the cause; never raises for what the user's code does."""
    started = time.perf_counter()
    batches = replays.take(step)
    context = replays.backend.context()
    plain = Autopsy(step, "not replayed", scale=scale, rank=context.rank if context.world_size > 1 else None)
    reason = _reason_against(replays, batches)
    if reason is not None:
        # Of shards this rank knows its own only; the skip event names those of all ranks.
        can_name = replays.run.device.type == "cpu" and not replays.backend.shards
        names = _bad_gradients(replays) if can_name else []
        seen_in = f" Gradients that are not finite: {', '.join(names[:8])}." if names else ""
        if overflowed := replays.backend.overflowed_ranks:
            seen_in += f" Gradients overflowed on rank {', '.join(map(str, overflowed))} of {context.world_size}."
        advice = (
            ""
            if replays.obstacle or replays.depth
            else "Pass engine.step(replay=fn), where fn() returns the loss of this micro-batch."
        )
        return replace(plain, sentence=f"no replay: {reason}.{seen_in}", advice=advice)
    known = [b for b in batches if b is not None]
    autopsy, failure = _attempt(replays, known, plain, careful=False)
    if autopsy is None:
        autopsy, failure = _attempt(replays, known, plain, careful=True)
    if autopsy is None:
        return replace(plain, sentence=f"the replay failed with {failure}")
    notes = autopsy.notes
    if replays.is_one_of_several and autopsy.replayed and not replays.backend.overflowed_ranks:
        notes = (*notes, "each rank's own gradients were finite: what overflowed is their sum over ranks, or a weight")
    if any(batch.is_edited for batch in known):
        notes = (
            *notes,
            "a buffer was written to between two forwards of a micro-batch; the replay has the values before that",
        )
    if replays.is_compiled:
        notes = (*notes, "compiled code was replayed in eager mode, where roundings and dropout masks can differ")
    return explained(replace(autopsy, notes=notes, seconds=time.perf_counter() - started), hardware)


def _attempt(
    replays: Replays, batches: list[MicroBatch], plain: Autopsy, *, careful: bool
) -> tuple[Autopsy | None, str]:
    """The autopsy, or the error; the frames of the error, and their memory, are gone."""
    try:
        with _without_collection(), undisturbed(replays):
            return _examine(replays, batches, plain, careful=careful), ""
    except MessageError as error:
        sentence = f"no replay: the step sends messages to other ranks ({error}), which do not compute it again."
        return replace(plain, sentence=sentence), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Pause Python's garbage collector: a replay creates objects by the ten thousand, and one collection can take longer than it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _reason_against(replays: Replays, batches: list[MicroBatch | None]) -> str | None:
    if replays.obstacle is not None:
        return replays.obstacle
    if replays.depth:
        return "the outcome was read inside engine.forward(); read it after the block"
    if not batches or any(b is not None and b.compute_loss is None for b in batches):
        return "step() got no function that computes the loss again"
    if any(b is None for b in batches):
        return "a micro-batch was computed outside engine.forward(), so its random numbers are not known"
    return None


def _examine(replays: Replays, batches: list[MicroBatch], plain: Autopsy, *, careful: bool) -> Autopsy:
    if all(float(batch.factor) == 0 for batch in batches):
        sentence = "every micro-batch of the window had the weight 0, so there was nothing to update."
        return replace(plain, cause="data", op="weight", sentence=sentence)
    for number, batch in enumerate(batches):
        case = replace(plain, window_index=number)
        factor = float(batch.factor)
        if not math.isfinite(factor):
            return replace(case, cause="data", op="weight", value="nan" if math.isnan(factor) else "inf")
        replays.buffers.load(batch.buffers)  # not while operations are traced: no operation of the step made them
        autopsy = _Replay(replays, batch, case, BufferCopies(replays.run.module), careful).autopsy()
        if autopsy is not None:
            return autopsy
    return _of_sum(replays, replace(plain, cause="not reproduced"))


def _of_sum(replays: Replays, clean: Autopsy) -> Autopsy:
    """Gradients that are finite one by one, and whose norm is not."""
    grads = [p.grad for p in replays.run.params.values() if p.grad is not None]
    if not grads or bool(total_norm(grads, replays.run.device).isfinite()):
        return clean
    return replace(clean, cause="backward", op="the norm of all gradients", dtype="float32", value="inf")


@dataclass(frozen=True)
class _Replay:
    """One micro-batch, computed again."""

    replays: Replays
    batch: MicroBatch
    case: Autopsy
    start: BufferCopies
    careful: bool  # measure at once, and use no graph twice

    def autopsy(self) -> Autopsy | None:
        """The cause, if it is in this micro-batch."""
        if self._has_scale and not self.careful:
            forward = self._forward()
            if all(bool(loss.isfinite().all()) for loss in forward.losses):
                return self._in_backward(forward)
            del forward  # its graph holds the activations
            self.start.restore()
        traced = self._traced_forward()
        bad = [p for p in traced.of_losses if p is not None and not traced.ranges[p].finite]
        if bad:
            return self._in_forward(traced, traced.trace.origins(traced.ranges)[bad[0]])
        return self._in_backward(traced)

    def _forward(self) -> _Forward:
        places, first = Places(self.replays.run.module), next_sequence_nr()
        with places.followed():
            losses = compute_losses(self.replays, self.batch)
        return _Forward(losses, places, first, next_sequence_nr() - first)

    def _traced_forward(self) -> _TracedForward:
        run = self.replays.run
        named = dict(run.module.named_buffers()) | dict(run.module.named_parameters()) | run.params
        probes, places, first = Probes(at_once=self.careful), Places(run.module), next_sequence_nr()
        trace = ForwardTrace(places, probes, named)
        with places.followed(), trace:
            losses = compute_losses(self.replays, self.batch)
        num_nodes, of_losses = next_sequence_nr() - first, [trace.look(loss) for loss in losses]
        return _TracedForward(losses, places, first, num_nodes, trace, of_losses, probes.read())

    def _in_forward(self, forward: _TracedForward, origin: Origin) -> Autopsy:
        trace, ranges = forward.trace, forward.ranges
        operation, probe = trace.operations[origin.operation], ranges[origin.probe]
        shown = {"op": operation.name, "dtype": probe.dtype, "value": probe.value, "module": operation.place}
        inputs = tuple(ranges[p] for p in operation.inputs)
        inputs += tuple(Range("number", (), value, value) for value in operation.numbers)
        parameter = next((trace.named[p] for p in operation.inputs if p in trace.named), "")
        cause: Cause = "forward"
        if origin.entered:
            name, user = trace.named.get(origin.probe), trace.entry(origin, ranges)
            operation = user
            shown["op"], shown["module"] = user.name, user.place
            others = tuple(ranges[p] for p in user.inputs if ranges[p].finite)
            cause, parameter, inputs = ("data" if name is None else "weights"), name or "", (probe, *others)
            if name is not None:
                shown["module"] = self._owner(name, user.place)
        notes = (f"it ran in a {operation.outsider}, which is not part of the model",) if operation.outsider else ()
        return replace(self.case, cause=cause, inputs=inputs, parameter=parameter, notes=notes, **shown)  # type: ignore[arg-type]

    def _owner(self, name: str, place: str | None) -> str:
        """The module of a parameter or buffer: the one that used it, if it is an owner, or the first that has it."""
        module = self.replays.run.module
        tensor = dict(module.named_parameters()) | dict(module.named_buffers())
        value = tensor.get(name)
        own = {n: [*m.parameters(recurse=False), *m.buffers(recurse=False)] for n, m in module.named_modules()}
        if place is not None and any(value is each for each in own.get(place, ())):
            return place
        return name.rpartition(".")[0]

    def _in_backward(self, forward: _Forward) -> Autopsy | None:
        graph = _Graph.of(self.replays, forward.losses) if self._has_scale and not self.careful else None
        with forward.places.followed():  # what checkpoints compute again
            gradients, measured = self._trace_backward(forward.losses, self.case.scale, retain_graph=graph is not None)
        origin = gradients.origin(measured)
        if origin is None:
            return self._of_accumulation()
        node = gradients.nodes[origin.node]
        autopsy = self._describe(origin, gradients, measured, forward.places)
        # Where the forward absorbs an inf its derivative is 0, and 0 * inf is NaN.
        absorbs = not origin.arrived and node.outer is None and measured[origin.probe].value == "nan"
        if absorbs and not isinstance(forward, _TracedForward):
            first, num_nodes = forward.first_nr, forward.num_nodes
            del forward, graph  # the activations
            for param in self.replays.run.params.values():
                param.grad = None
            self.start.restore()
            forward = self._traced_forward()
            if forward.num_nodes != num_nodes:
                return self._in_backward(forward)  # nodes cannot be told by their numbers
            node = replace(node, sequence_nr=node.sequence_nr - first + forward.first_nr)
            graph = _Graph.of(self.replays, forward.losses)
        if isinstance(forward, _TracedForward):
            absorbed = forward.trace.behind(node.sequence_nr, forward.ranges) if absorbs else None
            if absorbed is not None:
                autopsy = self._in_forward(forward, absorbed)
                note = f"the forward pass absorbed it; {operation_of(node.name)} of the backward pass did not"
                return replace(autopsy, notes=(*autopsy.notes, note))
            operation = forward.trace.of_node(node.sequence_nr) if node.outer is None else None
            inputs = () if operation is None else tuple(forward.ranges[p] for p in operation.inputs)
        else:
            inputs = graph.saved_by(node) if graph is not None and node.outer is None else ()
        return self._blame_scale(replace(autopsy, inputs=autopsy.inputs + inputs), graph)

    @property
    def _has_scale(self) -> bool:
        return self.replays.scaler.settings.mode != "none" and self.case.scale != 1.0

    def _trace_backward(
        self,
        losses: list[Tensor],
        scale: float,
        *,
        retain_graph: bool = False,
        only_arriving: torch.dtype | None = None,
    ) -> tuple[BackwardTrace, list[Range]]:
        probes = Probes(at_once=self.careful)
        trace = BackwardTrace(probes, only_arriving=only_arriving)
        scaled = scale_losses(self.replays, losses, self.batch.factor, scale)
        with trace.followed():
            run_backward(self.replays, scaled, retain_graph=retain_graph)
        return trace, probes.read()

    def _describe(self, origin: BackwardOrigin, trace: BackwardTrace, ranges: list[Range], places: Places) -> Autopsy:
        names = {id(p): name for name, p in self.replays.run.module.named_parameters()}
        node, probe = trace.nodes[origin.node], ranges[origin.probe]
        parameter = "" if origin.parameter is None else names.get(origin.parameter, "")
        is_own = node.variable is not None and parameter
        place = self._owner(parameter, None) if is_own else _place_of(node, trace, places)
        op = f"{operation_of(node.name) or 'accumulate_grad'} (backward)"
        if origin.arrived:
            op = f"a sum of gradients, or a hook on one, before {op}"
        inputs = () if origin.arrived else tuple(ranges[p] for p in node.inputs if p is not None)
        return replace(
            self.case,
            cause="backward",
            module=place,
            op=op,
            dtype=probe.dtype,
            value=probe.value,
            inputs=tuple(replace(each, name="gradient") for each in inputs),
            parameter=parameter,
        )

    def _of_accumulation(self) -> Autopsy | None:
        """A gradient that is finite in each micro-batch, and not in their sum."""
        names = _bad_gradients(self.replays)
        if not names:
            return None
        grad: Any = self.replays.run.params[names[0]].grad
        return replace(
            self.case,
            cause="backward",
            module=names[0].rpartition(".")[0],
            op="a sum over micro-batches, or a hook after it",
            dtype=str(grad.dtype).removeprefix("torch."),
            value=_value_of(grad),
            parameter=names[0],
        )

    def _blame_scale(self, autopsy: Autopsy, graph: _Graph | None) -> Autopsy:
        """Compute the gradients again without loss scaling, if there was any."""
        if not self._has_scale:
            return autopsy
        for param in self.replays.run.params.values():
            param.grad = None
        if graph is not None and graph.is_unchanged():
            graph.generators.restore()
            losses = graph.losses
        else:
            self.start.restore()
            losses = compute_losses(self.replays, self.batch)
        trace, ranges = self._trace_backward(losses, 1.0, only_arriving=getattr(torch, autopsy.dtype))
        finite = not _bad_gradients(self.replays)
        largest, limit = trace.largest(ranges, autopsy.dtype), largest_finite(autopsy.dtype)
        fitting = None
        if finite and largest and limit is not None:
            fitting = 2.0 ** math.floor(math.log2(limit / largest))
            fitting = fitting if fitting < self.case.scale else None  # an intermediate value that is nowhere visible
        return replace(autopsy, at_scale_1=finite, fitting_scale=fitting)


@dataclass(frozen=True)
class _Forward:
    """A forward pass that was computed again."""

    losses: list[Tensor]
    places: Places
    first_nr: int  # sequence number of its first autograd node
    num_nodes: int


@dataclass(frozen=True)
class _TracedForward(_Forward):
    trace: ForwardTrace
    of_losses: list[int | None]  # probes
    ranges: list[Range]


@dataclass(frozen=True)
class _Graph:
    """The graph of a forward pass and what a second backward over it needs: the state at the start of the first."""

    losses: list[Tensor]
    generators: Generators
    buffers: list[tuple[Tensor, int | None]]  # with their versions

    @classmethod
    def of(cls, replays: Replays, losses: list[Tensor]) -> _Graph | None:
        """None if a custom function is in the graph: it may change what it saved, so that a second backward is wrong."""
        if any(is_custom(node) for loss in losses for node in nodes_of(loss.grad_fn)):
            return None
        buffers = [(buffer, version_of(buffer)) for buffer in replays.run.module.buffers()]
        return cls(losses, Generators.now(replays.run.device), buffers)

    def is_unchanged(self) -> bool:
        """Whether the first backward changed no buffer: what a checkpoint computes again may depend on one."""
        return all(version is not None and version == version_of(buffer) for buffer, version in self.buffers)

    def saved_by(self, node: Node) -> tuple[Range, ...]:
        """The ranges of what the operation of a node saved for its derivative: those of its inputs that matter to it."""
        every = (n for loss in self.losses for n in nodes_of(loss.grad_fn))
        own = next((n for n in every if n._sequence_nr() == node.sequence_nr and n.name().endswith(node.name)), None)  # noqa: SLF001
        probes = Probes(at_once=True)
        for name in dir(own):
            with contextlib.suppress(RuntimeError):  # freed, or hooks that cannot unpack it twice
                value = getattr(own, name) if name.startswith("_saved_") else None
                if isinstance(value, Tensor):
                    probes.add(value, name.removeprefix("_saved_"))
        return tuple(probes.read())


def _place_of(node: Node, trace: BackwardTrace, places: Places) -> str | None:
    """The module in which a node was created; that of the outer node where only the caller of a checkpoint is known."""
    place = places.of_node(node.sequence_nr, node.thread)
    return _place_of(trace.nodes[node.outer], trace, places) if place is None and node.outer is not None else place


def _bad_gradients(replays: Replays) -> list[str]:
    """The parameters whose gradients are not finite; waits for the device."""
    probes = Probes()
    numbers = {name: probes.add(p.grad) for name, p in replays.run.params.items() if p.grad is not None}
    ranges = probes.read()
    return [name for name, number in numbers.items() if number is not None and not ranges[number].finite]


def _value_of(grad: Tensor) -> str:
    values = dense_values(grad)
    return "nan" if bool(values.isnan().any()) else "inf" if bool((values == math.inf).any()) else "-inf"
