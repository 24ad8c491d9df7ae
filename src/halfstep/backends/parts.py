"""Parts: what one rank steps of each parameter, where the parameters themselves do not show it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["Parts"]


@dataclass(frozen=True)
class Parts:
    """The values that this rank steps, by the names of the parameters, in the same order on every rank.

    Ranks have no element in common; a tensor is empty where a rank steps nothing of a parameter.
    """

    values: dict[str, Tensor]
    numels: dict[str, int]  # of the whole parameters
