"""The validation result of a checkpoint, written next to it after the fact.

A checkpoint is saved before its weights are validated, so that a validation that fails costs nothing. The result comes
later, and a checkpoint is never rewritten: it gets one more file, `score.json`, which its manifest does not cover.
"""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from halfstep.errors import HalfstepError

__all__ = ["Score", "read_score", "write_score"]

_FILE = "score.json"


@dataclass(frozen=True)
class Score:
    """What a validation measured: the value that ranks the checkpoint, and all values by name."""

    metric: float | None
    higher_is_better: bool
    values: dict[str, float]


def write_score(checkpoint: Path, score: Score) -> None:
    """Write the score of a checkpoint atomically; a later one replaces it."""
    aside = checkpoint / f".{_FILE}.{secrets.token_hex(4)}"
    try:
        with aside.open("w", encoding="ascii") as file:
            json.dump(asdict(score), file)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(checkpoint / _FILE)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise HalfstepError(
            f"The validation result of {checkpoint} could not be written: {error.strerror or error}. The checkpoint itself is "
            "complete; free disk space and continue with --resume."
        ) from error


def read_score(checkpoint: Path) -> Score | None:
    """The score of a checkpoint; None if it has none, or one that cannot be read."""
    try:
        fields: dict[str, Any] = json.loads((checkpoint / _FILE).read_text(encoding="ascii"))
        return Score(**fields)
    except (OSError, ValueError, TypeError):
        return None
