"""Whether all ranks are about to do the same: code, settings, model and data are compared before the first step.

Ranks that differ would train apart or wait for each other for ever, so the comparison ends in the same error on every
rank, with the values of the ranks that differ.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import halfstep
from halfstep.errors import SettingError
from halfstep.hardware.units import few
from halfstep.jobs.job import FIELDS, Job
from halfstep.train.config import TrainConfig
from halfstep.train.ranks import Ranks

__all__ = ["check_equal", "code_facts"]

_DIGITS = 12
_MOST_SHOWN = 3


def check_equal(ranks: Ranks, facts: Mapping[str, str]) -> None:
    """Raise on every rank if a fact differs between ranks."""
    gathered = ranks.gather(dict(facts))
    problems = []
    for name in dict.fromkeys(name for each in gathered for name in each):
        values: dict[str, list[int]] = {}
        for rank, each in enumerate(gathered):
            values.setdefault(each.get(name, "missing"), []).append(rank)
        if len(values) > 1:
            shown = ", ".join(f"{value} on rank {few(list(map(str, on)))}" for value, on in values.items())
            problems.append(f"{name}: {shown}")
    if problems:
        more = f" and {len(problems) - _MOST_SHOWN} more" if len(problems) > _MOST_SHOWN else ""
        raise SettingError(
            f"The ranks of this run differ in {'; '.join(problems[:_MOST_SHOWN])}{more}. They must run the same command with the same code and data: "
            "update the machines that differ, and start the run again."
        )


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
