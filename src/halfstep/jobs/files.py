"""Python files as modules: run a job file once, make its sibling modules importable and its classes picklable.

How it works. A file outside any package gets the module name `halfstep.jobs.files.` plus its path in hexadecimal. The
name is unique to the file, and any process can locate the file by it: when a worker started by `spawn` unpickles a
class of the job file, it imports that name, Python asks the finder below, and the finder decodes the path. So a
DataLoader with workers can use a Dataset that is defined in the file.

While the file runs, its folder is first on sys.path, as under `python job.py`; afterwards sys.path is restored. Later
imports, inside one of the job's functions, still find sibling modules, through the same finder and after every other
location.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType

__all__ = ["first_on_path", "load_file", "module_name"]

__path__: list[str] = []  # makes this module a package, so that the import system asks for names below it

_folders: dict[str, None] = {}  # of the files loaded so far; the latest is searched first
_siblings: dict[str, str] = {}  # name of a module next to a job file -> its folder


def module_name(path: Path) -> str:
    """The importable name of a file, which encodes its path."""
    return f"{__name__}.x{str(path.resolve()).encode().hex()}"


def load_file(path: Path) -> ModuleType:
    """Run a file and return its module; a file that was loaded before and has not changed is not run again."""
    path = path.resolve()
    name = module_name(path)
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__source__", None) == path.read_bytes():
        return loaded
    sys.modules.pop(name, None)
    _forget_siblings(str(path.parent))
    return importlib.import_module(name)


@contextlib.contextmanager
def first_on_path(folder: str) -> Iterator[None]:
    """Put a folder first on sys.path inside the `with` block."""
    before = list(sys.path)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path[:] = before


def _forget_siblings(folder: str) -> None:
    """Drop modules that an earlier file imported from another folder; this folder may have one of the same name."""
    for name, origin in list(_siblings.items()):
        if origin != folder:
            sys.modules.pop(name, None)
            del _siblings[name]


class _Loader(SourceFileLoader):
    """Runs a job file with its own folder first on sys.path."""

    def exec_module(self, module: ModuleType) -> None:
        path = Path(self.path)
        folder = str(path.parent)
        source = path.read_bytes()
        vars(module)["__source__"] = source  # load_file compares it with the file
        _folders.pop(folder, None)
        _folders[folder] = None
        before = set(sys.modules)
        try:
            with first_on_path(folder):
                # Compiled from the source each time: a .pyc misses an edit within the same second that keeps the length.
                code = compile(source, self.path, "exec", dont_inherit=True)
                exec(code, module.__dict__)  # noqa: S102 - running the user's file is the point
        finally:
            for name in set(sys.modules) - before:
                if _is_sibling(name, path.parent):
                    _siblings[name] = folder


def _is_sibling(name: str, folder: Path) -> bool:
    """Whether a module is a file or a package directly in the folder, not in a .venv below it."""
    top = Path(getattr(sys.modules.get(name.partition(".")[0]), "__file__", None) or "/")
    return folder in {top.parent, top.parent.parent if top.name == "__init__.py" else top.parent}


class _Finder:
    """Finds job files by their module name, and siblings of job files that no other finder finds."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        parent, _, encoded = name.rpartition(".x")
        if parent == __name__:
            with contextlib.suppress(ValueError):
                file = bytes.fromhex(encoded).decode()
                return importlib.util.spec_from_file_location(name, file, loader=_Loader(name, file))
            return None
        if path is None:
            return PathFinder.find_spec(name, list(reversed(_folders)))
        return None


sys.meta_path.append(_Finder())
