"""torch.optim.swa_utils.AveragedModel on a lean model: it averages the fp32 masters.

`AveragedModel` copies a model and averages its parameters one by one. Made before the Engine, its averages are fp32 and the
model's weights 16-bit, and torch's update raises a dtype mismatch; made after it, the averages are 16-bit too and stop
moving, because an average moves by a fraction of a difference. So its `update_parameters` is given the masters when the
model is a lean Engine's, and its 16-bit averages become fp32. For every other model it does what torch wrote.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from halfstep.engine.setup import PreparedRun
from halfstep.precision.formats import DTYPES_16_BIT

__all__ = ["average_masters"]

_runs: list[weakref.ref[PreparedRun]] = []
_stock_update = AveragedModel.update_parameters


def average_masters(run: PreparedRun) -> None:
    """Let AveragedModel average the masters of this run's model until the run is closed."""
    if run.policy.params == "fp32":
        return
    own = weakref.ref(run)
    _runs[:] = [*(other for other in _runs if other() is not None), own]
    run.undo.callback(_forget, own)
    AveragedModel.update_parameters = _update_parameters  # type: ignore[method-assign]


def _forget(run: weakref.ref[PreparedRun]) -> None:
    _runs[:] = [other for other in _runs if other is not run]


@functools.wraps(_stock_update)
def _update_parameters(self: AveragedModel, model: nn.Module) -> None:
    run = _run_of(model)
    if run is None:
        _stock_update(self, model)
        return
    for average in self.module.parameters():
        if average.dtype in DTYPES_16_BIT:
            average.data = average.data.float()
    _stock_update(self, _Masters(model, run))


def _run_of(model: nn.Module) -> PreparedRun | None:
    """The lean run that this model, or what it wraps, belongs to."""
    first = next(model.parameters(), None)
    for reference in _runs:
        run = reference()
        if run is not None and any(param is first for param in run.module.parameters()):
            return run
    return None


class _Masters(nn.Module):
    """A model as AveragedModel reads it, with fp32 values in the place of 16-bit weights."""

    def __init__(self, model: nn.Module, run: PreparedRun) -> None:
        super().__init__()
        self.__dict__["_model"] = model  # not a submodule: its parameters are replaced below
        self._run = run

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The masters, in the order of the model's parameters."""
        return (_value(p, self._run) for p in self.__dict__["_model"].parameters(recurse))

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        """The model's buffers."""
        return self.__dict__["_model"].buffers(recurse)  # type: ignore[no-any-return]


def _value(param: Tensor, run: PreparedRun) -> nn.Parameter:
    value = run.master_of(param) if param.dtype in DTYPES_16_BIT else param.detach()
    return nn.Parameter(value, requires_grad=False)
