"""Placeholder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class DeepSpeedSettings:
    """Placeholder."""

    precision: str
    max_norm: float | None
    accumulate: int | None
    notes: tuple[str, ...]


def read_settings(config: Mapping[str, Any] | str | Path) -> DeepSpeedSettings:
    """Placeholder."""
    raise NotImplementedError
