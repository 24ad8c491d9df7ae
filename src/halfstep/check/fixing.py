"""Fixes applied: each one safe by itself, and looked at again after it was made.

A fix is a few edits of the text. Those that do not overlap are made together, the file is checked again, and that goes
on until nothing more can be fixed. Every round has to prove itself on the changed file: it is read anew from its bytes,
it parses, no rule reports more errors than before, and the findings that were fixed are fewer. A round that fails is
made again one fix at a time, and the fixes that fail alone are left out. What is not edited stays as it is, byte for byte.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from halfstep.check.files.document import Document, apply_edits, read_document
from halfstep.check.finding import Edit, Finding

__all__ = ["Fixed", "fix_document", "write_back"]

Check = Callable[[Document], tuple[Finding, ...]]

MAX_ROUNDS = 20  # each fixes something, so this bounds a file with fixes that uncover one another


@dataclass(frozen=True)
class Fixed:
    """A document after its fixes."""

    before: Document
    after: Document
    findings: tuple[Finding, ...]  # what is left
    applied: tuple[Finding, ...]
    problem: str = ""  # why the file on disk was not changed

    @property
    def path(self) -> str:
        """The file's path."""
        return self.before.source.path


def fix_document(document: Document, findings: tuple[Finding, ...], check: Check) -> Fixed:
    """The document with every fix made that holds up, and what is left to find."""
    now, left = document, findings
    applied: list[Finding] = []
    refused: set[tuple[str, str]] = set()
    for _ in range(MAX_ROUNDS):
        chosen = _compatible(f for f in left if f.fix is not None and _mark(f) not in refused)
        if not chosen:
            break
        step = _try(now, left, chosen, check)
        if step is None and len(chosen) > 1:
            for finding in chosen:
                step = _try(now, left, [finding], check)
                if step is not None:
                    chosen = [finding]
                    break
                refused.add(_mark(finding))
        elif step is None:
            refused.add(_mark(chosen[0]))
        if step is None:
            continue
        now, left = step
        applied += chosen
    return Fixed(document, now, left, tuple(applied))


def _mark(finding: Finding) -> tuple[str, str]:
    """A finding told apart from others of its code across rounds, in which lines move."""
    return finding.code, finding.message


def _compatible(findings: Iterable[Finding]) -> list[Finding]:
    """Findings whose edits do not touch one another, the first ones first."""
    taken: list[Edit] = []
    chosen = []
    for finding in findings:
        assert finding.fix is not None
        edits = finding.fix.edits
        if edits and not any(_touch(edit, other) for edit in edits for other in taken):
            taken += edits
            chosen.append(finding)
    return chosen


def _touch(a: Edit, b: Edit) -> bool:
    return a.start <= b.end and b.start <= a.end


def _try(
    document: Document, findings: tuple[Finding, ...], chosen: list[Finding], check: Check
) -> tuple[Document, tuple[Finding, ...]] | None:
    """The document and its findings after these fixes; None if the result does not hold up."""
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
    errors_before = Counter(f.code for f in findings if _is_grave(f))
    errors_after = Counter(f.code for f in after if _is_grave(f))
    if errors_after - errors_before:
        return None
    codes_before, codes_after = Counter(f.code for f in findings), Counter(f.code for f in after)
    if any(codes_after[code] >= codes_before[code] for code in {f.code for f in chosen}):
        return None
    return changed, after


def write_back(fixed: Fixed) -> str:
    """Put a fixed file in its place at once, whole or not at all; what stood in the way, or nothing."""
    path = Path(fixed.path)
    spare = path.with_name(f".{path.name}.halfstep-{os.getpid()}")
    try:
        if path.is_symlink():
            return "it is a link; name the file it points to"
        state = path.stat()
        if not os.access(path, os.W_OK) or not state.st_mode & 0o222:  # root may write, but somebody meant it
            return "it is read-only"
        if path.read_bytes() != fixed.before.data:
            return "it changed while it was being checked"
        try:
            with spare.open("xb") as file:
                spare.chmod(stat.S_IMODE(state.st_mode))
                file.write(fixed.after.data)
                file.flush()
                os.fsync(file.fileno())
            spare.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                spare.unlink()
            raise
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _is_grave(finding: Finding) -> bool:
    """Whether no fix may bring this finding about: an error, or a text that can no longer be read."""
    return finding.severity == "error" or finding.code in {"HS004", "HS005"}
