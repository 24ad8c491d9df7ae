"""Comments that silence findings, and what is said about those that silence none.

    loss.backward()  # halfstep: ignore[HS104] clipped inside the optimizer
    # halfstep: ignore[HS104, HS12] a comment alone on its line speaks for the next line of code
    # halfstep: ignore-file[HS1] anywhere in the file, for all of it

The brackets hold selectors, as in `--ignore`; without brackets every finding of the line is meant. JSON takes `//`, `#`
and `/* */`, YAML takes `#`. A comment counts for the first and for the last line of a finding.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from halfstep.check.files.source import Source
from halfstep.check.finding import Finding
from halfstep.check.rules.files import UnknownSuppression, UnusedSuppression
from halfstep.check.select import Selection, is_known, matches
from halfstep.errors import nearest

__all__ = ["Suppression", "find_suppressions", "suppress"]

_WORDS = re.compile(r"halfstep:[ \t]*ignore(-file)?(?![\w-])[ \t]*(?:\[([^\]\n]{0,500})\])?", re.IGNORECASE)
_CONFIG_COMMENT = re.compile(r"(?:#|//|/\*).{0,200}?(?=halfstep:)", re.IGNORECASE)


@dataclass(frozen=True)
class Suppression:
    """One comment: where it stands, which lines it speaks for, and what it silences."""

    line: int
    column: int
    lines: frozenset[int] = field(default_factory=frozenset)  # empty: the whole file
    selectors: tuple[str, ...] = ()  # empty: everything

    def silences(self, finding: Finding, lines: tuple[int, int]) -> bool:
        """Whether it means this finding, which stands on these first and last lines of the text."""
        here = not self.lines or not self.lines.isdisjoint(lines)
        return here and (not self.selectors or any(matches(selector, finding) for selector in self.selectors))


def find_suppressions(source: Source) -> tuple[Suppression, ...]:
    """The suppression comments of a text, in order."""
    if "halfstep:" not in source.text.lower():
        return ()
    lines = source.text.split("\n")
    marker = "#" if source.language in {"python", "notebook"} else ("#", "//", "/*")
    found = []
    following = _next_code(lines, marker)
    for line, column, comment in _comments(source):
        words = _WORDS.search(comment)
        if words is None:
            continue
        on_file, inside = words.groups()
        selectors = tuple(_selector(word) for word in (inside or "").replace(",", " ").split())
        covers = {line}
        if lines[line - 1].lstrip().startswith(marker):
            covers.add(following[line - 1])
        found.append(Suppression(line, column, frozenset() if on_file else frozenset(covers), selectors))
    return tuple(found)


def _selector(word: str) -> str:
    return word.upper() if word[:2].lower() == "hs" and word[2:].isdigit() else word.casefold()


def _next_code(lines: list[str], marker: str | tuple[str, ...]) -> list[int]:
    """For each line, the number of the next one that is neither blank nor a comment; 0 where there is none."""
    following = [0] * len(lines)
    seen = 0
    for index in range(len(lines) - 1, -1, -1):
        following[index] = seen
        stripped = lines[index].strip()
        if stripped and not stripped.startswith(marker):
            seen = index + 1
    return following


def _comments(source: Source) -> Iterator[tuple[int, int, str]]:
    """Line, column and text of every comment; inside strings there are none where the language lets us know."""
    if source.language in {"python", "notebook"}:
        try:
            for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
                if token.type == tokenize.COMMENT:
                    yield token.start[0], token.start[1] + 1, token.string
        except (tokenize.TokenError, SyntaxError):
            return
        return
    for number, line in enumerate(source.text.split("\n"), 1):
        found = _CONFIG_COMMENT.search(line)
        if found:
            yield number, found.start() + 1, line[found.start() :]


def suppress(
    findings: Iterable[Finding], source: Source, selection: Selection, *, has_gpu: bool = False
) -> tuple[Finding, ...]:
    """The findings that are wanted and not silenced, and what is to be said about the comments."""
    wanted = [finding for finding in findings if selection.wants(finding)]
    comments = find_suppressions(source)
    if not comments:
        return tuple(wanted)
    kept = []
    used: set[Suppression] = set()
    first_lines = {cell.number: cell.first_line for cell in source.cells}
    for finding in wanted:
        offset = first_lines.get(finding.cell or 0, 1) - 1
        lines = (finding.line + offset, (finding.end_line or finding.line) + offset)
        silent = [comment for comment in comments if comment.silences(finding, lines)]
        used.update(silent)
        if not silent:
            kept.append(finding)
    said = _about(comments, used, source, selection, has_gpu=has_gpu)
    return (*kept, *(finding for finding in said if selection.wants(finding)))


def _about(
    comments: tuple[Suppression, ...], used: set[Suppression], source: Source, selection: Selection, *, has_gpu: bool
) -> Iterator[Finding]:
    for comment in comments:
        cell, line = source.place(comment.line)
        where = (source.path, line, comment.column, None, None, cell)
        strange = [word for word in comment.selectors if not is_known(word)]
        for word in strange:
            yield UnknownSuppression.finding(
                where, f"No rule is called {word!r}, so this comment does not silence it.{_guess(word)}"
            )
        if comment in used or strange or not _could_apply(comment, selection, has_gpu=has_gpu):
            continue
        what = ", ".join(comment.selectors) or "any rule"
        place = "this file" if not comment.lines else "this place"
        yield UnusedSuppression.finding(
            where, f"There is no finding of {what} at {place}.", instead="Remove the comment."
        )


def _could_apply(comment: Suppression, selection: Selection, *, has_gpu: bool) -> bool:
    """Whether what the comment silences was looked for at all in this run."""
    if selection.select or selection.ignore:
        return False  # some rules did not run; a comment for one of those is not unused
    return has_gpu or not any(word.startswith("HS3") for word in comment.selectors)


def _guess(word: str) -> str:
    from halfstep.check.registry import all_rules

    close = nearest(word, [text for rule in all_rules() for text in (rule.code, rule.name)])
    return f" Did you mean {close}?" if close else ""
