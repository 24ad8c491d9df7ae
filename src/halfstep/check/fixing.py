"""Apply fixes: each one is safe by itself, and is verified after it was applied.

A fix is a few edits of the text. Fixes that do not overlap are applied together, the file is checked again, and this
repeats until nothing more can be fixed. Every round is verified on the changed file: it is read again from its bytes, it
parses, each fixed finding is gone rather than moved or reworded, and no error or warning is new. A round that fails is
repeated one fix at a time, and fixes that fail alone are skipped. Bytes that are not edited do not change. That an inserted
line only uses names with a value is verified before a fix is offered at all (`halfstep.check.fixes.bound`).
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from halfstep.check.files.document import Document, apply_edits, read_document
from halfstep.check.finding import Edit, Finding

__all__ = ["Fixed", "fix_document", "write_back"]

Check = Callable[[Document], tuple[Finding, ...]]

MAX_ROUNDS = 20  # each fixes something; this bounds fixes that lead to further findings


@dataclass(frozen=True)
class Fixed:
    """A document after its fixes."""

    before: Document
    after: Document
    findings: tuple[Finding, ...]  # after the fixes
    applied: tuple[Finding, ...]
    problem: str = ""  # why the file on disk was not changed; "" if it was, or was not meant to be

    @property
    def path(self) -> str:
        """The file's path."""
        return self.before.source.path


def fix_document(document: Document, findings: tuple[Finding, ...], check: Check, *, unsafe: bool = False) -> Fixed:
    """The document with every safe fix applied that passes verification (with `unsafe`, every fix), and what is left."""
    state = _State(document, findings)
    applied: list[Finding] = []
    rejected: set[_Identity] = set()
    for _ in range(MAX_ROUNDS):
        chosen = _compatible(
            f for f in state.findings if f.fix is not None and (f.fix.safe or unsafe) and _identity(f) not in rejected
        )
        if not chosen:
            break
        after = _try(state, chosen, check)
        if after is None and len(chosen) > 1:
            for finding in chosen:
                after = _try(state, [finding], check)
                if after is not None:
                    chosen = [finding]
                    break
                rejected.add(_identity(finding))
        elif after is None:
            rejected.add(_identity(chosen[0]))
        if after is None:
            continue
        state = after
        applied += chosen
    return Fixed(document, state.document, state.findings, tuple(applied))


@dataclass(frozen=True)
class _State:
    """A document and its findings between two rounds."""

    document: Document
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class _Identity:
    """What identifies a finding across rounds, in which lines move."""

    code: str
    message: str


def _identity(finding: Finding) -> _Identity:
    return _Identity(finding.code, re.sub(r"\bline \d+", "line", finding.message))


def _compatible(findings: Iterable[Finding]) -> list[Finding]:
    """Findings whose edits do not touch each other; earlier findings take precedence."""
    reserved: list[Edit] = []
    chosen = []
    for finding in findings:
        assert finding.fix is not None
        edits = finding.fix.edits
        if edits and not any(_touch(edit, other) for edit in edits for other in reserved):
            reserved += edits
            chosen.append(finding)
    return chosen


def _touch(a: Edit, b: Edit) -> bool:
    return a.start <= b.end and b.start <= a.end


def _try(state: _State, chosen: list[Finding], check: Check) -> _State | None:
    """The document and its findings after these fixes; None if the result fails verification."""
    document = state.document
    edits = [edit for finding in chosen if finding.fix is not None for edit in finding.fix.edits]
    size = len(document.source.text)
    if any(not 0 <= edit.start <= edit.end <= size for edit in edits):
        return None
    data = apply_edits(document, edits)
    if data is None or data == document.data:
        return None
    changed = read_document(document.source.path, data, document.source.language)
    if changed.problem is not None or len(changed.notes) > len(document.notes):
        return None
    after = check(changed)
    if _grave(after) - _grave(state.findings):
        return None
    # Cured, not moved: fewer findings of each fixed rule, none of them new, and these among the missing.
    for code in {finding.code for finding in chosen}:
        mine = Counter(_identity(f) for f in chosen if f.code == code)
        old = Counter(_identity(f) for f in state.findings if f.code == code)
        new = Counter(_identity(f) for f in after if f.code == code)
        if new - old or any(new[text] >= old[text] for text in mine):
            return None
    return _State(changed, after)


def write_back(fixed: Fixed) -> str:
    """Replace the file atomically; returns why it could not be replaced, or ""."""
    path = Path(fixed.path)
    temporary = path.with_name(f".{path.name}.halfstep-{os.getpid()}")
    try:
        if path.is_symlink():
            return "it is a symbolic link; pass the file it points to"
        state = path.stat()
        if not os.access(path, os.W_OK) or not state.st_mode & 0o222:  # root may write, but the mode is deliberate
            return "it is read-only"
        if path.read_bytes() != fixed.before.data:
            return "it changed during the check"
        try:
            with temporary.open("xb") as file:
                temporary.chmod(stat.S_IMODE(state.st_mode))
                file.write(fixed.after.data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _grave(findings: Iterable[Finding]) -> Counter[str]:
    """How often each rule reports what no fix may cause: errors, warnings, and a text that can no longer be parsed."""
    return Counter(f.code for f in findings if f.severity != "advice" or f.code in {"HS004", "HS005"})
