"""Findings as text: location, source line with carets, what to write instead, and a summary at the end."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

from halfstep.check.files.source import Source
from halfstep.check.finding import SEVERITIES, Finding
from halfstep.check.session import Outcome
from halfstep.hardware.units import count_text

__all__ = ["as_text", "place_of", "summary"]

_COLOURS = {"error": "31", "warning": "33", "advice": "36"}
_WIDTH = 160  # of a source line; longer ones are cropped around the finding


def as_text(outcome: Outcome, *, colour: bool = False) -> str:
    """All findings and the summary."""
    parts = [_block(finding, result.source, colour=colour) for result in outcome.results for finding in result.findings]
    return "\n".join([*parts, summary(outcome)])


def summary(outcome: Outcome, *, done: bool = True) -> str:
    """How many files were checked, findings reported and fixes applied; with `done` false, how many would be."""
    findings = outcome.findings
    lines = []
    for fixed in outcome.fixed:
        change = f"{'fixed' if done else 'would fix'} {count_text(len(fixed.applied), 'finding')}"
        lines.append(f"{_clean(fixed.path)}: " + (f"not changed, {fixed.problem}" if fixed.problem else change))
    files = count_text(outcome.num_files, "file")
    left = " left" if outcome.fixed else ""
    if not findings:
        return "\n".join([*lines, f"{files} checked, no findings{left}."])
    kinds = Counter(finding.severity for finding in findings)
    split = ", ".join(
        count_text(kinds[kind], kind, "advice" if kind == "advice" else "") for kind in SEVERITIES if kinds[kind]
    )
    total = f"{count_text(len(findings), 'finding')}{left} in {count_text(len(outcome.results), 'file')}"
    return "\n".join([*lines, f"{files} checked, {total}: {split}.{_fix_hint(outcome)}"])


def _fix_hint(outcome: Outcome) -> str:
    """How many of the remaining findings can be fixed, and with which options."""
    unsafe = outcome.num_unsafe_fixes
    fixable = 0 if outcome.fixed else sum(finding.fix is not None for finding in outcome.findings) - unsafe
    if not unsafe:
        return f" {fixable} fixable with --fix (preview with --diff)." if fixable else ""
    if not fixable:
        return f" {unsafe} fixable with --fix --unsafe-fixes (review the changes with --diff)."
    return f" {fixable} fixable with --fix (preview with --diff), {unsafe} more with --unsafe-fixes."


def place_of(finding: Finding) -> str:
    """Path, cell, line and column, in the form that editors open."""
    cell = f"cell {finding.cell}:" if finding.cell is not None else ""
    return f"{_clean(finding.path)}:{cell}{finding.line}:{finding.column}"


def _block(finding: Finding, source: Source | None, *, colour: bool) -> str:
    kind = _paint(f"[{finding.severity}]", _COLOURS[finding.severity], colour=colour)
    code = _paint(finding.code, "1", colour=colour)
    lines = [f"{place_of(finding)}: {code} {kind} {_clean(finding.message)}"]
    lines += _excerpt(finding, source, colour=colour)
    if finding.instead:
        first, *rest = _clean(finding.instead, keep="\n").split("\n")
        lines += [f"   = instead: {first}", *(f"              {line}" for line in rest)]
    return "\n".join([*lines, ""])


def _excerpt(finding: Finding, source: Source | None, *, colour: bool) -> list[str]:
    """The line with carets under the finding; empty if the file could not be read."""
    text = source_line(finding, source)
    about_file = (finding.line, finding.column, finding.end_column) == (1, 1, None)
    if text is None or not text.strip() or about_file:
        return []
    start = min(finding.column - 1, len(text))
    end = len(text.rstrip())
    if finding.end_line == finding.line and finding.end_column is not None:
        end = min(finding.end_column - 1, len(text))
    elif finding.end_column is None:
        end = start + 1
    crop = max(0, start - _WIDTH // 2) if len(text) > _WIDTH else 0
    line = _clean(text[crop : crop + _WIDTH], keep="\t")
    blank = "".join("\t" if char == "\t" else " " for char in line[: start - crop])
    carets = "^" * max(1, min(end, crop + _WIDTH) - start)
    number = str(finding.line)
    return [
        f"{number:>4} | {line}",
        f"     | {blank}{_paint(carets, _COLOURS[finding.severity], colour=colour)}",
    ]


def source_line(finding: Finding, source: Source | None) -> str | None:
    """The text of a finding's line, or None."""
    if source is None:
        return None
    first = next((cell.first_line for cell in source.cells if cell.number == finding.cell), 1)
    lines = _lines(source.text)
    index = finding.line + first - 2
    return lines[index] if 0 <= index < len(lines) else None


@lru_cache(maxsize=4)
def _lines(text: str) -> list[str]:
    return text.split("\n")


def _clean(text: str, keep: str = "") -> str:
    """The text without control characters, which could move the terminal's cursor; file names and lines may have any."""
    return "".join(char if char.isprintable() or char in keep else "?" for char in text)


def _paint(text: str, code: str, *, colour: bool) -> str:
    return f"\033[{code}m{text}\033[0m" if colour else text
