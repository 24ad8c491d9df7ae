"""Which findings are wanted: by code, prefix of codes, name or severity.

A selector is `HS104`, `HS1` (all scripts), `clip-before-unscale` or `advice`. What is ignored is left out of what is
selected; with nothing selected, everything is. Paths in `per-file-ignores` are patterns relative to the pyproject.toml.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePath

from halfstep.check.finding import SEVERITIES, Finding
from halfstep.errors import SettingError, nearest

__all__ = ["Selection", "matches", "parse_selectors", "path_matches"]

_CODE = re.compile(r"hs\d{0,3}", re.IGNORECASE)


@dataclass(frozen=True)
class Selection:
    """What to keep of the findings."""

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()

    def wants(self, finding: Finding) -> bool:
        """Whether this finding is to be shown."""
        chosen = not self.select or any(matches(selector, finding) for selector in self.select)
        return chosen and not any(matches(selector, finding) for selector in self.ignore)

    def without(self, selectors: Iterable[str]) -> Selection:
        """The same with more ignored."""
        return Selection(self.select, (*self.ignore, *selectors))


def matches(selector: str, finding: Finding) -> bool:
    """Whether a selector means this finding."""
    if _CODE.fullmatch(selector):
        return finding.code.startswith(selector)
    return selector in {finding.name, finding.severity}


def parse_selectors(texts: Iterable[str], where: str) -> tuple[str, ...]:
    """Selectors as written (several may share one text, with commas), each one known; `where` is for the error."""
    found = []
    for text in texts:
        for word in text.replace(",", " ").split():
            selector = word.upper() if _CODE.fullmatch(word) else word.casefold()
            if not is_known(selector):
                raise SettingError(f"{where}: no rule is called {word!r}.{_guess(word)} docs/rules.md lists them all.")
            found.append(selector)
    return tuple(found)


def is_known(selector: str) -> bool:
    """Whether a selector means any rule, or a severity."""
    from halfstep.check.registry import all_rules  # every rule is loaded only where someone names one

    if selector in SEVERITIES:
        return True
    if _CODE.fullmatch(selector):
        return any(rule.code.startswith(selector) for rule in all_rules())
    return any(rule.name == selector for rule in all_rules())


def _guess(word: str) -> str:
    from halfstep.check.registry import all_rules

    close = nearest(word, [text for rule in all_rules() for text in (rule.code, rule.name)])
    return f" Did you mean {close!r}?" if close else ""


def path_matches(pattern: str, path: PurePath, root: PurePath | None) -> bool:
    """Whether a path fits a pattern: by its name, by its path below `root`, or by a folder on that path."""
    name = path.as_posix()
    if root is not None and path.is_relative_to(root):
        name = path.relative_to(root).as_posix()
    pattern = pattern.removeprefix("./").rstrip("/")
    folders = [name, *(parent.as_posix() for parent in PurePath(name).parents)]
    return fnmatchcase(path.name, pattern) or any(fnmatchcase(folder, pattern) for folder in folders)
