"""Results of earlier runs, so that a file that did not change is not analysed again.

A result is found by a hash of everything it depends on: the bytes of the file, its path, the settings and selected rules,
the versions of libraries that its folder pins, the version of Halfstep and Python, and for a DeepSpeed script the state of
the configuration files it names. One file in the cache folder has the results of all files checked with the same options.
It starts with a hash of its content and is replaced atomically: a damaged file is ignored, and of two runs at the same time
the last one wins, which costs the other one only its results. Nothing here raises: without a cache the check is slower, not
different.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import threading
import time
from dataclasses import asdict
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from halfstep import __version__
from halfstep.check.files.document import located_source, read_document, size_limit
from halfstep.check.finding import Edit, Finding, Fix
from halfstep.check.options import Options
from halfstep.check.pins import Pin, pins_for
from halfstep.check.regex import regex
from halfstep.check.runner import FileResult
from halfstep.check.settings import Settings
from halfstep.check.walk import Target

__all__ = ["Cache", "default_folder", "open_cache"]

_MAX_AGE_SECONDS = 30 * 24 * 3600  # of a file of results that no run has used
_MAX_BYTES = 2**28
# A string that names a configuration; in a notebook its quotes are escaped.
_CONFIG_NAME = regex(rb"[\"']([^\s{}$%*?<>|\"'\\]{1,200}\.(?:h?json|jsonc|ya?ml))\\?[\"']")
_TAG = "Signature: 8a477f597d28d172789f06886806bc55\n# This directory has results of `halfstep check`.\n"


def default_folder() -> Path | None:
    """`.halfstep_cache` in the project of the current folder, else the user's cache folder; None if there is neither."""
    try:
        here = Path.cwd()
        for parent in (here, *here.parents):
            if (parent / "pyproject.toml").is_file() or (parent / ".git").exists():
                return parent / ".halfstep_cache"
        base = os.environ.get("XDG_CACHE_HOME") or ""
        return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "halfstep"
    except (OSError, RuntimeError):  # the current folder was deleted, or there is no home
        return None


