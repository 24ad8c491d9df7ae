"""EMA: an exponential moving average of the masters, advanced only by steps that happened.

    average = average + (1 - decay) (master - average)

The update is gated by the step's flag on the device, so a skipped step leaves the EMA bit for bit as it was and nothing
waits. The EMA is fp32 and follows the fp32 masters, not their 16-bit roundings.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from halfstep.errors import SettingError
from halfstep.kernels.table import copied_to
from halfstep.optim.shards import local, placed

__all__ = ["UPDATE_COPIES", "Ema", "check_decay"]

UPDATE_COPIES = 3  # fp32 tensors of a parameter's size that its update has at once; the planner counts them


def check_decay(decay: object) -> None:
    """Raise for what is no decay of an EMA."""
    if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 < decay < 1:
        raise SettingError(f"ema={decay!r} must be a decay between 0 and 1, such as 0.999.")


class Ema:
    """The EMA of a set of named parameters."""

    def __init__(self, params: dict[str, Tensor], decay: float, master_of: Callable[[Tensor], Tensor]) -> None:
        check_decay(decay)
        self.decay = float(decay)
        self._params, self._master_of = params, master_of
        self.averages = {name: master_of(p).detach().clone() for name, p in params.items()}
        self.trained: dict[str, Tensor] | None = None  # the weights, while the parameters have their EMA values

    @torch.no_grad()
    def update(self, found_inf: Tensor) -> None:
        """Follow the masters, unless the flag is set."""
        for name, param in self._params.items():
            average, master = local(self.averages[name]), local(self._master_of(param))
            keep = copied_to(found_inf, master.device) != 0
            average.copy_(torch.where(keep, average, average + (master - average) * (1 - self.decay)))

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """The parameters have their EMA values inside this block."""
        if self.trained is not None:
            yield
            return
        self._swap()
        try:
            yield
        finally:
            self._swap_back()

    @contextlib.contextmanager
    def swapped_back(self) -> Iterator[None]:
        """The parameters have their trained values inside this block, also within `swapped`; what it changes stays."""
        if self.trained is None:
            yield
            return
        self._swap_back()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        self.trained = {name: p.detach().clone() for name, p in self._params.items()}
        self._put(self.averages)

    def _swap_back(self) -> None:
        assert self.trained is not None
        trained, self.trained = self.trained, None
        self._put(trained)

    @torch.no_grad()
    def _put(self, values: dict[str, Tensor]) -> None:
        for name, param in self._params.items():
            param.copy_(values[name])

    def state_dict(self) -> dict[str, object]:
        """Decay and averages."""
        return {"decay": self.decay, "averages": dict(self.averages)}

    def check_state(self, averages: dict[str, Tensor]) -> None:
        """Raise unless there is an EMA of the right shape for every parameter."""
        if averages.keys() != self.averages.keys():
            odd = sorted(averages.keys() ^ self.averages.keys())[:4]
            raise SettingError(f"The saved EMA has other parameters than this model: {', '.join(odd)}.")
        for name, own in self.averages.items():
            shape = getattr(averages[name], "shape", None)
            if shape != own.shape:
                raise SettingError(
                    f"The saved EMA of {name} has the shape {shape and tuple(shape)} and the parameter {tuple(own.shape)}; build the model "
                    "with the settings it was saved with."
                )

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, object]) -> None:
        """Load saved averages; the decay stays as constructed."""
        saved = state["averages"]
        assert isinstance(saved, dict)
        self.check_state(saved)
        for name, value in saved.items():
            self.averages[name].copy_(placed(value, self.averages[name]))
