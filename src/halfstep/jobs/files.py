"""Python files as modules: run a job file once, with its neighbours importable, and keep its classes picklable.

How it works. A file outside any package is given the module name `halfstep.jobs.files.` plus its path in
hexadecimal. The name is unique to the file, and a process that has never seen the file can find it again: when a
worker started by `spawn` unpickles a class of the job file, it imports that name, Python asks the finder below,
and the finder decodes the path. This is what lets a DataLoader with workers use a Dataset defined in the file.

While the file runs, its folder is first on sys.path, as under `python job.py`; afterwards sys.path is as before.
Imports that come later, inside one of the job's functions, still find the neighbours, through the same finder and
after everything else.
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

_folders: dict[str, None] = {}  # of the files loaded so far; the latest first in a search
_neighbours: dict[str, str] = {}  # module name -> folder it came from


def module_name(path: Path) -> str:
    """The importable name of a file, from which the path can be read back."""
    return f"{__name__}.x{str(path.resolve()).encode().hex()}"


def load_file(path: Path) -> ModuleType:
    """Run a file and return its module; a file already loaded and not changed since is not run again."""
    path = path.resolve()
    name = module_name(path)
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__source__", None) == path.read_bytes():
        return loaded
    sys.modules.pop(name, None)
    _forget_neighbours(str(path.parent))
    return importlib.import_module(name)


@contextlib.contextmanager
def first_on_path(folder: str) -> Iterator[None]:
    """Put a folder first on sys.path for the length of the block."""
    before = list(sys.path)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path[:] = before


def _forget_neighbours(folder: str) -> None:
    """Drop modules that an earlier file imported from another folder: this folder may have its own of that name."""
    for name, origin in list(_neighbours.items()):
        if origin != folder:
            sys.modules.pop(name, None)
            del _neighbours[name]


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
                # Compiled from the text each time: a .pyc may be older than an edit of the same second and length.
                code = compile(source, self.path, "exec", dont_inherit=True)
                exec(code, module.__dict__)  # noqa: S102 - running the user's file is the point
        finally:
            for name in set(sys.modules) - before:
                if _is_neighbour(name, path.parent):
                    _neighbours[name] = folder


def _is_neighbour(name: str, folder: Path) -> bool:
    """Whether a module is a file or a package of the folder itself; a .venv further down does not count."""
    top = Path(getattr(sys.modules.get(name.partition(".")[0]), "__file__", None) or "/")
    return folder in {top.parent, top.parent.parent if top.name == "__init__.py" else top.parent}


class _Finder:
    """Finds job files by their name, and neighbours of job files when nobody else finds them."""

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
