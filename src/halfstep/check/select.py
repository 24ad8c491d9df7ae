"""Which findings to report: selected by code, prefix of codes, name or severity.

A selector is `HS104`, `HS1` (all rules over scripts), `clip-before-unscale` or `advice`. Ignored findings are removed
from the selected ones; if nothing is selected, everything is. Paths in `per-file-ignores` are patterns relative to the
pyproject.toml.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePath

from halfstep.check.finding import SEVERITIES, Finding
from halfstep.check.regex import regex
from halfstep.check.registry import all_rules
from halfstep.errors import SettingError, nearest

__all__ = ["Selection", "is_known", "matches", "nearest_rule", "parse_selectors", "path_matches"]

_CODE = regex(r"hs\d{0,3}", re.IGNORECASE)


@dataclass(frozen=True)
class Selection:
    """Which findings to report."""

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    preview: bool = False  # whether rules run that are not stable yet

    def wants(self, finding: Finding) -> bool:
        """Whether to report this finding."""
        chosen = not self.select or any(matches(selector, finding) for selector in self.select)
        return chosen and not any(matches(selector, finding) for selector in self.ignore)

    def without(self, selectors: Iterable[str]) -> Selection:
        """The same selection with more selectors ignored."""
        return Selection(self.select, (*self.ignore, *selectors), self.preview)


def matches(selector: str, finding: Finding) -> bool:
    """Whether a selector matches this finding."""
    if _CODE.fullmatch(selector):
        return finding.code.startswith(selector)
    return selector in {finding.name, finding.severity}


def parse_selectors(texts: Iterable[str], where: str) -> tuple[str, ...]:
    """Validated selectors from text, several separated by commas or spaces; `where` is for the error message."""
    selectors = []
    for text in texts:
        for word in text.replace(",", " ").split():
            selector = word.upper() if _CODE.fullmatch(word) else word.casefold()
            if not is_known(selector):
                close = nearest_rule(word)
                hint = f" Did you mean {close!r}?" if close else ""
                raise SettingError(f"{where}: no rule is called {word!r}.{hint} docs/rules.md lists all rules.")
            selectors.append(selector)
    return tuple(selectors)


def is_known(selector: str) -> bool:
    """Whether a selector matches any rule, or is a severity."""
    if selector in SEVERITIES:
        return True
    if _CODE.fullmatch(selector):
        return any(rule.code.startswith(selector) for rule in all_rules())
    return any(rule.name == selector for rule in all_rules())


def nearest_rule(word: str) -> str | None:
    """The code or name of a rule that a misspelt word most likely means; None if nothing is close."""
    return nearest(word, [text for rule in all_rules() for text in (rule.code, rule.name)])


def path_matches(pattern: str, path: PurePath, root: PurePath | None) -> bool:
    """Whether a path matches a pattern: by its name, by its path below `root`, or by a folder on that path."""
    name = path.as_posix()
    if root is not None and path.is_relative_to(root):
        name = path.relative_to(root).as_posix()
    pattern = pattern.removeprefix("./").rstrip("/")
    folders = [name, *(parent.as_posix() for parent in PurePath(name).parents)]
    return fnmatchcase(path.name, pattern) or any(fnmatchcase(folder, pattern) for folder in folders)
