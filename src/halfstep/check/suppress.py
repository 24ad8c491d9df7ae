"""Comments that suppress findings, and the findings about comments that suppress nothing.

    loss.backward()  # halfstep: ignore[HS104] clipped inside the optimizer
    # halfstep: ignore[HS104, HS12] a comment on its own line applies to the next line of code
    # halfstep: ignore-file[HS1] anywhere in the file, applies to all of it

The brackets contain selectors, as in `--ignore`; without brackets, all findings of the line are suppressed. JSON comments
start with `//`, `#` or `/*`, YAML comments with `#`. A comment applies to the first and the last line of a finding.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from halfstep.check.files.problems import UnknownSuppression, UnusedSuppression
from halfstep.check.files.source import Source
from halfstep.check.finding import Finding
from halfstep.check.select import Selection, is_known, matches, nearest_rule

__all__ = ["Suppression", "find_suppressions", "suppress"]

_WORDS = re.compile(r"halfstep:[ \t]*ignore(-file)?(?![\w-])[ \t]*(?:\[([^\]\n]{0,500})\])?", re.IGNORECASE)
_CONFIG_COMMENT = re.compile(r"(?:#|//|/\*).{0,200}?(?=halfstep:)", re.IGNORECASE)


@dataclass(frozen=True)
class Suppression:
    """One comment: its position, the lines it applies to, and what it suppresses."""

    line: int
    column: int
    lines: frozenset[int] = field(default_factory=frozenset)  # empty: the entire file
    selectors: tuple[str, ...] = ()  # empty: everything

    def suppresses(self, finding: Finding, first_line: int, last_line: int) -> bool:
        """Whether it applies to this finding, which covers these lines of the text."""
        here = not self.lines or not self.lines.isdisjoint((first_line, last_line))
        return here and (not self.selectors or any(matches(selector, finding) for selector in self.selectors))


def find_suppressions(source: Source) -> tuple[Suppression, ...]:
    """The suppression comments of a text, in order."""
    if "halfstep:" not in source.text.lower():
        return ()
    lines = source.text.split("\n")
    marker = "#" if source.language in {"python", "notebook"} else ("#", "//", "/*")
    suppressions = []
    following = _next_code(lines, marker)
    for comment in _comments(source):
        words = _WORDS.search(comment.text)
        if words is None:
            continue
        on_file, inside = words.groups()
        line = comment.line
        selectors = tuple(_selector(word) for word in (inside or "").replace(",", " ").split())
        covers = {line}
        if lines[line - 1].lstrip().startswith(marker):
            covers.add(following[line - 1])
        suppressions.append(Suppression(line, comment.column, frozenset() if on_file else frozenset(covers), selectors))
    return tuple(suppressions)


def _selector(word: str) -> str:
    return word.upper() if word[:2].lower() == "hs" and word[2:].isdigit() else word.casefold()


def _next_code(lines: list[str], marker: str | tuple[str, ...]) -> list[int]:
    """For each line, the number of the next one that is neither blank nor a comment; 0 if there is none."""
    following = [0] * len(lines)
    next_line = 0
    for index in range(len(lines) - 1, -1, -1):
        following[index] = next_line
        stripped = lines[index].strip()
        if stripped and not stripped.startswith(marker):
            next_line = index + 1
    return following


@dataclass(frozen=True)
class _Comment:
    """A comment and its position in the text."""

    line: int
    column: int
    text: str


def _comments(source: Source) -> Iterator[_Comment]:
    """Every comment; in Python, comment characters inside strings do not count."""
    if source.language in {"python", "notebook"}:
        try:
            for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
                if token.type == tokenize.COMMENT:
                    yield _Comment(token.start[0], token.start[1] + 1, token.string)
        except (tokenize.TokenError, SyntaxError):
            return
        return
    for number, line in enumerate(source.text.split("\n"), 1):
        match = _CONFIG_COMMENT.search(line)
        if match:
            yield _Comment(number, match.start() + 1, line[match.start() :])


def suppress(
    findings: Iterable[Finding], source: Source, selection: Selection, *, has_gpu: bool = False
) -> tuple[Finding, ...]:
    """The selected findings that are not suppressed, and findings about the comments."""
    wanted = [finding for finding in findings if selection.wants(finding)]
    comments = find_suppressions(source)
    if not comments:
        return tuple(wanted)
    reported = []
    used: set[Suppression] = set()
    first_lines = {cell.number: cell.first_line for cell in source.cells}
    for finding in wanted:
        offset = first_lines.get(finding.cell or 0, 1) - 1
        first_line, last_line = finding.line + offset, (finding.end_line or finding.line) + offset
        matching = [comment for comment in comments if comment.suppresses(finding, first_line, last_line)]
        used.update(matching)
        if not matching:
            reported.append(finding)
    about_comments = _check_comments(comments, used, source, selection, has_gpu=has_gpu)
    return (*reported, *(finding for finding in about_comments if selection.wants(finding)))


def _check_comments(
    comments: tuple[Suppression, ...], used: set[Suppression], source: Source, selection: Selection, *, has_gpu: bool
) -> Iterator[Finding]:
    for comment in comments:
        where = source.place(comment.line, comment.column)
        unknown = [word for word in comment.selectors if not is_known(word)]
        for word in unknown:
            close = nearest_rule(word)
            hint = f" Did you mean {close}?" if close else ""
            yield UnknownSuppression.finding(
                where, f"No rule is called {word!r}; the comment does not suppress it.{hint}"
            )
        if comment in used or unknown or not _could_apply(comment, selection, has_gpu=has_gpu):
            continue
        rules = ", ".join(comment.selectors) or "any rule"
        scope = "in this file" if not comment.lines else "on this line"
        yield UnusedSuppression.finding(
            where, f"There is no finding of {rules} {scope}.", instead="Remove the comment."
        )


def _could_apply(comment: Suppression, selection: Selection, *, has_gpu: bool) -> bool:
    """Whether the rules that the comment names were run at all."""
    if selection.select or selection.ignore:
        return False  # some rules did not run; a comment for one of those is not unused
    return has_gpu or not any(word.startswith("HS3") for word in comment.selectors)
