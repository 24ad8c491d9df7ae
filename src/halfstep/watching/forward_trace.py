"""The forward pass, operation by operation: where a value that is not finite came from.

A tensor with inf or NaN is not yet a fault: attention masks are -inf, and softmax absorbs them. So the first such tensor is
not the culprit, but the one from which an unbroken chain leads to the loss:

    result finite                       nothing, whatever the inputs were: absorbed
    result not finite, inputs finite    this operation is the origin
    result not finite, an input too     the origin of that input; NaN before inf, arithmetic before masks, the earliest first
    softmax NaN, its inputs -inf        softmax, if a mask made them -inf: a row was masked everywhere
    a tensor that no operation made     it entered as it is: a parameter, a buffer or data
    a constant, made in the code        data if a loss has it (targets are made there); in a module, that module's forward

Results are measured on the device as they appear (`probes.py`), and the chain is followed on the host after one read.
Tensors are recognised by storage, offset, shape and stride; a write into a storage ends what was known about its views.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.engine.graph import is_opaque
from halfstep.watching.places import Places, next_sequence_nr
from halfstep.watching.probes import Probes, Range, storage_of, view_of

__all__ = ["CONSTANTS", "ForwardTrace", "Operation", "Origin"]

_UNDEFINED = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize_")
_OVERWRITES = ("copy_", "fill_", "zero_", "bernoulli_", "normal_", "uniform_", "random_", "exponential_")
CONSTANTS = (  # operations that write numbers of the code's own, such as masks
    "index_fill",
    "index_fill_",
    "index_put",
    "index_put_",
    "lift_fresh",
    "masked_fill",
    "masked_fill_",
    "where",
    "full",
    "full_like",
    "fill",
    "fill_",
    "triu",
    "triu_",
    "tril",
    "scalar_tensor",
)
_ARITHMETIC = ("mul", "mul_", "div", "div_", "add", "add_", "sub", "sub_", "pow", "pow_")
_COPIES = ("_to_copy", "clone", "copy_", "contiguous")
_ABSORBING = ("softmax", "attention", "logsumexp")
_SEVERITY = {"nan": 2, "inf": 1, "-inf": 0}

_Key = tuple[Any, ...]


@dataclass(frozen=True)
class Operation:
    """One operation of the forward pass."""

    name: str
    place: str | None  # the module in whose code it ran
    node: int  # the number of its autograd node; -1 if it has none
    inputs: tuple[int, ...]  # probes
    outputs: tuple[int, ...]
    is_constant: bool = False  # without a tensor among its arguments
    numbers: tuple[float, ...] = ()  # operands of arithmetic that are Python numbers
    outsider: str = ""  # the class of the module in which it ran, if that is no part of the model


@dataclass(frozen=True)
class Origin:
    """Where a value that is not finite came from: an operation, or a tensor that entered it."""

    operation: int
    probe: int  # of the result, or of the tensor that entered
    entered: bool


@dataclass
class _Storage:
    writers: tuple[int, ...] = ()  # the operations that wrote it or parts of it
    is_empty: bool = False  # whatever was in memory, until something is written
    probes: dict[_Key, int | None] = field(default_factory=dict)  # by view, since the last of them
    measured: dict[Any, int | None] = field(default_factory=dict)  # by memory: views of other shapes are measured once


class ForwardTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Measures the inputs and results of every operation in its block."""

    def __init__(self, places: Places, probes: Probes, named: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []
        self._places, self._probes = places, probes
        self._storages: dict[int, _Storage] = {}
        self._names = {storage_of(tensor): name for name, tensor in reversed(list(named.items()))}
        self._writers_of: dict[int, tuple[int, ...]] = {}  # probe -> operations
        self.named: dict[int, str] = {}  # probe -> parameter or buffer
        self._thread = 0  # in which the forward runs
        self._apply: Any = None  # of autograd functions, while it is replaced
        self._num_opaque = 0  # custom functions in progress
        self._last_nr, self._node, self._in_function = next_sequence_nr(), -1, False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # a replay runs in eager mode anyway, and torch's wrapper against compiling costs time for each operation

    def __enter__(self) -> Self:
        """Observe; tensors do not wait in custom functions, whose kernels may write to them without torch's knowledge."""
        self._thread = threading.get_ident()
        self._apply = apply = torch.autograd.Function.__dict__["apply"]

        def followed_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if not is_opaque(cls):
                return apply.__func__(cls, *args, **kwargs)
            self._probes.flush()
            self._num_opaque += 1
            try:
                return apply.__func__(cls, *args, **kwargs)
            finally:
                self._num_opaque -= 1

        torch.autograd.Function.apply = classmethod(followed_apply)  # type: ignore[method-assign,assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch.autograd.Function.apply = self._apply  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        about = _about(func)
        self._find_node()
        is_constant = about.name == "lift_fresh"  # torch.tensor(...)
        if about.is_view and not is_constant:
            return func(*args, **kwargs)
        inputs: list[int | None] = []
        sources: set[int] = set()
        changes_waiting = False
        for place, value in (*enumerate(args), *kwargs.items()):
            if not isinstance(value, Tensor | list | tuple):
                continue
            for tensor in (value,) if isinstance(value, Tensor) else _tensors(value):
                storage = storage_of(tensor)
                sources.add(storage)
                is_changed = place in about.changed
                if not is_constant and place not in about.overwritten:
                    inputs.append(self._look(tensor, storage, at_once=is_changed))
                changes_waiting |= is_changed and storage in self._probes.storages
        if changes_waiting:
            self._probes.flush()
        result = func(*args, **kwargs)
        number = len(self.operations)
        outputs: list[int | None] = []
        for tensor in _tensors(result):
            if about.undefined:
                self._storages[storage_of(tensor)] = _Storage(is_empty=True)
            else:
                outputs.append(self._written(tensor, number, sources))
        places = self._places
        self.operations.append(
            Operation(
                about.name,
                self._place(),
                self._node,
                _some(inputs),
                _some(outputs),
                is_constant or not sources,
                tuple(float(a) for a in args if type(a) in (int, float)) if about.name in _ARITHMETIC else (),
                places.outsider,
            )
        )
        return result

    def _place(self) -> str | None:
        """The module whose code runs; in a derivative that the forward takes (torch.autograd.grad), the one that it is of."""
        running = torch._C._current_autograd_node()  # noqa: SLF001 - no public name
        here = self._places.current
        return here if running is None else self._places.of_node(running._sequence_nr(), self._thread) or here  # noqa: SLF001

    def _find_node(self) -> None:
        """The node of the operation that is about to run: autograd creates it before, if there is to be one.

        The operations inside a custom autograd function share the node of the function; they run without gradients.
        """
        number, grads = next_sequence_nr(), torch.is_grad_enabled()
        if number != self._last_nr:
            self._node, self._in_function = number - 1, not grads
        elif grads or not self._in_function:
            self._node, self._in_function = -1, False
        self._last_nr = number

    def look(self, tensor: Tensor) -> int | None:
        """The probe of a tensor as it is now."""
        return self._look(tensor, storage_of(tensor))

    def _look(self, tensor: Tensor, number: int, *, at_once: bool = False) -> int | None:
        dtype = tensor.dtype
        if not (dtype.is_floating_point or dtype.is_complex):
            return None
        storage = self._storages.get(number)
        if storage is None:
            storage = self._storages[number] = _Storage()
        if storage.is_empty:
            return None
        key = view_of(tensor)
        if key not in storage.probes:
            name = "" if storage.writers else self._names.get(number, "")
            probe = self._probes.add(tensor, name, measured=storage.measured, at_once=at_once or self._num_opaque > 0)
            storage.probes[key] = probe
            if probe is not None:
                self._writers_of[probe] = storage.writers
                if name:
                    self.named[probe] = name
        return storage.probes[key]

    def _written(self, tensor: Tensor, number: int, sources: set[int]) -> int | None:
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return None
        storage = storage_of(tensor)
        # Into a tensor that exists, perhaps a part of it only, or into new memory, perhaps where a freed tensor was.
        before = self._storages.get(storage, _Storage()).writers if storage in sources else ()
        self._storages[storage] = _Storage((*before, number))
        return self._look(tensor, storage)

    # --- after the read ---------------------------------------------------------------------------------------------

    def origins(self, ranges: Sequence[Range]) -> dict[int, Origin]:
        """The origin of every probe that is not finite."""
        origins: dict[int, Origin] = {}
        of_operation: dict[int, Origin] = {}
        left_out: dict[int, Origin] = {}  # of what a nansum, which is half of a nanmean, has left out
        for number, operation in enumerate(self.operations):
            for probe in operation.inputs:
                if not ranges[probe].finite and probe not in origins:
                    writers = (of_operation.get(w) for w in reversed(self._writers_of[probe]))
                    is_constant = operation.place is not None and self._is_number(ranges[probe])
                    origins[probe] = next(filter(None, writers), None) or Origin(number, probe, not is_constant)
            bad = [probe for probe in operation.outputs if not ranges[probe].finite]
            causes = [probe for probe in operation.inputs if not ranges[probe].finite]
            origin = min((origins[p] for p in causes), key=lambda o: self._rank(o, ranges), default=None)
            if origin is not None and operation.name == "nansum":
                left_out.update(dict.fromkeys(operation.outputs, origin))
            if not bad:
                continue
            origin = origin or next((left_out[p] for p in operation.inputs if p in left_out), None)
            if origin is not None and self._is_masked_everywhere(operation, origin, ranges):
                origin = None
            entered = operation.is_constant and operation.place is None
            of_operation[number] = origin or Origin(number, bad[0], entered)
            origins.update(dict.fromkeys(bad, of_operation[number]))
        return origins

    @staticmethod
    def _is_number(probe: Range) -> bool:
        """Whether a tensor that no operation made is a Python number: torch passes those as scalars of float64.

        A scalar of another dtype is a tensor of somebody's: a gain in the batch, a temperature.
        """
        return not probe.shape and probe.dtype in {"float64", "complex128"} and not probe.name

    def _is_masked_everywhere(self, operation: Operation, origin: Origin, ranges: Sequence[Range]) -> bool:
        """Whether a softmax gave NaN because of a mask: a mask belongs there, but not in all places of a row."""
        if not any(word in operation.name for word in _ABSORBING):
            return False
        values = {ranges[p].value for p in operation.inputs} - {""}
        made = any(ranges[p].value == "nan" for p in operation.outputs)
        return made and values == {"-inf"} and (origin.entered or self._masks(origin))

    def _masks(self, origin: Origin) -> bool:
        return self.operations[origin.operation].name in CONSTANTS

    def _rank(self, origin: Origin, ranges: Sequence[Range]) -> tuple[int, bool, int]:
        masks = self._masks(origin) and not origin.entered
        return -_SEVERITY[ranges[origin.probe].value], masks, origin.operation

    def entry(self, origin: Origin, ranges: Sequence[Range]) -> Operation:
        """The operation that first computed with a tensor that entered; copies and casts only pass it on."""
        origins = self.origins(ranges)
        for operation in self.operations[origin.operation :]:
            if operation.name not in (*_COPIES, "lift_fresh") and any(
                origins.get(p) == origin for p in operation.inputs
            ):
                return operation
        return self.operations[origin.operation]

    def behind(self, node: int, ranges: Sequence[Range]) -> Origin | None:
        """The origin of what the operation of an autograd node read or gave that was not finite, though it was absorbed."""
        origins = self.origins(ranges)
        for operation in (o for o in self.operations if o.node == node):
            if all(ranges[p].finite for p in operation.outputs):
                continue  # where it saturates, its derivative is 0
            bad = [p for p in (*operation.inputs, *operation.outputs) if not ranges[p].finite]
            if any(word in operation.name for word in _ABSORBING):
                bad = [p for p in bad if ranges[p].value != "-inf"]  # a mask, which belongs there
            if bad and bad[0] in origins:
                return min((origins[p] for p in bad if p in origins), key=lambda o: self._rank(o, ranges))
        return None

    def of_node(self, node: int) -> Operation | None:
        """The operation for which an autograd node was created, if one was."""
        return next((operation for operation in self.operations if operation.node == node), None)


@dataclass(frozen=True)
class _About:
    name: str
    is_view: bool
    undefined: bool  # its results are whatever is in memory
    changed: frozenset[int | str]  # positions and names of the arguments that it writes
    overwritten: frozenset[int | str]  # those of which what it writes does not depend


@functools.cache
def _about(func: Any) -> _About:
    schema = func._schema  # noqa: SLF001 - the only name
    name = schema.name.rpartition("::")[2]
    written = [i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    names = [schema.arguments[i].name for i in written]
    overwrites = name in _OVERWRITES or "out" in names
    # The schemas of batch norms do not declare that they update the running statistics.
    hidden = [i for i, a in enumerate(schema.arguments) if a.name.startswith("running_")]
    changed = frozenset((*written, *hidden, *names, *(schema.arguments[i].name for i in hidden)))
    return _About(name, is_view, name in _UNDEFINED, changed, frozenset((*written, *names) if overwrites else ()))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _some(probes: Sequence[int | None]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(p for p in probes if p is not None))