def open_cache(folder: Path | None, options: Options) -> Cache | None:
    """The results stored for these options (none if they cannot be read), in this folder or the default one."""
    folder = folder or default_folder()
    if folder is None:
        return None
    name = hashlib.blake2b(repr((options, _fingerprint())).encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()
    file = folder / f"check-{name}.json"
    return Cache(file, options, _read(file))


class Cache:
    """The results of files, each found by the hash of what it depends on."""

    def __init__(self, file: Path, options: Options, entries: dict[str, Any]) -> None:
        self.file = file
        self.options = options
        self.entries = entries
        self.num_hits = 0
        self._pending: dict[str, _Pending] = {}
        self._new: dict[str, Any] = {}

    def find(self, target: Target) -> FileResult | None:
        """The stored result of a file; None if it has to be checked."""
        try:
            state = os.stat(target.path)  # noqa: PTH116  (called for every file of a project)
            if state.st_size > size_limit(target.language):
                return None
            with open(target.path, "rb") as file:  # noqa: PTH123
                data = file.read(size_limit(target.language) + 1)
        except (OSError, ValueError):
            return None
        key = self._key(target, data)
        entry = self.entries.get(os.path.abspath(target.path))  # noqa: PTH100
        if not isinstance(entry, list) or entry[0] != key:
            self._pending[target.path] = _Pending(key, state)
            return None
        self.num_hits += 1
        findings = tuple(_finding(values, target.path) for values in entry[1])
        source = located_source(read_document(target.path, data, target.language)) if findings else None
        return FileResult(target.path, findings, source)

    def store(self, result: FileResult) -> None:
        """Remember the result of a file that `find` did not have, unless the file changed in between."""
        pending = self._pending.pop(result.path, None)
        if pending is None or any(finding.code in {"HS001", "HS005", "HS006"} for finding in result.findings):
            return
        with contextlib.suppress(OSError):
            if pending.is_same(os.stat(result.path)):  # noqa: PTH116
                values = [_values(finding) for finding in result.findings]
                self._new[os.path.abspath(result.path)] = [pending.key, values]  # noqa: PTH100

    def save(self) -> None:
        """Write the results to the folder, with those that another run has stored meanwhile."""
        if not self._new:
            return
        entries = _read(self.file) | self._new
        entries = {path: e for path, e in entries.items() if path in self._new or os.path.exists(path)}  # noqa: PTH110
        body = json.dumps(entries, separators=(",", ":")).encode("utf-8", "surrogatepass")
        temporary = self.file.with_name(f"{self.file.name}.{os.getpid()}.{time.monotonic_ns()}")
        with contextlib.suppress(OSError, ValueError):
            _prepare(self.file.parent)
            try:
                temporary.write_bytes(_digest(body) + b"\n" + body)
                temporary.replace(self.file)
            finally:
                temporary.unlink(missing_ok=True)
            _remove_old(self.file.parent)

    def _key(self, target: Target, data: bytes) -> str:
        settings = self.options.settings(target.project)
        selection = self.options.selection(target.project, target.path)
        named = _named_files(target, data)
        # Pinned and installed versions decide which defects apply.
        pins = _pins(os.path.dirname(os.path.abspath(target.path)), settings)  # noqa: PTH100, PTH120
        context = repr((settings, selection, target.named, target.language, target.path, named, pins))
        return hashlib.blake2b(context.encode("utf-8", "surrogatepass") + data, digest_size=16).hexdigest()


class _Pending:
    """The key of a file that is being checked, and the state it had when the key was made."""

    def __init__(self, key: str, state: os.stat_result) -> None:
        self.key = key
        self.state = state

    def is_same(self, state: os.stat_result) -> bool:
        before = self.state
        return (before.st_size, before.st_mtime_ns, before.st_ino) == (state.st_size, state.st_mtime_ns, state.st_ino)


def _named_files(target: Target, data: bytes) -> tuple[object, ...]:
    """The states of the configuration files that a DeepSpeed script names, on which its findings depend too."""
    if target.language not in {"python", "notebook"} or b"deepspeed" not in data.lower():
        return ()
    states: list[object] = []
    for name in sorted(set(_CONFIG_NAME.findall(data))):
        for folder in (Path(target.path).parent, Path()):
            with contextlib.suppress(OSError, ValueError):
                state = (folder / os.fsdecode(name)).stat()
                states.append((name, state.st_size, state.st_mtime_ns, state.st_ino))
    return tuple(states)


@lru_cache(maxsize=64)
def _pins(folder: str, settings: Settings) -> tuple[Pin, ...]:
    return tuple(pins_for(folder, settings.pins, look_up=settings.look_up).values())


@cache
def _fingerprint() -> str:
    """What results depend on besides the file and the options: the versions, and the files of the checker itself."""
    package = Path(__file__).parent.parent
    states = []
    for name in ("check", "precision", "hardware"):
        for folder, _, files in os.walk(package / name):
            for file in sorted(files):
                if file.endswith(".py"):
                    state = os.stat(f"{folder}/{file}")  # noqa: PTH116
                    states.append((folder, file, state.st_size, state.st_mtime_ns))
    return repr((__version__, sys.version_info[:3], sorted(states)))


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=16).hexdigest().encode()


def _read(file: Path) -> dict[str, Any]:
    try:
        if file.stat().st_size > _MAX_BYTES:
            return {}
        digest, _, body = file.read_bytes().partition(b"\n")
        if digest != _digest(body):
            return {}
        entries = json.loads(body.decode("utf-8", "surrogatepass"))
    except (OSError, ValueError, RecursionError):
        return {}
    return entries if isinstance(entries, dict) else {}


def _prepare(folder: Path) -> None:
    """Make the folder, with files that keep it out of version control and of backups."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in ((".gitignore", "*\n"), ("CACHEDIR.TAG", _TAG)):
        file = folder / name
        if not file.exists():
            # Another run must not see an empty .gitignore, and check the results as configurations.
            temporary = file.with_name(f"{name}.{os.getpid()}.{threading.get_ident()}")
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(file)


def _remove_old(folder: Path) -> None:
    oldest = time.time() - _MAX_AGE_SECONDS
    with os.scandir(folder) as entries:  # closed even if another run removes a file in between
        for entry in entries:
            if entry.name.startswith("check-") and entry.stat().st_mtime < oldest:
                Path(entry.path).unlink(missing_ok=True)


def _values(finding: Finding) -> dict[str, Any]:
    values = asdict(finding)
    del values["path"]
    return values


def _finding(values: dict[str, Any], path: str) -> Finding:
    fix = values["fix"]
    if fix is not None:
        fix = Fix(**{**fix, "edits": tuple(Edit(**edit) for edit in fix["edits"])})
    return Finding(**{**values, "path": path, "fix": fix})
