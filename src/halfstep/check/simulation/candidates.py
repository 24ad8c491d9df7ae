"""Which scripts are worth running; by itself, because most scripts are not, and the simulation takes time to load."""

from __future__ import annotations

__all__ = ["trains"]

MAX_TEXT = 120_000  # characters: larger files are libraries


def trains(text: str) -> bool:
    """Whether a script has a training loop in mixed precision, and is no library."""
    return ".backward(" in text and ("GradScaler" in text or "autocast" in text) and len(text) < MAX_TEXT
