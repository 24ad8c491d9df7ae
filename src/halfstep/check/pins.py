"""Which versions a program runs with: named by the user, pinned by the project, or installed.

The first source that names a package wins, in this order:

    --with torch=2.11             the command line
    [tool.halfstep.check.with]    the project's settings
    torch==2.11.0                 an exact pin in requirements*.txt or pyproject.toml, nearest folder first
    installed                     the packages next to Halfstep, by the names of their dist-info folders

A CPU build of torch ("2.13.0+cpu") is the machine that checks, not the one that trains, so it is not used.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from halfstep.check.regex import regex
from halfstep.errors import SettingError, unknown
from halfstep.hardware.advisory_words import PACKAGES
from halfstep.hardware.versions import is_version

__all__ = ["Pin", "installed_pins", "parse_pin", "pins_for", "pins_in_folder"]

# Packages by the names they are installed under.
_DISTRIBUTIONS = {**{name: name for name in PACKAGES}, "nvidia-cudnn-cu12": "cudnn", "nvidia-cudnn-cu13": "cudnn"}
_PIN = regex(r"""(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[[^\]]*\])?\s*===?\s*(?P<version>[^\s;,"'#)]+)""")
_MAX_BYTES = 2**18
_MAX_FILES = 20


@dataclass(frozen=True)
class Pin:
    """The version of one package, and where it is named."""

    package: str
    version: str
    origin: str  # "--with", "requirements.txt", "installed"

    def __str__(self) -> str:
        return f"{self.package} {self.version} ({self.origin})"


def parse_pin(text: str, origin: str) -> Pin:
    """A pin from `NAME=VERSION`."""
    name, equals, version = text.partition("=")
    package, version = _DISTRIBUTIONS.get(_normal(name.strip())), version.lstrip("=").strip()
    if not equals:
        raise SettingError(f"{origin}: {text!r} is not NAME=VERSION. Write it like torch=2.11.0.")
    if package is None:
        raise unknown(f"package for {origin}:", name.strip(), PACKAGES)
    if not is_version(version):
        raise SettingError(f"{origin}: {version!r} is not a version of {package}. Write it like torch=2.11.0.")
    return Pin(package, version, origin)


def pins_for(folder: str, named: tuple[Pin, ...], *, look_up: bool) -> dict[str, Pin]:
    """The version of each package for the files of a folder: those named, with `look_up` also those pinned or installed."""
    pins: dict[str, Pin] = {}
    sources = [named]
    if look_up:
        sources += [pins_in_folder(parent) for parent in _folders(Path(folder).absolute())]
        sources.append(installed_pins())
    for source in sources:
        for pin in source:
            if is_version(pin.version):  # --deepspeed also accepts other spellings
                pins.setdefault(pin.package, pin)
    return pins


@cache
def _folders(folder: Path) -> tuple[Path, ...]:
    """The folder and its parents up to the root of the repository."""
    folders: list[Path] = []
    for parent in (folder, *folder.parents):
        folders.append(parent)
        if _is_root(parent) or len(folders) == 8:
            return tuple(folders)
    return tuple(folders[:1])  # not in a repository: what lies in a home folder is not about this file


@cache
def _is_root(folder: Path) -> bool:
    return (folder / ".git").exists()


@cache
def pins_in_folder(folder: Path) -> tuple[Pin, ...]:
    """The exact pins of the requirement files in a folder."""
    try:
        with os.scandir(folder) as entries:
            names = sorted(e.name for e in entries if e.name == "pyproject.toml" or _is_requirements(e.name))
    except OSError:
        return ()
    pins = []
    for name in sorted(names, key=lambda name: (name != "requirements.txt", name))[:_MAX_FILES]:
        pins += _pins_in_file(folder / name)
    return tuple(pins)


def _is_requirements(name: str) -> bool:
    return name.startswith("requirements") and name.endswith(".txt")


def _pins_in_file(file: Path) -> list[Pin]:
    try:
        with file.open("rb") as stream:
            text = stream.read(_MAX_BYTES).decode("utf-8", "replace")
    except OSError:
        return []
    pins = []
    for line in text.splitlines():
        for match in _PIN.finditer(line.partition("#")[0]):
            package, version = _DISTRIBUTIONS.get(_normal(match["name"])), match["version"].removesuffix(".*")
            if package and is_version(version):
                pins.append(Pin(package, version, file.name))
    return pins


@cache
def installed_pins() -> tuple[Pin, ...]:
    """The packages installed alongside Halfstep; nothing is imported.

    importlib.metadata finds them as well, but takes several times as long (61 ms instead of 10 on a busy machine).
    """
    pins: dict[str, Pin] = {}
    for folder in sys.path:
        try:
            with os.scandir(folder or ".") as entries:
                names = [entry.name for entry in entries]
        except OSError:
            continue
        for name in names:
            match = re.fullmatch(r"(.+)-([^-]+)\.dist-info", name)
            package = _DISTRIBUTIONS.get(_normal(match[1])) if match else None
            if match and package and is_version(match[2]) and not match[2].endswith("+cpu"):
                pins.setdefault(package, Pin(package, match[2], "installed"))
    return tuple(pins.values())


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
