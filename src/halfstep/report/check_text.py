"""Findings as text: location, source line with carets, what to write instead, and a summary at the end."""

from __future__ import annotations

from collections import Counter

from halfstep.check.files.source import Source
from halfstep.check.finding import SEVERITIES, Finding
from halfstep.check.session import Outcome
from halfstep.events import fold, fold_lines
from halfstep.hardware.units import count_text
from halfstep.report.theme import BAD, CAUTION, STRONG, paint

__all__ = ["as_concise", "as_text", "place_of", "summary"]

_STYLES = {"error": BAD, "warning": CAUTION, "advice": STRONG}
_NO_WIDTH = "\u200d\ufe0e\ufe0f"  # joiner and variation selectors of emoji
_WIDTH = 160  # of a source line outside a terminal; longer ones are cropped around the finding
_GUTTER = 7  # columns before a source line: its number and a bar
_INSTEAD = "   = instead: "


def as_text(outcome: Outcome, *, colour: bool = False, width: int | None = None) -> str:
    """All findings and the summary, for a terminal of `width` columns; None folds nothing."""
    parts = [
        _block(finding, result.source, width, colour=colour)
        for result in outcome.results
        for finding in result.findings
    ]
    return "\n".join([*parts, fold_lines(summary(outcome), width)])


def as_concise(outcome: Outcome) -> str:
    """One line for each finding, and the summary."""
    lines = [f"{place_of(f)}: {f.code} [{f.severity}] {_clean(f.message)}" for f in outcome.findings]
    return "\n".join([*lines, summary(outcome)])


def summary(outcome: Outcome, *, done: bool = True) -> str:
    """How many files were checked, findings reported and fixes applied; with `done` false, how many would be."""
    findings = outcome.findings
    lines = []
    for fixed in outcome.fixed:
        change = f"{'fixed' if done else 'would fix'} {count_text(len(fixed.applied), 'finding')}"
        lines.append(f"{_clean(fixed.path)}: " + (f"not changed, {fixed.problem}" if fixed.problem else change))
    files = count_text(outcome.num_files, "file")
    left = " left" if outcome.fixed else ""
    known = f" ({outcome.num_known} in the baseline)" if outcome.num_known else ""
    if not outcome.num_files and not lines:
        return "0 files checked: no script, notebook or configuration was found there."
    if not findings:
        return "\n".join([*lines, f"{files} checked, no findings{left}{known}."])
    kinds = Counter(finding.severity for finding in findings)
    split = ", ".join(
        count_text(kinds[kind], kind, "advice" if kind == "advice" else "") for kind in SEVERITIES if kinds[kind]
    )
    total = f"{count_text(len(findings), 'finding')}{left} in {count_text(len(outcome.results), 'file')}{known}"
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


def _block(finding: Finding, source: Source | None, width: int | None, *, colour: bool) -> str:
    kind = paint(f"[{finding.severity}]", _STYLES[finding.severity], colour=colour)
    code = paint(finding.code, STRONG, colour=colour)
    place = place_of(finding)
    plain = f"{place}: {finding.code} [{finding.severity}] "  # never folded: editors open it, and it has no colours yet
    folded = fold(_clean(finding.message), width, 4, plain)
    lines = [f"{place}: {code} {kind} " + folded.removeprefix(plain)]
    lines += _excerpt(finding, source, _WIDTH if width is None else width - _GUTTER, colour=colour)
    if finding.instead:
        first, *rest = _clean(finding.instead, keep="\n").split("\n")
        indent = len(_INSTEAD)
        # What has several lines is code, and code that is folded cannot be copied.
        lines += [fold(first, None if rest else width, indent, _INSTEAD), *(" " * indent + line for line in rest)]
    return "\n".join([*lines, ""])


def _excerpt(finding: Finding, source: Source | None, columns: int, *, colour: bool) -> list[str]:
    """The line with carets under the finding, cropped to `columns`; empty if the file could not be read."""
    text = source.line_of(finding.cell, finding.line) if source is not None else None
    about_file = (finding.line, finding.column, finding.end_column) == (1, 1, None)
    if text is None or not text.strip() or about_file:
        return []
    start = min(finding.column - 1, len(text))
    end = len(text.rstrip())
    if finding.end_line == finding.line and finding.end_column is not None:
        end = min(finding.end_column - 1, len(text))
    elif finding.end_column is None:
        end = start + 1
    crop = 0
    if len(text) > columns or _width(_expand(text)) > columns:
        crop = max(0, start - columns // 2)
        while _width(_expand(text[crop:start])) > columns // 2:  # tabs and East Asian characters are wider
            crop += 1
    stop = min(len(text), crop + columns)
    while stop > crop + 1 and _width(_expand(text[crop:stop])) > columns:
        stop -= 1
    before, marked = text[crop:start], text[start : max(start, min(end, stop))]
    line = _expand(text[crop:stop])
    if crop and line[:3].isascii():
        line = "..." + line[3:]
    if stop < len(text.rstrip()):
        line = line[:-3] + "..."
    carets = "^" * max(1, _width(_expand(before + marked)) - _width(_expand(before)))
    number = str(finding.line)
    return [
        f"{number:>4} | {line}",
        f"     | {' ' * _width(_expand(before))}{paint(carets, _STYLES[finding.severity], colour=colour)}",
    ]


def _expand(text: str) -> str:
    """The text as printed: tabs as blanks up to the next multiple of 4 columns, and no control characters."""
    if text.isprintable():  # most lines; a tab is not
        return text
    parts: list[str] = []
    width = 0
    for char in text:
        shown = " " * (4 - width % 4) if char == "\t" else _clean(char)
        parts.append(shown)
        width += _width(shown)
    return "".join(parts)


def _width(text: str) -> int:
    """The number of columns of a terminal: East Asian characters and emoji have two, combining marks none."""
    if text.isascii():
        return len(text)
    from unicodedata import combining, east_asian_width

    wide = sum(east_asian_width(char) in {"W", "F"} for char in text)
    return len(text) + wide - sum(combining(char) != 0 or char in _NO_WIDTH for char in text)


def _clean(text: str, keep: str = "") -> str:
    """The text without control characters, which could move the terminal's cursor; file names and lines may have any."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in keep else "?" for char in text)
