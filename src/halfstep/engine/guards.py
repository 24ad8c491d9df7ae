"""Guards: gradients and models that changed outside the Engine, and gradients in the way of a forward.

Gradients between `backward` and `step` are multiplied by the loss scale. A bare `loss.backward()` adds unscaled ones to
them, and clipping or editing them by hand works on numbers that are 65536 times too large; both continue training,
silently wrong. Every tensor has a version that counts its in-place changes, so the Engine records the version of each
gradient after its own backward and compares before it continues. That costs no device work.

During a forward the gradients of its window are sometimes in the way, and are set aside. A model compiled into CUDA
graphs writes its gradients to the same memory at every replay: they are valid until the next forward, so a step over one
micro-batch uses them in place, but those that must outlive a forward (accumulation, a second loss) are copied out once
per window, and from then on autograd adds to the copy. And torch.compile cannot trace a 16-bit weight that has an fp32
gradient: it falls back to eager at every layer. So where gradients are summed in fp32, weights have none during a forward.

Set-up fits masters, optimizer states and casts to the parameters it sees. `model.half()` or `model.to(device)` afterwards
keeps the Parameter objects and changes what is in them: updates are lost to rounding, or weights and masters disagree. A layer
that is replaced afterwards has parameters that no optimizer knows. Both train on without an error, so each micro-batch
compares dtypes, devices and the registered objects with those of the set-up, on the host. With hundreds of modules a walk
over them costs milliseconds, and where the host is the bottleneck they show in every step. So a hook of torch's counts what is
registered in any module of the process, and the tables are compared only after that count has changed, and every
so often, because code can write to a module's tables directly.

A lean model that is called outside the Engine's blocks fails with torch's own error about two dtypes. Whether a call will
fail cannot be known before it: the inputs may be 16-bit, or the model casts them. So a hook adds a note to the error itself.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from halfstep.errors import SettingError
from halfstep.events import log_warning
from halfstep.hardware.units import few
from halfstep.precision.formats import DTYPES_16_BIT

__all__ = ["GradientGuard", "ModelGuard", "count_registrations", "num_registrations"]

_grad, _dtype, _device = map(operator.attrgetter, ("grad", "dtype", "device"))  # loops over parameters in C
Place = tuple[torch.dtype, torch.device]
_EVERY = 16  # checks: the tables are compared although nothing was registered
_registrations = 0
_counted: WeakSet[nn.Module] = WeakSet()


def num_registrations() -> int:
    """How often a parameter, module or buffer was registered in a module of a model that `count_registrations` saw."""
    return _registrations


def count_registrations(model: nn.Module) -> int:
    """Count registrations in this model's modules from now on; returns the count so far.

    Those in other modules do not count: a slice of a ModuleList, as many models take in every forward, registers its layers
    in a new list.
    """
    _start_counting()
    _counted.update(model.modules())
    return _registrations


def _count(module: nn.Module, *_: object) -> None:
    global _registrations  # noqa: PLW0603 - torch's hooks are global too
    if not torch.compiler.is_compiling():  # else dynamo would guard on every module of the set
        _registrations += module in _counted


@functools.cache
def _start_counting() -> None:
    modules = torch.nn.modules.module
    modules.register_module_parameter_registration_hook(_count)
    modules.register_module_module_registration_hook(_count)
    modules.register_module_buffer_registration_hook(_count)


class GradientGuard:
    """Detects gradients that changed outside the Engine, and parameters added to optimizers after it was built."""

    def __init__(
        self,
        params: Mapping[str, Tensor],
        optimizers: Sequence[torch.optim.Optimizer] = (),
        *,
        in_graphs: bool = False,
        hide: bool = False,
    ) -> None:
        self._params, self._in_graphs, self._hide = params, in_graphs, hide
        self._optimizers, self._num_owned = optimizers, _num_owned(optimizers)
        self._grads: list[Tensor | None] = [None] * len(params)  # as recorded, in the order of the parameters
        self._versions: list[int | None] = [None] * len(params)
        self._copied: set[str] = set()  # out of a graph's memory
        self._aside: dict[str, Tensor] = {}

    def record(self) -> None:
        """Take the gradients as they are for the Engine's own."""
        self._grads, self._versions = self._current()

    def forget(self) -> None:
        """Expect no gradients."""
        self._copied, self._aside = set(), {}
        self._grads, self._versions = [None] * len(self._params), [None] * len(self._params)

    def _current(self) -> tuple[list[Tensor | None], list[int | None]]:
        grads: list[Tensor | None] = list(map(_grad, self._params.values()))
        return grads, [None if grad is None else grad._version for grad in grads]  # noqa: SLF001

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[None]:
        """Keep the gradients out of the way of a forward; one that was edited is still detected."""
        if self._in_graphs:
            self._copy_out()
        if self._hide:
            for name, param in self._params.items():
                if param.grad is not None:
                    self._aside[name], param.grad = param.grad, None
        try:
            yield
        finally:
            self._put_back()

    def _put_back(self) -> None:
        """Return the gradients to their weights; one that was made in between stays, and is detected."""
        for name, grad in self._aside.items():
            if self._params[name].grad is None:
                self._params[name].grad = grad
        self._aside.clear()

    def _copy_out(self) -> None:
        for index, (name, param) in enumerate(self._params.items()):
            old = param.grad
            if old is None or name in self._copied:
                continue
            param.grad = old.clone()
            self._copied.add(name)
            if self._grads[index] is old and self._versions[index] == old._version:  # noqa: SLF001
                self._grads[index], self._versions[index] = param.grad, param.grad._version  # noqa: SLF001

    def check(self, caller: str) -> None:
        """Raise if a gradient appeared, changed or disappeared since `record`, or an optimizer has new parameters."""
        self._put_back()  # in case this is called inside the block of a forward
        added = _num_owned(self._optimizers) - self._num_owned
        if added:
            raise SettingError(
                f"{caller}(): the optimizer has {added:+d} parameters since the Engine was built (add_param_group?); the Engine would not "
                "check or clip them. Give the optimizer every parameter at the start (one with requires_grad=False waits until it is "
                "unfrozen), or close() this engine and build a new one."
            )
        grads, versions = self._current()
        if versions == self._versions and all(map(operator.is_, grads, self._grads)):
            return
        pairs = list(zip(self._params, grads, versions, self._grads, self._versions, strict=True))
        gone = [name for name, grad, _, recorded, _ in pairs if grad is None and recorded is not None]
        changed = [n for n, g, v, recorded, old in pairs if g is not None and (g is not recorded or v != old)]
        if gone:
            raise SettingError(
                f"{caller}(): the gradients of {few(gone)} were cleared since engine.backward(). The Engine clears gradients itself "
                "after a step; remove optimizer.zero_grad() from the loop."
            )
        if changed and all(recorded is None for recorded in self._grads):
            raise SettingError(
                f"{caller}(): there are gradients that engine.backward() did not compute ({few(changed)}): a bare loss.backward(), another "
                "engine's backward through this model, or left over from before. Write engine.backward(loss), freeze this model "
                "(requires_grad_(False)) where another is trained through it, and clear old gradients with model.zero_grad()."
            )
        if changed:
            raise SettingError(
                f"{caller}(): the gradients of {few(changed)} changed since engine.backward(): clipped or edited by hand, a bare "
                "loss.backward(), another engine's backward through this model, or a backward that failed halfway. They are still "
                "multiplied by the loss scale. Use Engine(max_norm=...) to clip, or call engine.unscale() before you edit them; "
                "engine.reset_window() drops this window and starts a new one."
            )

    def check_present(self, caller: str) -> None:
        """Raise if every gradient is gone: after unscale() the Engine allows edits, but an update needs gradients."""
        if all(param.grad is None for param in self._params.values()):
            raise SettingError(
                f"{caller}(): all gradients were cleared since engine.unscale(), so nothing would be updated. Remove optimizer.zero_grad() "
                "from the loop; engine.reset_window() drops a window."
            )


