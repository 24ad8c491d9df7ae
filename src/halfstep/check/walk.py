"""Which files are checked.

A file that the user names is always checked. In a folder, files are selected by their suffix. Hidden folders,
environments, caches and build output are skipped, and so is anything that git ignores or that matches `exclude`. Links to
folders are not followed, and broken links are skipped.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from halfstep.check.files.document import language_of
from halfstep.check.files.source import Language
from halfstep.check.project import Project, find_project
from halfstep.check.select import path_matches
from halfstep.errors import SettingError

if TYPE_CHECKING:
    from halfstep.check.gitignore import Ignores  # a named file needs none of it

__all__ = ["Target", "find_files"]

_SKIPPED = frozenset(
    {"__pycache__", "node_modules", "build", "dist", "venv", "env", "site-packages", "__pypackages__", "_build"}
)
# Files of packagers and tools: no training configuration is in them, and a project has many.
_SKIPPED_FILES = frozenset({
    "pyproject.toml", "Cargo.toml", "package.json", "package-lock.json", "tsconfig.json", ".pre-commit-config.yaml",
})  # fmt: skip


@dataclass(frozen=True)
class Target:
    """A file to check: its path as shown to the user, its language and project, and whether the user named it."""

    path: str
    language: Language
    project: Project
    named: bool


def find_files(
    paths: Iterable[str | os.PathLike[str]], *, gitignore: bool | None = None, force_exclude: bool = False
) -> list[Target]:
    """The files to check in `paths` (files and folders), in a stable order, each once.

    `gitignore` decides whether files that git ignores are skipped (None: the project decides). With `force_exclude`,
    named files are treated like those of a folder, as a hook needs that passes every changed file.
    """
    targets: dict[str, Target] = {}
    for argument in paths:
        path = os.fspath(argument)
        try:
            is_folder = bool(path) and Path(path).is_dir()  # an empty path is usually an unset shell variable
            exists = is_folder or os.path.lexists(path)
        except ValueError:  # a null byte in the path
            exists = is_folder = False
        if not exists:
            raise SettingError(f"There is no file or folder {path!r}. Pass existing paths, or - for standard input.")
        here = Path(path).absolute()
        project = find_project(here if is_folder else here.parent)
        if is_folder:
            respect = project.respect_gitignore if gitignore is None else gitignore
            for file in _walk(path, project, respect_gitignore=respect):
                language = language_of(file)
                assert language is not None
                targets.setdefault(file, Target(file, language, project, named=False))
        elif force_exclude:
            language = language_of(path)
            if language and here.name not in _SKIPPED_FILES and not _is_excluded(path, project):
                targets.setdefault(path, Target(path, language, project, named=False))
        else:
            language = language_of(path) or _by_first_line(path)
            if language is None:
                raise SettingError(
                    f"Unknown file type, so it cannot be checked: {path!r}. Known: .py, .ipynb, JSON, YAML and TOML. To check "
                    "it anyway, pipe it in: halfstep check - --stdin-filename NAME.py"
                )
            targets[path] = Target(path, language, project, named=True)
    return list(targets.values())


def _by_first_line(path: str) -> Language | None:
    """Python, if the first line of the file names it as its interpreter."""
    try:
        if Path(path).is_file():
            with Path(path).open("rb") as file:
                first = file.read(200).partition(b"\n")[0]
                return "python" if first.startswith(b"#!") and b"python" in first else None
    except OSError:
        pass
    return None


@dataclass(frozen=True)
class _Folder:
    """A folder to walk: its path as shown, its absolute path, and what git ignores in it."""

    shown: str
    path: str
    ignores: Ignores


def _walk(folder: str, project: Project, *, respect_gitignore: bool) -> Iterator[str]:
    from halfstep.check.gitignore import Ignores, ignores_of

    top = os.path.abspath(folder)  # noqa: PTH100  (resolves "..", which pathlib keeps)
    # A stack instead of recursion: folders can be nested deeper than Python's recursion limit.
    stack = [_Folder(folder, top, ignores_of(Path(top)) if respect_gitignore else Ignores())]
    while stack:
        here = stack.pop()
        try:
            entries = sorted(os.scandir(here.shown), key=lambda entry: entry.name)
        except OSError:
            continue  # a folder that was deleted meanwhile, or without permission
        names = frozenset(entry.name for entry in entries)
        if here.path != top and "pyvenv.cfg" in names:
            continue
        ignores = here.ignores.enter(here.path, names) if respect_gitignore else here.ignores
        folders = []
        for entry in entries:
            is_folder = entry.is_dir(follow_symlinks=False)
            if is_folder and _is_skipped(entry.name):
                continue
            if not is_folder and (not language_of(entry.name) or entry.name in _SKIPPED_FILES):
                continue
            path = os.path.join(here.path, entry.name)  # noqa: PTH118  (4 times faster than pathlib)
            shown = entry.path.removeprefix("./")
            if ignores.ignores(path, is_folder=is_folder) or _is_excluded(shown, project):
                continue
            if is_folder:
                folders.append(_Folder(shown, path, ignores))
            elif entry.is_file():  # not a broken link or a device
                yield shown
        stack.extend(reversed(folders))


def _is_skipped(name: str) -> bool:
    return name.startswith(".") or name in _SKIPPED or name.endswith(".egg-info")


def _is_excluded(path: str, project: Project) -> bool:
    if not project.exclude:
        return False
    place = Path(path).absolute()
    return any(path_matches(pattern, place, project.root) for pattern in project.exclude)
