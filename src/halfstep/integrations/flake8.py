"""A plugin of flake8: the findings of `halfstep check` in the Python files that flake8 checks. No torch.

Installed with Halfstep; flake8 finds it by its entry point and reports the codes HS001 and up. The project's
`[tool.halfstep.check]` applies, with its excludes and its baseline, and so do comments of both kinds: `# halfstep: ignore[HS104]` and
`# noqa: HS104`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from halfstep import __version__
from halfstep.check.baseline import read_baseline, subtract
from halfstep.check.files.document import language_of
from halfstep.check.options import Options
from halfstep.check.project import find_project
from halfstep.check.runner import FileResult
from halfstep.check.session import check_stdin
from halfstep.check.walk import find_files
from halfstep.errors import HalfstepError

__all__ = ["Checker"]


class Checker:
    """Checks one file; flake8 makes one for each."""

    name = "halfstep"
    version = __version__

    # flake8 passes what the parameters are called; a plugin for files has a `tree`.
    def __init__(self, tree: ast.AST, lines: list[str], filename: str) -> None:
        self._text, self._filename = "".join(lines), filename

    def run(self) -> Iterator[tuple[int, int, str, type[Checker]]]:
        """The findings as flake8 wants them: line, column from 0, and the code with the message."""
        try:
            results = self._check()
        except HalfstepError as error:  # such as a baseline or a pyproject.toml that cannot be read
            yield 1, 0, f"HS006 halfstep check cannot run: {error}", Checker
            return
        for result in results:
            for finding in result.findings:
                instead = f" Instead: {finding.instead}" if finding.instead else ""
                text = " ".join(f"{finding.code} {finding.message}{instead}".split())
                yield finding.line, finding.column - 1, text, Checker

    def _check(self) -> tuple[FileResult, ...]:
        # Of standard input flake8 passes "stdin" or "-", and of a script a name without a suffix: all are Python.
        is_python = language_of(self._filename) == "python"
        if is_python and Path(self._filename).is_file() and not find_files([self._filename], force_exclude=True):
            return ()  # the project excludes it
        name = self._filename if is_python else f"{self._filename}.py"
        outcome = check_stdin(self._text.encode("utf-8", "surrogatepass"), name, Options())
        project = find_project(Path(name).absolute().parent)
        if project.baseline is None or project.root is None:
            return outcome.results
        return subtract(outcome.results, read_baseline(project.root / project.baseline))