class ModelGuard:
    """Detects a model whose parameters were cast, moved or replaced after the Engine was built; never waits for the device."""

    def __init__(
        self, module: nn.Module, params: Mapping[str, Tensor], drop_copies: Callable[[], None] = lambda: None
    ) -> None:
        """`params` are those that the optimizers own, by the module's names; `drop_copies` registers them where copies are."""
        self._module, self._drop_copies = module, drop_copies
        self._params = dict(params)
        self._places = self._current_places()
        self._owned = {id(p) for p in params.values()}
        # Weak: a part of the model that is dropped later must not stay in memory.
        self._idle = WeakTensorKeyDictionary({p: None for p in module.parameters() if id(p) not in self._owned})
        self._structure = _structure(module)
        self._registered, self._num_checks = count_registrations(module), 0
        self.parameters = list(module.parameters())  # all of the module, as of the last check
        self._new: dict[str, Tensor] = {}
        self._warned = False

    def check(self, caller: str) -> None:
        """Raise if a trained parameter has another dtype or device, or a new one has a gradient and no optimizer."""
        moved = self._moved()
        if any(self._params[name].requires_grad for name, _, _ in moved):
            changes = [f"{name} from {_place(*old)} to {_place(*new)}" for name, old, new in moved]
            raise SettingError(
                f"{caller}(): the model was cast or moved after the Engine was built: {few(changes)}. Masters and optimizer states "
                "do not follow, and updates would be lost. Remove .half() / .bfloat16() / .float() / .to(...) after Engine(...): build the "
                "model on its device in fp32, then its optimizer and the Engine, and choose the precision with Engine(precision=...)."
                f"{_advice(self._module, moved)}"
            )
        if self._has_changed():
            count_registrations(self._module)
            self._structure = _structure(self._module)
            self.parameters = list(self._module.parameters())
            named = self._module.named_parameters()
            self._new = {name: p for name, p in named if id(p) not in self._owned and p not in self._idle}
        trained = [name for name, param in self._new.items() if param.grad is not None]
        if trained:
            raise SettingError(
                f"{caller}(): {few(trained)} came into the model after the Engine was built (a replaced layer or parameter, a "
                "parametrization, load_state_dict(assign=True)?) and no optimizer of the Engine has them, so they would never be updated. "
                "Change the model before its optimizer and Engine are built, or close() this engine and build both again."
            )

    def _current_places(self) -> tuple[list[torch.dtype], list[torch.device]]:
        params = self._params.values()
        return list(map(_dtype, params)), list(map(_device, params))

    def _moved(self) -> list[tuple[str, Place, Place]]:
        """The parameters that have another dtype or device than at the set-up, with both."""
        places = self._current_places()
        if places == self._places:
            return []
        before, now = (zip(*lists, strict=True) for lists in (self._places, places))
        return [(name, old, new) for name, old, new in zip(self._params, before, now, strict=True) if old != new]

    def _has_changed(self) -> bool:
        """Whether the tables of the model's modules are other than at the last check."""
        self._num_checks += 1
        if self._registered == num_registrations() and self._num_checks % _EVERY:
            return False
        self._registered = num_registrations()
        self._drop_copies()
        return any(list(map(id, table.values())) != ids for table, ids, _ in self._structure)

    def check_reached(self, gradients: Mapping[str, Tensor]) -> None:
        """Warn once about an update that has no gradient at all: the loss is of another model."""
        if not gradients and not self._warned:
            self._warned = True
            log_warning(
                "No parameter of the Engine has a gradient, so this update changes nothing: the loss depends on none of them. Compute it "
                "with the model that was passed to Engine(...), not with a copy or a new one."
            )


