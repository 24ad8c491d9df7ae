"""Findings for a person: the place, the line with a caret, what to write instead, and a sum at the end."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

from halfstep.check.files.source import Source
from halfstep.check.finding import SEVERITIES, Finding
from halfstep.check.session import Outcome

__all__ = ["as_text", "place_of", "summary"]

_COLOURS = {"error": "31", "warning": "33", "advice": "36"}
_WIDTH = 160  # of a source line; longer ones are cut around the finding


def as_text(outcome: Outcome, *, colour: bool = False) -> str:
    """All findings and the sum of them."""
    parts = [_block(finding, result.source, colour=colour) for result in outcome.results for finding in result.findings]
    return "\n".join([*parts, summary(outcome)])


def summary(outcome: Outcome, *, done: bool = True) -> str:
    """A few lines: how much was looked at, found and mended; with `done` false, what would be mended."""
    findings = outcome.findings
    lines = []
    for fixed in outcome.fixed:
        what = f"{'fixed' if done else 'would fix'} {_count(len(fixed.applied), 'finding')}"
        lines.append(f"{_clean(fixed.path)}: " + (f"not changed, {fixed.problem}" if fixed.problem else what))
    looked = _count(outcome.num_files, "file")
    if not findings:
        return "\n".join([*lines, f"{looked} checked, nothing {'left' if outcome.fixed else 'found'}."])
    kinds = Counter(finding.severity for finding in findings)
    words = {"error": "error", "warning": "warning", "advice": "advice"}
    split = ", ".join(
        f"{kinds[kind]} advice" if kind == "advice" else _count(kinds[kind], words[kind])
        for kind in SEVERITIES
        if kinds[kind]
    )
    left = " left" if outcome.fixed else ""
    found = f"{looked} checked, {_count(len(findings), 'finding')}{left} in {len(outcome.results)}: {split}."
    fixable = sum(finding.fix is not None for finding in findings)
    if fixable and not outcome.fixed:
        found += f" {fixable} can be mended with --fix; --diff shows how."
    return "\n".join([*lines, found])


def place_of(finding: Finding) -> str:
    """Path, cell, line and column, as editors take them."""
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
    """The line with carets under what is meant; nothing where the file could not be read."""
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
    cut = max(0, start - _WIDTH // 2) if len(text) > _WIDTH else 0
    shown = _clean(text[cut : cut + _WIDTH], keep="\t")
    blank = "".join("\t" if char == "\t" else " " for char in shown[: start - cut])
    carets = "^" * max(1, min(end, cut + _WIDTH) - start)
    number = str(finding.line)
    return [
        f"{number:>4} | {shown}",
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
    """The text without what could move a terminal's cursor: a file's name or line may hold anything."""
    return "".join(char if char.isprintable() or char in keep else "?" for char in text)


def _paint(text: str, code: str, *, colour: bool) -> str:
    return f"\033[{code}m{text}\033[0m" if colour else text


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"
