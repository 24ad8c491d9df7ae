"""Fixes as a unified diff that `patch -p0` applies."""

from __future__ import annotations

import difflib
import re

from halfstep.check.fixing import Fixed
from halfstep.check.session import Outcome

__all__ = ["as_diff"]


def as_diff(outcome: Outcome) -> str:
    """The changes of all files, concatenated; empty if there are none."""
    return "".join(_diff(fixed) for fixed in outcome.fixed)


def _diff(fixed: Fixed) -> str:
    lines = difflib.unified_diff(_lines(fixed.before.raw), _lines(fixed.after.raw), fixed.path, fixed.path)
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _lines(text: str) -> list[str]:
    """Lines as `patch` splits them: only at line feeds."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)