def _structure(module: nn.Module) -> list[tuple[Mapping[str, object], list[int], list[object]]]:
    """Every table of parameters and children in a model, with the identities of what is registered in it.

    Comparing them takes a fifth of the time of a walk over `module.parameters()`, which removes duplicates. The objects
    themselves are in the list so that none is freed and its identity reused.
    """
    tables = (table for m in module.modules() for table in (m._parameters, m._modules))  # noqa: SLF001
    return [(table, list(map(id, table.values())), list(table.values())) for table in tables]


def _advice(model: nn.Module, moved: Sequence[tuple[str, Place, Place]]) -> str:
    """What to do about modules that the model casts to fp32 in its own forward, as routers of experts do; else ""."""
    if any(old[0] not in DTYPES_16_BIT or new != (torch.float32, old[1]) for _, old, new in moved):
        return ""
    modules = dict.fromkeys(name.rpartition(".")[0] or name for name, _, _ in moved)
    patterns = dict.fromkeys(re.sub(r"\b\d+\.", "*.", name) for name in modules)
    others = [name for name, _ in model.named_modules() if name not in modules]
    exact = not any(fnmatchcase(name, pattern) for name in others for pattern in patterns)
    named = "|".join(patterns if exact else modules)
    return f" If the model itself casts them in its forward, keep them in fp32: keep_fp32={named} in the precision."


def _place(dtype: torch.dtype, device: torch.device) -> str:
    return f"{str(dtype).removeprefix('torch.')} on {device}"


def _num_owned(optimizers: Sequence[torch.optim.Optimizer]) -> int:
    return sum(len(group["params"]) for optimizer in optimizers for group in optimizer.param_groups)
