"""Comments that suppress findings, and the findings about comments that suppress nothing.

    loss.backward()  # halfstep: ignore[HS104] clipped inside the optimizer
    # halfstep: ignore[HS104, HS12] a comment on its own line applies to the next line of code
    # halfstep: ignore-file[HS1] anywhere in the file, applies to all of it

The brackets contain selectors, as in `--ignore`; without brackets, all findings of the line are suppressed. JSON comments
start with `//`, `#` or `/*`, YAML and TOML comments with `#`. A comment applies to findings that start or end on its line. On
the first or last line of a statement that is written over several lines, it applies to all of them, and inside one to the
findings around it, because formatters move comments.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from halfstep.check.files.problems import UnknownSuppression, UnusedSuppression
from halfstep.check.files.source import Source
from halfstep.check.finding import Finding
from halfstep.check.regex import regex
from halfstep.check.registry import find_rule
from halfstep.check.select import Selection, is_known, matches, nearest_rule

__all__ = ["Suppression", "find_suppressions", "suppress"]

_WORDS = regex(r"halfstep:[ \t]*ignore(-file)?(?![\w-])[ \t]*(?:\[([^\]\n]{0,500})\])?", re.IGNORECASE)
_STRINGS = r"""'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*\""""
# Strings are matched first, so that a comment sign inside one does not count.
_CONFIG_COMMENTS = {
    "json": regex(rf"(?P<comment>//[^\n]*|\#[^\n]*|/\*[^\n]*)|{_STRINGS}"),
    "yaml": regex(rf"(?:(?<=\s)|^)(?P<comment>\#[^\n]*)|(?<=[\s\[{{,:])(?:{_STRINGS})", re.MULTILINE),
    "toml": regex(rf"(?P<comment>\#[^\n]*)|\"\"\"[\s\S]*?\"\"\"|'''[\s\S]*?'''|{_STRINGS}"),
}


@dataclass(frozen=True)
class Suppression:
    """One comment: its position, the lines it applies to, and what it suppresses."""

    line: int
    column: int
    lines: frozenset[int] = field(default_factory=frozenset)  # empty: the entire file
    selectors: tuple[str, ...] = ()  # empty: everything
    statement: _Statement | None = None  # of several lines, which the comment is inside of

    def suppresses(self, finding: Finding, first_line: int, last_line: int) -> bool:
        """Whether it applies to this finding, which covers these lines of the text."""
        here = not self.lines or not self.lines.isdisjoint((first_line, last_line))
        if not here and self.statement is not None:
            inside = self.statement.first <= first_line and last_line <= self.statement.last
            here = inside and first_line <= self.line <= last_line
        return here and (not self.selectors or any(matches(selector, finding) for selector in self.selectors))


@dataclass(frozen=True)
class _Statement:
    """The first and last line of a statement, without the body of a compound one."""

    first: int
    last: int


def find_suppressions(source: Source) -> tuple[Suppression, ...]:
    """The suppression comments of a text, in order."""
    # Bytes are converted to lower case five times as fast as text.
    if b"halfstep:" not in source.text.encode("utf-8", "surrogatepass").lower():
        return ()
    lines = source.text.split("\n")
    marker = "#" if source.language in {"python", "notebook"} else ("#", "//", "/*")
    suppressions = []
    following = _next_code(lines, marker)
    comments, statements = _read_comments(source)
    by_line = {line: s for s in statements for line in range(s.first, s.last + 1)}
    for comment in comments:
        words = _WORDS.search(comment.text)
        if words is None:
            continue
        on_file, inside = words.groups()
        line = comment.line
        selectors = tuple(_selector(word) for word in (inside or "").replace(",", " ").split())
        covers = {line}
        if lines[line - 1].lstrip().startswith(marker) and _same_cell(source, line, following[line - 1]):
            covers.add(following[line - 1])
        for covered in tuple(covers):
            statement = by_line.get(covered)
            if statement is not None and covered in {statement.first, statement.last}:
                covers.update(range(statement.first, statement.last + 1))
        area = frozenset() if on_file else frozenset(covers)
        suppressions.append(Suppression(line, comment.column, area, selectors, by_line.get(line)))
    return tuple(suppressions)


def _same_cell(source: Source, line: int, other: int) -> bool:
    """Whether two lines are in the same cell; a comment at the end of a cell does not apply to the next one."""
    return source.cell_line(line).cell == source.cell_line(other).cell


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


def _read_comments(source: Source) -> tuple[list[_Comment], list[_Statement]]:
    """Every comment that is not inside a string, and every statement over several lines."""
    comments: list[_Comment] = []
    statements: list[_Statement] = []
    if source.language not in {"python", "notebook"}:
        starts = [0, *(match.end() for match in re.finditer("\n", source.text))]
        for match in _CONFIG_COMMENTS[source.language].finditer(source.text):
            if match["comment"] is not None:
                number = bisect_right(starts, match.start())
                comments.append(_Comment(number, match.start() - starts[number - 1] + 1, match["comment"]))
        return comments, statements
    import io
    import tokenize  # 8 ms to import, and few files have such a comment

    first = 0
    try:
        for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
            if token.type == tokenize.COMMENT:
                comments.append(_Comment(token.start[0], token.start[1] + 1, token.string))
            elif token.type == tokenize.NEWLINE:
                if first and token.start[0] > first:
                    statements.append(_Statement(first, token.start[0]))
                first = 0
            elif token.type not in {tokenize.NL, tokenize.INDENT, tokenize.DEDENT} and not first:
                first = token.start[0]
    except (tokenize.TokenError, SyntaxError):
        pass  # comments up to there count
    return comments, statements


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
    if not selection.preview and any(rule.preview for word in comment.selectors if (rule := find_rule(word))):
        return False
    return has_gpu or not any(word.startswith("HS3") for word in comment.selectors)
