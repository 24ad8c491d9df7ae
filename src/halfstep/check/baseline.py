"""A baseline: the findings a project has today, so that a check reports only new ones.

A finding is recognised by its file, its rule and the text of its line, so it is still the same after lines above it were
added or removed, and it is new once its line changes. The file lists them by path and code, sorted, so that it merges and
reviews well:

    {"version": 1, "findings": {"src/train.py": {"HS104": {"scaler.step(optimizer)": 1}}}}

Paths are relative to the baseline's folder, so that it does not matter where the check is run.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from halfstep.check.files.source import Source
from halfstep.check.finding import Finding
from halfstep.check.runner import FileResult
from halfstep.errors import HalfstepError, SettingError

__all__ = ["Baseline", "read_baseline", "subtract", "write_baseline"]

_MAX_CHARS = 120  # of a line; enough to recognise it


@dataclass(frozen=True, order=True)
class Known:
    """What identifies a finding across versions of a file."""

    path: str
    code: str
    line: str


@dataclass(frozen=True)
class Baseline:
    """Known findings, each with how often it occurs."""

    folder: Path
    counts: Counter[Known]


def read_baseline(file: Path) -> Baseline:
    """The baseline in a file; `SettingError` if there is none."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        counts = {
            Known(path, code, line): count
            for path, codes in data["findings"].items()
            for code, lines in codes.items()
            for line, count in lines.items()
        }
        is_valid = data["version"] == 1 and all(type(count) is int for count in counts.values())
    except OSError as error:
        raise SettingError(
            f"Cannot read the baseline {str(file)!r}: {error.strerror}. Write it with --write-baseline {file}."
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        is_valid = False
    if not is_valid:
        raise SettingError(
            f"{str(file)!r} is not a baseline of halfstep check. Write it again with --write-baseline {file}."
        )
    return Baseline(file.absolute().parent, Counter(counts))


def write_baseline(file: Path, results: Iterable[FileResult]) -> int:
    """Write the findings of a check as a baseline; returns how many there are."""
    if file.is_dir():  # an empty name is the current directory
        raise HalfstepError(f"Cannot write the baseline {str(file)!r}: it is a directory. Pass a file name.")
    folder = file.absolute().parent
    counts = Counter(_known(f, result.source, folder) for result in results for f in result.findings)
    tree: dict[str, dict[str, dict[str, int]]] = {}
    for known in sorted(counts):
        tree.setdefault(known.path, {}).setdefault(known.code, {})[known.line] = counts[known]
    text = json.dumps({"version": 1, "findings": tree}, indent=1) + "\n"
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(file)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise HalfstepError(f"Cannot write the baseline {str(file)!r}: {error.strerror}.") from None
    return counts.total()


def subtract(results: Iterable[FileResult], baseline: Baseline) -> tuple[FileResult, ...]:
    """The results without the findings that the baseline has; files without others are left out."""
    left = baseline.counts.copy()
    remaining = []
    for result in results:
        findings = []
        for finding in result.findings:
            known = _known(finding, result.source, baseline.folder)
            if left[known] > 0:
                left[known] -= 1
            else:
                findings.append(finding)
        if findings:
            remaining.append(replace(result, findings=tuple(findings)))
    return tuple(remaining)


def _known(finding: Finding, source: Source | None, folder: Path) -> Known:
    path = Path(os.path.relpath(finding.path, folder)).as_posix()
    line = source.line_of(finding.cell, finding.line) if source is not None else None
    return Known(path, finding.code, " ".join((line or finding.message).split())[:_MAX_CHARS])
