"""The settings of a run, read from its run file, so that --resume needs no other option."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfstep.checkpoint.runlog import read_runlog
from halfstep.errors import SettingError

__all__ = ["RUN_FILE", "SavedSettings", "Source", "saved_settings"]

RUN_FILE = "run.jsonl"  # in the directory of a run


@dataclass(frozen=True)
class Source:
    """The target that loads the job of a run from any directory."""

    target: str
    data_dir: str | None = None
    recipe: str | None = None


@dataclass(frozen=True)
class SavedSettings:
    """The precision and the TrainConfig fields of a run, and where its job came from."""

    policy: str
    config: dict[str, Any]
    source: Source | None  # None if the run was started from Python, with a Job


def saved_settings(out: Path) -> SavedSettings:
    """Read the settings of the run in `out` from the header of its run file."""
    path = out / RUN_FILE
    if not path.exists():
        raise SettingError(f"There is nothing to resume in {out}; start the run without --resume.")
    header = read_runlog(path).header
    if "config" not in header:
        raise SettingError(f"{path} was not written by halfstep train and cannot be resumed; check --out.")
    source = header.get("source")
    return SavedSettings(header["policy"], header["config"], None if source is None else Source(**source))
