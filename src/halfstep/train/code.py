"""The code of a run in words: versions, settings and files, which ranks compare before the first step."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import platform
from pathlib import Path
from typing import Any

import torch

import halfstep
from halfstep.jobs.job import FIELDS, Job
from halfstep.train.config import TrainConfig

__all__ = ["code_facts"]

_DIGITS = 12


def code_facts(job: Job, config: TrainConfig, precision: str) -> dict[str, str]:
    """Versions, settings and the files that define the job."""
    facts = {
        "halfstep": f"{halfstep.__version__} ({_package_hash()})",
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "precision": precision,
    }
    facts |= {f"setting {field.name}": repr(getattr(config, field.name)) for field in dataclasses.fields(config)}
    sources = (_source_file(getattr(job, which)) for which in FIELDS)
    files = {path for path in sources if path is not None}
    facts |= {f"file {file.name}": f"sha256 {_digest(file.read_bytes())}" for file in sorted(files)}
    return facts


def _source_file(function: Any) -> Path | None:
    """The file in which a callable of a job is defined; None for what has none."""
    while hasattr(function, "func"):  # functools.partial
        function = function.func
    try:
        path = Path(inspect.getsourcefile(inspect.unwrap(function)) or "")
    except (TypeError, ValueError, OSError):
        return None
    return path if path.is_file() else None


@functools.cache
def _package_hash() -> str:
    root = Path(halfstep.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:_DIGITS]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:_DIGITS]
