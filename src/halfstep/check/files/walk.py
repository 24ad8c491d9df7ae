"""Which files are checked.

A file that is named is always checked. In a folder, files are found by their ending. Hidden folders, environments,
caches and build output are left out, and so is what `exclude` names. A .gitignore is not read: what it hides is
mostly in the list below, and half an implementation of its rules would surprise. Links to folders are not followed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from halfstep.check.files.document import language_of
from halfstep.check.files.source import Language
from halfstep.check.project import Project, find_project
from halfstep.check.select import path_matches
from halfstep.errors import SettingError

__all__ = ["Target", "find_files"]

_SKIPPED = frozenset(
    {"__pycache__", "node_modules", "build", "dist", "venv", "env", "site-packages", "__pypackages__", "_build"}
)


@dataclass(frozen=True)
class Target:
    """A file to check: its path as it is shown, its language, its project, and whether a person named it."""

    path: str
    language: Language
    project: Project
    named: bool


def find_files(paths: Iterable[str | os.PathLike[str]]) -> list[Target]:
    """The files that `paths` (files and folders) mean, in a stable order, each once."""
    found: dict[str, Target] = {}
    for given in paths:
        path = os.fspath(given)
        try:
            is_folder = bool(path) and Path(path).is_dir()  # an empty name is a variable that was not set
            exists = is_folder or os.path.lexists(path)
        except ValueError:  # a zero byte in the name
            exists = is_folder = False
        if not exists:
            raise SettingError(f"There is no file or folder {path!r}. Give paths that exist, or - for standard input.")
        here = Path(path).absolute()
        project = find_project(here if is_folder else here.parent)
        if is_folder:
            for file in _walk(path, project):
                language = language_of(file)
                assert language is not None
                found.setdefault(file, Target(file, language, project, named=False))
        else:
            language = language_of(path) or _by_first_line(path)
            if language is None:
                raise SettingError(
                    f"{path!r} is neither Python (.py), a notebook (.ipynb), JSON nor YAML by its name, so it cannot be "
                    "checked. To check it anyway, pipe it in: halfstep check - --stdin-filename NAME.py"
                )
            found[path] = Target(path, language, project, named=True)
    return list(found.values())


def _by_first_line(path: str) -> Language | None:
    """Python, for a file whose first line says that Python runs it."""
    try:
        if Path(path).is_file():
            with Path(path).open("rb") as file:
                first = file.read(200).partition(b"\n")[0]
                return "python" if first.startswith(b"#!") and b"python" in first else None
    except OSError:
        pass
    return None


def _walk(folder: str, project: Project) -> Iterator[str]:
    # One stack instead of recursion: folders can be nested deeper than Python's calls.
    stack = [folder]
    while stack:
        here = stack.pop()
        try:
            entries = sorted(os.scandir(here), key=lambda entry: entry.name)
        except OSError:
            continue  # a folder that vanished or may not be read, like one that is not there
        if here != folder and any(entry.name == "pyvenv.cfg" for entry in entries):
            continue
        folders = []
        for entry in entries:
            path = entry.path.removeprefix("./")
            if entry.is_dir(follow_symlinks=False):
                if not _is_skipped(entry.name) and not _is_excluded(path, project):
                    folders.append(path)
            elif language_of(entry.name) is not None and not _is_excluded(path, project):
                yield path
        stack.extend(reversed(folders))


def _is_skipped(name: str) -> bool:
    return name.startswith(".") or name in _SKIPPED or name.endswith(".egg-info")


def _is_excluded(path: str, project: Project) -> bool:
    if not project.exclude:
        return False
    place = Path(path).absolute()
    return any(path_matches(pattern, place, project.root) for pattern in project.exclude)
