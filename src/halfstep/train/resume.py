"""What an earlier attempt at a run was started with, so that --resume needs no other option."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfstep.checkpoint.runlog import read_runlog
from halfstep.errors import SettingError

__all__ = ["SavedSettings", "Source", "saved_settings"]


@dataclass(frozen=True)
class Source:
    """What loads a run's job again, from any folder."""

    target: str
    data_dir: str | None = None


@dataclass(frozen=True)
class SavedSettings:
    """The precision and the TrainConfig fields of a run, and where its job came from."""

    policy: str
    config: dict[str, Any]
    source: Source | None  # None where the run was started from Python, with a Job


def saved_settings(out: Path) -> SavedSettings:
    """Read them from the first record of the run file."""
    path = out / "run.jsonl"
    if not path.exists():
        raise SettingError(f"There is nothing to resume in {out}; start the run without --resume.")
    header = read_runlog(path).header
    if "config" not in header:
        raise SettingError(f"{path} was not written by halfstep train; it cannot be resumed.")
    source = header.get("source")
    return SavedSettings(header["policy"], header["config"], None if source is None else Source(**source))
