"""Which paths git ignores, from .gitignore files alone.

Patterns mean what gitignore(5) describes: the last matching line of a file decides, `!` includes again, a file in a deeper
folder takes precedence, and nothing inside an ignored folder can be included again, because the folder is not entered.
Read are the .gitignore files from the root of the repository down, and .git/info/exclude. A user's global list is not,
so that a check gives the same result on every machine. Files that are tracked although a pattern matches them are
skipped too, as other linters do.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from halfstep.check.regex import regex

__all__ = ["Ignores", "ignores_of", "parse_patterns"]

_MAX_BYTES = 2**20
_STARS = regex(r"\*{2,}(?:/|$)")
_CLASS = regex(r"\[([!^]?)(\]?(?:\[:\w+:\]|\\.|[^\]\\])*)\]")
_POSIX = {
    "alnum": "a-zA-Z0-9", "alpha": "a-zA-Z", "blank": " \\t", "cntrl": "\\x00-\\x1f\\x7f", "digit": "0-9",
    "graph": "\\x21-\\x7e", "lower": "a-z", "print": "\\x20-\\x7e", "punct": "!-/:-@\\[-`{-~", "space": "\\s",
    "upper": "A-Z", "xdigit": "0-9a-fA-F",
}  # fmt: skip


@dataclass(frozen=True)
class Pattern:
    """One line of a .gitignore: what it matches below its folder, and whether it includes again."""

    regex: re.Pattern[str]
    negated: bool
    folders_only: bool


@dataclass(frozen=True)
class _File:
    """The patterns of one .gitignore, and its folder."""

    folder: str
    patterns: tuple[Pattern, ...]
    any: re.Pattern[str]  # matches if one of the patterns may

    def verdict(self, path: str, *, is_folder: bool) -> bool | None:
        """Whether the path, which is absolute, is ignored; None if no pattern matches."""
        relative = path[len(self.folder) + 1 :] if self.folder != "/" else path[1:]
        if not self.any.fullmatch(relative):
            return None
        for pattern in reversed(self.patterns):
            if (is_folder or not pattern.folders_only) and pattern.regex.fullmatch(relative):
                return not pattern.negated
        return None


@dataclass(frozen=True)
class Ignores:
    """The patterns that apply in one folder, those of deeper folders last."""

    files: tuple[_File, ...] = ()

    def ignores(self, path: str, *, is_folder: bool) -> bool:
        """Whether git ignores an entry of this folder; `path` is absolute."""
        for file in reversed(self.files):
            verdict = file.verdict(path, is_folder=is_folder)
            if verdict is not None:
                return verdict
        return False

    def enter(self, folder: str, names: frozenset[str]) -> Ignores:
        """The patterns that apply in `folder` (absolute), which has entries of these names."""
        files = () if ".git" in names else self.files  # a repository inside another one has its own patterns only
        if ".git" in names:
            files = _with(files, folder, Path(folder, ".git", "info", "exclude"))
        if ".gitignore" in names:
            files = _with(files, folder, Path(folder, ".gitignore"))
        return self if files is self.files else Ignores(files)


def ignores_of(folder: Path) -> Ignores:
    """The patterns that apply in a folder because of the folders above it, up to the root of the repository."""
    above: list[Path] = []
    for parent in folder.parents:
        above.append(parent)
        if (parent / ".git").exists():
            break
    else:
        return Ignores()  # not in a repository: only the folder's own files count
    if (folder / ".git").exists():
        return Ignores()
    ignores = Ignores()
    for parent in reversed(above):
        names = frozenset(name for name in (".git", ".gitignore") if (parent / name).exists())
        ignores = ignores.enter(str(parent), names)
    return ignores


def _with(files: tuple[_File, ...], folder: str, path: Path) -> tuple[_File, ...]:
    try:
        if path.is_symlink():  # git does not follow such a link either
            return files
        with path.open("rb") as file:
            text = os.fsdecode(file.read(_MAX_BYTES))
    except OSError:
        return files
    patterns = parse_patterns(text)
    if not patterns:
        return files
    any_of = re.compile("|".join(f"(?:{pattern.regex.pattern})" for pattern in patterns), re.DOTALL)
    return (*files, _File(folder, patterns, any_of))


def parse_patterns(text: str) -> tuple[Pattern, ...]:
    """The patterns of a .gitignore, in order."""
    patterns = []
    for line in text.removeprefix("\ufeff").removeprefix(os.fsdecode(b"\xef\xbb\xbf")).split("\n"):
        pattern = _parse(line.removesuffix("\r"))
        if pattern is not None:
            patterns.append(pattern)
    return tuple(patterns)


def _parse(line: str) -> Pattern | None:
    if line.startswith("#"):
        return None
    line = re.sub(r"(?<!\\)((?:\\\\)*) +$", r"\1", line)  # trailing blanks count only after a backslash
    negated = line.startswith("!")
    line = line[negated:]
    folders_only = line.endswith("/")
    line = line.removesuffix("/")
    if not line:
        return None
    anchored = "/" in line
    line = line.removeprefix("/")
    expression = _translate(line)
    if expression is None:
        return None
    try:
        return Pattern(
            re.compile(expression if anchored else f"(?:.*/)?{expression}", re.DOTALL), negated, folders_only
        )
    except re.error:
        return None


def _translate(glob: str) -> str | None:
    """A glob as a regular expression; None for one that never matches."""
    out = []
    index = 0
    # git compares the text before the first special character separately, so `**` right after it counts as leading.
    special = re.search(r"[*?\[\\]", glob)
    first = special.start() if special else len(glob)
    while index < len(glob):
        after_slash = index > 0 and glob[index - 1] == "/"
        stars = _STARS.match(glob, index) if after_slash or index == first else None
        if stars and stars.group().endswith("/"):
            out.append("(?:.*/)?")
            index = stars.end()
        elif stars:
            out.append(".+" if after_slash else ".*")
            index = stars.end()
        elif glob[index] == "*":
            while glob.startswith("*", index):
                index += 1
            out.append("[^/]*")
        elif glob[index] == "?":
            out.append("[^/]")
            index += 1
        elif glob[index] == "[":
            match = _CLASS.match(glob, index)
            if match is None:
                return None  # as in git, an unclosed bracket matches nothing
            out.append(_translate_class(match))
            index = match.end()
        else:
            if glob[index] == "\\":
                index += 1
                if index == len(glob):
                    return None
            out.append(re.escape(glob[index]))
            index += 1
    return "".join(out)


def _translate_class(match: re.Match[str]) -> str:
    negated, inside = match.groups()

    def part(piece: re.Match[str]) -> str:
        if piece[1]:
            return _POSIX.get(piece[1], "")
        char = piece[2] or piece[0]
        return char if char == "-" and not piece[2] else re.escape(char)

    body = re.sub(r"\[:(\w+):\]|\\(.)|.", part, inside, flags=re.DOTALL)
    return f"(?!/)[{'^' if negated else ''}{body}]"
